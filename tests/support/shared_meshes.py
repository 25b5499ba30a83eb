"""Share equal meshes and the group of all ranks between the tests that run in one rank process.

Each group has two threads, and the threads of hundreds of tests would slow the process down. Meshes cannot be
destroyed after a test, as DTensor's caches keep the first of equal ones. Import this module before modules that import
the replaced functions by name.
"""

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh

unshared_mesh = device_mesh.init_device_mesh
_keep = functools.cache(unshared_mesh)
_new_group = dist.new_group
_keep_group = functools.cache(_new_group)
_shared = False


def share() -> None:
    """Share meshes and groups in this process from now on."""
    global _shared
    _shared = True
    share_gloo_device()


def _init_device_mesh(*args: Any, **kwargs: Any) -> device_mesh.DeviceMesh:
    return (_keep if _shared else unshared_mesh)(*args, **kwargs)


def _group(ranks: list[int] | None = None, **kwargs: Any) -> dist.ProcessGroup:
    return _keep_group(**kwargs) if _shared and ranks is None else _new_group(ranks, **kwargs)


def share_gloo_device() -> None:
    """Use one gloo device for all groups, through private names of torch 2.13.

    A device has a thread that polls a hundred times a second. With a device for each group, as torch creates them, the
    threads of eight ranks took a third of the time of their tests.
    """
    group, interface = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME", "")
    device = group.create_device(interface=interface) if interface else group.create_default_device()
    make, devices = group.__init__, [device]

    def make_on_device(self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = group._Options()
        options._devices, options._timeout = devices, timeout
        make(self, store, rank, size, options)

    group.__init__ = make_on_device


dist.new_group = _group
device_mesh.init_device_mesh = dist.init_device_mesh = _init_device_mesh
