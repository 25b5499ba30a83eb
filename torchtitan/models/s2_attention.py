"""Attention inside groups in training, as LongLoRA's shifted sparse attention has it (arXiv:2309.12307, 3.2): a model
whose every layer looks at everything in evaluation learns from long sequences at the price of short ones.

Half of the heads attend in groups of neighbouring tokens, the other half in groups that begin half a group later, so
that from layer to layer all of a sequence is reached. Both are causal, by places that are not rolled round: in
LongLoRA's own code, which rolls them, the first half group sees the sequence's end.
"""

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from torchtitan.core.errors import JobError
from torchtitan.models.attention import AttentionKernel
from torchtitan.parallelisms.context.kernel import Tokens


class GroupKernel(AttentionKernel):
    """Causal attention inside groups of `size` tokens, of which the first has `missing` fewer."""

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
    """In training the first half of `heads` attends in groups of `size` tokens, which is even, the second in shifted
    ones; in evaluation all attend as AttentionKernel's.
    """

    takes_parts = True

    def __init__(self, size: int, heads: int, backend: str = "auto"):
        super().__init__(backend)
        self.size, self.heads = size, heads
        self.halves = [GroupKernel(size, missing, backend) for missing in (0, size // 2)]
        self.share = 0  # which of as many equal shares of the heads as tensor parallel has made is here

    def with_backend(self, backend: str) -> AttentionKernel:
        return ShiftedGroups(self.size, self.heads, backend).train(self.training)

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> HalfMasks | torch.Tensor | BlockMask | None:
        """As AttentionKernel's; in training one for each half of the heads, [B or 1, 1, Q, S]."""
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
        """As AttentionKernel's: q [B, H, Q, D], k [B, H / n, S, D] and v [B, H / n, S, V] -> [B, H, Q, V]."""
        if not isinstance(mask, tuple):
            return super().forward(q, k, v, mask)
        heads = q.shape[1]
        first = min(max(self.heads // 2 - self.share * heads, 0), heads)  # of those here, how many are not shifted
        if first % (heads // k.shape[1]):  # query heads of both kinds share a key
            k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        cuts = [(x.shape[1] * first // heads, x) for x in (q, k, v)]
        parts = ([x[:, :cut] for cut, x in cuts], [x[:, cut:] for cut, x in cuts])
        made = [half(*part, own) for half, part, own in zip(self.halves, parts, mask, strict=True) if part[0].numel()]
        return torch.cat(made, dim=1)


def attend_in_groups(model: Any, size: int) -> None:
    """Give all blocks of a decoder such a kernel, in place, for a size above 0. JobError where its attention is of
    another kind.
    """
    if not size:
        return
    own = getattr(model, "kernel", None)
    if type(own) is not AttentionKernel or not own.causal or own.window:
        raise JobError(
            f"model.s2_group_size: given {size}; allowed: 0 for {type(model).__name__}, whose attention "
            f"({type(own).__name__}) is not plainly causal; leave it out"
        )
    model.set_attention_kernel(ShiftedGroups(size, model.args.n_heads, own.backend))
