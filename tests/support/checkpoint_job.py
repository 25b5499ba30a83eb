"""A job that is small enough to resume a hundred times: a tied MLP with dropout, AdamW, schedule and data position.

Dropout reveals a lost generator state; widths that no number of ranks divides reveal errors of resharding.
"""

import hashlib
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtitan.checkpoint import Checkpointer, TrainerHooks, rng_state, set_rng_state
from torchtitan.config.sections.run import Checkpoint

WIDTH, VOCABULARY = 6, 11


class TinyModel(nn.Module):
    """A tied MLP with dropout and a buffer."""

    def __init__(self, width: int = WIDTH, layers: int = 2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleDict(
            {str(i): nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Linear(7, width)) for i in range(layers)}
        )
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("scale", torch.ones(width))
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tok_embeddings(tokens) * self.scale
        for layer in self.layers.values():
            hidden = hidden + self.dropout(layer(hidden))
        return self.output(hidden)


class Job:
    """A training job with a checkpointer. `kind`: plain, fsdp, hsdp, ddp, wrapped, compiled, in_backward"""

    def __init__(self, folder: Path, kind: str = "plain", model: nn.Module | None = None, retry_pauses=(), **options):
        torch.manual_seed(1)
        self.model = model or TinyModel()
        parameters = list(self.model.parameters())
        if kind in ("fsdp", "hsdp"):
            world = torch.distributed.get_world_size()
            shape, names = ((world,), ("shard",)) if kind == "fsdp" else ((2, world // 2), ("replicate", "shard"))
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            for layer in self.model.layers.values():
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif kind == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif kind == "wrapped":
            for name, layer in self.model.layers.items():
                self.model.layers[name] = checkpoint_wrapper(layer)
        elif kind == "compiled":
            for layer in self.model.layers.values():
                layer.compile(backend="eager")
        parameters = list(self.model.parameters())
        groups = [[p] for p in parameters] if kind == "in_backward" else [parameters]
        self.optimizers = [torch.optim.AdamW(group, lr=0.05) for group in groups]
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in self.optimizers]
        self.step, self.position, self.losses = 0, 0, []
        self.resumed_with: tuple | None = None
        self.checkpointer = Checkpointer(
            folder,
            Checkpoint(**{"enable": True, "interval": 2, "on_save_error": "stop", **options}),
            [self.model],
            self.optimizers,
            TrainerHooks(
                trainer_state=lambda: {"step": self.step, "lr_scheduler": [s.state_dict() for s in self.schedules]},
                rank_state=lambda: {"dataloader": self.position, "rng": rng_state()},
                load_state=self.load_state,
            ),
        )
        self.checkpointer.retry_pauses = retry_pauses

    def load_state(self, trainer: dict, ranks: list[dict]) -> None:
        self.resumed_with = trainer, ranks
        self.step = trainer["step"]
        for optimizer, schedule, saved in zip(self.optimizers, self.schedules, trainer["lr_scheduler"], strict=True):
            schedule.load_state_dict(saved)
            for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate
        rank_state = ranks[rank() % len(ranks)]
        self.position = rank_state["dataloader"]
        if "rng" in rank_state and len(ranks) == world():
            set_rng_state(rank_state["rng"])

    def train(self, steps: int, last: bool = False) -> None:
        for index in range(steps):
            generator = torch.Generator().manual_seed(1000 * rank() + self.position)
            tokens = torch.randint(VOCABULARY, (3, 5), generator=generator)
            self.position += 1
            loss = nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            self.step += 1
            self.losses.append(loss.item())
            self.checkpointer.maybe_save(self.step, last=last and index == steps - 1)

    def digest(self) -> dict[str, str]:
        """Hash every full tensor of model and optimizers, by names that do not depend on ranks or wrappers."""
        tensors = {}
        names = {}
        for name, parameter in self.model.named_parameters():
            names[parameter] = name.replace("module.", "").replace("_checkpoint_wrapped_module.", "")
            tensors[names[parameter]] = parameter.detach()
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                tensors |= {f"{names[parameter]}/{key}": value for key, value in state.items()}
        return {name: tensor_hash(tensor) for name, tensor in tensors.items()}


def tensor_hash(tensor: torch.Tensor) -> str:
    """Return dtype, shape and sha256 of a full tensor."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return f"{full.dtype} {list(full.shape)} {hashlib.sha256(full.contiguous().numpy().tobytes()).hexdigest()}"


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
