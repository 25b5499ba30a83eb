"""All ranks take the same decision: a failure on one is a failure on all, and nobody is left waiting in a collective.

A group of its own for whoever uses it, over gloo on every machine: two threads must not share one (gloo hands out
silently wrong data then), and the trainer's groups belong to the main thread.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtitan.checkpoint.layout import CheckpointError

TIMEOUT = timedelta(minutes=30)
"""A rank waits here while another writes or checks its files, which takes longer than any step."""

T = TypeVar("T")


class Peers:
    """The ranks of the job, or this process alone. Every rank constructs it at the same point, and one thread uses it,
    for `purpose`, which is in the group's name (where distributed.set_timeout sees whose group it is).
    """

    def __init__(self, purpose: str) -> None:
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.group: dist.ProcessGroup | None = None
        if self.size > 1:
            self.group = dist.new_group(backend="gloo", timeout=TIMEOUT, group_desc=f"checkpoint: {purpose}")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on all ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, doing: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; the results of all, or one `CheckpointError` on all that says who failed."""
        result, failure, cause = None, None, None
        try:
            result = action()
        except Exception as error:
            failure, cause = describe(error), error
        answers = self.gather((result, failure))
        ranks_of: dict[str, list[int]] = {}
        for rank, (_, text) in enumerate(answers):
            if text is not None:
                ranks_of.setdefault(text, []).append(rank)
        if not ranks_of:
            return [answer for answer, _ in answers]
        if isinstance(cause, CheckpointError) and len(ranks_of) == 1 and len(ranks_of[str(cause)]) == self.size:
            raise cause
        told = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items())
        raise CheckpointError(f"{doing} failed on {told}") from cause

    def decide(self, action: Callable[[], T]) -> T:
        """What `action` gives on rank 0, on all ranks; or its error, as a `CheckpointError`, on all ranks."""
        answer: tuple[Any, CheckpointError | None] = None, None
        if self.is_main:
            try:
                answer = action(), None
            except CheckpointError as error:
                answer = None, error
            except Exception as error:
                answer = None, CheckpointError(f"{describe(error)} (on rank 0)")
        result, refusal = self.gather(answer)[0]
        if refusal is not None:
            raise refusal
        return result

    def maximum(self, *values: int) -> list[int]:
        """Element by element over all ranks; a small message."""
        if self.group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()


def describe(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
