"""Progress bars for slow work: only on a terminal, only on the first rank, only after three seconds."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

DELAY_SECONDS = 3


def progress_bar(label: str, total: int | None, unit: str = "B", shown: bool = True) -> tqdm:
    """Return a bar that counts bytes, or another unit. It vanishes when it is closed or its `with` block ends."""
    return tqdm(
        desc=label,
        total=total,
        unit=unit,
        unit_scale=True,
        disable=not (shown and is_watched()),
        delay=DELAY_SECONDS,
        leave=False,
        dynamic_ncols=True,
    )


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """Show the time elapsed so far, for work without measurable progress."""
    if not is_watched():
        yield
        return
    done = threading.Event()

    def show() -> None:
        if not done.wait(DELAY_SECONDS):
            style = {"bar_format": "{desc} {elapsed}", "leave": False, "dynamic_ncols": True, "delay": DELAY_SECONDS}
            with tqdm(desc=label, **style) as bar:
                bar.start_t, bar.delay = bar.start_t - DELAY_SECONDS, 0
                bar.refresh()
                while not done.wait(1):
                    bar.refresh()

    thread = threading.Thread(target=show, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def hide_bars() -> Iterator[None]:
    """Hide visible bars while the block writes a line of text."""
    if not getattr(tqdm, "_instances", None):  # no bar exists
        yield
        return
    with tqdm.external_write_mode():
        yield


def is_watched() -> bool:
    """Return True on the first rank of a run that writes to a terminal."""
    return sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
