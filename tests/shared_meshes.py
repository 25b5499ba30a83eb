"""In a rank that many tests share: one mesh for all that ask for the same one.

Each group of a mesh has three threads, and hundreds of meshes would add up to a standstill. They cannot be left behind:
DTensor's caches keep the first mesh of equal ones.
"""

import functools

import torch.distributed as dist
from torch.distributed import device_mesh

device_mesh.init_device_mesh = dist.init_device_mesh = functools.cache(device_mesh.init_device_mesh)
