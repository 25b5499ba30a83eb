"""Name the ranks that are slower than their peers, for which all other ranks wait.

A rank's time of a step is its wait for data and the forward of some of its blocks, on a GPU between events in its
stream. FSDP gathers the parameters of a block before that, and sums gradients after it, so no wait for another
data-parallel rank is part of it. Ranks that exchange tensors within a block (tensor, context and expert parallel) wait
for one another there and have about the same time.
"""

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchtitan.metrics.goodput import MARGIN
from torchtitan.metrics.logger import MetricsLogger
from torchtitan.process import distributed
from torchtitan.process.host import host

logger = logging.getLogger(__name__)
STEPS_TO_NAME = 16
"""Steps in a row that one of two ranks is slow before it is named, and not slow before it no longer is.

Samples of random lengths alone make a rank slow in nearly every second step, so twice as many ranks take one step more.
Then fewer than 1 % of runs of 1,000 steps name a rank for its samples. A rank that is slow in most steps, but not in
all, is not named here, but by `torchtitan why` from all steps of the run.
"""
SECONDS_TO_NAME = 5.0
"""Shortest time for which a rank is slow before it is named: longer than another program takes a core in turn."""
MOST_BLOCKS = 4
"""Blocks that are timed, evenly spaced: a rank that is slow is slow in each, and events cost the host time."""
MOST_NAMES = 8
"""Ranks that a message names."""


class BlockTimer:
    """The time of each step's wait for data and forward of some blocks in training, without FSDP's hooks.

    `blocks`: of this rank, already wrapped, so that FSDP's hooks run outside. `compiled`: they are compiled, and the
    compiler must not trace the clock.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device, compiled: bool) -> None:
        self._device, self._last_time, self._begun = device, time.perf_counter(), 0
        self._steps: deque[tuple[float, list[Any]]] = deque(maxlen=STEPS_TO_NAME)
        note = torch.compiler.disable(self._note) if compiled else self._note
        for block in blocks[:: -(-len(blocks) // MOST_BLOCKS) or 1]:
            block.register_forward_pre_hook(note)
            block.register_forward_hook(note, prepend=True)

    def _note(self, block: nn.Module, *inputs: object) -> None:
        """Note the time, or an event in the device's stream: the begin of a forward and its end in turn."""
        if not self._steps or not block.training:
            return
        times = self._steps[-1][1]
        if self._device.type == "cpu":
            times.append(time.perf_counter())
        else:
            times.append(torch.cuda.Event(enable_timing=True))
            times[-1].record()

    def begin_step(self, data_seconds: float) -> None:
        """Time the next step. `data_seconds`: its wait for data."""
        self._steps.append((data_seconds, []))
        self._begun += 1

    def pop_seconds(self) -> torch.Tensor:
        """Return the seconds [steps + 1] of each step since the last call, and a whole step's mean; forget them.

        Of many steps, the last are returned. 0 for a step without a forward of a block. The device must have completed
        the forwards.
        """
        seconds = [self._sum(data_seconds, times) for data_seconds, times in self._steps]
        previous, self._last_time = self._last_time, time.perf_counter()
        mean = (self._last_time - previous) / max(1, self._begun)
        self._steps.clear()
        self._begun = 0
        return torch.tensor([*seconds, mean])

    def _sum(self, data_seconds: float, times: list[Any]) -> float:
        pairs = zip(times[::2], times[1::2], strict=True)
        if self._device.type == "cpu":
            forward = sum(end - begin for begin, end in pairs)
        else:
            forward = sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
        return data_seconds + forward if forward else 0.0


class SlowRanks:
    """Judge the times of all ranks. Peers are the ranks of the same pipeline stages: one of `stages` equal groups."""

    def __init__(self, world_size: int, stages: int) -> None:
        self._stages, self._steps_to_name = stages, STEPS_TO_NAME + max(0, (world_size - 1).bit_length() - 1)
        self._ratios = torch.empty(0, world_size)  # [last steps, ranks], as multiples of the median of the peers
        self._slow_steps = torch.zeros(world_size)  # in a row, up to the last step
        self._slow_seconds = torch.zeros(world_size)
        self._other_steps = torch.zeros(world_size)
        self._is_slow = torch.zeros(world_size, dtype=torch.bool)

    def update(self, seconds: torch.Tensor, step_seconds: float) -> torch.Tensor:
        """Note the ranks' times [steps, ranks]. Return them as multiples of the lower median of their peers'.

        1 for the ranks of a pipeline stage without blocks. `step_seconds`: mean duration of a whole step.
        """
        ratios = self.ratios(seconds)
        self._ratios = torch.cat((self._ratios, ratios))[-STEPS_TO_NAME:]
        for is_slow in ratios > MARGIN:
            self._slow_steps = (self._slow_steps + 1) * is_slow
            self._slow_seconds = (self._slow_seconds + step_seconds) * is_slow
            self._other_steps = (self._other_steps + 1) * ~is_slow
        has_become_slow = (self._slow_steps >= self._steps_to_name) & (self._slow_seconds >= SECONDS_TO_NAME)
        self._is_slow = has_become_slow | (self._is_slow & (self._other_steps < STEPS_TO_NAME))
        return ratios

    def ratios(self, seconds: torch.Tensor) -> torch.Tensor:
        """Return times [any, ranks] as multiples of the lower median of the peers', 1 without blocks."""
        by_stage = seconds.unflatten(1, (self._stages, -1))
        return (by_stage / by_stage.median(2, keepdim=True).values).nan_to_num(1.0, posinf=1.0).flatten(1)

    def slow(self) -> dict[int, float]:
        """Return the slow ranks, each with its median ratio."""
        return {rank: float(self._ratios[:, rank].median()) for rank in self._is_slow.nonzero().flatten().tolist()}


class Stragglers:
    """One rank's timer and the judgement of all ranks, which every rank reaches from the same times.

    `timer`: None if there are no peers, or their forward cannot be timed; all ranks agree on that.
    """

    def __init__(self, timer: BlockTimer | None, world_size: int, stages: int) -> None:
        self._timer, self._slow_ranks = timer, SlowRanks(world_size, stages)
        self._named: set[int] = set()

    def begin_step(self, data_seconds: float) -> None:
        if self._timer is not None:
            self._timer.begin_step(data_seconds)

    @host.computes
    def compare(self, step: int, metrics: MetricsLogger) -> dict[str, float]:
        """Compare the times of all ranks since the last call, and report if other ranks are slow than before.

        All ranks call it together, after they have waited for their devices. Returns the slowest rank of this time and
        its ratio to its peers for the step's record.
        """
        if self._timer is None:
            return {}
        gathered = distributed.all_gather_floats(self._timer.pop_seconds())
        seconds, step_seconds = gathered[:, :-1], float(gathered[0, -1])
        if not seconds.any():
            return {}
        self._slow_ranks.update(seconds.T, step_seconds)
        ratios = self._slow_ranks.ratios(seconds.sum(1)[None])[0]  # a few long steps count as much as they take
        slow = self._slow_ranks.slow()
        if slow.keys() != self._named:
            self._named = set(slow)
            self._report(step, slow, metrics)
        return {"slowest_rank": int(ratios.argmax()), "slowest_ratio": float(ratios.max())}

    def _report(self, step: int, slow: dict[int, float], metrics: MetricsLogger) -> None:
        places = distributed.all_gather_json(f"{socket.gethostname()}, {place_on_machine()}")
        texts = [f"rank {rank} ({places[rank]}) by {ratio:.2f}" for rank, ratio in slow.items()]
        text = "; ".join(texts[:MOST_NAMES]) + f" and {len(texts) - MOST_NAMES} more" * (len(texts) > MOST_NAMES)
        if slow:
            logger.warning("step %d: slower than their peers, which wait for them: %s times", step, text)
        else:
            logger.info("step %d: no rank is slower than its peers any more", step)
        metrics.record_event(step, "straggler", {"ranks": text, "number": len(slow)})


def place_on_machine() -> str:
    """Describe what this rank computes on: its GPU with its PCI address, as nvidia-smi shows it, or its process."""
    if not torch.cuda.is_available():
        return f"process {os.getpid()}"
    device = torch.device("cuda", torch.cuda.current_device())
    return f"GPU {device.index} at {distributed.pci_address(device)}"
