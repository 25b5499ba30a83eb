"""The exchange of a group of one rank, to run chunks of an overlapped pipeline without a process group."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchtitan.parallelisms.pipeline.overlap.exchange import SplitSizes


class NoExchange:
    """A group of one rank, which receives the rows that it sends."""

    size = 1

    def issue(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> "_Here":
        return _Here(rows)

    def issue_counts(self, counts: torch.Tensor) -> "_Here":
        return _Here(SplitSizes(counts[None], [], []))  # the sizes are not used, so the host does not wait for them


class _Here(NamedTuple):
    value: object

    def wait(self):
        return self.value
