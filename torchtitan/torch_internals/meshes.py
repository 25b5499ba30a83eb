"""Slices of device meshes. Importing this file does not import torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def flattened(mesh: "DeviceMesh", name: str) -> "DeviceMesh":
    """torch 2.13: the mesh with one axis for all of its axes; repeatedly the same one."""
    return mesh._flatten(name)


def concatenated(meshes: "Sequence[DeviceMesh]") -> "DeviceMesh":
    """torch 2.13: the mesh with the axes of several slices of one mesh."""
    return type(meshes[0])._concatenate(list(meshes))
