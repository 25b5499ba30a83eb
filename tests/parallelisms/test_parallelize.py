"""Tests of the policies of recomputation."""

import torch
from torch.utils import checkpoint

from torchtitan.parallelisms.parallelize import recompute_policy


def test_selective_recompute_of_segments_ignores_the_profilers_markers(monkeypatch):
    marker = torch.ops.profiler._record_function_enter_new.default
    monkeypatch.setattr(checkpoint, "SAC_IGNORED_OPS", checkpoint.SAC_IGNORED_OPS - {marker})
    recompute_policy("selective", "1", True)
    assert marker not in checkpoint.SAC_IGNORED_OPS
    recompute_policy("selective", "op", True)
    assert marker in checkpoint.SAC_IGNORED_OPS
