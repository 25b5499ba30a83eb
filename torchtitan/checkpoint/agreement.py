"""Let all ranks reach the same decision: a failure on one rank is raised on all, so none waits in a collective for
ever.

Each user has its own process group, over gloo on every machine. Two threads must not share one (gloo then silently
returns wrong data), and the trainer's groups belong to the main thread.
"""

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from torchtitan.checkpoint.layout import CannotSave, CheckpointError, NotFinite, NothingLoadable
from torchtitan.core.errors import JobError
from torchtitan.core.machine_errors import MachineError, error_text, is_of_the_machine
from torchtitan.process import distributed

TIMEOUT = timedelta(minutes=30)
"""Timeout of a rank that waits while another writes or checks its files, which takes longer than any step."""

KINDS = (CheckpointError, CannotSave, NotFinite, NothingLoadable, MachineError)
"""Errors that rank 0 may raise on all ranks; the other ranks receive the index in this tuple."""

T = TypeVar("T")


def _identity(value: Any) -> Any:
    return value


class Peers:
    """The ranks of the job, or this process alone.

    Every rank constructs it at the same point, unless `of_job` is False, and only one thread uses it. `purpose` becomes
    part of the group's name; distributed.set_timeout recognizes the group by that name.
    """

    _counter = itertools.count()

    def __init__(self, purpose: str, of_job: bool = True) -> None:
        self.name = f"{purpose} {next(self._counter)}"
        """Unique in this process."""
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() and of_job else (0, 1)
        self.group: dist.ProcessGroup | None = None
        if self.size > 1:
            self.group = dist.new_group(backend="gloo", timeout=TIMEOUT, group_desc=f"checkpoint: {purpose}")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T] | None:
        """Gather the values of all ranks, as JSON. Return them on rank 0 and None on the others. Each value takes as
        much memory on rank 0 as the largest.
        """
        return [value] if self.group is None else distributed.gather_json(value, self.group)

    def agree(self, doing: str, action: Callable[[], T]) -> T:
        """Run `action` on every rank. Return its result, or raise one error that names the failed ranks, on all ranks.

        It is a `MachineError` if the machine of a rank failed, which says nothing of a checkpoint, and otherwise a
        `CheckpointError`.
        """
        result, failure, cause = None, None, None
        try:
            result = action()
        except Exception as error:
            failure, cause = describe(error), error
        severity = 0 if cause is None else 1 + is_of_the_machine(cause)
        (severity,) = self.maximum(severity)  # error texts are exchanged only if there are any
        if not severity:
            return cast(T, result)
        ranks_of: dict[str, list[int]] = {}
        for rank, text in enumerate(self.broadcast(self.gather(failure))):
            if text is not None:
                ranks_of.setdefault(text, []).append(rank)
        if isinstance(cause, CheckpointError) and len(ranks_of) == 1 and len(ranks_of[str(cause)]) == self.size:
            raise cause
        failures = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items())
        message = f"{doing} failed on {failures}"
        raise (CheckpointError(message) if severity == 1 else MachineError(message, on_all_ranks=True)) from cause

    def decide(
        self, action: Callable[[], T], encode: Callable[[T], Any] = _identity, decode: Callable[[Any], T] = _identity
    ) -> T:
        """Run `action` on rank 0 and return its result, or raise its error as a `CheckpointError`, on all ranks. A
        result that is not JSON-able is encoded on rank 0 and decoded on the others.
        """
        result: T | None = None
        refusal: Exception | None = None
        text: Any = None
        if self.is_main:
            try:
                result = action()
                text = encode(result)
            except (CheckpointError, MachineError) as error:
                refusal = error
            except Exception as error:
                refusal = (MachineError if is_of_the_machine(error) else CheckpointError)(
                    f"{describe(error)} (on rank 0)"
                )
        kind = KINDS.index(type(refusal)) if type(refusal) in KINDS else 0
        failed, text, kind = self.broadcast((refusal is not None, text if refusal is None else str(refusal), kind))
        if failed:
            raised = refusal or KINDS[kind](text)
            if isinstance(raised, MachineError):
                raised.on_all_ranks = True
            raise raised
        return cast(T, result) if self.is_main else decode(text)

    def broadcast(self, value: T | None) -> T:
        """Broadcast rank 0's value to all ranks, as JSON."""
        return cast(T, value if self.group is None else distributed.broadcast_json(value, self.group))

    def maximum(self, *values: int) -> list[int]:
        """Return the element-wise maximum over all ranks, in one small message."""
        if self.group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()


def describe(error: BaseException) -> str:
    if isinstance(error, (JobError, MachineError)):
        return str(error)
    if isinstance(error, OSError) and is_of_the_machine(error):
        return f"{error.filename}: {error_text(error)}" if error.filename else error_text(error)
    return f"{type(error).__name__}: {error}"
