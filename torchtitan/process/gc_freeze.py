"""Garbage collection at chosen moments: never during imports, whose many objects stay, and after the same step on all
ranks.
"""

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


def collect_garbage(step: int, freq: int, debug: bool) -> None:
    """Collect the younger objects every `freq` steps, or all of them after every step and log their number."""
    if debug:
        logger.info("garbage collection after step %d: %d objects were unreachable", step, gc.collect())
    elif step % freq == 0:
        gc.collect(1)


@contextmanager
def lasting() -> Iterator[None]:
    """Nothing is collected inside, and what has been made by its end is never looked at again, if one was imported.
    Imports of torch make a million objects: to look for garbage among them again and again takes a fifth of their time,
    and each full collection later a fifth of a second.
    """
    enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:  # else garbage of whoever calls it again and again would be kept for good
            gc.freeze()
        if enabled:
            gc.enable()
