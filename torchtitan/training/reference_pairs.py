"""Read the pairs of a run before it starts, for its reference, and report the progress of the reference."""

import dataclasses
import logging
import time
from collections.abc import Iterator
from itertools import chain, islice
from types import TracebackType
from typing import Any

import torch

from torchtitan.build import parts
from torchtitan.build.data import batches_of_a_step, held_out, pairs_in_a_pass, training_loader
from torchtitan.config.batch_shape import batch_rows, rows_per_sample
from torchtitan.config.job import JobConfig
from torchtitan.core.progress_bar import progress_bar
from torchtitan.datasets.loader import HeldOutBatches
from torchtitan.metrics.console import duration
from torchtitan.training.batches import Batch, BatchPreparer

logger = logging.getLogger(__name__)

PAIRS_OF_A_CHUNK = 16
"""Of a rank: after each chunk ranks exchange what they have computed, and it is written."""
SECONDS_OF_A_LINE = 30


class Readings:
    """One rank's data for the steps after `step`, from the data position `state`, and for validations."""

    def __init__(self, config: JobConfig, preparer: BatchPreparer, step: int, state: dict[str, Any] | None) -> None:
        data = dataclasses.replace(config.data, pad_to="seq_len")
        self.config, self.preparer, self.state = dataclasses.replace(config, data=data), preparer, state
        self.vocabulary = parts.tokenizer(config)
        self.steps = config.training.steps - step
        self.held_out = held_out(self.config, self.vocabulary, preparer.dp_rank, preparer.dims, preparer.objective)
        before = 0 if state is None else state["samples"]
        self.rows = before + self.steps * parts.global_rows(config, preparer.dims)
        """Of the training data, up to the last step."""
        self.validation = self.held_out.samples if isinstance(self.held_out, HeldOutBatches) else 0
        """Rows that validations read."""

    @property
    def pairs(self) -> int:
        """The number of different pairs, at most."""
        read = self.steps * parts.global_batch_size(self.config, self.preparer.dims)
        return min(read, pairs_in_a_pass(self.config)) + self.validation // rows_per_sample(self.config)

    def chunks(self) -> Iterator[tuple[int, Batch]]:
        """Yield (rows of a batch, chunk of several batches [n, S]); the number of chunks is the same on all ranks."""
        loader = training_loader(self.config, self.vocabulary, self.preparer.dp_rank, self.preparer.dims, self.state)
        batches = islice(loader, self.steps * batches_of_a_step(self.config, self.preparer.dims))
        try:
            yield from _joined(batches, batch_rows(self.config))
        finally:
            loader.close()
        if self.held_out is not None:
            try:
                yield from _joined(iter(self.held_out), batch_rows(self.config, "validation"))
            finally:
                self.held_out.close()


def _joined(batches: Iterator[Batch], rows: int) -> Iterator[tuple[int, Batch]]:
    size = max(1, 2 * PAIRS_OF_A_CHUNK // rows)
    for first in batches:
        chunk = list(chain([first], islice(batches, size - 1)))
        yield rows, {name: torch.cat([batch[name] for batch in chunk]) for name in first}


class Report:
    """A progress bar on a terminal, and a line with the remaining time every 30 s. `shown`: on this rank."""

    def __init__(self, total: int, done: int, shown: bool) -> None:
        self.total, self.first, self.shown = max(total, done), done, shown
        self.began = self.told = time.monotonic()
        self.bar = progress_bar("reference", self.total, unit=" pairs", shown=shown)
        self.bar.update(done)
        self.done = done

    def __enter__(self) -> "Report":
        return self

    def show(self, done: int) -> None:
        if self.done == self.first and done > self.first and self.shown:
            self._line(done)
        self.bar.update(done - self.done)
        self.done, now = done, time.monotonic()
        if self.shown and now - self.told >= SECONDS_OF_A_LINE:
            self._line(done)

    def _line(self, done: int) -> None:
        self.told = time.monotonic()
        remaining = (self.told - self.began) * max(0, self.total - done) / max(1, done - self.first)
        logger.info("reference  %d of %d pairs, %s left", done, max(self.total, done), duration(remaining))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.close()
        if self.shown and kind is None and self.done > self.first:
            logger.info("reference  %d pairs in %s", self.done - self.first, duration(time.monotonic() - self.began))
