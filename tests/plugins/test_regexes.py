"""Regexes of other programs' files match what they match in Python, in bounded time, or are refused."""

import random
import re
import time
import warnings

import pytest

from torchtitan.plugins.importers.regexes import Regex, RegexError

PARTS = [
    "a",
    "b",
    ".",
    "(",
    "(?:",
    ")",
    "|",
    "*",
    "+",
    "?",
    "[ab]",
    "[^a]",
    "[a-c]",
    "[]a]",
    "[a-]",
    "[\\d.]",
    "[^\\d]",
]
PARTS += ["^", "$", "{2}", "{1,2}", "{0,2}", "{2,}", "\\d", "\\D", "\\w", "\\.", "\\-", "-", "1"]
NAMES = ("", "a", "ab", "aab", "a.b", "1ab", "bc1", "aaaa", "-", "]", ".1")


@pytest.mark.parametrize("plain_dots", [False, True])
def test_regexes_match_as_in_python(plain_dots):
    draw, num_valid = random.Random(0), 0
    for _ in range(3000):
        regex = "".join(draw.choices(PARTS, k=draw.randrange(1, 9)))
        try:
            ours = Regex(regex, plain_dots)
        except RegexError:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of classes that look like sets
            reference = re.compile(re.sub(r"\.(?!\+)", r"\\.", regex) if plain_dots else regex)
        num_valid += 1
        for name in NAMES:
            assert ours.matches(name) == bool(reference.fullmatch(name)), (regex, name)
            assert ours.matches_prefix(name) == bool(reference.match(name)), (regex, name)
    assert num_valid > 700


WRONG = {
    "(?=a)": "a group of another kind than (?:)",
    "(?i)a": "a group of another kind than (?:)",
    "(a": "a ( without its )",
    "a)": "a ) without its (",
    "*a": "nothing before * to be repeated",
    "a**": "a repetition of a repetition",
    "a*+": "a repetition of a repetition",
    "^*": "a ^ that is repeated",
    "a{1000}": "a repetition of more than 99 times",
    "a{x}": "a { without a number of repetitions",
    "a{,2}": "a { without a number of repetitions",
    "[a": "a malformed class",
    "[b-a]": "a malformed class",
    "[a-\\d]": "a malformed class",
    "[\\D]": "a malformed class",
    "a\\b": "a backslash, except before punctuation",
    "a\\": "a backslash, except before punctuation",
    "(a)\\1": "a backslash, except before punctuation",
    "(" * 21 + ")" * 21: "more than 20 groups within groups",
    "((a{99}){99}){99}": "more than 1000",
    "a" * 301: "longer than 300 characters",
}


@pytest.mark.parametrize("regex", WRONG, ids=[regex[:20] for regex in WRONG])
def test_unsupported_regexes_are_refused(regex):
    with pytest.raises(RegexError, match=re.escape(WRONG[regex])):
        Regex(regex)


SLOW = ["a*" * 99 + "$", "(a*)*" * 50 + "b", "(" * 18 + "a*" + ")*" * 18 + "b", "(a|a)*" * 40 + "b", ".*" * 140 + "x"]
"""Python's re would take years for some of them."""


def test_no_regex_takes_long():
    names = [
        f"model.layers.{layer}.{'a' * 40}.{name}" for layer in range(50) for name in ("q_proj", "k_proj", "o_proj")
    ]
    start = time.process_time()
    for slow in SLOW:
        assert not any(map(Regex(slow).matches, names)) and not Regex(slow).matches("a" * 60 + "c")
    assert time.process_time() - start < 5, "0.1 ms for each character and regex, and names have beginnings in common"
