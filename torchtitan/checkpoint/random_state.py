"""The state of all random generators of this process as JSON values: Python, numpy, torch on the CPU and on its GPU."""

import random
import sys
from typing import Any

import torch

from torchtitan.checkpoint.layout import CheckpointError

_PYTHON_VERSION = 3
"""Version of `random.getstate()`: 624 words and a position."""


class RandomState:
    """A snapshot of the generators, a few kilobytes. It includes numpy's if numpy has been imported, and CUDA's (of the
    current device) if CUDA has been used.
    """

    def __init__(self) -> None:
        self.python, self.torch = random.getstate(), torch.get_rng_state()
        numpy = sys.modules.get("numpy")
        self.numpy = numpy.random.get_state() if numpy else None
        self.cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def to_json(self) -> dict[str, Any]:
        version, state_words, gauss = self.python
        assert version == _PYTHON_VERSION, version
        state: dict[str, Any] = {
            "python": {"words": _words_to_hex(state_words), "gauss": gauss},
            "torch": self.torch.numpy().tobytes().hex(),
        }
        if self.numpy is not None:
            _, keys, position, has_gauss, cached = self.numpy
            state["numpy"] = {"words": _words_to_hex(keys.tolist()), "position": position, "gauss": [has_gauss, cached]}
        if self.cuda is not None:
            state["cuda"] = self.cuda.numpy().tobytes().hex()
        return state


def rng_state() -> dict[str, Any]:
    """Return the current state."""
    return RandomState().to_json()


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the generators from `rng_state`. One that is missing in `state` or not in use here is unchanged."""
    try:
        python = state["python"]
        random.setstate((_PYTHON_VERSION, tuple(_hex_to_words(python["words"])), python["gauss"]))
        torch.set_rng_state(_bytes_tensor(state["torch"]))
        if "numpy" in state and (numpy := sys.modules.get("numpy")):
            saved = state["numpy"]
            state_words = numpy.array(_hex_to_words(saved["words"]), dtype=numpy.uint32)
            numpy.random.set_state(("MT19937", state_words, saved["position"], *saved["gauss"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes_tensor(state["cuda"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the saved state of the random generators cannot be used: {error!r}") from None


def _words_to_hex(values: list[int] | tuple[int, ...]) -> str:
    return b"".join(value.to_bytes(4, "little") for value in values).hex()


def _hex_to_words(text: str) -> list[int]:
    data = bytes.fromhex(text)
    return [int.from_bytes(data[start : start + 4], "little") for start in range(0, len(data), 4)]


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
