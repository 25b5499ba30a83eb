"""Translate which parameters an Axolotl file trains: an adapter, or the parameters that match unfrozen_parameters.

unfrozen_parameters holds regexes of Hugging Face's parameter names. They are tried on the names of the folder's model,
and become patterns of the names here. Axolotl's regexes have two peculiarities: a dot matches only a dot, and a regex
only has to match the beginning of a name.

A regex of a file is untrusted and must not take long, so none is passed to `re`. Instead, the parts of a regex are
applied to the set of positions in a name that are reached so far; a name of n characters has at most n + 1 of them.
Supported are characters, classes, digits (backslash d), ^, $, |, groups that hold no groups, and repetition.
"""

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from pkgutil import resolve_name
from string import digits

from torchtitan.core.errors import JobError
from torchtitan.models import CONFIG_CONVERTERS, family_in
from torchtitan.models.sizes import HEAD, parameters
from torchtitan.plugins.importers.translation import LINEARS, JobDraft, Options, targets_of

MODULES = {"embed_tokens": "tok_embeddings.weight", "lm_head": "output.weight", "norm": "norm.weight"}
"""Modules outside the layers, by their names in the Llama of transformers."""
VOCABULARY_MODULES = ("embed_tokens", "lm_head")
"""Modules with one row per token of the vocabulary."""
PRUNE_RATIO = 0.999
"""Fraction of the moments of A and B that a restart prunes."""
ADAPTER_OPTIONS = ("lora_target_modules", "lora_modules_to_save", "relora_steps", "peft_use_dora")
NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "load_in_4bit": True}
"""The 4-bit options of bitsandbytes with the only supported values."""


class AdapterTranslation:
    """The adapter of one file. `new_tokens`: added tokens; their rows have to be trained."""

    def __init__(self, options: Options, draft: JobDraft, new_tokens: Sequence[str]) -> None:
        self.options, self.draft, self.new_tokens = options, draft, new_tokens
        self.values, self.note, self.refuse = draft.values, draft.notes.append, draft.refuse

    def read(self) -> None:
        options, values, kind = self.options, self.values, self.options["adapter"]
        for name, required_kind in {"load_in_4bit": "qlora", "load_in_8bit": "lora"}.items():
            if options[name] and kind != required_kind:
                allowed = f"false, or adapter: {required_kind}"
                self.refuse(name, True, allowed, "weights are only quantized below an adapter")
        if kind not in ("lora", "qlora", "dora"):
            self._no_adapter(kind)
            return
        if regexes := options["unfrozen_parameters"]:
            remedy = "use lora_modules_to_save to train parameters with it"
            self.refuse("unfrozen_parameters", regexes, "nothing with an adapter", remedy)
        if options["peft_use_dora"] and kind != "lora":
            self.refuse("peft_use_dora", True, "false, or adapter: lora", "the base of DoRA is not quantized")
        if options["load_in_8bit"]:
            self.note("load_in_8bit: only weights are in 8 bits here, with a scale per row; inputs are not rounded")
        kind = "dora" if options["peft_use_dora"] else "lora_int8" if options["load_in_8bit"] else kind
        values |= {"adapter.kind": kind, "adapter.dropout": values.get("adapter.dropout", 0.0)}
        for name in ("lora_r", "lora_alpha"):
            if options[name] is None:
                self.refuse(name, None, "a number", "Axolotl needs it too")
        self._targets()
        self._check_4bit()
        self._restarts()

    def _no_adapter(self, kind: str | None) -> None:
        """Handle the options of adapters in a file without a supported one."""
        options, values = self.options, self.values
        if kind is not None:
            self.refuse("adapter", kind, "lora, qlora or dora", "others are not supported")
        for name in ADAPTER_OPTIONS:
            if options[name]:
                self.refuse(name, options[name], "nothing without an adapter", "give adapter: lora")
        for key in [key for key in values if key.startswith("adapter.")]:
            self.note(f"no adapter, so no effect: {key} = {values.pop(key)}")
        if regexes := options["unfrozen_parameters"]:
            values["training.unfrozen"] = unfrozen(regexes, options["base_model"] or "", self.draft)

    def _targets(self) -> None:
        options, values = self.options, self.values
        target_modules = options["lora_target_modules"] or []
        are_known = all(name in LINEARS for name in target_modules)
        if options["lora_target_linear"] and are_known:
            values["adapter.target"] = ["all-linear"]
            if target_modules:
                self.note(f"lora_target_linear includes {', '.join(target_modules)}")
        elif target_modules and are_known:
            values["adapter.target"] = targets_of(target_modules)
        else:
            allowed = f"some of {', '.join(LINEARS)}, or lora_target_linear: true"
            self.refuse("lora_target_modules", target_modules or None, allowed)
        full_modules = list(options["lora_modules_to_save"] or [])
        if self.new_tokens and (missing := [name for name in VOCABULARY_MODULES if name not in full_modules]):
            self.note(f"rows of new tokens are trained, so {' and '.join(missing)} are trained with the adapter")
            full_modules += missing
        if unknown := [name for name in full_modules if name not in MODULES]:
            self.refuse("lora_modules_to_save", unknown, f"some of {', '.join(MODULES)}")
        elif full_modules:
            values["adapter.train_fully"] = [MODULES[name] for name in full_modules]
        if full_modules:
            self.note("peft's layout has no place for fully trained parts: torchtitan export --merge writes the result")
        elif values["adapter.kind"] != "dora":
            values["adapter.last_save_in_peft"] = True

    def _check_4bit(self) -> None:
        """Check the 4-bit options of bitsandbytes. Only one 4-bit format is supported here."""
        for name, value in (self.options["bnb_config_kwargs"] or {}).items():
            if name in NF4 and value != NF4[name]:
                self.refuse(f"bnb_config_kwargs.{name}", value, str(NF4[name]), "other formats are not supported")
            elif name == "bnb_4bit_compute_dtype" and value in ("float16", "fp16"):
                self.refuse(f"bnb_config_kwargs.{name}", value, "bfloat16 or float32", "float16 overflows")
            elif name not in NF4 and name != "bnb_4bit_compute_dtype":
                self.refuse(f"bnb_config_kwargs.{name}", value, ", ".join([*NF4, "bnb_4bit_compute_dtype"]))

    def _restarts(self) -> None:
        every, warmup, values = self.options["relora_steps"], self.options["relora_warmup_steps"], self.values
        if every:
            values |= {"adapter.relora.every": every, "adapter.relora.reset": "magnitude"}
            values |= {"adapter.relora.prune_ratio": PRUNE_RATIO, "adapter.relora.warmup_steps": warmup or 0}
            values.pop("adapter.last_save_in_peft", None)
            return
        values["adapter.save"] = "alone"
        if warmup:
            self.refuse("relora_warmup_steps", warmup, "nothing without relora_steps")


# Unfrozen parameters

KEY = "unfrozen_parameters"
FAMILIES = "torchtitan.models.spec:MODELS"
"""Resolved by name, as it needs torch."""
MAX_REGEXES = 2000
"""Two for each matrix of a large model."""
ROWS = re.compile(r"\[(\d*:[^]\[]*|\d+)\]\Z")
"""A range of a matrix's rows, or one row, at the end of an entry."""


def unfrozen(regexes: Sequence[str], folder: str, draft: JobDraft) -> list[str]:
    """Return training.unfrozen for the regexes. Refuses in `draft` the ones that cannot be translated."""
    matchers = []
    for regex in regexes[:MAX_REGEXES]:
        if rows := ROWS.search(regex[-50:]):
            remedy = f"all rows of a matrix are trained, or none: drop {rows[0]}, or the whole entry"
            draft.refuse(KEY, regex, "names without a range of rows", remedy)
            continue
        try:
            matchers.append((regex, prefix_matcher(regex)))
        except RegexError as error:
            draft.refuse(KEY, regex, f"regexes without {error}", "or write the patterns of training.unfrozen yourself")
    if len(regexes) > MAX_REGEXES:
        draft.refuse(KEY, f"{len(regexes)} regexes", f"at most {MAX_REGEXES}")
    if draft.faults:
        return []
    try:
        hf_names = _hf_names(folder)
    except JobError as error:
        remedy = "download the model, so that they can be tried on its names, or write training.unfrozen into the job"
        allowed = f"regexes for a model with its config.json in {folder}"
        draft.refuse(KEY, list(regexes), allowed, f"{remedy} ({error})")
        return []
    chosen = set()
    for regex, matches in matchers:
        matched = {name for name in hf_names if any(map(matches, hf_names[name]))}
        if not matched:
            candidates = {re.sub(r"\b\d+\b", "*", hf_name) for names in hf_names.values() for hf_name in names}
            allowed = f"regexes of how some of these begin: {', '.join(sorted(candidates))}"
            draft.refuse(KEY, regex, allowed, "correct or drop it")
        for name in sorted(matched):
            if not all(any(matches_name(hf_name) for _, matches_name in matchers) for hf_name in hf_names[name]):
                draft.refuse(KEY, regex, f"none, or all, of {name}", "its experts are one parameter: name all of them")
        chosen |= matched
    return _patterns(chosen, list(hf_names))


def _hf_names(folder: str) -> dict[str, list[str]]:
    """Return Hugging Face's names of each parameter of a folder's model. Raises JobError for an unknown model."""
    family = family_in(Path(folder))
    if family is None:
        raise JobError(f"{folder}: its family is not supported")
    args = CONFIG_CONVERTERS[family].args_from_folder(folder)
    form = resolve_name(FAMILIES)[family].hf.tensor_map(args)
    names = [name for name in parameters(args) if not (args.tied_embeddings and name == f"{HEAD}.weight")]
    return {name: form.hf_names(name) for name in names}


def _patterns(chosen: set[str], names: Sequence[str]) -> list[str]:
    """Return few patterns that match only the chosen names: layers, a parameter of all layers, single names."""
    layer_names = [name.split(".", 2)[1:] for name in names if name.startswith("layers.")]
    layers = list(dict.fromkeys(layer for layer, _ in layer_names))
    full_layers = [layer for layer in layers if all(n in chosen for n in names if n.startswith(f"layers.{layer}."))]
    patterns = ["layers.*"] if full_layers == layers else [f"layers.{layer}.*" for layer in full_layers]
    for parameter in dict.fromkeys(parameter for layer, parameter in layer_names if layer not in full_layers):
        having = [layer for layer, layer_parameter in layer_names if layer_parameter == parameter]
        matching = [layer for layer in having if f"layers.{layer}.{parameter}" in chosen]
        if matching == having:
            patterns.append(f"layers.*.{parameter}")
        else:
            patterns += [f"layers.{layer}.{parameter}" for layer in matching if layer not in full_layers]
    patterns += [name for name in names if name in chosen and not name.startswith("layers.")]
    assert {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)} == chosen
    return patterns


# Regexes

MAX_LENGTH = 200
MAX_REPEATS = 99
"""Limit of a repetition that says how many times."""
Positions = frozenset[int]
Part = Callable[[str, Positions], Positions]
"""From a name and the positions in it at which this part may begin, to those at which it may end."""


class RegexError(Exception):
    """An unsupported part of a regex, named by the message."""


def prefix_matcher(regex: str) -> Callable[[str], bool]:
    """Return a function that tells whether the beginning of a name matches. Raises RegexError if not supported."""
    if len(regex) > MAX_LENGTH:
        raise RegexError(f"longer than {MAX_LENGTH} characters")
    parser = _Parser(regex)
    part = parser.alternatives()
    if parser.remaining:
        raise RegexError("a ) without its (")
    return lambda name: bool(part(name, frozenset({0})))


class _Parser:
    """A recursive-descent parser. `remaining`: the end of the regex that is not parsed yet."""

    def __init__(self, regex: str) -> None:
        self.remaining, self.in_group = regex, False

    def alternatives(self) -> Part:
        sequences = [self._sequence()]
        while self._skip("|"):
            sequences.append(self._sequence())
        return lambda name, starts: frozenset().union(*(sequence(name, starts) for sequence in sequences))

    def _sequence(self) -> Part:
        parts = []
        while self.remaining and self.remaining[0] not in "|)":
            parts.append(self._repeated(self._part()))

        def sequence(name: str, positions: Positions) -> Positions:
            for part in parts:
                if not positions:
                    break
                positions = part(name, positions)
            return positions

        return sequence

    def _skip(self, prefix: str) -> bool:
        is_next = self.remaining.startswith(prefix)
        self.remaining = self.remaining.removeprefix(prefix)
        return is_next

    def _part(self) -> Part:
        char, self.remaining = self.remaining[0], self.remaining[1:]
        if char in "^$":
            if self.remaining[:1] in ("*", "+", "?", "{"):
                raise RegexError(f"a {char} that is repeated")
            return lambda name, starts: starts & {0 if char == "^" else len(name)}
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == "\\":
            if not self._skip("d"):
                raise RegexError("a backslash, except in \\d: write a plain dot instead")
            return _one_of(frozenset(digits))
        if char in "*+?{":
            raise RegexError(f"nothing before {char} to be repeated")
        return _one_of(frozenset(char))

    def _group(self) -> Part:
        if self.in_group:
            raise RegexError("a group in a group")
        if self.remaining.startswith("?") and not self._skip("?:"):
            raise RegexError("a group of another kind than (?:)")
        self.in_group = True
        part = self.alternatives()
        self.in_group = False
        if not self._skip(")"):
            raise RegexError("a ( without its )")
        return part

    def _class(self) -> Part:
        is_negated = self._skip("^")
        body, closing, remaining = self.remaining.partition("]")
        if not closing or not body or "\\" in body or "[" in body:
            raise RegexError("a malformed class")
        self.remaining, chars = remaining, set[str]()
        while body:
            if body[1:2] == "-" and len(body) > 2:
                chars |= set(map(chr, range(ord(body[0]), ord(body[2]) + 1))) if body[2].isascii() else set()
                body = body[3:]
            else:
                chars.add(body[0])
                body = body[1:]
        return _one_of(frozenset(chars), is_negated)

    def _repeated(self, part: Part) -> Part:
        """Parse a repetition after a part. A lazy one (with a ? after it) matches the same names."""
        if not self.remaining or self.remaining[0] not in "*+?{":
            return part
        least, most = self._bounds()
        self._skip("?")
        if self.remaining[:1] in ("*", "+", "{"):
            raise RegexError("a repetition of a repetition")

        def repeated(name: str, positions: Positions) -> Positions:
            for _ in range(least):
                before, positions = positions, part(name, positions)
                if positions == before:  # and will stay so; without this, nested repetitions could take minutes
                    break
            reached, new, times = positions, positions, least
            while new and (most is None or times < most):
                new = part(name, new) - reached
                reached, times = reached | new, times + 1
            return reached

        return repeated

    def _bounds(self) -> tuple[int, int | None]:
        """Parse how many times a part occurs: the least number, and the most or None."""
        char, self.remaining = self.remaining[0], self.remaining[1:]
        if char != "{":
            return 1 if char == "+" else 0, 1 if char == "?" else None
        bounds, closing, self.remaining = self.remaining.partition("}")
        low, comma, high = bounds.partition(",")
        if not closing or not low.isdecimal() or (high and not high.isdecimal()):
            raise RegexError("a { without a number of repetitions")
        least = int(low)
        most = int(high) if high else None if comma else least
        if max(least, most or 0) > MAX_REPEATS:
            raise RegexError(f"a repetition of more than {MAX_REPEATS} times")
        return least, most


def _one_of(chars: frozenset[str], is_negated: bool = False) -> Part:
    """Return a part that matches one of these characters, or any other if negated."""
    return lambda name, starts: frozenset(i + 1 for i in starts if i < len(name) and (name[i] in chars) != is_negated)
