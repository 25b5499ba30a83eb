"""Regexes of other programs' files, matched in bounded time.

A stranger's regex is not passed to `re`, where a few characters can take years. It becomes an automaton, and a name of
n characters takes n steps that follow all states at once, at most MAX_STATES of them. Supported are characters, the
dot, classes, \\d, \\w and \\s with their complements, escaped punctuation, ^, $, |, groups and repetition.
"""

import re
from collections.abc import Callable
from string import ascii_letters, digits, punctuation

MAX_LENGTH, MAX_DEPTH = 300, 20
"""Limits of a regex: its characters, and groups within groups."""
MAX_STATES = 1000
MAX_REPEATS = 99
"""Limit of a repetition that says how many times."""
ESCAPED = {"d": digits, "w": ascii_letters + digits + "_", "s": " \t\n\r\f\v"}
"""Classes by their letter, as far as names of modules have their characters; an upper-case letter is the complement."""
Chars = tuple[frozenset[str], bool]
"""Characters, and whether all others are meant."""
Part = Callable[[int], int]
"""Adds the states of a part of a regex: from the state that follows it to the one that it begins with."""
States = frozenset[int]
END = 0


class RegexError(Exception):
    """An unsupported part of a regex, named by the message."""


class Regex:
    """A parsed regex. Raises RegexError if it is not supported.

    `plain_dots`: a dot is a literal dot, but before a plus, and punctuation cannot be escaped.
    """

    def __init__(self, regex: str, plain_dots: bool = False) -> None:
        if len(regex) > MAX_LENGTH:
            raise RegexError(f"longer than {MAX_LENGTH} characters")
        parser = _Parser(regex, plain_dots)
        self._begin, self._states = parser.parse(), parser.states
        self._steps: dict[tuple[States, str, bool], States] = {}

    def matches(self, name: str) -> bool:
        """Return True if the whole name matches."""
        return END in self._run(name, stops=False)

    def matches_prefix(self, name: str) -> bool:
        """Return True if the beginning of the name matches."""
        return END in self._run(name, stops=True)

    def _run(self, name: str, stops: bool) -> States:
        states = self._closure({self._begin}, True, not name)
        for number, char in enumerate(name, 1):
            if not states or (stops and END in states):
                break
            step = (states, char, number == len(name))
            if step not in self._steps:  # names have beginnings in common
                self._steps[step] = self._next(*step)
            states = self._steps[step]
        return states

    def _next(self, states: States, char: str, at_end: bool) -> States:
        following = set[int]()
        for state in states:
            test, nexts = self._states[state]
            if isinstance(test, tuple) and (char in test[0]) != test[1]:
                following.update(nexts)
        return self._closure(following, False, at_end)

    def _closure(self, states: set[int], at_start: bool, at_end: bool) -> States:
        """Return the states that are reached without a character, as far as these wait for one or end the regex."""
        pending, reached = list(states), set(states)
        while pending:
            test, nexts = self._states[pending.pop()]
            is_open = test is None or (at_start if test == "^" else at_end if test == "$" else False)
            new = [state for state in nexts if state not in reached] if is_open else []
            reached.update(new)
            pending += new
        return frozenset(state for state in reached if state == END or isinstance(self._states[state][0], tuple))


class _Parser:
    """A recursive-descent parser. `remaining`: the end of the regex that is not parsed yet.

    `states`: the test of each state (characters, ^, $, or None for none) and the states after it; END is the first.
    """

    def __init__(self, regex: str, plain_dots: bool) -> None:
        self.remaining, self.plain_dots, self.depth = regex, plain_dots, 0
        self.states: list[tuple[Chars | str | None, tuple[int, ...]]] = [(None, ())]

    def parse(self) -> int:
        part = self._alternatives()
        if self.remaining:
            raise RegexError("a ) without its (")
        return part(END)

    def _add(self, test: Chars | str | None, *nexts: int) -> int:
        if len(self.states) >= MAX_STATES:
            raise RegexError(f"parts that, with their repetitions, are more than {MAX_STATES}")
        self.states.append((test, nexts))
        return len(self.states) - 1

    def _alternatives(self) -> Part:
        sequences = [self._sequence()]
        while self._skip("|"):
            sequences.append(self._sequence())
        return lambda after: self._add(None, *[sequence(after) for sequence in sequences])

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while self.remaining and self.remaining[0] not in "|)":
            parts.append(self._repeated(self._part()))

        def sequence(after: int) -> int:
            for part in reversed(parts):
                after = part(after)
            return after

        return sequence

    def _skip(self, prefix: str) -> bool:
        is_next = self.remaining.startswith(prefix)
        self.remaining = self.remaining.removeprefix(prefix)
        return is_next

    def _next_char(self) -> str:
        char, self.remaining = self.remaining[:1], self.remaining[1:]
        return char

    def _part(self) -> Part:
        char = self._next_char()
        if char in "^$":
            if self.remaining[:1] in ("*", "+", "?", "{"):
                raise RegexError(f"a {char} that is repeated")
            return lambda after: self._add(char, after)
        if char == "(":
            return self._group()
        if char in "*+?{":
            raise RegexError(f"nothing before {char} to be repeated")
        if char == "[":
            chars = self._class()
        elif char == "\\":
            chars = self._escaped()
        else:
            is_any = char == "." and (not self.plain_dots or self.remaining.startswith("+"))
            chars = (frozenset("\n"), True) if is_any else (frozenset(char), False)
        return lambda after: self._add(chars, after)

    def _escaped(self) -> Chars:
        char = self._next_char()
        if char.lower() in ESCAPED and char:
            return frozenset(ESCAPED[char.lower()]), char.isupper()
        if self.plain_dots or not char or char not in punctuation:
            remedy = "except in \\d: write a plain dot instead" if self.plain_dots else "except before punctuation"
            raise RegexError(f"a backslash, {remedy}")
        return frozenset(char), False

    def _group(self) -> Part:
        if self.remaining.startswith("?") and not self._skip("?:"):
            raise RegexError("a group of another kind than (?:)")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RegexError(f"more than {MAX_DEPTH} groups within groups")
        part = self._alternatives()
        self.depth -= 1
        if not self._skip(")"):
            raise RegexError("a ( without its )")
        return part

    def _class(self) -> Chars:
        is_negated, chars, is_first = self._skip("^"), set[str](), True
        while is_first or not self._skip("]"):
            is_first = False
            first = self._class_item()
            if self.remaining.startswith("-") and not self.remaining.startswith("-]"):
                self._next_char()
                last = self._class_item()
                ends = [*first, *last]
                if len(first) > 1 or len(last) > 1 or not "".join(ends).isascii() or ends[0] > ends[1]:
                    raise RegexError("a malformed class")
                first = frozenset(map(chr, range(ord(ends[0]), ord(ends[1]) + 1)))
            chars |= first
        return frozenset(chars), is_negated

    def _class_item(self) -> frozenset[str]:
        char = self._next_char()
        if char == "\\":
            chars, is_negated = self._escaped()
            if not is_negated:
                return chars
        elif char and char != "[":
            return frozenset(char)
        raise RegexError("a malformed class")

    def _repeated(self, part: Part) -> Part:
        """Parse a repetition after a part. A lazy one (with a ? after it) matches the same names."""
        if not self.remaining or self.remaining[0] not in "*+?{":
            return part
        least, most = self._bounds()
        self._skip("?")
        if self.remaining[:1] in ("*", "+", "{"):
            raise RegexError("a repetition of a repetition")

        def repeated(after: int) -> int:
            if most is None:
                loop = self._add(None)
                self.states[loop] = (None, (part(loop), after))
                last = loop
            else:
                last = after
                for _ in range(most - least):
                    last = self._add(None, part(last), after)
            for _ in range(least):
                last = part(last)
            return last

        return repeated

    def _bounds(self) -> tuple[int, int | None]:
        """Parse how many times a part occurs: the least number, and the most or None."""
        char = self._next_char()
        if char != "{":
            return 1 if char == "+" else 0, 1 if char == "?" else None
        bounds, closing, self.remaining = self.remaining.partition("}")
        match = re.fullmatch(r"(\d{1,9})(,?)(\d{0,9})", bounds, re.ASCII)
        if not closing or match is None or (match[3] and not match[2]):
            raise RegexError("a { without a number of repetitions")
        least = int(match[1])
        most = int(match[3]) if match[3] else None if match[2] else least
        if max(least, most or 0) > MAX_REPEATS:
            raise RegexError(f"a repetition of more than {MAX_REPEATS} times")
        return least, most
