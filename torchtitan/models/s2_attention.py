"""LongLoRA's shifted sparse attention (arXiv:2309.12307, 3.2): groups in training, full attention in evaluation.

A model trains on long sequences at the cost of short ones. Half of the heads attend within groups of adjacent tokens,
the other half within groups shifted by half a group, so that information crosses groups from layer to layer. Both are
causal in the true positions. LongLoRA's code rolls the sequence instead, so there the first half group attends to the
sequence's end.
"""

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from torchtitan.core.errors import JobError
from torchtitan.models.attention import AttentionKernel
from torchtitan.parallelisms.attention_kernel import Tokens


class GroupKernel(AttentionKernel):
    """Causal attention within groups of `size` tokens; the first group is `missing` tokens shorter."""

    def __init__(self, size: int, missing: int, backend: str = "auto"):
        super().__init__(backend)
        self.size, self.missing = size, missing

    @property
    def plain_attention(self) -> bool:
        return False

    def hides(self, length: int) -> bool:
        return length > self.size - self.missing

    def _sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        same = (query + self.missing) // self.size == (key + self.missing) // self.size
        return super()._sees(query, key) & same


HalfMasks = tuple[torch.Tensor | BlockMask | None, torch.Tensor | BlockMask | None]


class ShiftedGroups(AttentionKernel):
    """Attention in groups of `size` tokens (an even number) in training: shifted groups for the second half of `heads`.

    In evaluation the same as AttentionKernel.
    """

    takes_parts = True

    def __init__(self, size: int, heads: int, backend: str = "auto"):
        super().__init__(backend)
        self.size, self.heads = size, heads
        self.halves = [GroupKernel(size, missing, backend) for missing in (0, size // 2)]
        self.share = 0  # index of this rank's share of the heads under tensor parallel

    def with_backend(self, backend: str) -> AttentionKernel:
        return ShiftedGroups(self.size, self.heads, backend).train(self.training)

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> HalfMasks | torch.Tensor | BlockMask | None:
        """Return AttentionKernel's mask; in training one mask [B or 1, 1, Q, S] for each half of the heads."""
        if not self.training:
            return super().prepare(queries, keys)
        groups, shifted = self.halves
        return groups.prepare(queries, keys), shifted.prepare(queries, keys)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: HalfMasks | torch.Tensor | BlockMask | None,
    ) -> torch.Tensor:
        """Attend as AttentionKernel does: q [B, H, Q, D], k [B, H / n, S, D] and v [B, H / n, S, V] -> [B, H, Q, V]."""
        if not isinstance(mask, tuple):
            return super().forward(q, k, v, mask)
        heads = q.shape[1]
        first = min(max(self.heads // 2 - self.share * heads, 0), heads)  # number of local heads that are not shifted
        if first % (heads // k.shape[1]):  # query heads of both kinds share a key
            k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        cuts = [(x.shape[1] * first // heads, x) for x in (q, k, v)]
        parts = ([x[:, :cut] for cut, x in cuts], [x[:, cut:] for cut, x in cuts])
        outputs = [
            half(*part, part_mask)
            for half, part, part_mask in zip(self.halves, parts, mask, strict=True)
            if part[0].numel()
        ]
        return torch.cat(outputs, dim=1)


def attend_in_groups(model: Any, size: int) -> None:
    """Replace the kernel of all blocks of a decoder by ShiftedGroups, in place, unless `size` is 0.

    Raises JobError unless the attention is plain causal.
    """
    if not size:
        return
    kernel = getattr(model, "kernel", None)
    if type(kernel) is not AttentionKernel or not kernel.causal or kernel.window:
        raise JobError(
            f"model.s2_group_size: given {size}; allowed: 0 for {type(model).__name__}, whose attention "
            f"({type(kernel).__name__}) is not plainly causal; leave it out"
        )
    model.set_attention_kernel(ShiftedGroups(size, model.args.n_heads, kernel.backend))
