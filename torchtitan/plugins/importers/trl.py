"""Translate lines of trl (1.16): `trl sft`, `trl dpo`, `trl reward`, and their scripts, with the file of --config.

hf_trainer.py translates what they share with transformers' Trainer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.adapters.targets import ALL_LINEAR
from torchtitan.config.options import hint
from torchtitan.core import yaml_file
from torchtitan.core.errors import JobError
from torchtitan.models.hf.config import read_json
from torchtitan.plugins.importers.adapter_targets import PARAMETERS, RENAMED, add_targets
from torchtitan.plugins.importers.axolotl_adapter import MODULES
from torchtitan.plugins.importers.hf_model import add_model, config_of, weight_type
from torchtitan.plugins.importers.hf_trainer import (
    ARGUMENTS,
    FASTER,
    TrainerTranslation,
    noted,
    options_of,
    refused,
)
from torchtitan.plugins.importers.translation import (
    FLOAT16,
    HUB_SPLITS,
    CommandLine,
    JobDraft,
    Setting,
    flag_value,
    make_reward_model,
    same,
)

KINDS_OF_SCRIPTS = {"trl sft": "sft", "sft.py": "sft", "trl dpo": "dpo", "dpo.py": "dpo"}
KINDS_OF_SCRIPTS |= {"trl reward": "reward", "reward.py": "reward"}
CONFIG_FLAG, LENGTH = "config", "max_length"
FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
ENTRY_KEYS = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")
CONTEXT = "max_position_embeddings"
QUERY_VALUE = ("q_proj", "v_proj")
PEFT_TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama2", "llama3", "llama3.1", "llama3.2", "mistral", "qwen2", "qwen3", "gemma3", "opt"), QUERY_VALUE
    ),
    "gpt2": ("c_attn",),
    "roberta": ("query", "value"),
}
"""Family -> the targets of peft where none are named."""
NAME = re.compile(r"[\w.-]+")
LOSSES = {"sigmoid": "dpo", "ipo": "ipo"}
TYPES = ("float32", "bfloat16", "auto")
NO_TOKENIZER = "write it into tokenizer_config.json of the model's folder"

COMMON: dict[str, Setting] = {
    **ARGUMENTS,
    "logging_steps": replace(ARGUMENTS["logging_steps"], default=10.0),
    "gradient_checkpointing": replace(ARGUMENTS["gradient_checkpointing"], default=True),
    "bf16": replace(ARGUMENTS["bf16"], default=True),
    "dataset_name": Setting("text"),
    "dataset_config": Setting("text"),
    "dataset_train_split": Setting("text", "train"),
    "dataset_test_split": Setting("text", "test"),
    "datasets": Setting("list"),
    "test_split_size": Setting("float", least=0),
    **noted({"any": "dataset_streaming streaming"}, "records are tokenized once, before the run"),
    **noted({"any": "ignore_bias_buffers"}, "no effect here"),
    "env": Setting("any", note="set these variables in the environment"),
    "model_name_or_path": Setting("text", required=True),
    "model_revision": Setting("text", note="not checked: download this revision into the folder"),
    **same("dtype torch_dtype", Setting("text", choices=TYPES, reason=FLOAT16)),
    **noted({"any": "attn_implementation padding_free pad_to_multiple_of trust_remote_code"}, FASTER),
    "use_peft": Setting("bool", False),
    "lora_r": Setting("int", 16, least=1),
    "lora_alpha": Setting("float", 32.0),
    "lora_dropout": Setting("float", 0.05),
    **same("lora_target_modules lora_target_parameters lora_modules_to_save", Setting("words")),
    **refused("only answers are learned by adapters here", lora_task_type="CAUSAL_LM"),
    **same("use_rslora use_dora load_in_8bit load_in_4bit use_bnb_nested_quant", Setting("bool", False)),
    "bnb_4bit_quant_type": Setting("text", "nf4", choices=("nf4",), reason="the only format of 4 bits here"),
    "bnb_4bit_quant_storage": Setting("text", note="quantized weights are stored as bytes"),
    **refused("write model.overrides yourself", model_init_kwargs=None),
    "router_aux_loss_coef": Setting("float"),
    "dataset_num_proc": Setting("int", to="data.num_proc"),
    "max_length": Setting("int", 1024, "training.seq_len data.max_tokens", least=2),
    "truncation_mode": Setting("text", "keep_start", choices=("keep_start",), reason="trl gives it up too"),
    **refused("activations stay on their device", activation_offloading=False),
    "pad_token": Setting("text", note="padding is masked by its position"),
}
"""Arguments of both scripts, with trl's defaults."""
SFT: dict[str, Setting] = {
    **COMMON,
    "learning_rate": replace(ARGUMENTS["learning_rate"], default=2e-5),
    "chat_template_path": Setting("text"),
    "dataset_text_field": Setting("text", "text"),
    **refused("records are always tokenized by their format", dataset_kwargs=None),
    "eos_token": Setting("text"),
    "shuffle_dataset": Setting("bool", note="records are always shuffled"),
    "packing": Setting("bool", False),
    "packing_strategy": Setting("text", "bfd", choices=("bfd", "bfd_split"), reason="records are kept apart"),
    "eval_packing": Setting("bool", note="the validation loss is the same packed or not"),
    "completion_only_loss": Setting("bool"),
    "assistant_only_loss": Setting("bool", False),
    "loss_type": Setting("text", "nll", choices=("nll", "chunked_nll"), reason="other losses are not supported"),
}
DPO: dict[str, Setting] = {
    **COMMON,
    "learning_rate": replace(ARGUMENTS["learning_rate"], default=1e-6),
    "disable_dropout": Setting("bool", True, choices=(True,), reason="pairs are learned without dropout"),
    **noted({"any": "precompute_ref_log_probs precompute_ref_batch_size"}, "they are always computed before the run"),
    "loss_type": Setting("words"),
    "loss_weights": Setting("any"),
    **refused("answers are not weighted", ld_alpha=1.0, use_weighting=False),
    "f_divergence_type": Setting("text", "reverse_kl", choices=("reverse_kl",), reason="others are not supported"),
    **noted({"any": "f_alpha_divergence_coef discopop_tau"}, "no effect with these losses"),
    "label_smoothing": Setting("float", note="trl does not use it with sigmoid and ipo"),
    "beta": Setting("float", 0.1, "dpo.beta"),
    **refused("the reference does not change", sync_ref_model=False),
    **noted({"any": "ref_model_mixup_alpha ref_model_sync_steps"}, "no effect without sync_ref_model"),
}
REWARD: dict[str, Setting] = {
    **COMMON,
    "learning_rate": replace(ARGUMENTS["learning_rate"], default=1e-4),
    **{name: SFT[name] for name in ("chat_template_path", "eos_token")},
    "disable_dropout": DPO["disable_dropout"],
    "lora_task_type": Setting("text", choices=("SEQ_CLS",), reason="trl trains no head otherwise"),
    "center_rewards_coefficient": Setting("float", least=0),
}
TABLES = {"sft": SFT, "dpo": DPO, "reward": REWARD}


def read(line: CommandLine) -> JobDraft:
    draft = JobDraft(line.config or line.script, "--")
    kind = KINDS_OF_SCRIPTS.get(line.script)
    if kind is None:
        remedy = "for a file give the line: torchtitan import 'trl sft --config FILE'"
        raise JobError(f"{line.script}: allowed: {', '.join(KINDS_OF_SCRIPTS)}; {remedy}")
    _Trl(line, draft, kind).read()
    return draft


class _Trl:
    def __init__(self, line: CommandLine, draft: JobDraft, kind: str) -> None:
        self.draft, self.kind, table = draft, kind, TABLES[kind]
        values = _values(line, table)
        self.is_unlimited = LENGTH in values and values[LENGTH] is None
        if self.is_unlimited:
            del values[LENGTH]
        self.options = options_of(values, table, draft)
        self.values, self.note, self.refuse = draft.values, draft.notes.append, draft.refuse
        self.folder = self.options["model_name_or_path"]
        self.trainer = TrainerTranslation("trl", line, self.options, draft)

    def read(self) -> None:
        if self.folder is not None:
            weight = self.options["router_aux_loss_coef"]
            add_model(self.folder, self.draft, "router_aux_loss_coef", weight, True, self.kind != "sft")
        self._data()
        if self.kind == "sft":
            self._answers()
        elif self.kind == "dpo":
            self._pairs()
        else:
            self._rewards()
        if self.is_unlimited:
            self._without_limit()
        self._precision()
        self._adapter()
        self.trainer.read()

    def _data(self) -> None:
        options, values = self.options, self.values
        entries = options["datasets"] or []
        if options["dataset_name"] is not None and entries:
            self.note("datasets precede dataset_name")
        train = [source for entry in entries if (source := self._entry(entry))]
        if not entries and options["dataset_name"] is not None:
            train = self._split("dataset_train_split")
        elif not entries:
            self.refuse("dataset_name", None, "a dataset", "trl needs it too")
        if train:
            values["training.sources"] = train
        if len(train) > 1:
            values["training.mixing"] = "sizes"
        strategy = options["eval_strategy"] or options["evaluation_strategy"] or "no"
        if options["test_split_size"] and not entries:
            self.note("no effect without datasets: test_split_size")
        if options["test_split_size"] and entries:
            values |= {
                "validation.enable": True,
                "validation.samples": 0,
                "validation.split": options["test_split_size"],
            }
        elif strategy != "no" and entries:
            self.refuse(
                "eval_strategy", strategy, "no, or test_split_size", "datasets have no held-out part without it"
            )
        elif (
            strategy != "no" and options["dataset_name"] is not None and (held_out := self._split("dataset_test_split"))
        ):
            values |= {"validation.enable": True, "validation.samples": 0, "validation.sources": held_out}

    def _split(self, option: str) -> list[dict[str, Any]]:
        split, name = self.options[option], self.options["dataset_name"]
        if split not in HUB_SPLITS:
            self.refuse(option, split, " or ".join(HUB_SPLITS), "write the split into a file, and name that in the job")
            return []
        if name.endswith(FILES) and split != "train":
            self.refuse(option, split, "train for a file", "name the file of these records in [validation]")
            return []
        if name.endswith(FILES):
            return [{"dataset": "text", "dataset_path": name}]
        config = self.options["dataset_config"]
        return [{"dataset": HUB_SPLITS[split], "dataset_path": f"{name}:{config}" if config else name}]

    def _entry(self, entry: Any) -> dict[str, Any] | None:
        """Translate an entry of a mixture."""
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            self.refuse("datasets", entry, "tables that have a path")
            return None
        faults = len(self.draft.faults)
        for key, value in entry.items():
            if key not in ENTRY_KEYS:
                self.refuse(f"datasets.{key}", value, "a known key", hint(key, ENTRY_KEYS))
            elif key == "name" and not isinstance(value, str | None):
                self.refuse("datasets.name", value, "text")
            elif key in ("data_dir", "columns", "fraction") and value is not None:
                self.refuse(f"datasets.{key}", value, "nothing", "write what it means into [[training.sources]]")
        split, name, files = entry.get("split", "train"), entry.get("name"), entry.get("data_files")
        if not isinstance(split, str) or split not in HUB_SPLITS:
            self.refuse("datasets.split", split, " or ".join(HUB_SPLITS))
        if len(self.draft.faults) > faults:
            return None
        if isinstance(files, str):
            root = "" if entry["path"] in ("json", "csv", "parquet", "arrow") else entry["path"]
            return {"dataset": "text", "dataset_path": str(Path(root, files))}
        if files is not None:
            self.refuse("datasets.data_files", files, "one path, or a glob")
            return None
        return {"dataset": HUB_SPLITS[split], "dataset_path": f"{entry['path']}:{name}" if name else entry["path"]}

    def _answers(self) -> None:
        options, values = self.options, self.values
        values |= {"task.kind": "sft", "data.packing": "best_fit" if options["packing"] else "off"}
        is_split = options["packing"] and options["packing_strategy"] == "bfd_split"
        values["data.too_long"] = "split" if is_split else "truncate"
        if is_split:
            values.pop("data.max_tokens", None)
        if options["dataset_text_field"] != "text":
            values["training.text_field"] = options["dataset_text_field"]
        only = options["completion_only_loss"]
        if options["assistant_only_loss"] and only is False:
            self.note("assistant_only_loss precedes completion_only_loss")
        values["data.train_on"] = "completion" if options["assistant_only_loss"] or only else "all"
        if only is None and not options["assistant_only_loss"]:
            self.note("messages and texts are learned whole, as by trl; for records with prompt and completion set")
            self.note('data.train_on = "completion", as trl learns only the completions of these')
        self._template()

    def _rewards(self) -> None:
        make_reward_model(self.values, self.options["center_rewards_coefficient"])
        self.values["data.too_long"] = "drop"
        self._template()

    def _template(self) -> None:
        """Translate the chat template and the end token, which have to be the tokenizer's or a file."""
        options, values = self.options, self.values
        template = options["chat_template_path"]
        if template is not None and not template.endswith((".jinja", ".j2")):
            self.refuse("chat_template_path", template, "a .jinja file", "copy the template of that folder into one")
        elif template is not None:
            values["data.chat_template"] = template
        eos = options["eos_token"]
        if eos is not None and eos != self._end_token():
            self.refuse("eos_token", eos, "the tokenizer's own", NO_TOKENIZER)

    def _end_token(self) -> Any:
        path = Path(self.folder or "", "tokenizer_config.json")
        token = read_json(path).get("eos_token") if path.is_file() else None
        return token.get("content") if isinstance(token, dict) else token

    def _pairs(self) -> None:
        options, values = self.options, self.values
        losses = [name for entry in options["loss_type"] or ["sigmoid"] for name in entry.split()]
        if len(losses) != 1 or losses[0] not in LOSSES:
            self.refuse("loss_type", losses, f"one of {', '.join(LOSSES)}", "other losses are not supported")
        elif options["loss_weights"] not in (None, 1, 1.0, [1.0], "1.0"):
            self.refuse("loss_weights", options["loss_weights"], "nothing with one loss")
        values["task.kind"] = LOSSES.get(losses[0] if losses else "", "dpo")
        values["data.too_long"] = "drop"
        self.note("not the same: pairs of more than max_length tokens are left out, and counted; trl cuts them")

    def _without_limit(self) -> None:
        """Translate max_length: null, with which trl cuts nothing: no record may exceed the model's context."""
        length = config_of(self.folder).get(CONTEXT)
        if self.kind == "sft" and self.options["packing"]:
            self.refuse(LENGTH, None, "a number with packing", "trl refuses it too")
        elif not isinstance(length, int):
            allowed = f"null for a model with {CONTEXT} in its config.json, or a number"
            self.refuse(LENGTH, None, allowed, "download the model, or give the tokens of the longest record")
        else:
            self.values |= {"training.seq_len": length, "data.too_long": "error"}
            self.values.pop("data.max_tokens", None)
            self.note(f"{LENGTH} null: nothing is cut; samples are padded to the longest of their batch, and a record")
            self.note(f"with more inputs than the model's context, {length}, is refused: see torchtitan prepare")

    def _precision(self) -> None:
        options, values = self.options, self.values
        kind = options["dtype"] or options["torch_dtype"] or "float32"
        if kind == "auto":
            kind = weight_type(self.folder)
            self.note(f"dtype auto: weights in {kind}, as config.json says, or would")
        if kind not in TYPES[:2]:
            self.refuse("dtype", kind, "float32 or bfloat16", FLOAT16)
        is_quantized = options["load_in_4bit"] or options["load_in_8bit"]
        if kind == "bfloat16" and not options["use_peft"]:
            values |= {"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"}
        elif kind == "bfloat16" or is_quantized:
            values["training.mixed_precision_param"] = "bfloat16"
        if is_quantized and options["use_peft"]:
            values["training.dtype"] = "bfloat16"  # as trl stores A and B then

    def _adapter(self) -> None:
        options, values = self.options, self.values
        bits = [name for name in ("load_in_4bit", "load_in_8bit") if options[name]]
        if not options["use_peft"]:
            for name in [*bits, "use_dora", "use_rslora"]:
                if options[name]:
                    self.refuse(name, True, "false without use_peft")
            if ignored := [name for name in COMMON if name.startswith("lora_") and name in options]:
                self.note(f"no effect without use_peft: {', '.join(ignored)}")
            return
        if len(bits) > 1 or (bits and options["use_dora"]):
            self.refuse(bits[0], True, "one of load_in_4bit, load_in_8bit and use_dora", "choose one")
        if "load_in_4bit" in bits and not options["use_bnb_nested_quant"]:
            self.refuse("use_bnb_nested_quant", False, "true with load_in_4bit", "scales are always in 8 bits here")
        kinds = {"load_in_4bit": "qlora", "load_in_8bit": "lora_int8"}
        kind = kinds[bits[0]] if bits else "dora" if options["use_dora"] else "lora"
        values |= {"adapter.kind": kind, "adapter.rank": options["lora_r"], "adapter.alpha": options["lora_alpha"]}
        values |= {"adapter.dropout": options["lora_dropout"] if self.kind == "sft" else 0.0, "adapter.save": "alone"}
        if self.kind != "sft" and "lora_dropout" in options:
            self.note("no effect for pairs, which trl learns without dropout: lora_dropout")
        if options["use_rslora"]:
            values["adapter.rslora"] = True
        modules = [name for entry in options["lora_modules_to_save"] or [] for name in entry.split()]
        if self.kind == "reward":  # peft trains the head of classes, whose name is score
            if options["lora_task_type"] is None:
                self.note("not the same: the new head is trained; by trl only with lora_task_type SEQ_CLS")
            modules = ["lm_head", *(name for name in modules if name != "score")]
        if unknown := [name for name in modules if name not in MODULES]:
            self.refuse("lora_modules_to_save", unknown, f"some of {', '.join(MODULES)}")
        elif modules:
            values["adapter.train_fully"] = [MODULES[name] for name in modules]
            self.note("peft's layout has no place for fully trained parts: torchtitan export --merge writes the result")
        elif kind != "dora":
            values["adapter.last_save_in_peft"] = True
        if "model.name" in values:
            self._targets(modules, "trl" if bits else "")

    def _targets(self, saved: Sequence[str], quantizer: str) -> None:
        """Translate the targets. peft takes a single one, which trl takes out of its list, for a regex."""
        names = [name for entry in self.options["lora_target_modules"] or [] for name in entry.split()]
        parameters = [name for entry in self.options[PARAMETERS] or [] for name in entry.split()]
        family = self.values["model.name"]
        if not parameters or family not in RENAMED:
            names = names or list(PEFT_TARGETS.get(family, ()))
        are_all = names == [ALL_LINEAR]
        if are_all and family in RENAMED:
            reason = "peft then adapts experts and routers too, which have no pair here"
            self.refuse("lora_target_modules", ALL_LINEAR, "names in a model with experts", reason)
            return
        is_regex = len(names) == 1 and NAME.fullmatch(names[0]) is None
        modules = [] if are_all else names[0] if is_regex else names
        option, folder = "lora_target_modules", self.folder or ""
        add_targets(self.draft, option, modules, are_all, folder, saved, quantizer, parameters)


def _values(line: CommandLine, table: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the values of a line: those of the file that --config names, overridden by the flags."""
    values: dict[str, Any] = {}
    for name, text in line.flags:
        if name == CONFIG_FLAG:
            values = yaml_file.read(text or "") | values
    if line.config is not None:
        values = yaml_file.read(line.config) | values
    for name, text in line.flags:
        negated = name.removeprefix("no_")
        if name == CONFIG_FLAG:
            continue
        if text is None and name not in table and negated in table:
            values[negated] = False
        else:
            values[name] = flag_value(table.get(name), text)
    return values
