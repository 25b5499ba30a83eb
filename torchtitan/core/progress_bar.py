"""Bars for what may take long: on a terminal only, of the first rank only, not before three seconds have passed."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

DELAY_SECONDS = 3


def progress_bar(what: str, total: int | None, unit: str = "B", shown: bool = True) -> tqdm:
    """Over bytes, or over something else by its unit. It goes when it is closed, or with its `with` block."""
    return tqdm(
        desc=what,
        total=total,
        unit=unit,
        unit_scale=True,
        disable=not (shown and is_watched()),
        delay=DELAY_SECONDS,
        leave=False,
        dynamic_ncols=True,
    )


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """For work of which no part can be counted: the time that it has taken so far."""
    if not is_watched():
        yield
        return
    done = threading.Event()

    def show() -> None:
        if not done.wait(DELAY_SECONDS):
            style = {"bar_format": "{desc} {elapsed}", "leave": False, "dynamic_ncols": True, "delay": DELAY_SECONDS}
            with tqdm(desc=what, **style) as bar:
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
def set_aside() -> Iterator[None]:
    """For a line of text between the bars that are shown."""
    if not getattr(tqdm, "_instances", None):  # none has ever been
        yield
        return
    with tqdm.external_write_mode():
        yield


def is_watched() -> bool:
    """Return True on the first rank of a run that writes to a terminal."""
    return sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
