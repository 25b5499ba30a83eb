"""A baseline without torchtitan for the benchmarks: a Llama in plain torch with FSDP2 and AdamW.

Run as a program (`[torchrun --nproc-per-node=N] scripts/bench_bare.py`), it imports torch, joins the process group,
builds the debug model and takes one step in float32: the least time that any trainer needs for this.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of the debug model."""

    dim: int = 256
    hidden: int = 768
    layers: int = 6
    heads: int = 16
    vocabulary: int = 2048
    seq_len: int = 256
    batch: int = 8


class Block(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads = sizes.heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(sizes.dim, 1e-5), nn.RMSNorm(sizes.dim, 1e-5)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(sizes.dim, sizes.dim, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(sizes.dim, sizes.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.hidden, sizes.dim, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (self.heads, -1)) for w in (self.wq, self.wk, self.wv))
        q, k = (rotate(t, rotation).transpose(1, 2) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).type_as(x)


class Llama(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.dim, 1e-5)
        self.output = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)
        head_dim = sizes.dim // sizes.heads
        frequencies = 5e5 ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.arange(sizes.seq_len)[:, None, None] * frequencies
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, self.rotation)
        return self.output(self.norm(x))


def shard(model: Llama, dtype: torch.dtype) -> None:
    """FSDP2 by block, in place: computes in `dtype`, reduces in float32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, labels: torch.Tensor) -> None:
    """tokens and labels [B, S]."""
    logits = model(tokens).float().flatten(0, 1)
    F.cross_entropy(logits, labels.flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    sizes = Sizes()
    torch.manual_seed(0)
    model = Llama(sizes)
    if world_size > 1:
        shard(model, torch.float32)
    ids = torch.randint(sizes.vocabulary, (sizes.batch, sizes.seq_len + 1))
    step(model, build_optimizer(model), ids[:, :-1], ids[:, 1:])
    if dist.get_rank() == 0:
        print("step 1", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # see torchtitan/process/exit.py


if __name__ == "__main__":
    main()
