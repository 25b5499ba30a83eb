"""The options of other programs, and the draft of a job that they are translated to.

A program has a table of `Setting`s. Each entry gives the type of an option and its translation: an option of the job,
a note, or a refusal. Translations of several options together are code of the program's reader.

Also the names of linear layers in other libraries, and the options of a job that starts from a Hugging Face folder.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torchtitan.config.options import Fault, hint, show
from torchtitan.core import yaml_file
from torchtitan.core.errors import JobError
from torchtitan.models import CONFIG_CONVERTERS, FROM_HF, SIZES
from torchtitan.models.hf.config import CONFIG, read_json

COMMAND_LINE = "the command line"
AUTO = "auto"
BOOLEANS = {"true": True, "false": False}
YAML_BOOLEANS = BOOLEANS | {"yes": True, "no": False, "1": True, "0": False}
ROUTER_LOSS = "output_router_logits"
"""Key of a config with which transformers adds the router's loss to that of the tokens."""
BALANCE = "aux_loss_weight"
"""Size of models with experts: the weight of the loss that balances them."""
HUB_SPLITS = {"train": "huggingface", "validation": "huggingface_validation", "test": "huggingface_test"}
"""Split of a dataset of the hub -> dataset here."""
FLOAT16 = "float16 overflows without a scaler; bf16 needs none"
BFLOAT16_INSTEAD = "not the same: computed in bfloat16, which needs no scaler of the loss, in place of float16"


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line.

    `script`: the script's name, or the options file's if there is no script. `ranks`: total over all machines; None if
    it depends on the machine. `flags`: the flags after both, in order, as (name without dashes, value); the value is
    None for a flag without one. `config`: path of the options file. `launcher`: the program that starts the script, one
    of launchers.OPTIONS, or empty. `launched`: the launcher's options by name with underscores, "" for an option
    without a value. `unread`: unrecognized words before the launcher, or before a script without one. `program`: the
    program whose command the line is, a key of programs.PROGRAMS, or empty. `environment`: variables that it sets.
    """

    script: str
    ranks: int | None
    flags: list[tuple[str, str | None]] = field(default_factory=list)
    config: str | None = None
    launcher: str = ""
    launched: dict[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    program: str = ""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """An option of another program, and its translation to a job.

    `kind`: a key of KINDS. `default`: the program's own default, written into the job if `to` is set. `to`: the options
    of the job that take its value, separated by blanks. `choices`: accepted values, or a mapping from them to the
    values in the job; None leaves `to` unset. `least`: smallest accepted number. `note`: remark written into the job's
    head when the option is set. `reason`: why other values than `choices`, or without `choices` any value except
    `default`, false, 0 and empty, are refused. An option with none of these is read by the code of its program.
    """

    kind: str
    default: Any = None
    to: str = ""
    choices: Collection[Any] = ()
    least: int | None = None
    required: bool = False
    note: str = ""
    reason: str = ""

    def allowed(self) -> str:
        return one_of(self.choices) if self.choices else KINDS[self.kind][0]


Table = Mapping[str, Setting]


def same(names: str, option: Setting) -> dict[str, Setting]:
    """Return table entries for several options, separated by blanks, that are treated alike."""
    return dict.fromkeys(names.split(), option)


def one_of(choices: Iterable[Any]) -> str:
    return f"one of {', '.join(choice if isinstance(choice, str) else show(choice) for choice in choices)}"


@dataclass
class JobDraft:
    """A job that is being translated from a command line or file.

    `values`: options by dotted name. `notes`: remarks for readers of the job, one line each. `faults`: options that
    cannot be translated or are invalid; with any of them there is no job. `source`: the line, or a file. `prefix`: text
    before the options' names in it. `evaluate_args`: for a line that only evaluates, the arguments with which
    `torchtitan evaluate` does the same with the job. `launched`: launcher options that the reader has handled itself.
    """

    source: str = COMMAND_LINE
    prefix: str = "--"
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    evaluate_args: list[str] | None = None
    launched: set[str] = field(default_factory=set)

    def refuse(self, name: str, value: Any, allowed: str, remedy: str = "") -> None:
        self.faults.append(Fault(self.source, f"{self.prefix}{name}", show(value), allowed, remedy))

    def apply(self, name: str, option: Setting, value: Any) -> None:
        """Record what becomes of an option's valid value: a refusal, a note, or values of the job, as `option` says.

        `name`: the option without prefix. `value`: as set, or the program's default.
        """
        if option.reason and not option.choices and value and value != option.default:
            self.refuse(name, value, "nothing", option.reason)
        elif option.note and value not in (None, False):
            self.notes.append(f"{self.prefix}{name}: {option.note}")
        elif option.to:
            job_value = option.choices[value] if isinstance(option.choices, Mapping) else value
            if job_value is not None and job_value not in ("", []):
                self.values |= dict.fromkeys(option.to.split(), job_value)

    def part_of(self, source: str, prefix: str) -> "JobDraft":
        """Return a draft that adds to this one, for the options of another file or program."""
        return JobDraft(source, prefix, self.values, self.notes, self.faults)


class Options:
    """The options of one file or command line by name. An unset option has the default of the table, or None.

    `is_complete`: False if a required option is missing or a number is below its minimum.
    """

    def __init__(self, table: Table, draft: JobDraft) -> None:
        self._table, self._draft, self._values, self._invalid = table, draft, dict[str, Any](), set[str]()
        self.is_complete = True

    def add(self, name: str, raw_value: Any, value: Any) -> None:
        """Add a value, or refuse it. `raw_value`: as written; `value`: parsed, None if that failed."""
        option = self._table[name]
        if value is None or (option.choices and value not in option.choices):
            self._invalid.add(name)
            self._draft.refuse(name, raw_value, option.allowed(), option.reason if option.choices else "")
        elif option.least is not None and value < option.least:
            self._invalid.add(name)
            self.is_complete = False
            self._draft.refuse(name, value, f"at least {option.least}")
        else:
            self._values[name] = value

    def translate(self) -> None:
        """Apply the table to all values, and to the program's defaults of options that a job has too."""
        for name, option in self._table.items():
            if name in self._values or (option.to and option.default is not None):
                self._draft.apply(name, option, self[name])
            elif option.required:
                self.is_complete = False
                if name not in self._invalid:
                    self._draft.refuse(name, None, option.allowed(), "the program needs it too")

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name, self._table[name].default)


def is_finite(number: float) -> bool:
    """Return True if `number` is not NaN and a float can hold it."""
    return abs(number) <= sys.float_info.max


def _float(value: Any) -> float | None:
    """Parse a finite float. Also accepts 2e-5, which YAML reads as text because it has no decimal point."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if is_finite(number) else None


def _int(value: Any) -> int | None:
    number = _float(value)
    return int(number) if number is not None and abs(number) < 2**63 and number % 1 == 0 else None


def _bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return YAML_BOOLEANS.get(str(value).lower()) if isinstance(value, (str, int)) else None


def _choice(value: Any) -> bool | str | None:
    """Parse a boolean in any spelling; return any other text unchanged."""
    flag = _bool(value)
    return value if flag is None and isinstance(value, str) else flag


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None


def _lower_case_word(value: Any) -> str | None:
    """Parse a word in lower case that YAML may read as a boolean: `save_strategy: no` is false."""
    text = ("yes" if value else "no") if isinstance(value, bool) else _text(value)
    return text if text is None else text.lower()


def _list(value: Any) -> list[Any] | None:
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return [value]
    return value if isinstance(value, list) else None


def _text_list(value: Any) -> list[str] | None:
    items = _list(value)
    return None if items is None or any(not isinstance(item, str) for item in items) else items


KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bool": ("true or false", _bool),
    "int": ("a whole number", _int),
    "float": ("a finite number", _float),
    "choice": ("true or false", _choice),
    "text": ("text", _text),
    "word": ("text", _lower_case_word),
    "list": ("a list", _list),
    "words": ("a list of texts", _text_list),
    "table": ("a table", lambda value: value if isinstance(value, dict) else None),
    "any": ("a value", lambda value: value),
}
"""Kind of an option -> (description, parser of a YAML value or a launcher's text; None for an invalid one)."""
PLAIN_KINDS = ("bool", "int", "float", "choice", "text", "word")


def flag_value(option: Setting | None, text: str | None) -> Any:
    """Return a flag's value as programs parse their flags, which for plain values is not as YAML.

    `text`: the value as written; a flag without one is true. For argparse, click and fire 010 is 10 and the text 010,
    and 1:30 or on is no number and no truth value; YAML 1.1 has others: 8, 90 and true. Lists, tables and the values of
    unknown options (None) are read as YAML.
    """
    if text is None:
        return True
    return text if option is not None and option.kind in PLAIN_KINDS else yaml_file.parse_value(text)


class Script(ABC):
    """One command line of a script with the flags `FLAGS`, parsed as by argparse."""

    FLAGS: ClassVar[Table]

    def __init__(self, line: CommandLine) -> None:
        self.line, self.draft = line, JobDraft()
        self.options = Options(self.FLAGS, self.draft)
        self.values, self.note, self.refuse = self.draft.values, self.draft.notes.append, self.draft.refuse
        for raw_name, text in line.flags:  # the last of repeated flags wins
            name = _unabbreviated(raw_name, self.FLAGS)
            if name in self.FLAGS:
                self.options.add(name, text, _flag_value(self.FLAGS[name], text))
            else:
                self.refuse(name, text, f"a flag of {line.script}", hint(name, self.FLAGS))
        self.options.translate()

    @classmethod
    def draft_of(cls, line: CommandLine) -> JobDraft:
        script = cls(line)
        script.read()
        return script.draft

    @abstractmethod
    def read(self) -> None:
        """Translate the flags that the table does not cover."""


def _unabbreviated(name: str, flags: Iterable[str]) -> str:
    """Return the flag that `name` abbreviates, or `name` itself if it is ambiguous or unknown."""
    matches = [flag for flag in flags if flag.startswith(name)]
    return matches[0] if len(matches) == 1 and name not in matches else name


def _flag_value(option: Setting, text: str | None) -> Any | None:
    """Parse a flag as the script does, more strictly than YAML. Returns None if it is invalid."""
    if option.kind == "bool":
        return True if text is None else BOOLEANS.get(text.lower())
    if text is None or option.kind == "text":
        return text.lower() if text is not None and option.choices else text
    try:
        number = int(text) if option.kind == "int" else float(text)
    except ValueError:
        return None
    return number if is_finite(number) else None


ATTENTION = {"q": "*attention.wq", "k": "*attention.wk", "v": "*attention.wv", "o": "*attention.wo"}
LINEARS: dict[str, list[str]] = {
    **{f"{name}_proj": [pattern] for name, pattern in ATTENTION.items()},
    "gate_proj": ["*feed_forward.w1"],
    "down_proj": ["*feed_forward.w2"],
    "up_proj": ["*feed_forward.w3"],
    "query": [ATTENTION["q"]],
    "key": [ATTENTION["k"]],
    "value": [ATTENTION["v"]],
    "c_attn": [ATTENTION[name] for name in "qkv"],
    "c_fc": ["*feed_forward.w1"],
    "c_proj": [ATTENTION["o"], "*feed_forward.w2"],
    "out_proj": [ATTENTION["o"]],
    "fc1": ["*feed_forward.w1"],
    "fc2": ["*feed_forward.w2"],
}
"""Names of linear layers in Llama, RoBERTa, GPT-2 and OPT -> adapter targets here."""


def targets_of(names: Iterable[str]) -> list[str]:
    """Return the adapter targets of linear layers, each once."""
    return list(dict.fromkeys(pattern for name in names for pattern in LINEARS[name]))


def from_folder(family: str, folder: str) -> dict[str, Any]:
    """Return the options that take sizes and weights from a folder."""
    values = {"model.name": family, "model.flavor": FROM_HF, "model.hf_folder": folder}
    return values | {"checkpoint.initial_load_path": folder, "checkpoint.initial_load_in_hf": True}


def router_loss(family: str, folder: str, weight: float | None, draft: JobDraft) -> dict[str, Any]:
    """Return model.overrides for the loss with which transformers balances experts.

    `weight`: its coefficient, or None for that of the folder. There it weighs a mean over the layers of a sum over the
    chosen experts. Some families here add up the layers' losses, each 1 if the experts are even (mean_aux_loss).
    """
    overrides = {BALANCE: weight, "bias_rate": 0.0} if weight else {}
    if getattr(next(iter(SIZES[family].values())), "mean_aux_loss", True):
        return overrides or _coefficient_in(folder, family, draft)
    try:
        args = CONFIG_CONVERTERS[family].args_from_folder(folder)
    except (JobError, OSError):
        draft.notes.append(f"not the same: {BALANCE} weighs each layer here: times top_k / layers it is transformers'")
        return overrides
    coefficient = args.aux_loss_weight if weight is None else weight
    return {BALANCE: coefficient * args.top_k / args.expert_layers, "bias_rate": 0.0}


def _coefficient_in(folder: str, family: str, draft: JobDraft) -> dict[str, Any]:
    """Return model.overrides for the coefficient in a folder, where its sizes leave the loss out (gpt_oss)."""
    converter = CONFIG_CONVERTERS[family]
    try:
        config = read_json(Path(folder, CONFIG))
        weights = [converter.args_from_config(config | flag).aux_loss_weight for flag in ({}, {ROUTER_LOSS: True})]
    except (JobError, OSError):
        if ROUTER_LOSS in converter.keys.used:
            draft.notes.append(f"not the same: {BALANCE} is router_aux_loss_coef of config.json: set model.overrides")
        return {}
    return {} if weights[0] == weights[1] else {BALANCE: weights[1], "bias_rate": 0.0}


def make_reward_model(values: dict[str, Any], center_coefficient: float | None) -> None:
    """Set the options of a job that trains a reward model."""
    values |= {"task.kind": "reward", "model.overrides": values.get("model.overrides", {}) | {"n_classes": 1}}
    if center_coefficient:
        values["task.options"] = {"center_coefficient": center_coefficient}


def replicated(ranks: int) -> dict[str, int]:
    """Return the options that replicate the model on each rank."""
    return {"parallelism.data_parallel_replicate_degree": ranks, "parallelism.data_parallel_shard_degree": 1}
