"""Rehearse few microbatches of a pipeline and replay them for the others, which allocate, free and send the same.

Of each kind of action of a stage the first two microbatches run, since the first one of all also gathers parameters or
creates gradients. Then the memory of the full table is added up action by action. Schedules that overlap all-to-alls
are not replayed: they defer weight gradients from one action to another, so that their actions differ.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import Any, NamedTuple

from torchtitan.parallelisms.pipeline.runtime import TableSchedule
from torchtitan.planner.live_tensors import Bytes, LiveTensors
from torchtitan.planner.traffic import Traffic

RUNNING = 2
"""Number of microbatches that run for each kind of action."""


class Record(NamedTuple):
    """An action's effect: bytes by kind that it adds and that its peak adds to its start, and its messages."""

    added: Bytes
    peak: Bytes
    messages: list[Any]


def kind_of(action: Any) -> Hashable:
    return action.computation_type, action.stage_index


def running_microbatches(actions: list[Any]) -> set[int | None]:
    """Return the microbatches that run: the first of each kind of action, in the order of the table.

    The microbatch of an action that is done once per stage is None.
    """
    numbers: dict[Hashable, int] = defaultdict(int)
    running: set[int | None] = {None}
    for action in actions:
        if numbers[kind_of(action)] < RUNNING:
            running.add(action.microbatch_index)
        numbers[kind_of(action)] += 1
    return running


class FewMicrobatches:
    """Runs some microbatches of a pipeline's passes, and counts all in `live.peak` and `traffic` at their ends.

    It observes the actions of `schedule`.
    """

    def __init__(self, schedule: TableSchedule, live: LiveTensors, traffic: Traffic) -> None:
        self.schedule, self.live, self.traffic = schedule, live, traffic
        self.actions = schedule.pipeline_order_with_comms[schedule.rank]
        self.start: Bytes = Counter()
        self.records: dict[tuple[Hashable, int | None], Record] = {}

    def begin_pass(self) -> None:
        running, schedule = running_microbatches(self.actions), self.schedule
        few = [action for action in self.actions if action.microbatch_index in running]
        schedule.pipeline_order_with_comms[schedule.rank] = few
        schedule.observer = self
        self.records.clear()

    def begin(self, action: Any) -> None:
        self.before, self.sent_before = self.live.now.copy(), len(self.traffic.exchanges)
        if not self.records:
            self.start = self.before
        self.live.forget_peak()

    def end(self, action: Any) -> None:
        live, exchanges = self.live, self.traffic.exchanges
        added, peak = live.now.copy(), live.peak.copy()
        for sizes in (added, peak):
            sizes.subtract(self.before)
        self.records[kind_of(action), action.microbatch_index] = Record(added, peak, exchanges[self.sent_before :])
        del exchanges[self.sent_before :]
        live.forget_peak()

    def end_pass(self) -> None:
        self.schedule.pipeline_order_with_comms[self.schedule.rank] = self.actions
        self.schedule.observer = None
        peak = self._replay()
        if peak.total() > self.live.most:
            self.live.most, self.live.peak = peak.total(), peak

    def _replay(self) -> Bytes:
        """Return the peak of all actions by kind, and count the messages of all."""
        last = {kind: record for (kind, _), record in self.records.items()}
        now, peak = self.start.copy(), self.start.copy()
        for action in self.actions:
            kind = kind_of(action)
            record = self.records.get((kind, action.microbatch_index), last[kind])
            if now.total() + record.peak.total() > peak.total():
                peak = now.copy()
                peak.update(record.peak)
            now.update(record.added)
            self.traffic.exchanges += record.messages
        return peak
