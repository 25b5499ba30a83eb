"""Policies of recomputation of segments."""

import torch

from torchtitan.parallelisms.pipeline.overlap.segments import (
    RecomputePolicy,
)

SAVED = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}
POLICIES = {
    "none": RecomputePolicy(),
    "selective": RecomputePolicy("selective", save_op=SAVED.__contains__),
    "selective 2": RecomputePolicy("selective", every=2),
    "full_keep_comm": RecomputePolicy("full_keep_comm"),
    "full": RecomputePolicy("full"),
}
