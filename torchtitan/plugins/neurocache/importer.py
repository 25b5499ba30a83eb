"""Translate command lines of train_neurocache.py, by Neurocache's authors, to jobs.

The script trains a cache of past states, LoRA, or both, with a frozen model. Supported are the flags of August 2024,
with their defaults, and earlier ones. A note records behavior of the script that a job does not reproduce. The script
executed its map of layers as Python; here it is parsed.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.lr_schedules import TRANSFORMERS
from torchtitan.models import CONFIG_CONVERTERS, SIZES, family_in
from torchtitan.models.hf.config import CONFIG
from torchtitan.plugins.importers import ImportSource
from torchtitan.plugins.importers.translation import CommandLine, Script, Setting, from_folder, targets_of
from torchtitan.plugins.neurocache.authors_format import CONFIG as ADAPTER
from torchtitan.plugins.neurocache.authors_format import OPTION_NAMES, options_of
from torchtitan.plugins.neurocache.authors_format import read as read_adapter
from torchtitan.plugins.neurocache.options import NeurocacheOptions
from torchtitan.plugins.neurocache.sizes import KEY, layers_of

SCHEDULES = {"linear": "linear", "cosine": "cosine", "cosine_with_restarts": "cosine_restarts", "polynomial": "linear"}
SCHEDULES |= {"constant": "constant", "constant_with_warmup": "constant"}
LAST_RATE = 1e-7
"""Final learning rate of the script's polynomial schedule."""
NO_STATES = "states of accelerate are not read; a job that is started again resumes from its own newest checkpoint"
FLAGS: dict[str, Setting] = {
    "model_name_or_path": Setting("text", required=True),
    "dataset_name": Setting("text", required=True),
    "tokenizer_name": Setting("text"),
    "train_split": Setting("text", "train"),
    "eval_split": Setting("text", "validation"),
    "test_split": Setting("text", "test"),
    "per_device_batch_size": Setting("int", least=1),  # older name of the next two
    "per_device_train_batch_size": Setting("int", 2, least=1),
    "per_device_eval_batch_size": Setting("int", 4, least=1),
    "sequence_length": Setting("int", 1024, to="training.seq_len", least=1),
    "gradient_accumulation_steps": Setting("int", 8, least=1),
    "max_train_steps": Setting("int", 25_000, to="training.steps", least=1),
    "max_eval_steps": Setting("int", 250, to="validation.steps", least=1),
    "evaluate_every_steps": Setting("int", 500, to="validation.freq"),
    "checkpointing_steps": Setting("int", 2_000, to="checkpoint.interval"),
    "keep_n_checkpoints": Setting("int", 2),
    "logging_steps": Setting("int", 100, to="metrics.log_freq"),
    "learning_rate": Setting("float", 1e-4, to="optimizer.lr"),
    "num_warmup_steps": Setting("int", 1_000),
    "lr_scheduler_type": Setting("text", "cosine", to="lr_scheduler.decay_type", choices=SCHEDULES),
    "weight_decay": Setting("float", 0.0, to="optimizer.weight_decay"),
    "max_grad_norm": Setting("float", 1.0, to="training.max_norm"),
    "seed": Setting("int", 1_234_567, to="debug.seed"),
    "nf4": Setting("bool", False),
    "disable_grad_checkpointing": Setting(
        "bool", False, to="activation_checkpoint.mode", choices={True: "none", False: "full"}
    ),
    "disable_lora": Setting("bool", False),
    "lora_r": Setting("int", 32),
    "lora_alpha": Setting("float", 64.0),
    "lora_dropout": Setting("float", 0.1),
    "lora_modules": Setting("text", "gate_proj,up_proj,down_proj"),
    "disable_neurocache": Setting("bool", False),
    "only_evaluate": Setting("bool", False),
    "pretrained_neurocache": Setting("text"),
    "save_and_quit": Setting("bool", False, reason="torchtitan export RUN --to FOLDER writes a run's adapter"),
    "resume_from_checkpoint": Setting("text", "", reason=NO_STATES),
    "output_dir": Setting("text", to="job.dump_folder", required=True),
    "with_tracking": Setting("bool", True),
    "report_to": Setting("text", "tensorboard"),
    "cache_size": Setting("int", 16_384),
    "cache_type": Setting("text", "fifo", choices=("fifo", "lru")),
    "cache_dtype": Setting("text", "bfloat16", choices=("bfloat16", "float16", "float32")),
    "compression_factor": Setting("int", 4),
    "topk": Setting("int", 16),
    "neighborhood_size": Setting("int", 2),
    "context_size": Setting("int", 2),
    "similarity_fn": Setting("text", "l2", choices=("l2", "dot")),
    "global_cache": Setting("bool", False),
    "retrieval_map": Setting("text"),
    "cache_layers": Setting("text"),  # older name, for layers that look up their stored entries
    "attention_layers": Setting("text"),
}
CONSTANTS = {
    "task.kind": "documents",
    "validation.enable": True,
    "optimizer.name": "AdamW",
    "optimizer.beta2": 0.999,
    "optimizer.decay_norms_and_biases": False,
    "checkpoint.enable": True,
}
"""Options of every job."""
PRECISIONS = {"fp16": "float16", "bf16": "bfloat16"}
PUBLISHED = {f"opt-{size.lower()}": ("opt", size) for size in ("125M", "350M", "1.3B", "2.7B", "6.7B")}
PUBLISHED |= {f"llama-2-{size.lower()}-hf": ("llama2", size) for size in ("7B", "13B", "70B")}
PUBLISHED |= {"meta-llama-3-8b": ("llama3", "8B"), "mistral-7b-v0.1": ("mistral", "7B")}
"""Names of published model folders -> (family, size)."""
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPT_MODULES = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
MAP = re.compile(r"\{\s*(?:['\"]?\d+['\"]?\s*:\s*\d+\s*,?\s*)+\}")
PAIR = re.compile(r"(\d+)['\"]?\s*:\s*(\d+)")
VERSION = re.compile(r":\d+\.\d+\.\d+")
HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
LAYER_OPTIONS = ("retrieval_map", "attention_layers")
TRACKERS = ("tensorboard", "wandb", "mlflow", "aim")


class _Script(Script):
    FLAGS = FLAGS

    def __init__(self, line: CommandLine) -> None:
        super().__init__(line)
        self.has_cache, self.has_lora = not self.options["disable_neurocache"], not self.options["disable_lora"]

    def read(self) -> None:
        if not self.options.is_complete:
            return
        self.values |= CONSTANTS
        n_layers = self.model()
        self.data()
        self.batch()
        self.schedule()
        self.precision()
        if n_layers is not None:
            self.adapter(n_layers)
        self.output()

    def model(self) -> int | None:
        """Translate the model. Returns its number of layers, or None if that is unknown."""
        options, values, name = self.options, self.values, self.options["model_name_or_path"]
        values["model.tokenizer_path"] = options["tokenizer_name"] or name
        published = PUBLISHED.get(Path(name).name.lower())
        if (Path(name) / CONFIG).is_file():
            family = family_in(Path(name))
            if family is None:
                self.refuse("model_name_or_path", name, f"a model of {', '.join(SIZES)}", "no other family is here")
                return None
            values |= from_folder(family, name)
            return CONFIG_CONVERTERS[family].args_from_folder(name).n_layers
        if published is None:
            allowed = f"a folder in Hugging Face format, or the name of one: {', '.join(PUBLISHED)}"
            self.refuse("model_name_or_path", name, allowed, "download the model to a folder")
            return None
        self.note(f"download the model's weights and tokenizer to a folder {name} here")
        values["model.name"], values["model.flavor"] = published
        values |= {"checkpoint.initial_load_path": name, "checkpoint.initial_load_in_hf": True}
        return SIZES[published[0]][published[1]].n_layers

    def data(self) -> None:
        options, values, name = self.options, self.values, self.options["dataset_name"]
        local = VERSION.sub("", name)
        if HUB.fullmatch(name) and not Path(local).exists():
            values |= {"training.dataset": "huggingface", "training.dataset_path": name}
            values |= {"validation.dataset": "huggingface_validation", "validation.dataset_path": name}
            for flag in ("train_split", "eval_split"):
                if options[flag] != FLAGS[flag].default:
                    remedy = "download the splits into folders of their names, as text files, and give their parent"
                    self.refuse(flag, options[flag], FLAGS[flag].default, remedy)
            return
        values |= {"training.dataset": "text", "training.dataset_path": f"{local}/{options['train_split']}"}
        values |= {"validation.dataset": "text", "validation.dataset_path": f"{local}/{options['eval_split']}"}
        self.note(f"put the documents of {name} into folders {local}/SPLIT: one .txt file, or line of a .jsonl, each")
        test_path = f"--validation.dataset_path={local}/{options['test_split']}"
        self.note(f"after the run, to measure --test_split: torchtitan evaluate {options['output_dir']} {test_path}")

    def batch(self) -> None:
        options, values, both = self.options, self.values, self.options["per_device_batch_size"]
        for flag, section in (("train", "training"), ("eval", "validation")):
            name = f"per_device_{flag}_batch_size"
            values[f"{section}.local_batch_size"] = both if both and name not in options else options[name]
        passes, ranks = options["gradient_accumulation_steps"], self.line.ranks
        if ranks is not None or passes > 1:
            values["training.global_batch_size"] = values["training.local_batch_size"] * (ranks or 1) * passes
        if ranks is None:
            batch = "training.global_batch_size is for ONE" if passes > 1 else "a step has the batch of each of them"
            self.note(f"no --num_processes: accelerate starts all GPUs, and {batch}; --world-size N writes the total")
        if passes == 1 and self.has_cache:
            self.note(
                "one forward pass per step: the cached states are older than the weights; the authors saw divergence"
            )
        self.note("parameters are sharded over the ranks, where the script kept all on each; losses are the same")
        self.note("validation is a mean over tokens, with its own caches; the script's was over batches, one more")

    def schedule(self) -> None:
        options, values, kind = self.options, self.values, self.options["lr_scheduler_type"]
        warmup = 0 if kind == "constant" else options["num_warmup_steps"]
        floor = LAST_RATE / options["learning_rate"] if kind == "polynomial" and options["learning_rate"] else 0.0
        values |= {"lr_scheduler.warmup_steps": warmup, "lr_scheduler.min_lr_factor": floor}
        values["lr_scheduler.convention"] = TRANSFORMERS
        if warmup >= options["max_train_steps"]:
            values["lr_scheduler.total_steps"] = warmup + 1
            self.note(f"--num_warmup_steps {warmup} is longer than the run: the schedule is made longer than the run")

    def precision(self) -> None:
        precision = self.line.launched.get("mixed_precision", "no")
        self.draft.launched.add("mixed_precision")
        name = self.options["cache_dtype"] if precision == "no" else PRECISIONS.get(precision)
        if name is None:
            self.refuse("mixed_precision", precision, f"no, {', '.join(PRECISIONS)}")
        elif name == "float16":
            self.note("bfloat16 instead of float16, which overflows without a scaler; cache_dtype is unchanged")
            name = "bfloat16"
        self.values["training.mixed_precision_param"] = name or "bfloat16"

    def adapter(self, n_layers: int) -> None:
        options, values, low_rank = self.options, self.values, "qlora" if self.options["nf4"] else "lora"
        is_pretrained = bool(options["pretrained_neurocache"]) and self.has_cache
        cache_options = self._pretrained_options() if is_pretrained else self._cache_options()
        layer_options = {key: cache_options[key] for key in LAYER_OPTIONS if key in cache_options}
        try:
            layers = NeurocacheOptions(**layer_options)
        except ValueError:  # pydantic's
            folder = options["pretrained_neurocache"]
            self.refuse("pretrained_neurocache", folder, f"layer numbers in its {ADAPTER}")
            return
        if self._has_adapter():
            values["adapter.kind"] = "neurocache" if self.has_cache else low_rank
        if self.has_cache:
            values |= {KEY + name: value for name, value in cache_options.items()}
            values[KEY + "beside"] = low_rank if self.has_lora else "none"
        else:
            self._note_without_effect((*OPTION_NAMES.values(), "cache_type", "global_cache"), "--disable_neurocache")
        if self.has_lora and "adapter.kind" in values:
            self._low_rank(layers_of(layers, n_layers).attending)

    def _note_without_effect(self, flags: Iterable[str], cause: str) -> None:
        if unused := [flag for flag in flags if flag in self.options]:
            self.note(f"no effect with {cause}: --{', --'.join(unused)}")

    def _has_adapter(self) -> bool:
        """Return True if the job has an adapter. An untrained adapter is not evaluated."""
        options, is_pretrained = self.options, self.options["pretrained_neurocache"] is not None
        if options["nf4"] and not self.has_lora:
            self.refuse("nf4", True, "nothing with --disable_lora", "only matrices with LoRA are stored in 4 bits")
        if not self.has_cache and is_pretrained:
            self.note("no effect with --disable_neurocache: --pretrained_neurocache")
        if not options["only_evaluate"]:
            if not self.has_cache and not self.has_lora:
                remedy = "nothing would be trained; add --only_evaluate to evaluate the model"
                self.refuse("disable_lora", True, "nothing with --disable_neurocache", remedy)
            return True
        if self.has_cache and not is_pretrained:
            allowed = "--disable_neurocache or --pretrained_neurocache with it"
            self.refuse("only_evaluate", True, allowed, "an untrained cache would be evaluated")
        if not self.has_cache and self.has_lora:
            self.note("untrained LoRA adds nothing and is left out")
        return self.has_cache

    def _cache_options(self) -> dict[str, Any]:
        """Return the cache's options from the flags."""
        options = self.options
        cache_options = {ours: options[flag] for ours, flag in OPTION_NAMES.items()}
        cache_options |= {
            "ordering": options["cache_type"],
            "scope": "global" if options["global_cache"] else "lane",
        }
        layer_map = options["retrieval_map"]
        if layer_map is not None and options["cache_layers"] is not None:
            self.refuse("cache_layers", options["cache_layers"], "nothing with --retrieval_map", "drop one of the two")
        if layer_map is not None and MAP.fullmatch(layer_map.strip()):
            cache_options["retrieval_map"] = {reader: int(storing) for reader, storing in PAIR.findall(layer_map)}
        elif layer_map is not None:
            remedy = "it is parsed, not executed"
            self.refuse("retrieval_map", layer_map, "layer numbers such as {18: 18}", remedy)
        if layers := self._layer_numbers("cache_layers"):
            cache_options["retrieval_map"] = {str(layer): layer for layer in layers}
        if layers := self._layer_numbers("attention_layers"):
            cache_options["attention_layers"] = layers
        return cache_options

    def _layer_numbers(self, flag: str) -> list[int]:
        text = self.options[flag]
        if text is None:
            return []
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() for part in parts):
            self.refuse(flag, text, "layer numbers such as 18,19,20")
            return []
        return [int(part) for part in parts]

    def _pretrained_options(self) -> Mapping[str, Any]:
        """Return the cache's options from a pretrained adapter's folder."""
        folder = self.options["pretrained_neurocache"]
        try:
            cache_options = options_of(read_adapter(Path(folder)))
        except JobError as error:
            self.refuse("pretrained_neurocache", folder, f"a folder with {ADAPTER}", str(error))
            return {}
        flags = (
            *OPTION_NAMES.values(),
            "cache_type",
            "global_cache",
            "retrieval_map",
            "cache_layers",
            "attention_layers",
        )
        self._note_without_effect(flags, "--pretrained_neurocache, which sets them")
        self.values["adapter.initial_path"] = folder
        self.note("heads are laid out as by the authors; drop compat_head_layout for an adapter trained by torchtitan")
        return cache_options | {"compat_head_layout": True}

    def _low_rank(self, layers: list[int]) -> None:
        """Translate the LoRA options, for the layers that read the cache."""
        options, values = self.options, self.values
        allowed_modules = OPT_MODULES if values["model.name"] == "opt" else MODULES
        names = [name.strip() for name in options["lora_modules"].split(",")]
        if allowed_modules is OPT_MODULES and "lora_modules" not in options:
            names = ["fc1", "fc2"]
            self.note("no --lora_modules: fc1,fc2, as OPT has none of the script's default modules")
        if not set(names) <= set(allowed_modules):
            self.refuse("lora_modules", options["lora_modules"], f"some of {', '.join(allowed_modules)}")
            return
        values |= {"adapter.rank": options["lora_r"], "adapter.alpha": options["lora_alpha"]}
        values |= {"adapter.dropout": options["lora_dropout"], "adapter.layers": layers}
        values["adapter.target"] = targets_of(names)
        if options["nf4"]:
            self.note("only matrices with LoRA are stored in 4 bits")

    def output(self) -> None:
        options, values, folder = self.options, self.values, self.options["output_dir"]
        if options["keep_n_checkpoints"] == 1:
            self.note("--keep_n_checkpoints 1: two are kept, because a single one may be damaged")
        num_kept = options["keep_n_checkpoints"]
        values["checkpoint.keep_latest_k"] = 2 if num_kept == 1 else num_kept
        trackers = [name.strip() for name in options["report_to"].split(",")]
        if not set(trackers) <= set(TRACKERS):
            self.refuse("report_to", options["report_to"], f"some of {', '.join(TRACKERS)}")
        elif options["with_tracking"]:
            values["metrics.trackers"] = trackers
        if options["only_evaluate"]:
            rows = values["validation.local_batch_size"] * options["max_eval_steps"] * (self.line.ranks or 1)
            self.draft.evaluate_args = [options["model_name_or_path"], f"--samples={rows}"]
        elif "adapter.kind" in values:
            self.note(f"to write the adapter in the authors' format: torchtitan export {folder} --to FOLDER")


read = _Script.draft_of


SOURCE = ImportSource(
    "train_neurocache.py",
    "torchtitan.plugins.neurocache.importer:read",
    "a cache of past states for a frozen decoder",
    uses_accelerate=True,
)
