"""The segments of a decoder (models/decoder.py) and of its mixture-of-experts blocks, for pipelines that run parts by
segments. The parts are taken by the names of their steps; the arithmetic stays in the model.

    dense block     attention | feed-forward
    experts         attention | route and sort | (counts, dispatch) | shared experts | experts | (combine) | rest

Shared experts need nothing from others, so they run while tokens travel.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from torchtitan.parallelisms.chunk import Meta
from torchtitan.parallelisms.expert_parallel import by_expert, inverse, permute
from torchtitan.parallelisms.segments import CountExchange, Exchange, Program, Segment
from torchtitan.parallelisms.tensor_parallel import LocalWeights


class Shared(NamedTuple):
    """What all segments of a microbatch see."""

    rotation: torch.Tensor
    mask: object
    labels: torch.Tensor | None


def decoder_programs(part: nn.Module) -> list[Program]:
    """Of a whole decoder or a pipeline part of it. Embedding and head keep their graphs whatever the policy."""
    programs = []
    if part.tok_embeddings is not None:
        embed = Segment("embed", lambda meta, tokens: _embed(part, tokens), ("x",), ("out",), light=True)
        programs.append(Program("tok_embeddings", (embed,), recompute=False))
    for name, block in part.layers.items():
        steps = _expert_steps(block) if hasattr(block, "moe") else _dense_steps(block)
        programs.append(Program(f"layers.{name}", steps))
    if part.norm is not None or part.output is not None:
        head = Segment("head", lambda meta, x: _head(part, meta, x), ("x",), ("out",), light=True)
        programs.append(Program("head", (head,), recompute=False))
    return programs


def decoder_context(
    part: nn.Module,
    x: torch.Tensor,
    positions: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    sequence_shards: int = 1,
) -> Shared:
    """x [B, S] or [B, S / sequence_shards, D], the input of the part; the others as its forward takes them."""
    if positions is None:
        shards = 1 if part.tok_embeddings is not None else sequence_shards
        positions = torch.arange(x.shape[1] * shards, device=x.device)[None]  # [1, S]
    return Shared(part.rotary(positions), part.kernel.prepare(document_ids), labels)


def _embed(part: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    x = part.tok_embeddings(tokens)
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _head(part: nn.Module, meta: Meta, x: torch.Tensor) -> torch.Tensor:
    x = x if part.norm is None else part.norm(x)
    if meta.shared.labels is not None:
        return part.loss(x, part.output, meta.shared.labels)
    return x if part.output is None else part.output(x)


def _dense_steps(block: nn.Module) -> tuple[Segment, ...]:
    def attention(meta: Meta, x: torch.Tensor) -> torch.Tensor:
        return x + block.attention(block.attention_norm(x), meta.shared.rotation, meta.shared.mask)

    def feed_forward(meta: Meta, h: torch.Tensor) -> torch.Tensor:
        return h + block.feed_forward(block.ffn_norm(h))

    return Segment("attention", attention, ("x",), ("h",)), Segment("feed_forward", feed_forward, ("h",), ("out",))


def _expert_steps(block: nn.Module) -> tuple[Any, ...]:
    moe, names = block.moe, ("h", "w", "zc")

    def attention(meta: Meta, x: torch.Tensor) -> torch.Tensor:
        return block.attend(x, meta.shared.rotation, meta.shared.mask)

    def route(meta: Meta, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """-> normed tokens [B, S, D], weights [N, k], rows sorted by expert [N k, D]"""
        n = block.ffn_norm(h)
        ids, weights = moe.route(n, meta.get("ids"))
        meta.once("ids", lambda: ids)
        rows, order = moe.dispatch(n, ids, weights)
        meta.once("order", lambda: order)
        meta.once("counts", lambda: order.sizes)
        return n, weights, rows

    def experts(meta: Meta, y: torch.Tensor) -> torch.Tensor:
        counts = meta["sizes"].received_counts
        rows = by_expert(counts, len(y))
        done = type(moe.experts).forward(_local(moe.experts), permute(y, rows), counts.sum(0))
        return permute(done, inverse(rows))

    def shared_experts(meta: Meta, n: torch.Tensor) -> torch.Tensor:
        return moe.shared_experts(n)

    def rest(meta: Meta, h: torch.Tensor, weights: torch.Tensor, zc: torch.Tensor, *shared: torch.Tensor):
        y = moe.combine(zc, weights, meta["order"]).view_as(h)
        return h + sum(shared, y)

    steps = [
        Segment("attention", attention, ("x",), ("h",)),
        Segment("route", route, ("h",), ("n", "w", "xs"), light=True),
        CountExchange(),
        Exchange("dispatch", "xs", "y"),
        Segment("experts", experts, ("y",), ("z",)),
        Exchange("combine", "z", "zc", back=True),
    ]
    if moe.shared_experts is not None:
        steps.insert(4, Segment("shared_experts", shared_experts, ("n",), ("s",)))
        names += ("s",)
    return (*steps, Segment("rest", rest, names, ("out",), light=True))


def _local(experts: nn.Module) -> Any:
    """With this rank's part of each matrix, where they are split over ranks."""
    is_split = any(hasattr(parameter, "to_local") for parameter in experts.parameters())
    return LocalWeights(experts) if is_split else experts
