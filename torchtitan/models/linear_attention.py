"""The gated delta rule: linear attention whose state forgets, and stores only what it does not predict yet.

For each head a state S [K, V] maps keys to values. Token t with key k, value v, log decay g <= 0 and strength b in
(0, 1) changes it, and its query q reads it (arXiv:2412.06464, equation 10):

    S <- exp(g) S        S <- S + b k (v - S^T k)^T        y = S^T q

Chunks of C tokens are computed by matrix products (arXiv:2406.06484, section 3, with the decays of arXiv:2412.06464,
section 3.3). Within a chunk, the corrections v - S^T k of all tokens follow from one triangular system, and they are
affine in the state before the chunk: U - W S. So the state after it is affine in S too, S <- A S + B, and so is the
state after any number of chunks. Under context parallel each rank computes A and B of its own tokens, gathers those of
all others, and so has the state before its tokens without waiting for another rank to finish.

At the first token of a document the state is zero again. All is computed in float32 or wider, as decays multiply up.

Letters of the shapes: B samples, S tokens, R rows (samples, or their pieces under context parallel), T tokens of a row,
G key heads, H value heads, J = H / G, N chunks of C tokens, K and V features of a key and of a value, D channels.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Placement, Shard

from torchtitan.models.flops import STATE_CHUNK
from torchtitan.models.layers import autocast_off
from torchtitan.parallelisms.context_parallel import GatherSequence, gather_documents
from torchtitan.parallelisms.sequence_layout import SequenceLayout, Tokens

CHUNK = STATE_CHUNK
"""Tokens of a chunk; of a shorter row all tokens."""


class Chunks(NamedTuple):
    """The terms of the recurrence over the chunks, each [R, G, J, N, ...]."""

    queries: torch.Tensor  # [.., C, K], decayed since the state before the chunk
    keys: torch.Tensor  # [.., C, K], decayed until the state after the chunk
    values: torch.Tensor  # U, [.., C, V]: the corrections if the state before is zero
    factors: torch.Tensor  # W, [.., C, K]: what they lose, W S, for the state S before
    scores: torch.Tensor  # [.., C, C], of queries and keys of the chunk, causal and decayed
    decay: torch.Tensor  # [.., 1, 1], of the state over the chunk


def into_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> Chunks:
    """Compute all that does not depend on a state, of all chunks at once.

    q, k [R, T, G, K], v [R, T, H, V], g, beta [R, T, H]; `starts` [R or 1, T] is True at the first token of a document.
    A last chunk is filled up with tokens that change nothing.
    """
    groups, width, size = k.shape[2], v.shape[-1], min(CHUNK, k.shape[1])
    dtype = torch.promote_types(v.dtype, torch.float32)

    def cut(x: torch.Tensor) -> torch.Tensor:
        """[R, T, heads, ...] -> [R, G, heads / G, N, C, ...]"""
        x = x.to(dtype).unflatten(2, (groups, -1))
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % size))
        return x.unflatten(1, (-1, size)).movedim((3, 4), (1, 2))

    q, k, v, g, beta = map(cut, (q, k, v, g, beta))
    # below this exp(g) is 0 anyway, and a sum with it would round smaller decays away, or overflow
    g = g.clamp(min=math.log(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps) - 1)
    decayed = g.cumsum(-1)  # [R, G, J, N, C], log decay since the chunk's start
    visible = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    since, until = decayed, decayed[..., -1:] - decayed
    if starts is not None:
        starts = F.pad(starts, (0, -starts.shape[1] % size)).unflatten(1, (-1, size))
        number = starts.cumsum(-1)[:, None, None]  # of the document within the chunk, [R or 1, 1, 1, N, C]
        visible = visible & (number[..., :, None] == number[..., None, :])
        since = since.masked_fill(number > 0, float("-inf"))
        until = until.masked_fill(number != number[..., -1:], float("-inf"))
    pairs = (decayed[..., :, None] - decayed[..., None, :]).masked_fill(~visible, float("-inf")).exp()
    since, until = since.exp()[..., None], until.exp()[..., None]
    strength = beta[..., None]
    system = strength * (k @ k.mT) * pairs
    sides = torch.cat((strength * v, strength * since * k), dim=-1)
    # only what is below the diagonal counts, and ones on it
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, factors = solved.split((width, solved.shape[-1] - width), dim=-1)
    return Chunks(q * since, k * until, values, factors, (q @ k.mT) * pairs, since[..., -1:, :])


def scan(chunks: Chunks, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence from a state [R, G, J, K, V] -> outputs [R, G, J, N, C, V], and the state after it."""
    outputs = []
    for queries, keys, values, factors, scores, decay in _by_chunk(chunks):
        corrections = values - factors @ state
        outputs.append(queries @ state + scores @ corrections)
        state = decay * state + keys.mT @ corrections
    return torch.stack(outputs, dim=3), state


def affine_map(chunks: Chunks) -> torch.Tensor:
    """Return B and A side by side, [R, G, J, K, V + K], of the state A S + B after a row that begins with S."""
    width = chunks.keys.shape[-1]
    identity = torch.eye(width, dtype=chunks.keys.dtype, device=chunks.keys.device)
    state = F.pad(identity, (chunks.values.shape[-1], 0))
    for _, keys, values, factors, _, decay in _by_chunk(chunks):
        state = decay * state + keys.mT @ (F.pad(values, (0, width)) - factors @ state)
    return state


def _by_chunk(chunks: Chunks) -> Iterator[tuple[torch.Tensor, ...]]:
    """Return the tensors of each chunk, without N."""
    # unbind, and not x[..., n]: its backward stacks the gradients
    return zip(*(x.unbind(3) for x in chunks), strict=True)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to rows that begin with a state [R, G, J, K, V], or with zeros. Arguments as for `into_chunks`.

    Returns [R, T, H, V] in the type of v, and the state after the rows.
    """
    with autocast_off(v.device.type):
        chunks = into_chunks(q, k, v, g, beta, starts)
        state = zero_state(chunks) if state is None else state
        outputs, state = scan(chunks, state)
    return _into_tokens(outputs, v), state


def _into_tokens(outputs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[R, G, J, N, C, V] -> [R, T, H, V], of the type and shape of v."""
    return outputs.movedim((1, 2), (3, 4)).flatten(3, 4).flatten(1, 2)[:, : v.shape[1]].to(v.dtype)


def zero_state(chunks: Chunks) -> torch.Tensor:
    """Return a state of zeros, [R, G, J, K, V]."""
    keys, values = chunks.keys, chunks.values
    return values.new_zeros(*values.shape[:3], keys.shape[-1], values.shape[-1])


def tokens_before(documents: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of the same document before each token: [B, S] -> [B, S]."""
    indices = torch.arange(documents.shape[1], device=documents.device)
    starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return indices - (indices * starts).cummax(1).values


class CausalConvolution(nn.Module):
    """A convolution of each channel over the last tokens of a document, without a bias."""

    def __init__(self, channels: int, taps: int):
        super().__init__()
        self.out_features, self.taps = channels, taps
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))

    def forward(self, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Map [R, taps - 1 + T, D], rows after the tokens before them, to [R, T, D].

        `before` [R, T]: number of tokens of the document before each one; None: they all belong to one document.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        x_wide, last = x.to(wide), self.taps - 1
        y = torch.zeros_like(x_wide[:, last:])
        for tap, weight in enumerate(self.weight.flatten(1).to(wide).unbind(1)):
            shifted = x_wide[:, tap : tap + y.shape[1]]
            if before is not None and tap < last:
                shifted = shifted.masked_fill((before < last - tap)[..., None], 0)
            y = y + shifted * weight
        return y.to(x.dtype)


class Decay(nn.Module):
    """The log decay of each value head's state and the step that it follows from, at least in float32.

    The step is softplus(a + step_bias), the log decay -exp(log_rate) times it (arXiv:2405.21060, section 7).
    """

    def __init__(self, heads: int):
        super().__init__()
        self.out_features = heads
        self.log_rate, self.step_bias = (nn.Parameter(torch.empty(heads)) for _ in range(2))

    def tensor_placements(self, role: str, default: Placement) -> dict[str, tuple[Placement, Placement]]:
        return dict.fromkeys(("log_rate", "step_bias"), (Shard(0), Shard(0)))

    def forward(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log decays and steps: [B, S, H] -> [B, S, H] each."""
        a = a.to(torch.promote_types(a.dtype, torch.float32))
        step = F.softplus(a + self.step_bias.to(a.dtype))
        return -self.log_rate.to(a.dtype).exp() * step, step


class StateKernel(nn.Module):
    """The exchange between tokens in a layer with the delta rule: it sets the rows that the layer computes.

    It takes the place of an attention kernel among the kernels of a model. Here a row is a full sample.
    """

    backend, causal, window = "auto", True, 0

    def with_backend(self, backend: str) -> "StateKernel":
        return self

    def context_parallel(self, group: dist.ProcessGroup, layout: SequenceLayout) -> "StateKernel":
        """Return the kernel for the tokens of one rank, whatever the method of attention is."""
        return ContextParallelState(group, layout)

    def caching(self) -> "StateKernel":
        """Return the kernel that continues where its last call ended, for generation."""
        return CachingState()

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> torch.Tensor | None:
        """Return the number of tokens of its document before each token, [R, T]; None without documents."""
        return None if queries.documents is None else tokens_before(queries.documents)

    def with_earlier(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Return rows of x [B, S, D] behind the `number` tokens before each, or zeros: [R, number + T, D]."""
        return F.pad(x, (0, 0, number, 0))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        """Apply the rule: q, k [R, T, G, K], v [R, T, H, V], g, beta [B, S, H] -> [B, S, H, V]."""
        return delta_rule(q, k, v, g, beta, _starts(before))[0]


def _starts(before: torch.Tensor | None) -> torch.Tensor | None:
    return None if before is None else before == 0


class ContextParallelState(StateKernel):
    """The exchange between the pieces of a sequence, of which each rank has one or two. A row is a piece.

    A piece needs the last tokens before it, for the convolution, and the state before it. Both are gathered: the ends
    of all pieces, and their affine maps, of K (V + K) numbers for each head and sample, whatever the length.
    """

    def __init__(self, group: dist.ProcessGroup, layout: SequenceLayout):
        super().__init__()
        self.group_name, self.layout = group.group_name, layout
        self.places = layout.pieces_of(group.rank())

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> torch.Tensor | None:
        if queries.documents is None:
            return None
        documents = self.layout.unshard(gather_documents(queries.documents, self.layout.ranks, self.group_name))
        pieces = tokens_before(documents).unflatten(1, (self.layout.pieces, -1))
        return pieces[:, self.places].flatten(0, 1)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S / ranks, ...] -> [R, T, ...]"""
        return x.unflatten(1, (len(self.places), -1)).flatten(0, 1)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather n vectors for each piece of this rank, [B, pieces of a rank, n, D] -> [B, all pieces, n, D]."""
        gathered = GatherSequence.apply(x.flatten(1, 2), self.layout, self.group_name)
        return gathered.unflatten(1, (self.layout.pieces, -1))

    def with_earlier(self, x: torch.Tensor, number: int) -> torch.Tensor:
        pieces = x.unflatten(1, (len(self.places), -1))
        ends = self._gather(pieces[:, :, -number:])  # a piece may be shorter, so several may be needed
        length, ends = ends.shape[2], F.pad(ends.flatten(1, 2), (0, 0, number, 0))
        earlier = torch.stack([ends[:, place * length :][:, :number] for place in self.places], dim=1)
        return torch.cat((earlier, pieces), dim=2).flatten(0, 1)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        with autocast_off(v.device.type):
            chunks = into_chunks(q, k, v, self._rows(g), self._rows(beta), _starts(before))
            outputs, _ = scan(chunks, self._states(affine_map(chunks), chunks.values.shape[-1]))
        return _into_tokens(outputs, v).unflatten(0, (-1, len(self.places))).flatten(1, 2)

    def _states(self, maps: torch.Tensor, width: int) -> torch.Tensor:
        """Return the states before the rows, [R, G, J, K, V], of the `affine_map` of each, V = `width`."""
        pieces = maps.unflatten(0, (-1, len(self.places)))
        all_maps = self._gather(pieces.flatten(2)[:, :, None]).squeeze(2).unflatten(2, pieces.shape[2:])
        state = torch.zeros_like(all_maps[:, 0, ..., :width])
        states = [state]
        for added, factor in (step.split((width, step.shape[-1] - width), dim=-1) for step in all_maps.unbind(1)):
            state = factor @ state + added
            states.append(state)
        # of all pieces, so that each rank's backward takes part in that of the gathering
        return torch.stack(states, dim=1)[:, self.places].flatten(0, 1)


class CachingState(StateKernel):
    """The exchange with tokens of earlier calls, by their last ones and the state after them."""

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.state: torch.Tensor | None = None
        self.ends: torch.Tensor | None = None

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> None:
        assert queries.documents is None and keys is None, "the cache supports no document masks"

    def with_earlier(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = super().with_earlier(x, number) if self.ends is None else torch.cat((self.ends, x), dim=1)
        self.ends = x[:, x.shape[1] - number :]
        return x

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        y, self.state = delta_rule(q, k, v, g, beta, None, self.state)
        return y
