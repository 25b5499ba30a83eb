"""Rehearse few microbatches of a pipeline and replay them for the others, which allocate, free and send the same.

Of each kind of action of a stage the first two microbatches run, since the first one of all also gathers parameters or
creates gradients. Then the memory of the full table is added up action by action. Schedules that overlap all-to-alls
are not replayed: they defer weight gradients from one action to another, so that their actions differ.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
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


class WatchedActions(list):
    """The actions of a rank that run. The runtime's loop over them records each one's effect on `live`."""

    def __init__(self, actions: list[Any], live: LiveTensors, traffic: Traffic) -> None:
        running = running_microbatches(actions)
        super().__init__(action for action in actions if action.microbatch_index in running)
        self.actions, self.live, self.traffic = actions, live, traffic
        self.start: Bytes = Counter()
        self.records: dict[tuple[Hashable, int | None], Record] = {}

    def __iter__(self) -> Iterator[Any]:
        live, exchanges = self.live, self.traffic.exchanges
        self.start = live.now.copy()
        for action in super().__iter__():
            before, sent_before = live.now.copy(), len(exchanges)
            live.forget_peak()
            yield action
            added, peak = live.now.copy(), live.peak.copy()
            for sizes in (added, peak):
                sizes.subtract(before)
            self.records[kind_of(action), action.microbatch_index] = Record(added, peak, exchanges[sent_before:])
            del exchanges[sent_before:]
        live.forget_peak()

    def replay(self) -> Bytes:
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


@contextmanager
def few_microbatches(schedule: TableSchedule, live: LiveTensors, traffic: Traffic) -> Iterator[None]:
    """Run only some microbatches inside the block. At its end `live.peak` and `traffic` count all."""
    order = schedule.pipeline_order_with_comms
    actions = order[schedule.rank]
    watched = order[schedule.rank] = WatchedActions(actions, live, traffic)
    try:
        yield
    finally:
        order[schedule.rank] = actions
    peak = watched.replay()
    if peak.total() > live.most:
        live.most, live.peak = peak.total(), peak
