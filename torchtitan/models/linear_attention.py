"""Linear attention with a state that forgets: the gated delta rule, and the state-space duality of Mamba 2.

For each head a state S [K, V] maps keys to values. Token t with key k, value v, log decay g <= 0 and strength b >= 0
changes it, and its query q reads it. The delta rule stores only what the state does not predict yet (arXiv:2412.06464,
equation 10; b < 1); without it the state stores the value itself (arXiv:2405.21060, equation 16):

    S <- exp(g) S        S <- S + b k (v - S^T k)^T, or S + b k v^T        y = S^T q

Chunks of C tokens are computed by matrix products (arXiv:2406.06484, section 3, with the decays of arXiv:2412.06464,
section 3.3). With the delta rule, the corrections v - S^T k of all tokens of a chunk follow from one triangular system,
and they are affine in the state before the chunk: U - W S. So the state after it is affine in S too, S <- A S + B, and
so is the state after any number of chunks; without the delta rule A is a number, the product of the decays. Under
context parallel each rank computes A and B of its own tokens, gathers those of all others, and so has the state before
its tokens without waiting for another rank to finish.

At the first token of a document the state is zero again. All is computed in float32 or wider, as decays multiply up.

Letters of the shapes: B samples, S tokens, R rows (samples, or their pieces under context parallel), T tokens of a row,
G key heads, H value heads, J = H / G, N chunks of C tokens, K and V features of a key and of a value, D channels.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Placement, Shard

from torchtitan.core.random_draws import Constant, Init, Normal, Uniform
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
    values: torch.Tensor  # U, [.., C, V]: what is stored if the state before is zero
    factors: torch.Tensor | None  # W, [.., C, K]: what they lose, W S, for the state S before; None: nothing
    scores: torch.Tensor  # [.., C, C], of queries and keys of the chunk, causal and decayed
    decay: torch.Tensor  # [.., 1, 1], of the state over the chunk


def into_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor | None = None,
    delta: bool = True,
) -> Chunks:
    """Compute all that does not depend on a state, of all chunks at once.

    q, k [R, T, G, K], v [R, T, H, V], g, beta [R, T, H]; `starts` [R or 1, T] is True at the first token of a document.
    `delta`: True for the delta rule. A last chunk is filled up with tokens that change nothing.
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
    values, factors = strength * v, None
    if delta:
        system = strength * (k @ k.mT) * pairs
        sides = torch.cat((values, strength * since * k), dim=-1)
        # only what is below the diagonal counts, and ones on it
        solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
        values, factors = solved.split((width, solved.shape[-1] - width), dim=-1)
    return Chunks(q * since, k * until, values, factors, (q @ k.mT) * pairs, since[..., -1:, :])


def scan(chunks: Chunks, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence from a state [R, G, J, K, V] -> outputs [R, G, J, N, C, V], and the state after it."""
    outputs = []
    for queries, keys, values, factors, scores, decay in _by_chunk(chunks):
        stored = values if factors is None else values - factors @ state
        outputs.append(queries @ state + scores @ stored)
        state = decay * state + keys.mT @ stored
    return torch.stack(outputs, dim=3), state


def affine_map(chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B [R, G, J, K, V] and A of the state A S + B after a row that begins with S.

    A is [R, G, J, K, K] with the delta rule and else [R, G, J, 1, 1], a number.
    """
    width = chunks.values.shape[-1]
    if chunks.factors is None:
        state, factor = zero_state(chunks), chunks.decay.new_ones(())
        for _, keys, values, _, _, decay in _by_chunk(chunks):
            state, factor = decay * state + keys.mT @ values, decay * factor  # the gradient of prod waits for the host
        return state, factor
    keys_width = chunks.keys.shape[-1]
    state = F.pad(torch.eye(keys_width, dtype=chunks.keys.dtype, device=chunks.keys.device), (width, 0))
    for _, keys, values, factors, _, decay in _by_chunk(chunks):
        assert factors is not None
        state = decay * state + keys.mT @ (F.pad(values, (0, keys_width)) - factors @ state)
    added, factor = state.split((width, keys_width), dim=-1)
    return added, factor


def apply_map(added: torch.Tensor, factor: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return A S + B for B, A (see `affine_map`) and S [..., K, V]."""
    return added + (factor @ state if factor.shape[-1] == state.shape[-2] else factor * state)


def _by_chunk(chunks: Chunks) -> Iterator[tuple[Any, ...]]:
    """Return the tensors of each chunk, without N, and None for those that are None."""
    number = chunks.keys.shape[3]
    # unbind, and not x[..., n]: its backward stacks the gradients
    return zip(*([None] * number if x is None else x.unbind(3) for x in chunks), strict=True)


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    delta: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run rows that begin with a state [R, G, J, K, V], or with zeros. Arguments as for `into_chunks`.

    Returns [R, T, H, V] in the type of v, and the state after the rows.
    """
    with autocast_off(v.device.type):
        chunks = into_chunks(q, k, v, g, beta, starts, delta)
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
    """A convolution of each channel over the last tokens of a document."""

    def __init__(self, channels: int, taps: int, bias: bool = False):
        super().__init__()
        self.out_features, self.taps = channels, taps
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

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
        return (y if self.bias is None else y + self.bias.to(wide)).to(x.dtype)


class Decay(nn.Module):
    """The log decay of each value head's state and the step that it follows from, at least in float32.

    The step is softplus(a + step_bias), at least `min_step`, the log decay -exp(log_rate) times it (arXiv:2405.21060,
    section 7).
    """

    def __init__(self, heads: int, min_step: float = 0.0):
        super().__init__()
        self.out_features, self.min_step = heads, min_step
        self.log_rate, self.step_bias = (nn.Parameter(torch.empty(heads)) for _ in range(2))

    def tensor_placements(self, role: str, default: Placement) -> dict[str, tuple[Placement, Placement]]:
        return dict.fromkeys(("log_rate", "step_bias"), (Shard(0), Shard(0)))

    def forward(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log decays and steps: [B, S, H] -> [B, S, H] each."""
        a = a.to(torch.promote_types(a.dtype, torch.float32))
        # softplus, of which the compiler would mistake the strides of the gradient (torch 2.13, aot_eager)
        step = torch.logaddexp(a + self.step_bias.to(a.dtype), a.new_zeros(()))
        step = step.clamp(min=self.min_step) if self.min_step else step
        return -self.log_rate.to(a.dtype).exp() * step, step


def state_init(name: str, taps: int) -> Init | None:
    """Return the initial values of a parameter of a decay or a convolution; None for others.

    Rates of decay are from 1/16 to 16, the same number per octave. A mixer's outputs have all of its values.
    """
    if name.endswith("log_rate"):
        return Uniform(math.log(16))
    if name.endswith(("step_bias", "skip.weight")):
        return Constant(1.0)
    return Normal(taps**-0.5) if ".conv_" in name and name.endswith("weight") else None


class StateKernel(nn.Module):
    """The exchange between tokens in a layer of linear attention: it sets the rows that the layer computes.

    It takes the place of an attention kernel among the kernels of a model. Here a row is a full sample. `delta`: see
    `into_chunks`. `head_shard`: index of this rank's share of the heads under tensor parallel.
    """

    backend, causal, window = "auto", True, 0

    def __init__(self, delta: bool = True, head_shard: int = 0):
        super().__init__()
        self.delta, self.head_shard = delta, head_shard

    def with_backend(self, backend: str) -> "StateKernel":
        return self

    def context_parallel(self, group: dist.ProcessGroup, layout: SequenceLayout) -> "StateKernel":
        """Return the kernel for the tokens of one rank, whatever the method of attention is."""
        return ContextParallelState(group, layout, self.delta, self.head_shard)

    def caching(self) -> "StateKernel":
        """Return the kernel that continues where its last call ended, for generation."""
        return CachingState(self.delta)

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
        """Run the recurrence: q, k [R, T, G, K], v [R, T, H, V], g, beta [B, S, H] -> [B, S, H, V]."""
        return linear_attention(q, k, v, g, beta, _starts(before), delta=self.delta)[0]

    def to_samples(self, x: torch.Tensor) -> torch.Tensor:
        """Join rows to this rank's tokens of the samples: [R, T, ...] -> [B, S, ...]."""
        return x


def _starts(before: torch.Tensor | None) -> torch.Tensor | None:
    return None if before is None else before == 0


class ContextParallelState(StateKernel):
    """The exchange between the pieces of a sequence, of which each rank has one or two. A row is a piece.

    A piece needs the last tokens before it, for the convolution, and the state before it. Both are gathered: the ends
    of all pieces, and their affine maps, of K (V + K) numbers for each head and sample, or K V + 1 without the delta
    rule, whatever the length.
    """

    def __init__(self, group: dist.ProcessGroup, layout: SequenceLayout, delta: bool = True, head_shard: int = 0):
        super().__init__(delta, head_shard)
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
            chunks = into_chunks(q, k, v, self._rows(g), self._rows(beta), _starts(before), self.delta)
            outputs, _ = scan(chunks, self._states(*affine_map(chunks)))
        return self.to_samples(_into_tokens(outputs, v))

    def to_samples(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, len(self.places))).flatten(1, 2)

    def _states(self, added: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return the states before the rows, [R, G, J, K, V], of the `affine_map` of each."""
        maps = torch.cat((added.flatten(1), factor.flatten(1)), dim=-1).unflatten(0, (-1, len(self.places)))
        all_maps = self._gather(maps[:, :, None]).squeeze(2)
        parts = all_maps.split((added[0].numel(), factor[0].numel()), dim=-1)
        of_pieces = (part.unflatten(-1, x.shape[1:]).unbind(1) for part, x in zip(parts, (added, factor), strict=True))
        states = [torch.zeros_like(added[:: len(self.places)])]
        for step_added, step_factor in zip(*of_pieces, strict=True):
            states.append(apply_map(step_added, step_factor, states[-1]))
        # of all pieces, so that each rank's backward takes part in that of the gathering
        return torch.stack(states, dim=1)[:, self.places].flatten(0, 1)


class CachingState(StateKernel):
    """The exchange with tokens of earlier calls, by their last ones and the state after them."""

    def __init__(self, delta: bool = True) -> None:
        super().__init__(delta)
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
        y, self.state = linear_attention(q, k, v, g, beta, None, self.state, self.delta)
        return y


class HybridKernel(nn.Module):
    """Attention and linear attention side by side: its mask is the pair of theirs, and calling it attends."""

    causal, window = True, 0

    def __init__(self, attention: nn.Module, state: nn.Module):
        super().__init__()
        self.attention, self.state = attention, state

    @property
    def backend(self) -> str:
        return self.attention.backend

    @property
    def parts(self) -> tuple[nn.Module, nn.Module]:
        return self.attention, self.state

    def with_parts(self, replace: Callable[[nn.Module], nn.Module]) -> "HybridKernel":
        """Return a kernel of what `replace` makes of both."""
        return HybridKernel(*map(replace, self.parts))

    def with_backend(self, backend: str) -> "HybridKernel":
        return self.with_parts(lambda part: part.with_backend(backend))

    def prepare(self, *tokens: Tokens) -> tuple[Any, Any]:
        return self.attention.prepare(*tokens), self.state.prepare(*tokens)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: tuple[Any, Any]) -> torch.Tensor:
        """Attend: q [B, H, S, E], k [B, H / n, S, E], v [B, H / n, S, E] -> [B, H, S, E]."""
        return self.attention(q, k, v, mask[0])

    def clear(self) -> None:
        """Forget the tokens of earlier calls."""
        for part in self.parts:
            part.clear()
