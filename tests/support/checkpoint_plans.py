"""A Llama under any plan, sharded directly with torch, for tests of checkpoint storage.

Nothing is trained: weights are the plain model's and moments exact multiples of them, so every tensor of every rank is
known without a checkpoint. Sizes are uneven on purpose: rows that neither tp nor fsdp divides, heads cut in two.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchtitan.checkpoint import Checkpointer, TrainerHooks
from torchtitan.config.sections.run import Checkpoint
from torchtitan.core.random_draws import clean_name, initialize
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.parallelisms.pipeline.cut import stage_modules, stages_of_rank

ARGS = LlamaArgs(
    dim=20, n_layers=4, n_heads=2, n_kv_heads=1, vocab_size=21, multiple_of=1, ffn_dim_multiplier=0.7, max_seq_len=32
)
TIED = LlamaArgs(**{**vars(ARGS), "tied_embeddings": True})
COLUMNS = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
ROWS = ("attention.wo", "feed_forward.w2")
MOMENTS = {"exp_avg": -2.0, "exp_avg_sq": 4.0}  # powers of two: exact in any type
STEPS = 3


@dataclass(frozen=True)
class Plan:
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    stages: int = 1  # per rank
    style: str = "loop"

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in vars(self).items() if v not in (1, "loop")) or "plain"


PLANS = {
    1: [Plan()],
    2: [
        Plan(dp_shard=2),
        Plan(tp=2),
        Plan(cp=2),
        Plan(pp=2),
        Plan(pp=2, stages=2),
        Plan(pp=2, stages=2, style="v"),
    ],
    4: [
        Plan(dp_shard=2, tp=2),
        Plan(dp_replicate=2, tp=2),
        Plan(dp_replicate=2, dp_shard=2),
        Plan(cp=2, tp=2),
        Plan(tp=4),
        Plan(pp=4),
        Plan(dp_shard=2, pp=2),
        Plan(tp=2, pp=2, stages=2, style="v"),
    ],
}


class CountingAdamW(torch.optim.AdamW):
    """AdamW with an additional state value that is not a tensor."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


class PlannedModel:
    """The parts of a model on one rank under a plan, with an optimizer for each."""

    def __init__(self, plan: Plan, args: LlamaArgs = TIED, seed: int = 0):
        dims = ParallelDims(plan.world, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.pp)
        self.mesh = dims.build_mesh("cpu") if plan.world > 1 else None
        model = reference(args, seed)
        self.parts = [model]
        if plan.pp > 1:
            stages = stage_modules(args.n_layers, plan.pp * plan.stages)
            local_stages = stages_of_rank(dims.axis_rank(self.mesh, "pp"), plan.pp, len(stages), plan.style)
            self.parts = [cut(model, stages[index]) for index in local_stages]
        for part in self.parts:
            if plan.tp > 1:
                apply_tensor_parallel(part, self.mesh["tp"])
            if dims.dp * dims.cp > 1:
                for block in part.layers.values():
                    fully_shard(block, mesh=dims.dp_mesh(self.mesh))
                fully_shard(part, mesh=dims.dp_mesh(self.mesh))
        self.renew_optimizers()

    def renew_optimizers(self) -> None:
        # for-loop: tensors of a part are on several meshes
        self.optimizers = [CountingAdamW(part.parameters(), lr=0.1, foreach=False) for part in self.parts]

    @torch.no_grad()
    def train(self) -> "PlannedModel":
        """Set weights and moments as after some steps."""
        for optimizer, part in zip(self.optimizers, self.parts, strict=True):
            for name, parameter in part.named_parameters():
                state = optimizer.state[parameter]
                state |= {key: parameter.detach() * factor for key, factor in MOMENTS.items()}
                state |= {"step": torch.tensor(float(STEPS)), "count": len(tied_name(part, name))}
        return self

    def tensors(self) -> dict[str, torch.Tensor | int]:
        """Return all tensors and values by "PART/NAME.KEY", including tied copies."""
        tensors = {}
        for index, (optimizer, part) in enumerate(zip(self.optimizers, self.parts, strict=True)):
            for name, parameter in part.named_parameters():
                for key, value in [("weight", parameter), *optimizer.state.get(parameter, {}).items()]:
                    tensors[f"{index}/{clean_name(name)}.{key}"] = value.detach() if key == "weight" else value
        return tensors

    def snapshot(self) -> dict[str, Any]:
        return {name: local(value).clone() if is_tensor(value) else value for name, value in self.tensors().items()}

    def differing(self, expected: dict[str, Any]) -> list[str]:
        """Return the keys of tensors and values that are not bit-equal to a snapshot."""
        now = self.tensors()
        assert now.keys() == expected.keys(), now.keys() ^ expected.keys()
        return [name for name, value in now.items() if not same(value, expected[name])]

    @torch.no_grad()
    def spoil(self) -> None:
        """Overwrite all tensors and values."""
        for part in self.parts:
            for parameter in part.parameters():
                local(parameter).fill_(7.0)
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    local(value).fill_(7.0) if is_tensor(value) else state.update({key: -1})

    def checkpointer(self, folder: Path, **options: Any) -> Checkpointer:
        return Checkpointer(
            folder,
            Checkpoint(enable=True, on_save_error="stop", **options),
            self.parts,
            self.optimizers,
            TrainerHooks(
                trainer_state=lambda: {"step": 1},  # the tests save under this one
                rank_state=lambda: {},
                load_state=lambda trainer, ranks: None,
            ),
        )


def reference(args: LlamaArgs, seed: int = 0) -> Llama:
    """Return the initialized plain model."""
    model = Llama(args)
    initialize(model, seed, model.init_rule)
    return model


def cut(model: Llama, names: list[str]) -> Llama:
    """Return a copy of the model with only the named modules, as a pipeline stage has them."""
    part = copy.deepcopy(model)
    for end in ("tok_embeddings", "norm", "output"):
        if end not in names:
            setattr(part, end, None)
    for index in list(part.layers):
        if f"layers.{index}" not in names:
            del part.layers[index]
    if part.args.tied_embeddings and part.output is not None and part.tok_embeddings is None:
        part.tied_names = {"output.weight": "tok_embeddings.weight"}
    return part


def apply_tensor_parallel(part: Llama, mesh: DeviceMesh) -> None:
    """Split the linears; norms stay plain tensors, so a part has both kinds."""
    styles = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for block in part.layers.values():
        parallelize_module(block, mesh, styles)
    for name, style in (("tok_embeddings", RowwiseParallel()), ("output", ColwiseParallel())):
        if getattr(part, name) is not None:
            parallelize_module(part, mesh, {name: style})
    part.tie_weights()


def tied_name(part: nn.Module, name: str) -> str:
    """Return the name of the parameter that a tied copy belongs to."""
    return getattr(part, "tied_names", {}).get(clean_name(name), clean_name(name))


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same(value: Any, expected: Any) -> bool:
    """True if a value, or this rank's part of a tensor, is bit-equal to the expected one."""
    if not is_tensor(value):
        return value == expected
    return value.dtype == expected.dtype and torch.equal(local(value), expected)
