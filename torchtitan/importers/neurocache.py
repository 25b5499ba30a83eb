"""Translate command lines of train_neurocache.py, by Neurocache's authors, to jobs.

The script trains a cache of past states, LoRA, or both, with a frozen model. Its flags are those of August 2024, with
their defaults, and earlier ones. A note records behavior of the script that a job does not reproduce. The script
executed its map of layers as Python; here it is parsed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.adapters.neurocache.authors_format import CONFIG as ADAPTER
from torchtitan.adapters.neurocache.authors_format import NAMES, options_of
from torchtitan.adapters.neurocache.authors_format import read as read_adapter
from torchtitan.adapters.neurocache.sizes import KEY, layers_of
from torchtitan.config.sections.adapter import Neurocache
from torchtitan.core.errors import JobError
from torchtitan.importers.command_line import CommandLine
from torchtitan.importers.script import Flag, Script
from torchtitan.importers.translation import LINEARS, family_in, from_folder
from torchtitan.models import CONFIGS, SIZES
from torchtitan.models.hf.config import CONFIG

SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")

FLAGS: dict[str, Flag] = {
    "model_name_or_path": Flag(str),
    "dataset_name": Flag(str),
    "tokenizer_name": Flag(str),
    "train_split": Flag(str, "train"),
    "eval_split": Flag(str, "validation"),
    "test_split": Flag(str, "test"),
    "per_device_batch_size": Flag(int),  # which it had instead of the next two
    "per_device_train_batch_size": Flag(int, 2),
    "per_device_eval_batch_size": Flag(int, 4),
    "sequence_length": Flag(int, 1024),
    "gradient_accumulation_steps": Flag(int, 8),
    "max_train_steps": Flag(int, 25_000),
    "max_eval_steps": Flag(int, 250),
    "evaluate_every_steps": Flag(int, 500),
    "checkpointing_steps": Flag(int, 2_000),
    "keep_n_checkpoints": Flag(int, 2),
    "logging_steps": Flag(int, 100),
    "learning_rate": Flag(float, 1e-4),
    "num_warmup_steps": Flag(int, 1_000),
    "lr_scheduler_type": Flag(str, "cosine", SCHEDULES),
    "weight_decay": Flag(float, 0.0),
    "max_grad_norm": Flag(float, 1.0),
    "seed": Flag(int, 1_234_567),
    "nf4": Flag(bool, False),
    "disable_grad_checkpointing": Flag(bool, False),
    "disable_lora": Flag(bool, False),
    "lora_r": Flag(int, 32),
    "lora_alpha": Flag(float, 64.0),
    "lora_dropout": Flag(float, 0.1),
    "lora_modules": Flag(str, "gate_proj,up_proj,down_proj"),
    "disable_neurocache": Flag(bool, False),
    "only_evaluate": Flag(bool, False),
    "pretrained_neurocache": Flag(str),
    "save_and_quit": Flag(bool, False),
    "resume_from_checkpoint": Flag(str, ""),
    "output_dir": Flag(str),
    "with_tracking": Flag(bool, True),
    "report_to": Flag(str, "tensorboard"),
    "cache_size": Flag(int, 16_384),
    "cache_type": Flag(str, "fifo", ("fifo", "lru")),
    "cache_dtype": Flag(str, "bfloat16", ("bfloat16", "float16", "float32")),
    "compression_factor": Flag(int, 4),
    "topk": Flag(int, 16),
    "neighborhood_size": Flag(int, 2),
    "context_size": Flag(int, 2),
    "similarity_fn": Flag(str, "l2", ("l2", "dot")),
    "global_cache": Flag(bool, False),
    "retrieval_map": Flag(str),
    "cache_layers": Flag(str),  # which it had instead: layers that look up what they store
    "attention_layers": Flag(str),
}


COUNTS = (
    *("per_device_batch_size", "per_device_train_batch_size", "per_device_eval_batch_size", "sequence_length"),
    *("gradient_accumulation_steps", "max_train_steps", "max_eval_steps"),
)
SHAPES = {"linear": "linear", "polynomial": "linear", "cosine": "cosine", "cosine_with_restarts": "cosine_restarts"}
SHAPES |= {"constant": "constant", "constant_with_warmup": "constant"}
LAST_RATE = 1e-7
"""Final learning rate of the script's polynomial schedule."""
PRECISIONS = {"fp16": "float16", "bf16": "bfloat16"}
PUBLISHED = {f"opt-{size.lower()}": ("opt", size) for size in ("125M", "350M", "1.3B", "2.7B", "6.7B")}
PUBLISHED |= {f"llama-2-{size.lower()}-hf": ("llama2", size) for size in ("7B", "13B", "70B")}
PUBLISHED |= {"meta-llama-3-8b": ("llama3", "8B"), "mistral-7b-v0.1": ("mistral", "7B")}
"""Names of published model folders -> (family, size)."""
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OF_OPT = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
MAP = re.compile(r"\{\s*(?:['\"]?\d+['\"]?\s*:\s*\d+\s*,?\s*)+\}")
PAIR = re.compile(r"(\d+)['\"]?\s*:\s*(\d+)")
VERSION = re.compile(r":\d+\.\d+\.\d+")
HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
TRACKERS = ("tensorboard", "wandb", "mlflow", "aim")


class _Script(Script):
    FLAGS = FLAGS

    def __init__(self, line: CommandLine) -> None:
        super().__init__(line)
        self.cached, self.low_rank = not self.given["disable_neurocache"], not self.given["disable_lora"]

    def read(self) -> None:
        missing = [flag for flag in ("model_name_or_path", "dataset_name", "output_dir") if self.given[flag] is None]
        few = [flag for flag in COUNTS if self.given[flag] is not None and self.given[flag] < 1]
        for flag in missing:
            self.refuse(flag, None, "a value", "the script needs it too")
        for flag in few:
            self.refuse(flag, self.given[flag], "at least 1")
        if missing or few:
            return
        layers = self.model()
        self.data()
        self.batch()
        self.optimizer()
        self.precision()
        if layers is not None:
            self.adapter(layers)
        self.output()
        self.rest()

    def model(self) -> int | None:
        """Translate the model. Returns its number of layers, or None if that is unknown."""
        flags, values, name = self.given, self.values, self.given["model_name_or_path"]
        values["model.tokenizer_path"] = flags["tokenizer_name"] or name
        published = PUBLISHED.get(Path(name).name.lower())
        if (Path(name) / CONFIG).is_file():
            family = family_in(Path(name))
            if family is None:
                self.refuse("model_name_or_path", name, f"a model of {', '.join(SIZES)}", "no other family is here")
                return None
            values |= from_folder(family, name)
            return CONFIGS[family].args_of(name).n_layers
        if published is None:
            allowed = f"a folder in the form of Hugging Face, or the name of one: {', '.join(PUBLISHED)}"
            self.refuse("model_name_or_path", name, allowed, "fetch the model to a folder")
            return None
        self.note(f"the model's weights and tokenizer have to be in a folder {name} here")
        values["model.name"], values["model.flavor"] = published
        values |= {"checkpoint.initial_load_path": name, "checkpoint.initial_load_in_hf": True}
        return SIZES[published[0]][published[1]].n_layers

    def data(self) -> None:
        flags, values, name = self.given, self.values, self.given["dataset_name"]
        values |= {"task.kind": "documents", "training.seq_len": flags["sequence_length"], "debug.seed": flags["seed"]}
        local = VERSION.sub("", name)
        if HUB.fullmatch(name) and not Path(local).exists():
            values |= {"training.dataset": "huggingface", "training.dataset_path": name}
            values |= {"validation.dataset": "huggingface_validation", "validation.dataset_path": name}
            for flag in ("train_split", "eval_split"):
                if flags[flag] != FLAGS[flag].default:
                    remedy = "fetch the splits into folders of their names, as files of text, and name what holds these"
                    self.refuse(flag, flags[flag], FLAGS[flag].default, remedy)
            return
        values |= {"training.dataset": "text", "training.dataset_path": f"{local}/{flags['train_split']}"}
        values |= {"validation.dataset": "text", "validation.dataset_path": f"{local}/{flags['eval_split']}"}
        self.note(
            f"the documents of {name}: .txt or .jsonl files in folders {local}/SPLIT, one document each or a line"
        )
        data_option = f"--validation.dataset_path={local}/{flags['test_split']}"
        self.note(f"behind the run, of --test_split: torchtitan evaluate {flags['output_dir']} {data_option}")

    def batch(self) -> None:
        flags, values, both = self.given, self.values, self.given["per_device_batch_size"]
        for flag, section in (
            ("per_device_train_batch_size", "training"),
            ("per_device_eval_batch_size", "validation"),
        ):
            values[f"{section}.local_batch_size"] = both if both and flag not in flags else flags[flag]
        passes, ranks = flags["gradient_accumulation_steps"], self.line.ranks
        if ranks is None:
            self.note("no --num_processes: a batch of one rank; --world-size N says how many there are")
        values["training.global_batch_size"] = values["training.local_batch_size"] * (ranks or 1) * passes
        values["training.steps"] = flags["max_train_steps"]
        if passes == 1 and self.cached:
            self.note("one pass a step: what is stored lags behind the weights, and the authors found it to diverge")
        self.note("parameters are sharded over the ranks, where the script kept all on each; losses are the same")
        values |= {"validation.enable": True, "validation.steps": flags["max_eval_steps"]}
        values["validation.freq"] = flags["evaluate_every_steps"]
        self.note("validation is the mean over its tokens, in caches of its own; the script's was of batches, one more")

    def optimizer(self) -> None:
        flags, values, kind = self.given, self.values, self.given["lr_scheduler_type"]
        values |= {"optimizer.name": "AdamW", "optimizer.lr": flags["learning_rate"], "optimizer.beta2": 0.999}
        values |= {"optimizer.weight_decay": flags["weight_decay"], "optimizer.decay_norms_and_biases": False}
        values["training.max_norm"] = flags["max_grad_norm"]
        warmup = 0 if kind == "constant" else flags["num_warmup_steps"]
        floor = LAST_RATE / flags["learning_rate"] if kind == "polynomial" and flags["learning_rate"] else 0.0
        values |= {"lr_scheduler.decay_type": SHAPES[kind], "lr_scheduler.warmup_steps": warmup}
        values["lr_scheduler.min_lr_factor"] = floor
        if warmup >= flags["max_train_steps"]:
            values["lr_scheduler.total_steps"] = warmup + 1
            self.note(f"--num_warmup_steps {warmup} do not end in this run: the schedule is made longer than it")
        values["activation_checkpoint.mode"] = "none" if flags["disable_grad_checkpointing"] else "full"

    def precision(self) -> None:
        precision = self.line.launched.get("mixed_precision", "no")
        self.meaning.launched.add("mixed_precision")
        name = self.given["cache_dtype"] if precision == "no" else PRECISIONS.get(precision)
        if name is None:
            self.refuse("mixed_precision", precision, f"no, {', '.join(PRECISIONS)}")
        elif name == "float16":
            self.note("bfloat16 for float16, which overflows without a scaler; entries of the cache stay as they are")
            name = "bfloat16"
        self.values["training.mixed_precision_param"] = name or "bfloat16"

    def adapter(self, n_layers: int) -> None:
        flags, values = self.given, self.values
        options = self._released() if flags["pretrained_neurocache"] and self.cached else self._options()
        try:
            layer_options = Neurocache(
                **{key: options[key] for key in ("retrieval_map", "attention_layers") if key in options}
            )
        except ValueError:  # pydantic's
            self.refuse("pretrained_neurocache", flags["pretrained_neurocache"], f"numbers of layers in its {ADAPTER}")
            return
        if self._trains():
            values["adapter.kind"] = "neurocache" if self.cached else "qlora" if flags["nf4"] else "lora"
        if self.cached:
            values |= {KEY + name: value for name, value in options.items()}
            values[KEY + "beside"] = "none" if not self.low_rank else "qlora" if flags["nf4"] else "lora"
        elif idle := [flag for flag in (*NAMES.values(), "cache_type", "global_cache") if flag in flags]:
            self.note(f"no effect with --disable_neurocache: --{', --'.join(idle)}")
        if self.low_rank and "adapter.kind" in values:
            self._beside(layers_of(layer_options, n_layers).attending)

    def _trains(self) -> bool:
        """Return True if the job has an adapter. An untrained adapter is not evaluated."""
        flags, begun = self.given, self.given["pretrained_neurocache"] is not None
        if flags["nf4"] and not self.low_rank:
            self.refuse("nf4", True, "nothing with --disable_lora", "matrices in 4 bits have low-rank ones beside them")
        if not self.cached and begun:
            self.note("no effect with --disable_neurocache: --pretrained_neurocache")
        if not flags["only_evaluate"]:
            if not self.cached and not self.low_rank:
                remedy = "nothing would be trained; add --only_evaluate to measure the model"
                self.refuse("disable_lora", True, "nothing with --disable_neurocache", remedy)
            return True
        if self.cached and not begun:
            remedy = (
                "to measure the model, or --pretrained_neurocache: this cache would be one that nothing has trained"
            )
            self.refuse("only_evaluate", True, "--disable_neurocache beside it", remedy)
        if not self.cached and self.low_rank:
            self.note("LoRA that nothing has trained adds nothing, and is left out")
        return self.cached

    def _options(self) -> dict[str, Any]:
        """Return the cache's options from the flags."""
        flags = self.given
        options = {option: flags[flag] for option, flag in NAMES.items()}
        options |= {"ordering": flags["cache_type"], "scope": "global" if flags["global_cache"] else "lane"}
        if flags["retrieval_map"] is not None and flags["cache_layers"] is not None:
            self.refuse("cache_layers", flags["cache_layers"], "nothing beside --retrieval_map", "drop one of the two")
        if (text := flags["retrieval_map"]) is not None:
            if MAP.fullmatch(text.strip()):
                options["retrieval_map"] = {reader: int(storing) for reader, storing in PAIR.findall(text)}
            else:
                remedy = "it is read, and not run"
                self.refuse("retrieval_map", text, "numbers of layers such as {18: 18}", remedy)
        if layers := self._numbers("cache_layers"):
            options["retrieval_map"] = {str(layer): layer for layer in layers}
        if layers := self._numbers("attention_layers"):
            options["attention_layers"] = layers
        return options

    def _numbers(self, flag: str) -> list[int]:
        text = self.given[flag]
        if text is None:
            return []
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() for part in parts):
            self.refuse(flag, text, "numbers of layers such as 18,19,20")
            return []
        return [int(part) for part in parts]

    def _released(self) -> Mapping[str, Any]:
        """Return the cache's options from a pretrained adapter's folder."""
        given, folder = self.given, self.given["pretrained_neurocache"]
        try:
            options = options_of(read_adapter(Path(folder)))
        except JobError as error:
            self.refuse("pretrained_neurocache", folder, f"a folder with {ADAPTER}", str(error))
            return {}
        flags = (*NAMES.values(), "cache_type", "global_cache", "retrieval_map", "cache_layers", "attention_layers")
        if idle := [flag for flag in flags if flag in given]:
            self.note(f"no effect with --pretrained_neurocache, which says them: --{', --'.join(idle)}")
        self.values["adapter.initial_path"] = folder
        self.note("heads as in the authors' program; for an adapter of torchtitan's leave compat_head_layout out")
        return options | {"compat_head_layout": True}

    def _beside(self, layers: list[int]) -> None:
        """Translate the LoRA options, for the layers that read the cache."""
        flags, values = self.given, self.values
        allowed_modules = OF_OPT if values["model.name"] == "opt" else MODULES
        names = [name.strip() for name in flags["lora_modules"].split(",")]
        if allowed_modules is OF_OPT and "lora_modules" not in flags:
            names = ["fc1", "fc2"]
            self.note("no --lora_modules: fc1,fc2, as the script's own are none of OPT's")
        if not set(names) <= set(allowed_modules):
            self.refuse("lora_modules", flags["lora_modules"], f"some of {', '.join(allowed_modules)}")
            return
        values |= {"adapter.rank": flags["lora_r"], "adapter.alpha": flags["lora_alpha"]}
        values |= {"adapter.dropout": flags["lora_dropout"], "adapter.layers": layers}
        values["adapter.target"] = [pattern for name in dict.fromkeys(names) for pattern in LINEARS[name]]
        if flags["nf4"]:
            self.note("in 4 bits are the matrices that have low-rank ones beside them, and no others")

    def output(self) -> None:
        flags, values = self.given, self.values
        num_kept = flags["keep_n_checkpoints"]
        if num_kept == 1:
            self.note("--keep_n_checkpoints 1: two are kept, as the last one alone could not be trusted")
            num_kept = 2
        values |= {"job.dump_folder": flags["output_dir"], "checkpoint.enable": True}
        values |= {"checkpoint.interval": flags["checkpointing_steps"], "checkpoint.keep_latest_k": num_kept}
        values["metrics.log_freq"] = flags["logging_steps"]
        trackers = [name.strip() for name in flags["report_to"].split(",")]
        if not set(trackers) <= set(TRACKERS):
            self.refuse("report_to", flags["report_to"], f"some of {', '.join(TRACKERS)}")
        elif flags["with_tracking"]:
            values["metrics.trackers"] = trackers
        if "adapter.kind" in values and not flags["only_evaluate"]:
            self.note(f"the adapter in the authors' files: torchtitan export {flags['output_dir']} --to FOLDER")

    def rest(self) -> None:
        """Handle the flags that have no equivalent in a job."""
        flags = self.given
        if flags["save_and_quit"]:
            self.refuse("save_and_quit", True, "nothing", "torchtitan export RUN --to FOLDER writes a run's adapter")
        if flags["resume_from_checkpoint"]:
            reason = "states of accelerate are not read; a job that is started again goes on from its own newest"
            self.refuse("resume_from_checkpoint", flags["resume_from_checkpoint"], "nothing", reason)
        if flags["only_evaluate"]:
            rows = self.values["validation.local_batch_size"] * flags["max_eval_steps"] * (self.line.ranks or 1)
            self.meaning.measures = [flags["model_name_or_path"], f"--samples={rows}"]


read = _Script.meaning_of
