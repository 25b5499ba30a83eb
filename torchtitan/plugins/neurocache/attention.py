"""The attention to retrieved cache entries, in addition to a layer's own attention.

Keys and values are linear in the entries, which all heads share. So instead of computing both for each entry, the key
matrix is applied to the query and the value matrix to the weighted sum of entries: (W_k r) q = r (W_k' q), and
sum p W_v r = W_v sum p r. Per token and layer that is 2 D C + 2 c H N C products instead of 2 N C D and more.

Shapes: B lanes, S tokens, D width, H query heads, K key/value heads, E width of a head, N entries retrieved by a token,
C their width, c tokens of the context.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Placement, Shard

from torchtitan.core.random_draws import Init, Normal, local_part
from torchtitan.models.attention import GroupedQueryAttention, SharedInputs


class Retrieved(NamedTuple):
    """The entries retrieved by the tokens of a microbatch."""

    rows: torch.Tensor  # [B, S, N, C]
    mask: torch.Tensor  # bool [B, S, N]
    joined: bool = False  # True if entries of preceding tokens are included


def shift_tokens(x: torch.Tensor, by: int, repeat: bool = False) -> torch.Tensor:
    """Shift x [B, S, ...] by `by` tokens, so that each token has the value of an earlier one.

    Without such a token the value is zero or False; with `repeat`, the first token's value.
    """
    if not by:
        return x
    if repeat:
        return x[:, (torch.arange(x.shape[1], device=x.device) - by).clamp(min=0)]
    return F.pad(x[:, :-by], (*(0, 0) * (x.dim() - 2), by, 0)) if by < x.shape[1] else torch.zeros_like(x)


class EntryAttention(nn.Module):
    """Attention to entries [B, S, N, C] with matrices `wk` and `wv` [K E, C].

    Each token reads the entries retrieved by itself and by the `context` - 1 tokens before it.

    `scrambled`: compute the same as the authors' program, for adapters that were trained with it. It reads the keys
    [N, K, E] of a token's entries as [K, N, E] without a transpose, and likewise the values, and joins the `context`
    tokens after that. The first token of a segment replaces the ones before it. Missing entries are not masked: they
    have the row that the memory gives them.
    """

    def __init__(self, width: int, heads: int, head_dim: int, context: int, scrambled: bool):
        super().__init__()
        self.head_dim, self.context, self.scrambled = head_dim, context, scrambled
        self.wk = nn.Parameter(torch.empty(heads * head_dim, width))
        self.wv = nn.Parameter(torch.empty(heads * head_dim, width))

    def forward(self, q: torch.Tensor, retrieved: Retrieved) -> torch.Tensor:
        """Map queries [B, S, H, E] to outputs [B, S, H, E], zeros for a token without entries."""
        if self.scrambled:
            return self.scrambled_heads(q, retrieved)
        context = 1 if retrieved.joined else self.context
        entry_rows = [shift_tokens(retrieved.rows, by) for by in range(context)]
        mask = torch.cat([shift_tokens(retrieved.mask, by) for by in range(context)], dim=-1)  # [B, S, c N]
        return self.attend_absorbed(q, entry_rows, mask[..., None, :])

    def attend_absorbed(self, q: torch.Tensor, entry_rows: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        """Attend with q [B, S, H, E] to the entries of c tokens, [B, S, N, C] each: [B, S, H, E].

        `mask` [B, S, 1, c N]: True for existing entries.
        """
        wk, wv = (w.unflatten(0, (-1, self.head_dim)).to(q.dtype) for w in (self.wk, self.wv))  # [K, E, C]
        grouped = q.unflatten(2, (len(wk), -1))  # [B, S, K, H / K, E]
        key_queries = torch.einsum("bskge,kec->bskgc", grouped, wk).flatten(2, 3)  # [B, S, H, C]
        scores = torch.cat([key_queries @ rows.to(q.dtype).mT for rows in entry_rows], dim=-1)  # [B, S, H, c N]
        weights = self._weights(scores, mask).to(q.dtype).chunk(len(entry_rows), dim=-1)
        read = sum(part @ rows.to(q.dtype) for part, rows in zip(weights, entry_rows, strict=True))  # [B, S, H, C]
        return torch.einsum("bskgc,kec->bskge", read.unflatten(2, (len(wv), -1)), wv).flatten(2, 3)

    def attend_expanded(self, q: torch.Tensor, entry_rows: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        """Return the result of `attend_absorbed`, [B, S, H, E], from keys and values per entry, for tests only."""
        rows = torch.cat(entry_rows, dim=2).to(q.dtype)  # [B, S, c N, C]
        split = (F.linear(rows, w.to(q.dtype)).unflatten(-1, (-1, self.head_dim)) for w in (self.wk, self.wv))
        return self._attend(q, *(heads.transpose(2, 3) for heads in split), mask)

    def scrambled_heads(self, q: torch.Tensor, retrieved: Retrieved) -> torch.Tensor:
        """Map q [B, S, H, E] to [B, S, H, E], with the heads of keys and values ordered as in the authors' program."""
        parts = self.context if retrieved.joined else 1
        rows = retrieved.rows.unflatten(2, (parts, -1)).to(q.dtype)  # [B, S, c or 1, N, C]
        sizes = -1, rows.shape[3], self.head_dim  # K, N, E: the layout of the numbers is N, K, E
        read = [F.linear(rows, w.to(q.dtype)).flatten(3).unflatten(3, sizes) for w in (self.wk, self.wv)]
        if not retrieved.joined:
            read = [
                torch.cat([shift_tokens(heads, by, repeat=True) for by in range(self.context)], dim=2) for heads in read
            ]
        k, v = (heads.transpose(2, 3).flatten(3, 4) for heads in read)  # [B, S, K, c N, E]
        return self._attend(q, k, v, None)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend with q [B, S, H, E] to k and v [B, S, K, n, E]: [B, S, H, E].

        `mask` [B, S, 1, n]: True for the entries to read (None: all).
        """
        repeats = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        weights = self._weights((k @ q[..., None]).squeeze(-1), mask)
        return (weights.to(v.dtype)[..., None, :] @ v).squeeze(-2)

    def _weights(self, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the softmax of scores [B, S, H, n] over existing entries [B, S, 1, n] (None: all), 0 without any."""
        scaled = scores.to(torch.promote_types(scores.dtype, torch.float32)) * self.head_dim**-0.5
        if mask is None:
            return scaled.softmax(-1)
        return scaled.masked_fill(~mask, torch.finfo(scaled.dtype).min).softmax(-1).masked_fill(~mask, 0.0)

    def parameter_init(self, name: str) -> Init:
        return Normal(self.wk.shape[1] ** -0.5)

    def tensor_placements(self, role: str, default: Placement) -> dict[str, tuple[Placement, Placement]]:
        """Shard both matrices by heads over the ranks of tensor parallel."""
        return dict.fromkeys(("wk", "wv"), (Shard(0), Shard(0)))


class CacheAttention(nn.Module):
    """Maps the layer's input [B, S, D] to the cache attention's output, which is added to the residual stream."""

    def __init__(self, attention: nn.Module, width: int, context: int, scrambled: bool):
        super().__init__()
        self.head_dim = attention.head_dim
        self.wq = CacheProjection(attention.wq.in_features, attention.wq.out_features, bias=False)
        heads = attention.wk.out_features // attention.head_dim
        self.reading = EntryAttention(width, heads, attention.head_dim, context, scrambled)
        self.wo = CacheProjection(attention.wo.in_features, attention.wo.out_features, bias=False)

    def forward(self, x: torch.Tensor, retrieved: Retrieved) -> torch.Tensor:
        read = self.reading(self.wq(x).unflatten(-1, (-1, self.head_dim)), retrieved)
        return self.wo(read.flatten(-2))


class CacheProjection(nn.Linear):
    def parameter_init(self, name: str) -> Init:
        return Normal(self.in_features**-0.5)


class CachedAttention(GroupedQueryAttention):
    """A layer's attention plus the output of `cache`, a CacheAttention, without a gate.

    `measures`: record the norms of both, except in compiled graphs.
    """

    measures = False

    def add_cache(self, width: int, context: int, scrambled: bool, copies: bool) -> None:
        """Add the cache attention for entries of this width.

        `copies`: initialize it from the layer's own attention, for keys and values from the first `width` columns.
        Otherwise its initialization is random.
        """
        self.cache, self.copies = CacheAttention(self, width, context, scrambled), copies
        self.squares: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, shared: SharedInputs) -> torch.Tensor:
        y = GroupedQueryAttention.forward(self, x, shared)
        if shared.retrieved is None:
            return y
        read = self.cache(x, shared.retrieved)
        if self.measures and self.training and not torch.compiler.is_compiling():
            self._measure(read, y)
        return y + read

    @torch.no_grad()
    def _measure(self, read: torch.Tensor, layer_output: torch.Tensor) -> None:
        # A list and no running sum: with a sum, a recompute would run different operations from the forward.
        self.squares.append(torch.stack([output.float().square().sum() for output in (read, layer_output)]))

    def take_squares(self) -> list[torch.Tensor]:
        """Return and clear the recorded sums of squares [2] of the cache attention's and the layer's own output.

        There is one tensor for each forward since the last call.
        """
        recorded, self.squares = self.squares, []
        return recorded

    @torch.no_grad()
    def init_from_base(self) -> None:
        if not self.copies:
            return
        for name, target in (("wq", self.cache.wq.weight), ("wo", self.cache.wo.weight)):
            local_part(target)[0].copy_(local_part(_weight(getattr(self, name)))[0])
        for target, source in self._key_value_matrices():
            target.copy_(source[:, : target.shape[1]])

    @torch.no_grad()
    def init_from_directions(self, directions: torch.Tensor) -> None:
        """Project the layer's own key and value matrices on the directions [D, C] that an entry retains."""
        for target, source in self._key_value_matrices():
            target.copy_(source @ directions.to(source))

    def _key_value_matrices(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's rows of the cache's key and value matrices, each with the layer's rows of it."""
        for name, target in (("wk", self.cache.reading.wk), ("wv", self.cache.reading.wv)):
            yield local_part(target)[0], local_part(_weight(getattr(self, name)))[0]


def _weight(linear: nn.Module) -> torch.Tensor:
    """Return the linear's matrix, unpacked if it is quantized."""
    return linear.stores()["weight"].read() if hasattr(type(linear), "stores") else linear.weight
