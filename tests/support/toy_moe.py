"""A small MoE language model in segments, for tests of the overlapping pipeline.

It has attention-like mixing with dropout, a router that leaves some experts without tokens, and experts in a loop. With
NoExchange it is plain torch; with the transport of a group the same code runs expert parallel.
"""

from collections import Counter

import torch
from torch import nn

from torchtitan.parallelisms.pipeline.overlap.exchange import SplitSizes
from torchtitan.parallelisms.pipeline.overlap.segments import CountExchange, Program, RowExchange
from torchtitan.parallelisms.steps import Notes, Segment

VOCAB, DIM, EXPERTS, TOP = 11, 8, 4, 2
LAYERS = "dmmmdm"
"""Kinds of the layers: dense or experts."""

runs: Counter = Counter()
"""How often each segment ran: (layer, segment)."""


class Mixing(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        y = torch.softmax((q @ k.transpose(-1, -2)).tril(), -1) @ v
        return x + nn.functional.dropout(self.out(y), self.dropout)


class Experts(nn.Module):
    """The experts of one rank."""

    def __init__(self, local_experts: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(local_experts, DIM, 2 * DIM))
        self.w2 = nn.Parameter(torch.empty(local_experts, 2 * DIM, DIM))

    def forward(self, rows, counts):
        """rows [tokens, D] sorted by source rank, then expert; counts [ranks, local_experts]."""
        pieces = rows.split(counts.flatten().tolist())
        local_experts = counts.shape[1]
        done = [
            torch.tanh(piece @ self.w1[i % local_experts]) @ self.w2[i % local_experts]
            for i, piece in enumerate(pieces)
        ]
        return torch.cat(done)


class Block(nn.Module):
    """A layer with attention-like mixing and a feed-forward, dense or of experts."""

    def __init__(self, number: int, kind: str, local_experts: int, dropout: float):
        super().__init__()
        self.number, self.kind = number, kind
        self.mixing = Mixing(dropout)
        if kind == "d":
            self.ffn = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))
        else:
            self.router = nn.Linear(DIM, EXPERTS, bias=False)
            self.shared = nn.Linear(DIM, DIM)
            self.experts = Experts(local_experts)

    def mix(self, meta, x):
        runs[self.number, "mix"] += 1
        return self.mixing(x)

    def dense(self, meta, h):
        runs[self.number, "dense"] += 1
        return h + self.ffn(h)

    def route(self, meta, h):
        """Return rows sorted by expert [tokens * TOP, D], their weights, and a balancing loss."""
        runs[self.number, "route"] += 1
        flat = h.flatten(0, -2)
        scores = torch.softmax(self.router(flat), -1)
        ids = meta.once("ids", lambda: self.choose(scores))
        order = meta.once("order", lambda: ids.flatten().argsort(stable=True))
        meta.once("counts", lambda: torch.bincount(ids.flatten(), minlength=EXPERTS))
        weights = scores.gather(1, ids).flatten()[order]
        return flat[order // TOP], weights, 0.1 * scores.mean(0).square().sum() * len(flat)

    def choose(self, scores):
        """Choose TOP experts a token; one expert is never chosen, and in layer 3 one always."""
        runs[self.number, "choose"] += 1
        scores = scores.detach().clone()
        scores[:, self.number % EXPERTS] = -1  # no token chooses this expert
        if self.number == 3:
            scores[:, 0] = 2  # all tokens choose this one
        return scores.topk(TOP).indices

    def compute(self, meta, y):
        runs[self.number, "experts"] += 1
        return self.experts(y, meta["sizes"].received_counts)

    def shared_expert(self, meta, h):
        runs[self.number, "shared"] += 1
        return torch.tanh(self.shared(h))

    def finish(self, meta, h, s, weights, zc):
        runs[self.number, "finish"] += 1
        rows = (zc * weights[:, None]).to(h.dtype)
        rows = torch.zeros_like(h.flatten(0, -2)).index_add(0, meta["order"] // TOP, rows)
        return h + s + rows.view_as(h)

    def program(self):
        if self.kind == "d":
            steps = (Segment("mix", self.mix, ("x",), ("h",)), Segment("dense", self.dense, ("h",), ("out",)))
        else:
            steps = (
                Segment("mix", self.mix, ("x",), ("h",)),
                Segment("route", self.route, ("h",), ("xs", "w"), losses=("balance",)),
                CountExchange(),
                RowExchange("dispatch", "xs", "y"),
                Segment("shared", self.shared_expert, ("h",), ("s",)),
                Segment("experts", self.compute, ("y",), ("z",)),
                RowExchange("combine", "z", "zc", back=True),
                Segment("finish", self.finish, ("h", "s", "w", "zc"), ("out",), light=True),
            )
        return Program(f"layers.{self.number}", steps)


class Part(nn.Module):
    """The layers `numbers`, with the embedding if the first is among them, with head and loss if the last is."""

    def __init__(self, numbers=None, ep: int = 1, dropout: float = 0.0, kinds: str = LAYERS):
        super().__init__()
        numbers = range(len(kinds)) if numbers is None else numbers
        self.layers = nn.ModuleDict({str(i): Block(i, kinds[i], EXPERTS // ep, dropout) for i in numbers})
        self.embedding = nn.Embedding(VOCAB, DIM) if 0 in numbers else None
        self.head = nn.Linear(DIM, VOCAB) if len(kinds) - 1 in numbers else None

    def segment_programs(self):
        programs = [block.program() for block in self.layers.values()]
        if self.embedding is not None:
            embed = Segment("embed", lambda meta, tokens: self.embedding(tokens), ("x",), ("out",))
            programs.insert(0, Program("embedding", (embed,), recompute=False))
        if self.head is not None:
            loss = Segment("loss", self.loss, ("x",), ("out",))
            programs.append(Program("head", (loss,), recompute=False))
        return programs

    def loss(self, meta, x):
        logits = self.head(x).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return nn.functional.cross_entropy(logits, meta.shared.flatten(), reduction="sum")

    def segment_context(self, x, labels=None):
        return labels


def plain_forward(part: Part, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (loss, balancing losses) by running all segments in one autograd graph, with all experts on this rank."""
    x, balancing_loss = tokens, torch.zeros((), dtype=torch.float64)
    for program in part.segment_programs():
        meta, values = Notes(labels), {"x": x}
        for step in program.steps:
            if isinstance(step, CountExchange):
                meta["sizes"] = SplitSizes(meta["counts"][None], [], [])
            elif isinstance(step, RowExchange):
                values[step.target] = values[step.source]
            else:
                out = step.run(meta, *(values[name] for name in step.inputs))
                out = out if isinstance(out, tuple) else (out,)
                values.update(zip(step.outputs, out, strict=False))
                balancing_loss = balancing_loss + sum(out[len(step.outputs) :])
        x = values["out"]
    return x, balancing_loss


def fill_(part: Part, ep_rank: int = 0, ep: int = 1) -> None:
    """Fill parameters with values that depend on their names and, for experts, their numbers, not on the ranks."""
    for name, parameter in part.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        shape = list(parameter.shape)
        if ".experts." in name:
            shape[0] = EXPERTS
        full_tensor = torch.randn(shape, generator=generator, dtype=torch.float64) * (0.5 if len(shape) > 1 else 1.0)
        parameter.data.copy_(full_tensor.chunk(ep)[ep_rank] if ".experts." in name else full_tensor)


def batch(microbatches: int, rank: int, size: int = 2, length: int = 4):
    """Draw the tokens and labels of a rank, each [microbatches * size, length]."""
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = torch.randint(VOCAB, (microbatches * size, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
