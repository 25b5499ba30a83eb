"""DTensor's placements."""

import torch
from torch.distributed.tensor import _utils, placement_types

compute_local_shape_and_global_offset = _utils.compute_local_shape_and_global_offset
"""torch 2.13: the shape of this rank's shard and its offset in the full tensor, to draw initial weights."""
local_shape_and_offset_at = _utils._compute_local_shape_and_global_offset
"""torch 2.13: the same at any coordinate of the mesh, for optimizers that gather shards."""
StridedShard = placement_types._StridedShard
"""torch 2.13: a dimension that several axes of the mesh shard, in another order than theirs."""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """torch 2.13: this rank's part of a DTensor [any shape], without a node for autograd; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)
