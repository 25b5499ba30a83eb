"""Formulas over tensors that torch.compile fuses into one kernel, with an eager form of the same bits.

Compiling takes seconds. On a CPU small tensors are therefore computed in eager, and so is everything where no compiler
works, such as a machine without g++ or Triton.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)

LARGE = 2**19
"""Elements of a tensor on a CPU for which a formula is compiled."""


@cache
def compile_lazily(function: Callable, dynamic: bool | None = None) -> Callable:
    """Compile a function with torch.compile on its first use, because importing the compiler takes two seconds.

    `dynamic`: as in torch.compile.
    """
    return torch.compile(function, dynamic=dynamic)


class Fused:
    """A function of tensors, computed by `formula` compiled, or by `eager`, which gives the same bits.

    `eager` defaults to the formula. `dynamic`: as in torch.compile.
    """

    def __init__(self, formula: Callable, eager: Callable | None = None, dynamic: bool | None = None):
        self.formula, self.eager, self.dynamic = formula, eager or formula, dynamic
        self.is_proven, self.is_broken = False, False

    def __call__(self, *args: Any) -> Any:
        """Compute the function. The device and size of the first argument, a tensor, decide how."""
        if self.is_broken or (args[0].device.type == "cpu" and args[0].numel() < LARGE):
            return self.eager(*args)
        compiled = compile_lazily(self.formula, self.dynamic)
        if self.is_proven:
            return compiled(*args)
        try:
            result = compiled(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a compiler, which has many; another one comes again in eager
            self.is_broken = True
            reason = str(error).strip().partition("\n")[0]
            logger.warning(f"torch.compile does not work here, so {self.formula.__name__} is slower: {reason}")
            return self.eager(*args)
        self.is_proven = True
        return result
