"""How much of a GPU's memory a rank's process may take: a share of it, or an amount. Needs no torch."""

import re
from fractions import Fraction

from torchtitan.limits import LimitError

UNITS = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
SMALLEST = 256 * UNITS["MiB"]
"""No context of CUDA is smaller, so that less is a slip: of a share, or of a unit."""
KEY = "memory.limit"

Said = int | float | str
_AMOUNT = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})")


def amount_of(said: Said) -> int | None:
    """Bytes; None of a share, which is a number up to 1. Whole numbers are MiB. LimitError for less than `SMALLEST`."""
    if not isinstance(said, str):
        return None if said <= 1 else int(said) * UNITS["MiB"]
    match = _AMOUNT.fullmatch(said)
    found = 0 if match is None else int(Fraction(match[1]) * UNITS[match[2]])
    if found < SMALLEST:
        allowed = f'a share up to 1, whole MiB from 256 on, or a text such as "20GiB" ({", ".join(UNITS)})'
        raise LimitError(KEY, f'"{said}"', allowed, "leave it out for all of the memory")
    return found


def share_of(said: Said, total: int) -> float:
    """Of a GPU that has so many bytes. LimitError for more than it has."""
    amount = amount_of(said)
    if amount is None:
        return float(said)
    if amount > total:
        allowed = f"at most the {total / UNITS['GiB']:.2f} GiB of this GPU"
        raise LimitError(KEY, in_words(said), allowed, "lower it, or leave it out")
    return amount / total


def in_words(said: Said) -> str:
    amount = amount_of(said)
    return f"{float(said) * 100:g} %" if amount is None else f"{amount / UNITS['GiB']:.4g} GiB"
