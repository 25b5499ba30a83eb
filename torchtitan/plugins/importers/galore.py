"""Translate the script that compares LoRA, GaLore and 8-bit GaLore on one model (--mode, --optimizer, --model) to jobs.

A note records behavior of the script that a job does not reproduce. Some flags did not work as documented: its GaLore
left out norms and biases, the learning rate went up and down with the batches, weight decay did not apply to LoRA, and
tokens were counted as documents. Jobs implement them as documented.
"""

import json
from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

from torchtitan.config.options import hint, show
from torchtitan.core.errors import JobError
from torchtitan.lr_schedules import TORCHTITAN
from torchtitan.models import FROM_HF
from torchtitan.models.hf.config import read_json
from torchtitan.plugins.importers.relora import GALORE_TORCH
from torchtitan.plugins.importers.translation import LINEARS, Script, Setting, is_finite, targets_of

OPTIMIZERS = ("lora", "galore", "galore8bit", "lora+galore8bit", "baseline")
MODELS = {
    "llama_60m": ("llama2", "60m", "t5-base"),
    "llama_1b": ("llama2", "1b", "t5-base"),
    "llama_7b": ("llama2", "7b", "t5-base"),
    "roberta": ("roberta", "125M", "roberta-base"),
    "gpt2": ("gpt2", "124M", "gpt2"),
}
"""--model -> (family, size, folder of the tokenizer)."""
NO_FLOAT16 = "float16 overflows without a scaler, and GaLore finds no bases of such gradients; bf16 needs none"
FLAGS: dict[str, Setting] = {
    "mode": Setting("text", required=True, choices=("pretraining", "finetuning")),
    "optimizer": Setting("text", required=True, choices=OPTIMIZERS),
    "model": Setting("text", required=True, choices=tuple(MODELS)),
    "batch_size": Setting("int", 16, to="training.local_batch_size", least=1),
    "num_epochs": Setting("int", 30, least=1),
    "max_length": Setting("int", 512, to="training.seq_len", least=1),
    "num_training_tokens": Setting("float", 1e9, least=1),
    "shuffle": Setting("bool", True, to="training.shuffle"),
    "dtype": Setting("text", choices=("bf16",), reason=NO_FLOAT16),
    "lr": Setting("float", 4e-4, to="optimizer.lr"),
    "weight_decay": Setting("float", 0.01, to="optimizer.weight_decay"),
    "tmax": Setting("int", 30, least=1),
    "lora_config": Setting("text"),
    "galore_config": Setting("text"),
    "test": Setting("bool", False, to="checkpoint.enable", choices={True: False, False: True}),
}
CONSTANTS = {
    "optimizer.name": "AdamW",
    "optimizer.beta2": 0.999,
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.warmup_steps": 0,
    "lr_scheduler.min_lr_factor": 0.0,
    "lr_scheduler.convention": TORCHTITAN,  # CosineAnnealingLR would reach 0 after the last step too
    "metrics.log_freq": 1,
}
"""Options of every job."""
LORA = {"r": 8, "alpha": 8, "dropout": 0.1}
GALORE = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
SCRIPT_NAMES = {"lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets", "galore_scale": "scale"}
"""Keys of a JSON config: the libraries' name -> ours."""
TARGETS_PREFIX = "target_modules_"
"""The script's own file has a key of targets for each mode, with this prefix."""
DEFAULT_FILES = {"lora_config": "config/lora_config.json", "galore_config": "config/galore_config.json"}
"""Files that the script reads where a line does not name others, relative to the folder where the line runs."""
HEADS = {"roberta": ["output.*", "norm.dense.*"], "gpt2": ["output.*"]}
"""Parameters of the classification heads."""
TEST_TOKENS = 1000


class _Script(Script):
    FLAGS = FLAGS

    def read(self) -> None:
        if not self.options.is_complete:
            return
        self.values |= CONSTANTS
        self.values["model.name"], self.values["model.flavor"], tokenizer = MODELS[self.options["model"]]
        self.values["model.tokenizer_path"] = tokenizer
        if not Path(tokenizer).exists():
            self.note(f"the tokenizer {tokenizer} has to be in a folder of that name here, see docs/data.md")
        self.pretraining() if self.is_pretraining else self.finetuning()
        self.optimizer()
        self.precision()
        self.output()

    @property
    def is_pretraining(self) -> bool:
        return bool(self.options["mode"] == "pretraining")

    def pretraining(self) -> None:
        options, values = self.options, self.values
        if options["model"] == "roberta":
            values["task.kind"] = "masked_lm"
            self.note("masked words are learned (task.mask_share of all, by the tokenizer's mask token); the script's")
            self.note("own path for them did not work")
        values |= {"training.dataset": "c4", "training.dataset_path": "allenai/c4:realnewslike"}
        if options["model"].startswith("llama"):
            self.note("T5's tokenizer has 100 more tokens than the model, though not in text: set model.overrides =")
            self.note("{vocab_size = 32100} to include them")
        self.note("documents are packed: the script cut or padded each to --max_length, and learned the padding")
        if options["shuffle"]:
            self.note("a stream is shuffled within a buffer; the script did not shuffle streams")
        tokens = self.budget(int(options["num_training_tokens"]))
        self.note(f"{tokens:,} tokens are read once; the script read as many documents --num_epochs times;")
        self.note("--tmax is the same fraction of the run as of these epochs; the rate does not rise again after it")

    def finetuning(self) -> None:
        """Translate fine-tuning on SST-2, which classifies sentences as good or bad."""
        options, values = self.options, self.values
        values |= {"data.packing": "off", "data.too_long": "truncate"}
        if options["model"].startswith("llama"):
            values |= {"task.kind": "sft", "training.dataset": "text", "training.dataset_path": "sst2.jsonl"}
            self.note('write SST-2 as {"prompt": sentence, "completion": "good" or "bad"} into sst2.jsonl: Llamas name')
            self.note("the class in words, where the script's path did not work; set checkpoint.initial_load_path to")
            self.note("start from a pretrained model")
        else:
            self.classification()
        if options["test"]:
            self.budget(TEST_TOKENS)
        else:
            values |= {"training.epochs": options["num_epochs"], "lr_scheduler.t_max": options["tmax"]}
            self.note("--tmax counts epochs, as documented, not batches; the rate does not rise again after it")

    def classification(self) -> None:
        values, folder = self.values, self.values["model.tokenizer_path"]
        values |= {"task.kind": "seq_cls", "training.text_field": "sentence", "model.overrides": {"n_classes": 2}}
        values |= {"training.dataset": "huggingface", "training.dataset_path": "sst2"}
        self.note("save SST-2 with `datasets` (save_to_disk) as the folder sst2; its train split is used")
        if self.options["test"]:
            self.note(f"a test begins from random weights, so {folder} is not read")
            return
        values |= {"model.flavor": FROM_HF, "model.hf_folder": folder}
        values |= {"checkpoint.initial_load_path": folder, "checkpoint.initial_load_in_hf": True}
        values |= {"checkpoint.last_save_model_only": True, "checkpoint.last_save_in_hf": True}
        self.note(f"the model's weights are read from the folder {folder}")

    def budget(self, tokens: int) -> int:
        """Set the number of training tokens, and scale the schedule's length from epochs to tokens."""
        options, values = self.options, self.values
        values["training.tokens"] = tokens = TEST_TOKENS if options["test"] else tokens
        share = Fraction(options["tmax"], options["num_epochs"])
        if share != 1:
            values |= {"lr_scheduler.t_max": ceil(tokens * share), "lr_scheduler.t_max_unit": "token"}
        return tokens

    def optimizer(self) -> None:
        kind = self.options["optimizer"]
        targets = ["q_proj", "v_proj"] if self.is_pretraining else ["query", "value"]
        lora = self._config("lora_config", LORA | {"targets": targets}, "lora" in kind)
        galore = self._config("galore_config", GALORE, "galore" in kind)
        if "lora" in kind:
            self._adapter(lora)
        if "galore" in kind:
            self._projection(galore, lora["r"] if "lora" in kind else None)

    def _adapter(self, config: Mapping[str, Any]) -> None:
        supported_targets = [name for name in config["targets"] if name in LINEARS]
        if len(supported_targets) < len(config["targets"]) or not supported_targets:
            self.refuse("lora_config", config["targets"], f"targets among {', '.join(LINEARS)}")
        self.values |= {"adapter.kind": "lora", "adapter.rank": config["r"], "adapter.alpha": float(config["alpha"])}
        self.values |= {"adapter.dropout": config["dropout"], "adapter.target": targets_of(supported_targets)}
        self.note("weight decay is as in the flag; the script did not apply it to LoRA")
        if not self.is_pretraining and self.options["model"] in HEADS:
            self.values["adapter.train_fully"] = HEADS[self.options["model"]]
            self.note("the classification head is trained with the adapters: the script left it at its random values")
        if self.is_pretraining:
            self.values["adapter.train_dense_rest"] = True
            self.note("embeddings, head and norms are trained with the adapters: frozen at their random values they")
            self.note("would be useless")

    def _projection(self, config: Mapping[str, Any], lora_rank: int | None) -> None:
        values, kind, rank = self.values, self.options["optimizer"], config["rank"]
        if lora_rank is not None and rank >= lora_rank:
            values["optimizer.name"] = "AdamW8bit"
            self.note(f"NO GALORE HERE: its rank {rank} is not below LoRA's {lora_rank}; a projection would rotate the")
            self.note("gradients and save nothing: adapters use 8-bit AdamW; lower GaLore's rank to project them")
            return
        values["optimizer.name"] = "GaLore"
        values["optimizer.options"] = {
            "rank": rank,
            "update_gap": config["update_proj_gap"],
            "scale": config["scale"],
            "side": config["proj_type"],
            "inner": "adamw_8bit" if "8bit" in kind else "adamw",
        }
        if "8bit" not in kind:
            values["optimizer.eps"], formula = GALORE_TORCH
            values["optimizer.options"] |= formula
        if lora_rank is not None:
            values["optimizer.options"]["targets"] = ["*lora_A", "*lora_B"]
            self.note("only the gradients of the adapters' matrices are projected")
            return
        self.note("GaLore projects attention and feed-forward; embedding, head and norms use the moments directly: the")
        self.note("script projected embedding and head, and never trained the norms")

    def _config(self, flag: str, default: dict[str, Any], is_used: bool) -> dict[str, Any]:
        """Read a JSON object from the flag, or from the file that it names or defaults to, over published values."""
        value = self.options[flag]
        if value is None:
            value = self._default_file(flag, is_used)
        if value is None:
            return default
        try:
            entries = json.loads(value) if value.lstrip().startswith("{") else read_json(Path(value))
        except (JobError, ValueError, RecursionError) as error:
            self.refuse(flag, value, "a JSON object, or a file that holds one", str(error))
            return default
        for name, entry in self._with_script_names(entries).items():
            if name not in default:
                self.refuse(flag, name, f"the keys {', '.join(default)}", hint(name, default))
            elif not _fits(entry, default[name]):
                self.refuse(flag, f"{name} = {show(entry)}", f"{name} such as {show(default[name])}")
            else:
                default = default | {name: entry}
        return default

    def _default_file(self, flag: str, is_used: bool) -> str | None:
        """Return the path of the file that the script reads without the flag; None if it is missing or not used."""
        path = DEFAULT_FILES[flag]
        if not is_used:
            return None
        if Path(path).exists():
            self.note(f"no --{flag}: {path} is read, which is the script's default")
            return path
        self.note(f"no --{flag}, and its default {path} is not here: the published values of that file are used")
        return None

    def _with_script_names(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Rename the entries of a config to our names, and drop the targets of the other mode."""
        ignored = {TARGETS_PREFIX + mode for mode in FLAGS["mode"].choices if mode != self.options["mode"]}
        names = SCRIPT_NAMES | {TARGETS_PREFIX + self.options["mode"]: "targets"}
        return {names.get(name, name): value for name, value in entries.items() if name not in ignored}

    def precision(self) -> None:
        dtype = "float32" if self.options["test"] else "bfloat16"
        if "dtype" not in self.options and not self.options["test"]:
            self.note("no --dtype: bfloat16; the script's own default was fp16, which did not work")
        self.values |= {"training.dtype": dtype, "training.mixed_precision_param": dtype}

    def output(self) -> None:
        suffix = "pretrained" if self.is_pretraining else "finetuned"
        self.values["job.dump_folder"] = f"{self.options['model']}_{self.options['optimizer']}_{suffix}"
        self.note("the columns of its CSV file are in metrics.jsonl, see docs/low_rank.md")
        self.note("gradients are clipped to 1.0 (training.max_norm), which GaLore's authors needed at 7B")


read = _Script.draft_of


def _fits(value: object, like: object) -> bool:
    """Return True if `value` has the type of `like`. An int serves as a float; items of a list must be text."""
    if isinstance(value, list):
        return type(like) is list and all(isinstance(item, str) for item in value)
    if isinstance(value, (int, float)) and not is_finite(value):
        return False
    return type(value) is type(like) or (type(like) is float and type(value) is int)
