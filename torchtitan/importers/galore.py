"""Translate the script that compares LoRA, GaLore and 8-bit GaLore on one model (--mode, --optimizer, --model) to jobs.

A note records behavior of the script that a job does not reproduce. Some flags did not do what they said: its GaLore
left out norms and biases, the learning rate went up and down with the batches, weight decay did not apply to LoRA, and
tokens were counted as documents. Jobs do what the flags say.
"""

import json
from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

from torchtitan.config.options import hint, show
from torchtitan.core.errors import JobError
from torchtitan.importers.relora_flags import OF_THE_LIBRARY
from torchtitan.importers.script import Flag, Script
from torchtitan.importers.translation import LINEARS, is_finite
from torchtitan.models import FROM_HF
from torchtitan.models.hf.config import read_json

OPTIMIZERS = ("lora", "galore", "galore8bit", "lora+galore8bit", "baseline")
MODELS = {
    "llama_60m": ("llama2", "60m", "t5-base"),
    "llama_1b": ("llama2", "1b", "t5-base"),
    "llama_7b": ("llama2", "7b", "t5-base"),
    "roberta": ("roberta", "125M", "roberta-base"),
    "gpt2": ("gpt2", "124M", "gpt2"),
}
"""--model -> (family, size, folder of the tokenizer)."""
FLAGS: dict[str, Flag] = {
    "mode": Flag(str, None, ("pretraining", "finetuning")),
    "optimizer": Flag(str, None, OPTIMIZERS),
    "model": Flag(str, None, tuple(MODELS)),
    "batch_size": Flag(int, 16),
    "num_epochs": Flag(int, 30),
    "max_length": Flag(int, 512),
    "num_training_tokens": Flag(float, 1e9),
    "shuffle": Flag(bool, True),
    "dtype": Flag(str, None, ("fp16", "bf16")),
    "lr": Flag(float, 4e-4),
    "weight_decay": Flag(float, 0.01),
    "tmax": Flag(int, 30),
    "lora_config": Flag(str),
    "galore_config": Flag(str),
    "test": Flag(bool, False),
}
COUNTS = ("batch_size", "num_epochs", "max_length", "num_training_tokens", "tmax")
LORA = {"r": 8, "alpha": 8, "dropout": 0.1}
GALORE = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
SPELT = {"lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets", "galore_scale": "scale"}
"""Keys of a JSON config: the libraries' name -> the script's name."""
OF_A_MODE = "target_modules_"
"""Prefix of a mode: the script's own file has a key of targets for each mode."""
DEFAULT_FILES = {"lora_config": "config/lora_config.json", "galore_config": "config/galore_config.json"}
"""Files that the script reads where a line does not name others, relative to the folder where the line runs."""
HEADS = {"roberta": ["output.*", "norm.dense.*"], "gpt2": ["output.*"]}
"""Parameters of the classification heads."""
TEST_TOKENS = 1000


class _Script(Script):
    FLAGS = FLAGS

    def read(self) -> None:
        flags = self.given
        missing = [flag for flag in ("mode", "optimizer", "model") if flags[flag] is None]
        for flag in missing:
            self.refuse(flag, None, f"one of {', '.join(map(show, FLAGS[flag].choices))}", "the script needs it too")
        few = [flag for flag in COUNTS if self.given[flag] < 1]
        for flag in few:
            self.refuse(flag, self.given[flag], "at least 1", "")
        if missing or few:
            return
        (values := self.values)["model.name"], values["model.flavor"], tokenizer = MODELS[flags["model"]]
        values |= {"model.tokenizer_path": tokenizer, "training.seq_len": flags["max_length"]}
        values |= {"training.local_batch_size": flags["batch_size"], "training.shuffle": flags["shuffle"]}
        if not Path(tokenizer).exists():
            self.note(f"the tokenizer {tokenizer} has to be in a folder of that name here, see docs/data.md")
        self.pretraining() if self.pretrains else self.finetuning()
        self.optimizer()
        self.precision()
        self.output()

    @property
    def pretrains(self) -> bool:
        return self.given["mode"] == "pretraining"

    def pretraining(self) -> None:
        flags, values = self.given, self.values
        if flags["model"] == "roberta":
            values["task.kind"] = "masked_lm"
            self.note(
                "masked words are learned (task.mask_share of all, by the tokenizer's mask token); the script had no"
            )
            self.note("working path for them")
        values |= {"training.dataset": "c4", "training.dataset_path": "allenai/c4:realnewslike"}
        if flags["model"].startswith("llama"):
            self.note("with more tokens than the model (100, of no text) set model.overrides = {vocab_size = 32100}")
        self.note("documents are packed: the script cut or padded each to --max_length, and learned the pads")
        if flags["shuffle"]:
            self.note("shuffled as far as a stream can be, within a buffer; the script did not shuffle streams")
        tokens = self.budget(int(flags["num_training_tokens"]))
        self.note(f"{tokens:,} tokens are read once, where the script took so many documents --num_epochs times;")
        self.note("--tmax is as large a share of them as of these epochs, and the rate does not rise again behind it")

    def finetuning(self) -> None:
        """Translate fine-tuning on SST-2, which classifies sentences as good or bad."""
        flags, values = self.given, self.values
        values |= {"data.packing": "off", "data.too_long": "truncate"}
        if flags["model"].startswith("llama"):
            values |= {"task.kind": "sft", "training.dataset": "text", "training.dataset_path": "sst2.jsonl"}
            self.note('write SST-2 as {"prompt": sentence, "completion": "good" or "bad"} into sst2.jsonl: Llamas say')
            self.note("the class in words, where the script had no working path; checkpoint.initial_load_path lets the")
            self.note("run begin from a model that has been pretrained")
        else:
            self.classes()
        if flags["test"]:
            self.budget(TEST_TOKENS)
        else:
            values |= {"training.epochs": flags["num_epochs"], "lr_scheduler.t_max": flags["tmax"]}
            self.note("--tmax counts epochs, as it says, and not batches; the rate does not rise again behind it")

    def classes(self) -> None:
        values, folder = self.values, self.values["model.tokenizer_path"]
        values |= {"task.kind": "seq_cls", "training.text_field": "sentence", "model.overrides": {"n_classes": 2}}
        values |= {"training.dataset": "huggingface", "training.dataset_path": "sst2"}
        self.note("save SST-2 by `datasets` (save_to_disk) as the folder sst2; its split train is learned")
        if self.given["test"]:
            self.note(f"a test begins from random weights, and {folder} is not read")
            return
        values |= {"model.flavor": FROM_HF, "model.hf_folder": folder}
        values |= {"checkpoint.initial_load_path": folder, "checkpoint.initial_load_in_hf": True}
        values |= {"checkpoint.last_save_model_only": True, "checkpoint.last_save_in_hf": True}
        self.note(f"the model's weights are read from the folder {folder}")

    def budget(self, tokens: int) -> int:
        """Set the number of training tokens, and scale the schedule's length from epochs to tokens."""
        flags, values = self.given, self.values
        values["training.tokens"] = tokens = TEST_TOKENS if flags["test"] else tokens
        share = Fraction(flags["tmax"], flags["num_epochs"])
        if share != 1:
            values |= {"lr_scheduler.t_max": ceil(tokens * share), "lr_scheduler.t_max_unit": "token"}
        return tokens

    def optimizer(self) -> None:
        flags, values, kind = self.given, self.values, self.given["optimizer"]
        targets = ["q_proj", "v_proj"] if self.pretrains else ["query", "value"]
        lora = self._config("lora_config", LORA | {"targets": targets}, "lora" in kind)
        galore = self._config("galore_config", GALORE, "galore" in kind)
        values |= {"optimizer.name": "AdamW", "optimizer.lr": flags["lr"], "optimizer.beta2": 0.999}
        values |= {"optimizer.weight_decay": flags["weight_decay"], "lr_scheduler.decay_type": "cosine"}
        values |= {"lr_scheduler.warmup_steps": 0, "lr_scheduler.min_lr_factor": 0.0}
        if "lora" in kind:
            self._adapter(lora)
        if "galore" in kind:
            self._projection(galore, lora["r"] if "lora" in kind else None)

    def _adapter(self, config: Mapping[str, Any]) -> None:
        supported_targets = [name for name in config["targets"] if name in LINEARS]
        if len(supported_targets) < len(config["targets"]) or not supported_targets:
            self.refuse("lora_config", config["targets"], f"targets among {', '.join(LINEARS)}")
        self.values |= {"adapter.kind": "lora", "adapter.rank": config["r"], "adapter.alpha": float(config["alpha"])}
        chosen = [pattern for name in supported_targets for pattern in LINEARS[name]]
        self.values |= {"adapter.dropout": config["dropout"], "adapter.target": list(dict.fromkeys(chosen))}
        self.note("weight decay is that of the flag, which the script left out of LoRA")
        if not self.pretrains and self.given["model"] in HEADS:
            self.values["adapter.train_fully"] = HEADS[self.given["model"]]
            self.note("the head of classes is trained beside the adapters: the script left it as it was drawn")
        if self.pretrains:
            self.values["adapter.train_dense_rest"] = True
            self.note("embeddings, head and norms are trained beside the adapters: frozen as they are drawn, they say")
            self.note("nothing")

    def _projection(self, config: Mapping[str, Any], lora_rank: int | None) -> None:
        values, kind = self.values, self.given["optimizer"]
        if lora_rank is not None and config["rank"] >= lora_rank:
            values["optimizer.name"] = "AdamW8bit"
            self.note(
                f"NO GALORE HERE: its rank {config['rank']} reaches LoRA's {lora_rank}, so that it would turn their"
            )
            self.note(
                "gradients and save nothing: adapters step by AdamW in 8 bits; give it a lower rank to project them"
            )
            return
        values["optimizer.name"] = "GaLore"
        values["optimizer.options"] = {
            "rank": config["rank"],
            "update_gap": config["update_proj_gap"],
            "scale": config["scale"],
            "side": config["proj_type"],
            "inner": "adamw_8bit" if "8bit" in kind else "adamw",
        }
        if "8bit" not in kind:
            values["optimizer.eps"], formula = OF_THE_LIBRARY
            values["optimizer.options"] |= formula
        if lora_rank is not None:
            values["optimizer.options"]["targets"] = ["*lora_A", "*lora_B"]
            self.note("the adapters' matrices are projected, and nothing else")
            return
        self.note("GaLore projects attention and feed-forward; embedding and head step as norms do, by the moments as")
        self.note("they are: the script projected the former and never trained the latter")

    def _config(self, flag: str, default: dict[str, Any], needed: bool) -> dict[str, Any]:
        """Read a JSON object from the flag itself or from the file that it names, over the script's published values.
        Without the flag, read the script's default file if it exists.
        """
        value = self.given[flag]
        if value is None:
            value = self._default_file(flag, needed)
        if value is None:
            return default
        try:
            entries = json.loads(value) if value.lstrip().startswith("{") else read_json(Path(value))
        except (JobError, ValueError, RecursionError) as error:
            self.refuse(flag, value, "a JSON object, or a file that holds one", str(error))
            return default
        for name, entry in self._in_one_spelling(entries).items():
            if name not in default:
                self.refuse(flag, name, f"the keys {', '.join(default)}", hint(name, default))
            elif not _fits(entry, default[name]):
                self.refuse(flag, f"{name} = {show(entry)}", f"{name} such as {show(default[name])}")
            else:
                default = default | {name: entry}
        return default

    def _default_file(self, flag: str, needed: bool) -> str | None:
        """Return the path of the file that the script reads without the flag; None if it is missing or not `needed`."""
        path = DEFAULT_FILES[flag]
        if not needed:
            return None
        if Path(path).exists():
            self.note(f"no --{flag}: {path} is read, which is the script's default")
            return path
        self.note(f"no --{flag}, and its default {path} is not here: the published values of that file are taken")
        return None

    def _in_one_spelling(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Rename the entries of a config to our names, and drop the targets of the other mode."""
        other = {OF_A_MODE + mode for mode in FLAGS["mode"].choices if mode != self.given["mode"]}
        names = SPELT | {OF_A_MODE + self.given["mode"]: "targets"}
        return {names.get(name, name): value for name, value in entries.items() if name not in other}

    def precision(self) -> None:
        flags, values = self.given, self.values
        dtype = "float32" if flags["test"] else "bfloat16"
        if flags["dtype"] == "fp16":
            reason = "float16 overflows without a scaler, and bases of such gradients cannot be found; bf16 needs none"
            self.refuse("dtype", "fp16", "bf16", reason)
        elif flags["dtype"] is None and not flags["test"]:
            self.note("no --dtype: bfloat16; the script's own default was fp16, which did not work")
        values |= {"training.dtype": dtype, "training.mixed_precision_param": dtype}

    def output(self) -> None:
        flags, values = self.given, self.values
        done = "pretrained" if self.pretrains else "finetuned"
        values["job.dump_folder"] = f"{flags['model']}_{flags['optimizer']}_{done}"
        values |= {"metrics.log_freq": 1, "checkpoint.enable": not flags["test"]}
        self.note("the columns of its CSV file are in metrics.jsonl, see docs/low_rank.md")
        self.note("gradients are clipped to 1.0 (training.max_norm), which GaLore's authors needed at 7B")


read = _Script.meaning_of


def _fits(value: object, like: object) -> bool:
    """Return True if `value` has the type of `like`. An int serves as a float; items of a list must be text."""
    if isinstance(value, list):
        return type(like) is list and all(isinstance(item, str) for item in value)
    if isinstance(value, (int, float)) and not is_finite(value):
        return False
    return type(value) is type(like) or (type(like) is float and type(value) is int)
