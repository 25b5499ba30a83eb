"""Formulas over tensors that torch.compile fuses, each with an eager form.

Both forms of unpacking, packing and dropout give the same bits, and of moving moments in 8 bits on a CPU. Those of an
optimizer's other formulas differ in last bits, as the compiler fuses products with sums.

Compiling takes seconds. On a CPU small tensors are therefore computed in eager, and so is everything where no compiler
works, such as a machine without g++ or Triton.
"""

import logging
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from torchtitan.torch_internals.compiler import compiler_error, recompile_limit_error
from torchtitan.torch_internals.dispatch import FakeTensor, tree_map_only

logger = logging.getLogger(__name__)

LARGE = 2**19
"""Elements of a tensor on a CPU for which a formula is compiled."""
NEVER = math.inf
IS_COMPILED_FOR_EACH_FLOAT = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Before 2.13, torch compiled again for each value of a float, such as a learning rate, and soon gave up."""


@cache
def compile_lazily(function: Callable, checks_indices: bool = True, **options: Any) -> Callable:
    """Compile a function with torch.compile on its first use, because importing the compiler takes two seconds.

    Without `checks_indices`, an index out of bounds is no error but reads other memory. `options`: torch.compile's.
    """
    if not checks_indices:
        options["options"] = {"assert_indirect_indexing": False}
    return torch.compile(function, **options)


class Fused:
    """A function of tensors, computed by `formula` compiled, or by `eager`.

    `eager` defaults to the formula. `dynamic`: as in torch.compile; then floats may arrive as tensors without axes
    (IS_COMPILED_FOR_EACH_FLOAT), on which a formula cannot branch. A formula may change tensors in place: it is
    compiled as one graph, so that all errors of the compiler come before anything is computed, and eager can take over.
    Within a function that is compiled it is part of that. Compiled code does not check the indices that a formula
    computes, because on a CPU this takes longer than the look-ups: they have to be within bounds for all inputs.

    On a CPU it is compiled for tensors of `large` elements (default: LARGE) or more, once eager has computed `after` of
    these elements, since a short run would not win back the time to compile. `after = NEVER`: eager on every CPU.
    """

    def __init__(
        self,
        formula: Callable,
        eager: Callable | None = None,
        *,
        dynamic: bool | None = None,
        large: int | None = None,
        after: float = 0,
    ):
        self.formula, self.eager, self.dynamic = formula, eager or formula, dynamic
        self.large, self.after = large, after
        self.computed = 0
        """Elements of large tensors on a CPU that were computed."""
        self.is_broken = False
        self.refused: set[tuple[torch.Size, torch.dtype]] = set()
        """Shapes and dtypes of first arguments that exceeded torch's limit of compiled forms per function."""

    def __call__(self, *args: Any) -> Any:
        """Compute the function. Device, size and dtype of the first argument, a tensor or several, decide how."""
        if torch.compiler.is_compiling():
            return self.formula(*args)
        first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
        if first.device.type == "cpu" and isinstance(first, FakeTensor):
            return self.eager(*args)  # in a rehearsal; a kernel would read memory that is not there
        if self.is_broken or not self._compiles(first) or (first.shape, first.dtype) in self.refused:
            return self.eager(*args)
        try:
            compiled = compile_lazily(self.formula, checks_indices=False, dynamic=self.dynamic, fullgraph=True)
        except RuntimeError as error:  # of a Python that torch.compile does not support
            return self._give_up(error)(*args)
        inputs = tree_map_only(float, _scalar, args) if IS_COMPILED_FOR_EACH_FLOAT and self.dynamic else args
        try:
            return compiled(*inputs)
        except recompile_limit_error():
            self.refused.add((first.shape, first.dtype))
            return self.eager(*args)
        except compiler_error() as error:  # of the compiler; any other is one of the computation
            return self._give_up(error)(*args)

    def _compiles(self, first: torch.Tensor) -> bool:
        if first.device.type != "cpu":
            return first.numel() > 0
        if first.numel() < (LARGE if self.large is None else self.large):
            return False
        self.computed += first.numel()
        return self.computed > self.after

    def _give_up(self, error: Exception) -> Callable:
        """Report that compiling does not work here; return the eager form, which computes all calls from now on."""
        self.is_broken = True
        reason = str(error).strip().partition("\n")[0]
        logger.warning(f"torch.compile does not work here, so {self.formula.__name__} is slower: {reason}")
        return self.eager


def _scalar(number: float) -> torch.Tensor:
    """Return a number as the tensor, without an axis, that a compiled function takes for any of its values."""
    return torch.tensor(number, dtype=torch.float64)


def pieces(length: int, size: int) -> Iterator[slice]:
    """Yield slices of `size` that cover `length`; the last one overlaps the one before. One slice if it is shorter.

    None if it is 0, as of a rank without rows, and then the size may be 0 too.
    """
    for start in range(0, length, size or 1):
        yield slice(max(0, min(start, length - size)), min(start + size, length))
