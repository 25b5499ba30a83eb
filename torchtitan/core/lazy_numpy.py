"""Numpy as `np`, imported when an attribute of it is first read.

Modules that read the names and sizes of data import it from here, because a check of a job rarely needs more, and
numpy's import would take a quarter of the check's CPU time. Their annotations must not be evaluated.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
else:

    class _Numpy:
        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module("numpy"), name)
            setattr(self, name, value)  # the next read costs no more than one of the module
            return value

    np = _Numpy()

__all__ = ["np"]
