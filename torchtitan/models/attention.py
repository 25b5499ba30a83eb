"""Attention: its kernel, the layer with grouped key/value heads, and LongLoRA's shifted groups."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from torchtitan.core.errors import JobError
from torchtitan.core.fused import compile_lazily
from torchtitan.models.layers import UnitNorm, autocast_dtype, autocast_off, rotate
from torchtitan.parallelisms.attention_kernels import fastest_cpu_dtype, mask_bias
from torchtitan.parallelisms.attention_sinks import SinkAttentionFunction, join_sinks
from torchtitan.parallelisms.capped_attention import VisibleKeys, capped_attention
from torchtitan.parallelisms.region_attention import RegionTable, attend_by_regions, region_table
from torchtitan.parallelisms.sequence_layout import Tokens, with_sinks

BACKENDS = ("auto", "sdpa", "flex", "fa3")
Mask = torch.Tensor | BlockMask | RegionTable | None


class AttentionKernel(nn.Module):
    """Causal attention, or with causal=False attention to the full document, by one of torch's kernels.

    With a `window` a token attends to itself and the window - 1 tokens before it (arXiv:2310.06825, 2.1). A replacement
    must implement `prepare` and `forward`, and declare its abilities under context parallel
    (parallelisms/sequence_layout.py).

    sdpa: scaled_dot_product_attention, which picks the fastest kernel itself. flex: flex attention, which skips blocks
    that the mask empties. auto: flex for document masks or windows on a GPU (it has no backward on a CPU), else sdpa.
    Without such a mask all use sdpa, since there are no blocks to skip. fa3: auto, in a process that has called
    `activate_flash_attention`. On a CPU documents and windows are slices of the batch (region_attention.py) unless the
    backend is flex.
    """

    accepts_query_slices, has_dropout = True, False

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

    def without_causality(self) -> "AttentionKernel":
        """Return the kernel of a query that may attend to all keys."""
        return AttentionKernel("sdpa", causal=False)

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> Mask:
        """Make the mask for `forward`, once per forward of the model.

        Returns a BlockMask, a RegionTable, or a bool tensor [B or 1, 1, Q, S], True where a query may attend. None
        means causal without further restrictions, or no restriction at all if causal=False. `keys` default to the
        queries' tokens.
        """
        same_tokens, keys = keys is None, keys or queries
        if queries.documents is None and not self.masks_tokens(len(keys.indices)) and (same_tokens or not self.causal):
            return None
        if self.uses_flex(queries):
            return self._block_mask(queries, keys)
        if not self.uses_regions(queries):
            return self.dense_mask(queries, keys)
        segments = self.segments(queries), queries.indices, self.segments(keys), keys.indices
        return RegionTable(region_table(*segments, self.causal, self.window))

    def segments(self, tokens: Tokens) -> torch.Tensor:
        """Return the number of each token's segment, [B or 1, S]: tokens attend within their segment."""
        return torch.zeros_like(tokens.indices)[None] if tokens.documents is None else tokens.documents

    def masks_tokens(self, length: int) -> bool:
        """Return True if a document of this length masks tokens that the causal mask does not."""
        return 0 < self.window < length

    def num_needed(self, length: int) -> int:
        """Return how many of the last tokens of a document of this length the next token attends to."""
        return min(length, self.window - 1) if self.window else length

    def uses_flex(self, queries: Tokens) -> bool:
        if queries.documents is None and self.plain_attention:
            return False
        return self.backend == "flex" or (self.backend in ("auto", "fa3") and queries.indices.is_cuda)

    def uses_regions(self, queries: Tokens) -> bool:
        """Return True if `forward` attends by slices of the batch and so needs no mask over all pairs of tokens."""
        return queries.indices.device.type == "cpu"

    def dense_mask(self, queries: Tokens, keys: Tokens) -> torch.Tensor:
        """Return whether each query may attend to each key: bool [B or 1, 1, Q, S]."""
        visible = self.segments(queries)[:, :, None] == self.segments(keys)[:, None, :]  # [B or 1, Q, S]
        return (visible & self._is_visible(queries.indices[:, None], keys.indices))[:, None]

    def _is_visible(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return whether each query may attend to each key by position alone; bool, of the broadcast shape of both."""
        if not self.causal:
            return (query >= 0) & (key >= 0)  # all
        in_past = query >= key
        return in_past & (query - key < self.window) if self.window else in_past

    def _block_mask(self, queries: Tokens, keys: Tokens) -> BlockMask:
        device = queries.indices.device
        query_segments, key_segments = self.segments(queries), self.segments(keys)
        shared = len(query_segments) == 1  # by all samples
        if shared:  # inside `visible` the index 0 would be copied to the device
            query_segments, key_segments = query_segments.squeeze(0), key_segments.squeeze(0)

        def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            same = query_segments[q] == key_segments[k] if shared else query_segments[b, q] == key_segments[b, k]
            return same & self._is_visible(queries.indices[q], keys.indices[k])

        batch = None if shared else len(query_segments)
        create = compile_lazily(create_block_mask) if device.type == "cuda" else create_block_mask
        return create(visible, batch, None, len(queries.indices), len(keys.indices), device=device)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend with q [B, H, S, D], k [B, H / n, S, D] and v [B, H / n, S, V] -> [B, H, S, V].

        n query heads share a key/value head. Scores are scaled by 1 / sqrt(D). Values may be narrower than keys.
        `sinks`: [H], see Sinks.
        """
        if isinstance(mask, BlockMask):
            flex = flex_attention if torch.compiler.is_compiling() else compile_lazily(flex_attention)
            grouped = k.shape[1] != q.shape[1]
            if sinks is None:
                return flex(q, k, v, block_mask=mask, enable_gqa=grouped)
            out, aux = flex(q, k, v, block_mask=mask, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
            return join_sinks(out, aux.lse, sinks)[0]
        dtype = autocast_dtype(q.device.type) or q.dtype
        if sinks is not None:
            return self._with_sinks(*(x.to(dtype) for x in (q, k, v)), mask, sinks)
        if isinstance(mask, RegionTable):
            return attend_by_regions(*(x.to(dtype) for x in (q, k, v)), mask.regions, self.window)[0]
        if q.device.type != "cpu":
            return self._sdpa(q, k, v, mask)
        kernel_dtype = fastest_cpu_dtype(dtype, q.shape[-1], k.shape[2])
        with autocast_off("cpu"):
            return self._sdpa(*(x.to(kernel_dtype) for x in (q, k, v)), mask).to(dtype)

    def _with_sinks(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | RegionTable | None,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Attend as `forward` does without a BlockMask."""
        regions = mask.regions if isinstance(mask, RegionTable) else None
        kernel_dtype = q.dtype
        if q.device.type == "cpu" and regions is None:
            kernel_dtype = fastest_cpu_dtype(q.dtype, q.shape[-1], k.shape[2])
        q, k, v, dtype = *(x.to(kernel_dtype) for x in (q, k, v)), q.dtype
        bias = mask_bias(mask, q) if isinstance(mask, torch.Tensor) else None
        with autocast_off(q.device.type):
            return SinkAttentionFunction.apply(q, k, v, sinks, regions, self.window, bias, self.causal).to(dtype)

    def _sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        grouped = k.shape[1] != q.shape[1]
        # On CUDA only the flash kernel surely supports grouped heads, and it supports neither masks nor float32. Rather
        # than use the kernel that materializes all scores, repeat the heads. The CPU kernel always supports them.
        if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            grouped = False
        attend = partial(
            F.scaled_dot_product_attention, q, k, is_causal=self.causal and mask is None, enable_gqa=grouped
        )
        narrower = q.shape[-1] - v.shape[-1]
        if narrower > 0 and q.device.type == "cpu" and (q.dtype == torch.bfloat16 or q.shape[-2] >= 512):
            # The CPU's flash kernel needs equal widths; without it all scores are materialized. With keys of 192 and
            # values of 128, forward and backward at 256, 1024 and 4096 tokens then take 1.16, 0.75 and 0.48 of the
            # time in float32, and 0.9, 0.5 and 0.32 in bfloat16 (torch 2.13, 1 core).
            return attend(F.pad(v, (0, narrower)), mask)[..., :-narrower]
        return attend(v, mask)


class CappedKernel(AttentionKernel):
    """Attention with scores cap tanh(s / cap), by chunks of queries (parallelisms/capped_attention.py).

    No kernel of torch computes it, so `backend` has no effect.
    """

    accepts_query_slices = True

    def __init__(self, cap: float, backend: str = "auto", causal: bool = True, window: int = 0):
        super().__init__(backend, causal, window)
        self.cap = cap

    @property
    def plain_attention(self) -> bool:
        return False

    def with_backend(self, backend: str) -> AttentionKernel:
        return CappedKernel(self.cap, backend, self.causal, self.window)

    def without_causality(self) -> AttentionKernel:
        return CappedKernel(self.cap, self.backend, causal=False)

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> VisibleKeys:
        """Return which keys are visible. `keys` are the tokens of the sequence, in order."""
        segments, of_keys = self.segments(queries), self.segments(keys or queries)
        return VisibleKeys(queries.indices, segments, of_keys, self.causal, self.window, keys is None)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: VisibleKeys | None) -> torch.Tensor:
        """Attend as AttentionKernel does. mask: None if every query may attend to all keys."""
        if mask is None:
            every, queries = q.new_zeros(1, k.shape[2], dtype=torch.int64), q.shape[2]
            mask = VisibleKeys(every[0, :queries], every[:, :queries], every, False, 0, False)
        dtype = autocast_dtype(q.device.type) or q.dtype
        with autocast_off(q.device.type):
            return capped_attention(*(x.to(dtype) for x in (q, k, v)), *mask, self.cap)[0]


def activate_flash_attention(backend: str, device: torch.device) -> None:
    """Make FlashAttention 3 torch's flash kernel in this process if the backend is fa3 and the device a GPU.

    Raises JobError if its package is missing or has no such kernel, or if the GPU is none of Hopper.
    """
    if backend != "fa3" or device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise JobError(
            f'model.attention_backend: given "fa3"; allowed: another on this GPU, of compute capability '
            f'{major}.{minor}; FlashAttention 3 is for Hopper GPUs (9.0); write "auto"'
        )
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        raise JobError(
            f'model.attention_backend: given "fa3"; allowed: "fa3" only with the package flash_attn_interface, '
            f"FlashAttention 3 "
            f'for Hopper GPUs ({error}); install it, or write "auto"'
        ) from error


class SharedInputs(NamedTuple):
    """Inputs that all blocks share in a forward. `Decoder.shared_for_layer` sets `rotation`, `mask` and `keys`."""

    positions: torch.Tensor  # [B or 1, S]
    documents: torch.Tensor | None  # [B, S]
    rotation: torch.Tensor | None  # of the positions, see Rotary; None without rotary positions
    mask: Any  # from the attention kernel's `prepare`
    keys: torch.Tensor | None = None  # [B, S], random keys of this layer, see Dropout
    targets: Mapping[str, torch.Tensor] | None = None  # batch tensors that the loss reads
    retrieved: Any = None  # retrieved by the model's memory for its layers, in addition to the sequence
    lengths: torch.Tensor | None = None  # [B, S], lengths of the tokens' records, see EmbeddingNoise
    by_kind: Mapping[int, tuple[Any, Any]] | None = None  # index of a kind -> rotation and mask of its blocks


def run_attention(
    kernel: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shared: SharedInputs,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply the kernel to q [B, S, H, E], k [B, S, K, E] and v [B, S, K, V] -> concatenated heads [B, S, H V].

    `sinks`: [H], see Sinks.
    """
    draws = (shared.keys,) if getattr(kernel, "has_dropout", False) else ()
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    y = kernel(*heads_first, shared.mask, *draws, **with_sinks(sinks))  # [B, H, S, V]
    return y.transpose(1, 2).flatten(-2)


class Sinks(nn.Module):
    """A learned score of each head that joins the softmax of its queries, and has no value (attention_sinks.py)."""

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self) -> torch.Tensor:
        """Return the scores, [H]."""
        return self.weight


class GroupedSizes(Protocol):
    dim: int
    n_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245): each key/value head serves several query heads.

    It has rotary positions if the layer's kind does. With `qk_norm`, a kind of norm, each head's query and key are
    normalized before rotation (arXiv:2302.05442, as in Qwen 3) or with `norms_rotated` after it, with `over_heads` all
    heads' at once, with `by_head` by weights for each. `bias` applies to all four matrices, unless `output_bias` is
    given for the last one. Scores are scaled by `query_scale` / sqrt(E).
    `norms_values`: values are divided by their root mean square. `shares_keys`: values are the keys before their norm,
    the first feature of all pairs before the second one of all, as in transformers.
    `growth`: see growth_of_queries. `sinks`: heads have one, see Sinks.
    `gated`: the output of each head is multiplied by the sigmoid of E further features of wq, which follow the head's
    query (arXiv:2505.06708), or with `gate_matrix` of a matrix wg.

    Letters of the shapes: B samples, S tokens, D width, H query heads, K key/value heads, E = head_dim.
    """

    def __init__(
        self,
        args: GroupedSizes,
        kernel: AttentionKernel,
        qk_norm: Callable[..., nn.Module] | None = None,
        bias: bool = False,
        query_scale: float = 1.0,
        output_bias: bool | None = None,
        over_heads: bool = False,
        growth: tuple[float, int, int] = (0.0, 1, 0),
        sinks: bool = False,
        gated: bool = False,
        by_head: bool = False,
        norms_rotated: bool = False,
        gate_matrix: bool = False,
        norms_values: bool = False,
        shares_keys: bool = False,
    ):
        super().__init__()
        assert query_scale == 1 or not norms_rotated, "a norm would undo the scale"
        self.growth, self.gated, self.norms_rotated = growth, gated, norms_rotated
        self.head_dim, self.query_scale, self.over_heads = args.head_dim, query_scale, over_heads
        self.wq = nn.Linear(args.dim, (1 + gated) * args.n_heads * args.head_dim, bias)
        self.wk = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias)
        self.wv = None if shares_keys else nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias)
        self.wg = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False) if gate_matrix else None
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias if output_bias is None else output_bias)
        heads = (args.n_heads, args.num_kv_heads) if over_heads or by_head else (1, 1)
        norms = [qk_norm(n * args.head_dim, args.norm_eps) if qk_norm else None for n in heads]
        self.q_norm, self.k_norm = norms
        self.v_norm = UnitNorm(args.head_dim, args.norm_eps) if norms_values else None
        self.sinks = Sinks(args.n_heads) if sinks else None
        self.kernel = kernel

    def forward(self, x: torch.Tensor, shared: SharedInputs) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]"""
        # -1 and not the number of heads: under tensor parallelism a rank has only some of them
        q, k = self.wq(x), self.wk(x)
        v = k if self.wv is None else self.wv(x)
        gate = None if self.wg is None else self.wg(x)
        if self.over_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))  # [B, S, H or K, E]
        v = v if self.wv is not None else v.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        v = v if self.v_norm is None else self.v_norm(v)
        if self.gated:
            q, gate = q.unflatten(-2, (-1, 2)).unbind(-2)
            gate = gate.flatten(-2)
        if self.q_norm is not None and not self.over_heads and not self.norms_rotated:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.query_scale != 1:
            q = q * self.query_scale
        if shared.rotation is not None:
            q, k = rotate(q, shared.rotation), rotate(k, shared.rotation)
        if self.norms_rotated:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.growth[0]:
            q = q * growth_of_queries(shared.positions, *self.growth)[..., None, None].to(q.dtype)
        sinks = None if self.sinks is None else self.sinks()
        y = run_attention(self.kernel, q, k, v, shared, sinks)
        return self.wo(y if gate is None else y * gate.sigmoid())  # [B, S, D]


def growth_of_queries(positions: torch.Tensor, growth: float, period: int, first: int = 0) -> torch.Tensor:
    """Return the factor of queries at positions [B or 1, S], which makes attention sharper in long texts.

    Positions are counted from `first`.
    """
    return 1 + growth * torch.log(1 + torch.floor((positions + first) / period))


class GroupKernel(AttentionKernel):
    """Causal attention within groups of `size` tokens; the first group is `missing` tokens shorter."""

    def __init__(self, size: int, missing: int, backend: str = "auto"):
        super().__init__(backend)
        self.size, self.missing = size, missing

    @property
    def plain_attention(self) -> bool:
        return False

    def masks_tokens(self, length: int) -> bool:
        return length > self.size - self.missing

    def segments(self, tokens: Tokens) -> torch.Tensor:
        """Return the number of each token's group in its document, [B or 1, S]."""
        return super().segments(tokens) * 2**31 + (tokens.indices + self.missing) // self.size


class ChunkKernel(AttentionKernel):
    """Causal attention within chunks of `size` tokens, which are counted from the start of each document."""

    accepts_query_slices, plain_attention = True, False

    def __init__(self, size: int, backend: str = "auto"):
        super().__init__(backend)
        self.size = size

    def with_backend(self, backend: str) -> AttentionKernel:
        return ChunkKernel(self.size, backend)

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> Mask:
        """Return AttentionKernel's mask, with chunks in the place of documents. `keys` are in the sequence's order."""
        sequence = keys or queries
        if sequence.documents is None and len(sequence.indices) <= self.size:
            return super().prepare(queries, keys)
        chunks = self.chunks(sequence)
        of_keys = None if keys is None else keys._replace(documents=chunks)
        return super().prepare(queries._replace(documents=chunks[:, queries.indices]), of_keys)

    def chunks(self, tokens: Tokens) -> torch.Tensor:
        """Return the number of each token's chunk, [B or 1, S]; each chunk of each document has its own."""
        indices, documents = tokens.indices, tokens.documents
        starts = torch.zeros_like(indices)[None]
        if documents is not None:
            is_first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
            starts = (is_first * indices).cummax(-1).values
        return ((indices - starts) % self.size == 0).cumsum(-1)

    def num_needed(self, length: int) -> int:
        return length % self.size


class HalfMasks(NamedTuple):
    """The masks of the two halves of the heads."""

    groups: Mask
    shifted: Mask


class ShiftedGroups(AttentionKernel):
    """LongLoRA's shifted sparse attention (arXiv:2309.12307, 3.2): groups in training, full attention in evaluation.

    A model trains on long sequences at the cost of short ones. The first half of the `heads` attends within groups of
    `size` adjacent tokens (an even number), the second half within groups shifted by half a group, so that information
    crosses groups from layer to layer. Both are causal in the true positions. LongLoRA's code rolls the sequence
    instead, so there the first half group attends to the sequence's end.
    """

    accepts_query_slices = True

    def __init__(self, size: int, heads: int, backend: str = "auto"):
        super().__init__(backend)
        self.size, self.heads = size, heads
        self.halves = [GroupKernel(size, missing, backend) for missing in (0, size // 2)]
        self.head_shard = 0  # index of this rank's share of the heads under tensor parallel

    def with_backend(self, backend: str) -> AttentionKernel:
        return ShiftedGroups(self.size, self.heads, backend).train(self.training)

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> HalfMasks | Mask:
        """Return AttentionKernel's mask; in training one mask [B or 1, 1, Q, S] for each half of the heads."""
        if not self.training:
            return super().prepare(queries, keys)
        groups, shifted = self.halves
        return HalfMasks(groups.prepare(queries, keys), shifted.prepare(queries, keys))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: HalfMasks | Mask,
    ) -> torch.Tensor:
        """Attend as AttentionKernel does: q [B, H, Q, D], k [B, H / n, S, D] and v [B, H / n, S, V] -> [B, H, Q, V]."""
        if not isinstance(mask, HalfMasks):
            return super().forward(q, k, v, mask)
        heads = q.shape[1]
        # number of local heads that are not shifted
        first = min(max(self.heads // 2 - self.head_shard * heads, 0), heads)
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


def use_shifted_groups(model: Any, size: int) -> None:
    """Replace the kernels of all blocks of a decoder by ShiftedGroups, in place, unless `size` is 0.

    Raises JobError unless the attention is plain causal.
    """
    if not size:
        return
    kernels = list(getattr(model, "kernels", [None]))
    if any(type(kernel) is not AttentionKernel or not kernel.causal or kernel.window for kernel in kernels):
        raise JobError(
            f"model.s2_group_size: given {size}; allowed: 0 for {type(model).__name__}, whose attention "
            f"({', '.join(type(kernel).__name__ for kernel in kernels)}) is not plainly causal; leave it out"
        )
    model.set_attention_kernels(ShiftedGroups(size, model.args.n_heads, kernel.backend) for kernel in kernels)
