"""Reads of device values by the host, each with its reason.

The host waits for the device in a read, so a step makes only those that its job asks for. `torchtitan rehearse` counts
all waits, and reports one without a reason as a fault. Needs no torch.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Host:
    """The host of this process.

    `reason`: of the reads under way; "" if a wait is a mistake. `computing`: a context for tensors that the host fills
    and reads. `copy`: returns a copy of a tensor in host memory. A rehearsal, in which tensors have no values, leaves
    its mode in `computing` and answers `copy`.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.computing: Callable[[], AbstractContextManager] = nullcontext
        self.copy: Callable[[Any], Any] = lambda tensor: tensor.cpu()

    @contextmanager
    def reading(self, reason: str) -> Iterator[None]:
        """Read values of the device inside the block."""
        before, self.reason = self.reason, reason
        try:
            yield
        finally:
            self.reason = before

    def value(self, tensor: Any, reason: str) -> float:
        """Return the value of a scalar tensor."""
        with self.reading(reason):
            return float(tensor)

    def computes(self, function: Callable[P, T]) -> Callable[P, T]:
        """Let a function run in `computing`: its tensors hold numbers of the host alone."""

        @functools.wraps(function)
        def compute(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.computing():
                return function(*args, **kwargs)

        return compute


host = Host()
