r"""Regexes of parameters' names, as Axolotl has them: a dot stands for itself, and a regex only has to fit how a name
begins.

A regex of a file is data, which must not take long, so none is given to `re`: here the set of places that it has come
to goes through its parts, and a name of n characters has no more than n + 1 of them. What is known: characters,
classes, \d, ^, $, |, groups that hold no groups, and repetition.

Axolotl's unfrozen_parameters, regexes of Hugging Face's names: tried on those of the model's folder, they become
patterns of the names here.
"""

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from pkgutil import resolve_name
from string import digits

from torchtitan.core.errors import JobError
from torchtitan.importers.translation import Meaning, family_in
from torchtitan.models import CONFIGS
from torchtitan.models.sizes import HEAD, parameters

LONGEST = 200
MOST = 99
"""Times, of a repetition that says how many."""
Places = frozenset[int]
Part = Callable[[str, Places], Places]
"""Of a name and the places in it where this part may begin, those where it may end."""


class RegexError(Exception):
    """What of a regex is not read here."""


def fits(regex: str) -> Callable[[str], bool]:
    """Whether a name begins as the regex says. RegexError for one that is not read."""
    if len(regex) > LONGEST:
        raise RegexError(f"longer than {LONGEST} characters")
    reader = _Reader(regex)
    whole = reader.alternatives()
    if reader.rest:
        raise RegexError("a ) without its (")
    return lambda name: bool(whole(name, frozenset({0})))


class _Reader:
    """`rest`: of the regex, what has not been read."""

    def __init__(self, regex: str) -> None:
        self.rest, self.grouped = regex, False

    def alternatives(self) -> Part:
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        return lambda name, places: frozenset().union(*(part(name, places) for part in found))

    def _sequence(self) -> Part:
        parts = []
        while self.rest and self.rest[0] not in "|)":
            parts.append(self._repeated(self._part()))

        def through(name: str, places: Places) -> Places:
            for part in parts:
                if not places:
                    break
                places = part(name, places)
            return places

        return through

    def _take(self, start: str) -> bool:
        there = self.rest.startswith(start)
        self.rest = self.rest.removeprefix(start)
        return there

    def _part(self) -> Part:
        char, self.rest = self.rest[0], self.rest[1:]
        if char in "^$":
            if self.rest[:1] in ("*", "+", "?", "{"):
                raise RegexError(f"a {char} that is repeated")
            return lambda name, places: places & {0 if char == "^" else len(name)}
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == "\\":
            if not self._take("d"):
                raise RegexError("a backslash, except in \\d: a dot stands for itself")
            return _one_of(frozenset(digits))
        if char in "*+?{":
            raise RegexError(f"nothing before {char} to be repeated")
        return _one_of(frozenset(char))

    def _group(self) -> Part:
        if self.grouped:
            raise RegexError("a group in a group")
        if self.rest.startswith("?") and not self._take("?:"):
            raise RegexError("a group of another kind than (?:)")
        self.grouped = True
        inner = self.alternatives()
        self.grouped = False
        if not self._take(")"):
            raise RegexError("a ( without its )")
        return inner

    def _class(self) -> Part:
        but = self._take("^")
        body, closed, rest = self.rest.partition("]")
        if not closed or not body or "\\" in body or "[" in body:
            raise RegexError("a class that is none")
        self.rest, chars = rest, set[str]()
        while body:
            if body[1:2] == "-" and len(body) > 2:
                chars |= set(map(chr, range(ord(body[0]), ord(body[2]) + 1))) if body[2].isascii() else set()
                body = body[3:]
            else:
                chars.add(body[0])
                body = body[1:]
        return _one_of(frozenset(chars), but)

    def _repeated(self, part: Part) -> Part:
        """As often as it says; that it would rather have few (a ? behind) changes nothing in whether a name fits."""
        least, most = 1, 1 if not self.rest or self.rest[0] not in "*+?{" else None
        if most == 1:
            return part
        if self._take("{"):
            said, closed, self.rest = self.rest.partition("}")
            low, comma, high = said.partition(",")
            if not closed or not low.isdecimal() or (high and not high.isdecimal()):
                raise RegexError("a { that does not say how often")
            least = int(low)
            most = int(high) if high else None if comma else least
            if max(least, most or 0) > MOST:
                raise RegexError(f"a repetition of more than {MOST} times")
        else:
            least = 0 if self.rest[0] in "*?" else 1
            most = 1 if self.rest[0] == "?" else None
            self.rest = self.rest[1:]
        self._take("?")
        if self.rest[:1] in ("*", "+", "{"):
            raise RegexError("a repetition of a repetition")

        def often(name: str, places: Places) -> Places:
            for _ in range(least):
                before, places = places, part(name, places)
                if places == before:  # and so ever after; else a repetition in a repetition could take minutes
                    break
            reached, new, times = places, places, least
            while new and (most is None or times < most):
                new = part(name, new) - reached
                reached, times = reached | new, times + 1
            return reached

        return often


def _one_of(chars: frozenset[str], but: bool = False) -> Part:
    """A character of these, or with `but` any other."""
    return lambda name, places: frozenset(i + 1 for i in places if i < len(name) and (name[i] in chars) != but)


KEY = "unfrozen_parameters"
FAMILIES = "torchtitan.models.spec:MODELS"
"""By name, as it needs torch."""
MANY = 2000
"""Regexes of a file, at most: two for each matrix of a large model."""
ROWS = re.compile(r"\[(\d*:[^]\[]*|\d+)\]\Z")
"""Of a matrix: some, or the one of a number, which is no class of characters at the end of an entry."""


def unfrozen(regexes: Sequence[str], folder: str, meaning: Meaning) -> list[str]:
    """Of training.unfrozen. What has no meaning is said to `meaning`."""
    wanted = []
    for regex in regexes[:MANY]:
        if rows := ROWS.search(regex[-50:]):
            why = f"of a matrix all rows are trained, or none: drop {rows[0]}, or the whole entry"
            meaning.refuse(KEY, regex, "names without a range of rows", why)
            continue
        try:
            wanted.append((regex, fits(regex)))
        except RegexError as error:
            why = "or write the patterns of training.unfrozen yourself"
            meaning.refuse(KEY, regex, f"regexes without {error}", why)
    if len(regexes) > MANY:
        meaning.refuse(KEY, f"{len(regexes)} regexes", f"at most {MANY}")
    if meaning.faults:
        return []
    try:
        theirs, names = _names(folder)
    except JobError as error:
        why = "fetch the model, so that they can be tried on its names, or write training.unfrozen into the job"
        meaning.refuse(KEY, list(regexes), f"regexes of a model whose config.json is in {folder}", f"{why} ({error})")
        return []
    chosen = set()
    for regex, begins in wanted:
        found = {name for name in names if any(map(begins, theirs[name]))}
        if not found:
            known = sorted({re.sub(r"\b\d+\b", "*", each) for of_one in theirs.values() for each in of_one})
            meaning.refuse(KEY, regex, f"regexes of how some of these begin: {', '.join(known)}", "correct or drop it")
        for name in sorted(found):
            if not all(any(fit(each) for _, fit in wanted) for each in theirs[name]):
                why = "its experts are one parameter here: name all of them"
                meaning.refuse(KEY, regex, f"none, or all, of {name}", why)
        chosen |= found
    return _patterns(chosen, names)


def _names(folder: str) -> tuple[dict[str, list[str]], list[str]]:
    """Of all parameters that a folder's model has: theirs, by ours, and ours. JobError for a folder without one."""
    family = family_in(Path(folder))
    if family is None:
        raise JobError(f"{folder}: its family is not here")
    args = CONFIGS[family].args_of(folder)
    form = resolve_name(FAMILIES)[family].hf.form(args)
    own = [name for name in parameters(args) if not (args.tied_embeddings and name == f"{HEAD}.weight")]
    return {name: form.hf_names(name) for name in own}, own


def _patterns(chosen: set[str], names: Sequence[str]) -> list[str]:
    """Few that fit these of the names and no others: whole layers, a part in all layers, single names."""
    of_layers = [name.split(".", 2) for name in names if name.startswith("layers.")]
    layers = list(dict.fromkeys(layer for _, layer, _ in of_layers))
    whole = [layer for layer in layers if all(n in chosen for n in names if n.startswith(f"layers.{layer}."))]
    found = ["layers.*"] if whole == layers else [f"layers.{layer}.*" for layer in whole]
    for part in dict.fromkeys(part for _, layer, part in of_layers if layer not in whole):
        having = [layer for _, layer, each in of_layers if each == part]
        there = [layer for layer in having if f"layers.{layer}.{part}" in chosen]
        everywhere = there == having
        found += [f"layers.*.{part}"] if everywhere else [f"layers.{n}.{part}" for n in there if n not in whole]
    found += [name for name in names if name in chosen and not name.startswith("layers.")]
    assert {name for name in names if any(fnmatchcase(name, each) for each in found)} == chosen
    return found
