"""Imports without garbage collections: what they make stays, and there is a lot of it."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
