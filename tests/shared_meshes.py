"""In a rank that many tests share: one mesh for all that ask for the same one.

Each group of a mesh has three threads, and hundreds of meshes would add up to a standstill. They cannot be left behind:
DTensor's caches keep the first mesh of equal ones. Imported before whoever takes the name from where this puts another.
"""

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh

unshared_mesh = device_mesh.init_device_mesh
_keep = functools.cache(unshared_mesh)
_shared = False


def share() -> None:
    """From now on, in this process."""
    global _shared
    _shared = True


def _init_device_mesh(*args: Any, **kwargs: Any) -> device_mesh.DeviceMesh:
    return (_keep if _shared else unshared_mesh)(*args, **kwargs)


device_mesh.init_device_mesh = dist.init_device_mesh = _init_device_mesh
