"""Regular expressions that come with a tokenizer.json. Some need, on a short text, more steps than there are: the
library then panics, in the middle of a run. A pattern that repeats what repeats itself is tried out before it is used,
in a process of its own.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.datasets.tokenizer.base import TokenizerError

MANY = 10
"""A repetition that may be longer counts as one without end."""
RUN, SECONDS = 64, 30
_TRIAL = """
import json, sys, tokenizers
patterns, texts = json.load(sys.stdin)
for pattern in patterns:
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    for text in texts:
        split.pre_tokenize_str(text)
"""
_SIGN = re.compile(r"\\.|[\[\]()|]|(?:[*+]|\{\d*,?\d*\})[?+]?|.", re.DOTALL)


def check_patterns(path: Path, content: bytes) -> None:
    """TokenizerError where a pattern of a tokenizer.json can run away."""
    try:
        patterns = [p for p in _patterns(json.loads(content)) if may_run_away(p)]
    except (ValueError, RecursionError):
        return  # said by the library, which reads it next
    if not patterns:
        return
    letters = {*"a1 !é中\n", *(letter for pattern in patterns for letter in pattern if letter.isalnum())}
    texts = [letter * RUN + end for letter in sorted(letters) for end in ("", "\0", " ", "b!")]
    try:
        trial = [sys.executable, "-I", "-c", _TRIAL]
        done = subprocess.run(trial, input=json.dumps([patterns, texts]).encode(), capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:
        cause = f"its pattern {patterns[0][:80]!r} needs more steps than there are on a text of {RUN} letters"
        raise TokenizerError(path, cause, "give a tokenizer whose pattern does not repeat what repeats itself")


def _patterns(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(value.get("Regex"), str):
        yield value["Regex"]
    elif isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if key not in ("vocab", "merges"):
                yield from _patterns(inner)


def may_run_away(pattern: str) -> bool:
    """Whether a group is repeated that holds a repetition or a choice, or something refers back."""
    if re.search(r"\\(?:[1-9]|[kg]<)", pattern):
        return True
    inside, depth, closed = [False], 0, False
    for sign in _SIGN.findall(pattern):
        repeats = sign[0] in "*+" or (sign[0] == "{" and len(sign) > 1 and _is_long(sign))
        if repeats and closed:
            return True
        closed = False
        if sign == "[" or (sign == "]" and depth):
            depth += 1 if sign == "[" else -1
        elif depth:
            continue
        elif sign == "(":
            inside.append(False)
        elif sign == ")" and len(inside) > 1:
            closed = inside.pop()
            inside[-1] |= closed
        elif sign == "|" or repeats:
            inside[-1] = True
    return False


def _is_long(braces: str) -> bool:
    least, comma, most = braces.rstrip("?+").strip("{}").partition(",")
    return int((most or MANY + 1) if comma else (least or 0)) > MANY
