"""Attention: its kernel, and the layer with grouped key/value heads."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from torchtitan.core.errors import JobError
from torchtitan.models.layers import RMSNorm, rotate
from torchtitan.parallelisms.context.kernel import Tokens

BACKENDS = ("auto", "sdpa", "flex")


@cache
def compiled(function: Callable) -> Callable:
    """torch.compile, at the first use: the compiler takes two seconds to import. In eager, flex attention writes all
    scores down and its mask all pairs of positions.
    """
    return torch.compile(function)


class AttentionKernel(nn.Module):
    """Causal attention, or with causal=False attention to the whole document, by one of torch's kernels. With a
    `window` a token sees itself and the window - 1 before it (arXiv:2310.06825, 2.1). The place to swap: whatever
    replaces it keeps `prepare` and `forward`, and says of them what it can do where a rank has a part of the sequence
    (parallelisms/context/kernel.py).

    sdpa: scaled_dot_product_attention, which picks the fastest kernel itself. flex: flex attention, which skips blocks
    that a mask empties. auto: flex for masks of documents or windows on a GPU (it has no backward on a CPU), else sdpa.
    Without such a mask all three are sdpa: there is nothing more to skip.
    """

    takes_parts, drops = True, False

    def __init__(self, backend: str = "auto", causal: bool = True, window: int = 0):
        super().__init__()
        if backend not in BACKENDS:
            raise JobError(f"attention backend {backend!r}: choose one of {', '.join(BACKENDS)}")
        assert causal or not window, "a window is of earlier tokens"
        self.backend, self.causal, self.window = backend, causal, window

    @property
    def plain_attention(self) -> bool:
        return not self.window

    def with_backend(self, backend: str) -> "AttentionKernel":
        return AttentionKernel(backend, self.causal, self.window)

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> torch.Tensor | BlockMask | None:
        """Once per forward: the mask that `forward` takes, [B or 1, 1, Q, S], True where a query may look, or a
        BlockMask. None means plainly causal, or nothing hidden. Without `keys` they are those of the queries.
        """
        whole, keys = keys is None, keys or queries
        if queries.documents is None and not self.hides(len(keys.places)) and (whole or not self.causal):
            return None
        if self.uses_flex(queries):
            return self._block_mask(queries, keys)
        visible = self._sees(queries.places[:, None], keys.places)
        if queries.documents is not None:
            visible = visible & (queries.documents[:, :, None] == keys.documents[:, None, :])
        return visible.view(-1, 1, len(queries.places), len(keys.places))  # [B or 1, 1, Q, S], True = may look

    def hides(self, length: int) -> bool:
        """Whether, of a sequence of this length, a token does not see all of those that causality lets it."""
        return 0 < self.window < length

    def uses_flex(self, queries: Tokens) -> bool:
        if queries.documents is None and self.plain_attention:
            return False
        return self.backend == "flex" or (self.backend == "auto" and queries.places.is_cuda)

    def _sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """By their places in the sequence alone, of shapes that fit."""
        if not self.causal:
            return (query >= 0) & (key >= 0)  # all
        near = query >= key
        return near & (query - key < self.window) if self.window else near

    def _block_mask(self, queries: Tokens, keys: Tokens) -> BlockMask:
        device = queries.places.device

        def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            near = self._sees(queries.places[q], keys.places[k])
            return near if queries.documents is None else near & (queries.documents[b, q] == keys.documents[b, k])

        create = compiled(create_block_mask) if device.type == "cuda" else create_block_mask
        batch = None if queries.documents is None else len(queries.documents)
        return create(visible, batch, None, len(queries.places), len(keys.places), device=device)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | BlockMask | None
    ) -> torch.Tensor:
        """q [B, H, S, D], k [B, H / n, S, D] and v [B, H / n, S, V] -> [B, H, S, V]; n query heads share a key/value
        head. Scores are scaled by 1 / sqrt(D). Values may be narrower than keys.
        """
        if isinstance(mask, BlockMask):
            flex = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)
            return flex(q, k, v, block_mask=mask, enable_gqa=k.shape[1] != q.shape[1])
        if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[-1] < 64:
            return self._in_float32(q, k, v, mask)
        return self._sdpa(q, k, v, mask)

    def _sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        grouped = k.shape[1] != q.shape[1]
        # On CUDA only the flash kernel is sure to take grouped heads, and it takes neither masks nor float32; rather
        # than fall to the kernel that writes all scores down, repeat the heads. CPU's kernel takes them in any case.
        if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            grouped = False
        attend = partial(
            F.scaled_dot_product_attention, q, k, is_causal=self.causal and mask is None, enable_gqa=grouped
        )
        narrower = q.shape[-1] - v.shape[-1]
        if narrower > 0 and q.device.type == "cpu" and (q.dtype == torch.bfloat16 or q.shape[-2] >= 512):
            # The CPU's flash kernel wants one width; without it all scores are written down. With keys of 192 and
            # values of 128, forward and backward at 256, 1024 and 4096 tokens then take 1.16, 0.75 and 0.48 of the
            # time in float32, and 0.9, 0.5 and 0.32 in bfloat16 (torch 2.13, 1 core).
            return attend(F.pad(v, (0, narrower)), mask)[..., :-narrower]
        return attend(v, mask)

    def _in_float32(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        # The CPU kernel's bfloat16 backward is slow for narrow heads: at head_dim 16, 33.7 ms a call against 12.9 in
        # float32, half of a small model's step (torch 2.13, 2 cores). From 64 on, bfloat16 is the faster one.
        with torch.autocast("cpu", enabled=False):
            return self._sdpa(q.float(), k.float(), v.float(), mask).to(q.dtype)


class Shared(NamedTuple):
    """What all blocks of a forward share."""

    positions: torch.Tensor  # [B or 1, S]
    documents: torch.Tensor | None  # [B, S]
    rotation: torch.Tensor | None  # of the positions, see Rotary; None without rotary positions
    mask: object  # what the attention kernel made of the documents
    keys: torch.Tensor | None = None  # [B, S], of this layer's draws, see Dropout
    targets: Mapping[str, torch.Tensor] | None = None  # for the head, what the loss reads
    retrieved: Any = None  # what the model's memory gives its layers to read beside the sequence
    lengths: torch.Tensor | None = None  # [B, S], of the tokens' records, see EmbeddingNoise


def attended(kernel: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shared: Shared) -> torch.Tensor:
    """What the kernel makes of q [B, S, H, E], k [B, S, K, E] and v [B, S, K, V]: of all heads, side by side,
    [B, S, H V].
    """
    draws = (shared.keys,) if getattr(kernel, "drops", False) else ()
    y = kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), shared.mask, *draws)  # [B, H, S, V]
    return y.transpose(1, 2).flatten(-2)


class GroupedSizes(Protocol):
    dim: int
    n_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


class GroupedQueryAttention(nn.Module):
    """Attention whose key/value heads each serve several query heads (arXiv:2305.13245), with rotary positions if the
    model has them. With `qk_norm` each head's query and key are normed before they are turned (arXiv:2302.05442, as in
    Qwen 3). `bias`: of all four matrices.

    Letters of the shapes: B samples, S tokens, D width, H query heads, K key/value heads, E = head_dim.
    """

    def __init__(self, args: GroupedSizes, kernel: AttentionKernel, qk_norm: bool = False, bias: bool = False):
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias)
        self.wk = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias)
        self.wv = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias)
        self.q_norm = RMSNorm(args.head_dim, args.norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(args.head_dim, args.norm_eps) if qk_norm else None
        self.kernel = kernel

    def forward(self, x: torch.Tensor, shared: Shared) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]"""
        # -1 and not the number of heads: under tensor parallelism a rank has only some of them
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # [B, S, H, E]
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))  # [B, S, K, E]
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))  # [B, S, K, E]
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if shared.rotation is not None:
            q, k = rotate(q, shared.rotation), rotate(k, shared.rotation)
        return self.wo(attended(self.kernel, q, k, v, shared))  # [B, S, D]
