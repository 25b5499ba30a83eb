"""Show the progress of a long step: a bar on a terminal, elsewhere a line at least every 30 seconds.

A thread reads a clock once a second and prints only after the run has been silent for a while, so it prints nothing
during short steps. The training loop itself only counts its passes.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from torchtitan.core.progress_bar import DELAY_SECONDS, is_watched
from torchtitan.metrics.console import duration
from torchtitan.process.heartbeat import Progress

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
LINE_SECONDS = 30.0
"""Longest silence of a run that does not write to a terminal."""
PHASE_TEXTS = {
    "first": "step {step}/{total}, which may compile",
    "validate": "validation at step {step}/{total}",
    "save": "saving step {step}/{total}",
}
"""How a phase is described; the others are described by their step."""


class StepProgress:
    """A context manager around the training loop that shows the progress of long steps.

    `shown`: False on ranks that print nothing. `run` returns the run's current step, its last step and the tokens
    trained on. `dp`: the number of ranks that each read as many tokens as this one.
    """

    def __init__(
        self,
        shown: bool,
        progress: Progress,
        dp: int,
        run: Callable[[], tuple[int, int, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shown, self.progress, self.dp, self.run, self.clock = shown, progress, dp, run, clock
        self.step, self.passes, self.passes_done, self.tokens = 0, 1, 0, 0  # of the step under way
        self.all_passes_done, self.began_at = 0, clock()
        self.last_line_at = clock()
        self._bar: tqdm | None = None
        self._stop = threading.Event()
        self._listener = _Listener(self)

    def through(self, microbatches: Sequence[dict[str, torch.Tensor]]) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield the microbatches of the next step with their numbers, and count them."""
        self.step, self.passes, self.passes_done, self.tokens = self.run()[0] + 1, len(microbatches), 0, 0
        for number, batch in enumerate(microbatches):
            yield number, batch
            self.passes_done += 1
            self.all_passes_done += 1
            self.tokens += batch["tokens"].numel() * self.dp

    def describe(self) -> str:
        """Say where the run is, in one line."""
        doing, (step, total, tokens) = self.progress.doing, self.run()
        now, started = self.clock(), doing.since
        text = PHASE_TEXTS.get(doing.phase, "step {step}/{total}").format(step=doing.step, total=total)
        if doing.step == self.step == step + 1:
            tokens += self.tokens
            text += f": pass {min(self.passes_done + 1, self.passes)} of {self.passes}"
        parts = [text, f"{duration(now - started)} so far", f"{tokens:,} tokens"]
        if self.all_passes_done:
            remaining = (total - step) * self.passes - (self.passes_done if self.step == step + 1 else 0)
            parts.append(f"about {duration(remaining * (now - self.began_at) / self.all_passes_done)} left")
        return ", ".join(parts)

    def refresh(self, on_terminal: bool) -> None:
        """Show where the run is, if it has been silent for long enough."""
        silent = self.clock() - self.last_line_at
        if not on_terminal:
            if silent >= LINE_SECONDS:
                logger.info("%s", self.describe())
        elif silent < DELAY_SECONDS:
            self._close_bar()
        else:
            if self._bar is None:
                self._bar = tqdm(bar_format="{desc} |{bar:10}|", leave=False, dynamic_ncols=True, total=self.passes)
            self._bar.total, self._bar.n = self.passes, self.passes_done
            self._bar.set_description_str(self.describe())

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "StepProgress":
        self.began_at = self.last_line_at = self.clock()
        if self.shown:
            logging.getLogger("torchtitan").addHandler(self._listener)
            self._thread = threading.Thread(target=self._watch, name="step progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.shown:
            self._stop.set()
            self._thread.join()
            logging.getLogger("torchtitan").removeHandler(self._listener)

    def _watch(self) -> None:
        on_terminal = is_watched()
        while not self._stop.wait(LOOK_SECONDS):
            self.refresh(on_terminal)
        self._close_bar()


class _Listener(logging.Handler):
    """Notes when the run has printed a line."""

    def __init__(self, owner: StepProgress) -> None:
        super().__init__(logging.INFO)
        self.owner = owner

    def emit(self, record: logging.LogRecord) -> None:
        self.owner.last_line_at = self.owner.clock()
