"""Asynchronous all-to-alls of an expert-parallel group: computation overlaps with them between `issue` and `wait`.

A single thread issues them in program order, so all ranks of a group issue them in the same order.

On a GPU, torch runs a collective on the communicator's stream. It starts after the work that the current stream has at
`issue`, and `wait` makes the current stream, not the host, wait for it. Both buffers are referenced until `wait`, so
their memory is not reused before the transfer ends, without record_stream. The host needs the split sizes. These use a
separate stream, so that the host waits only for the router and not for later kernels. With a separate process group
(`counts_group`), they do not wait for the tokens of the other direction either.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist


class SplitSizes(NamedTuple):
    """The numbers of tokens in an all-to-all, exchanged in advance."""

    received_counts: torch.Tensor  # [ep, local experts], tokens from each rank for each expert of this rank
    send: list[int]  # tokens to each rank
    receive: list[int]  # tokens from each rank


class Transfer(Protocol):
    def wait(self) -> torch.Tensor:
        """Wait for the received rows [sum(receive), ...], `receive` as in `issue`."""
        ...


class SizesTransfer(Protocol):
    def wait(self) -> SplitSizes: ...


class Transport(Protocol):
    """The interface through which segments communicate. Tests and benchmarks replace AllToAll by other classes."""

    size: int

    def issue(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> Transfer:
        """Start an all-to-all of rows [sum(send), ...], sorted by destination rank -> [sum(receive), ...]."""
        ...

    def issue_counts(self, counts: torch.Tensor) -> SizesTransfer:
        """Start the exchange of counts [experts of the group], int64: this rank's tokens for each expert, by rank."""
        ...


class AllToAll:
    def __init__(self, group: dist.ProcessGroup, counts_group: dist.ProcessGroup | None = None):
        self.group, self.counts_group = group, counts_group or group
        self.size = dist.get_world_size(group)
        self._side_stream: object = None

    def issue(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> "_Rows":
        rows = rows.contiguous()
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        work = dist.all_to_all_single(received, rows, list(receive), list(send), group=self.group, async_op=True)
        return _Rows(work, rows, received)

    def issue_counts(self, counts: torch.Tensor) -> "_Counts | _CountsOnSide":
        counts = counts.contiguous()
        received = torch.empty_like(counts)
        if counts.device.type == "cpu":
            work = dist.all_to_all_single(received, counts, group=self.counts_group, async_op=True)
            return _Counts(work, counts, received, self.size)
        device = torch.get_device_module(counts.device)
        main = device.current_stream()
        if self._side_stream is None:
            self._side_stream = device.Stream()
        self._side_stream.wait_stream(main)
        with device.stream(self._side_stream):
            dist.all_to_all_single(received, counts, group=self.counts_group, async_op=True).wait()
            both = torch.stack((counts, received))
            on_host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            on_host.copy_(both, non_blocking=True)
            done = device.Event()
            done.record(self._side_stream)
        for tensor in (counts, received):  # allocated on the main stream, used on the side stream
            tensor.record_stream(self._side_stream)
        return _CountsOnSide(done, device, received, on_host, self.size)


class _Rows:
    def __init__(self, work: dist.Work, sent: torch.Tensor, received: torch.Tensor):
        self._held = (work, sent, received)

    def wait(self) -> torch.Tensor:
        work, _, received = self._held
        work.wait()
        self._held = ()
        return received


class _Counts(NamedTuple):
    work: dist.Work
    counts: torch.Tensor
    received: torch.Tensor
    size: int

    def wait(self) -> SplitSizes:
        self.work.wait()
        return _sizes(self.counts, self.received, self.received, self.size)


class _CountsOnSide(NamedTuple):
    done: object
    device: object
    received: torch.Tensor
    on_host: torch.Tensor
    size: int

    def wait(self) -> SplitSizes:
        self.device.current_stream().wait_event(self.done)
        self.done.synchronize()  # blocks the host, once per layer and microbatch
        return _sizes(*self.on_host, self.received, self.size)


def _sizes(sent: torch.Tensor, received: torch.Tensor, on_device: torch.Tensor, size: int) -> SplitSizes:
    """Return the sizes from counts [ep x local experts]; `sent` and `received` are on the host."""
    return SplitSizes(on_device.view(size, -1), *(counts.view(size, -1).sum(1).tolist() for counts in (sent, received)))
