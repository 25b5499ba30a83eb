"""Keys and sources of other programs' files: what is harmless, and what is refused with which words."""

import pytest

from torchtitan.core.errors import JobError
from torchtitan.core.files import DeclaredKeys, agreed_value

KEYS = DeclaredKeys(
    used=frozenset({"hidden_size"}),
    harmless=frozenset({"use_cache"}),
    defaults={"is_causal": True, "pretraining_tp": 1},
    read_when_private=frozenset({"_attn_implementation"}),
)


@pytest.mark.parametrize(
    "content",
    [
        {"hidden_size": 8},
        {"use_cache": True},
        {"is_causal": True, "pretraining_tp": 1},
        {"next_month": None, "b": False, "c": 0, "d": "", "e": [], "f": {}, "g": 0.0},
        {"_name_or_path": "x/y"},
    ],
    ids=["used", "harmless", "default", "empty", "underscore"],
)
def test_keys_without_effect(content):
    assert KEYS.unknown(content) == {}
    KEYS.check(content, "config.json", "remove it")


@pytest.mark.parametrize(
    "content",
    [
        {"is_causal": "no"},
        {"is_causal": False},
        {"pretraining_tp": 2},
        {"next_month": 1},
        {"_attn_implementation": "x"},
        {"next": [0]},
    ],
    ids=["not the default", "off where the default is on", "another number", "unknown", "read underscore", "list"],
)
def test_keys_that_may_have_an_effect_are_refused_by_name(content):
    (key,) = content
    with pytest.raises(JobError, match=rf"^config.json has a key .*: {key} = .*; remove it$"):
        KEYS.check({"hidden_size": 8} | content, "config.json", "remove it")


def test_all_unknown_keys_are_named_and_long_values_cut():
    with pytest.raises(JobError, match=r"has keys .* first = 1, second = '(x){119}\.\.\.; ask"):
        KEYS.check({"first": 1, "second": "x" * 1000}, "config.json", "ask")


def test_sources_agree_or_are_refused():
    assert agreed_value("theta", {"a": None, "b": None}, "fix") is None
    assert agreed_value("theta", {"a": None, "b": 2.0, "c": 2}, "fix") == 2
    with pytest.raises(JobError, match=r"^theta: a is 1, but c is 2; they must be equal; remove one$"):
        agreed_value("theta", {"a": 1, "b": None, "c": 2}, "remove one")
