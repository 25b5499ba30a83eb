"""Garbage collection at chosen moments: never during imports, and after the same steps on all ranks."""

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
    """Collect no garbage inside the block; if it imports a module, freeze all objects that exist at its end.

    Imports of torch make a million objects that stay. Collections during the imports take a fifth of their time, and
    with these objects each later full collection takes a fifth of a second more.
    """
    enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:  # else repeated calls would keep their callers' garbage for good
            gc.freeze()
        if enabled:
            gc.enable()
