"""Low-rank adapters (arXiv:2106.09685): a frozen matrix W [out, in] gets A [rank, in] and B [out, rank].

The layer computes x W^T + scale (x A^T) B^T. B starts at zero, so the model starts unchanged. Any linear can have such
a pair. Stacked matrices of experts, W [experts, in, out], have A [experts, in, rank] and B [experts, rank, out]. A kind
of adapter is a pair of classes, for linears and for experts, see lora.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from torchtitan.adapters import peft_folder
from torchtitan.adapters.interface import Adapter
from torchtitan.adapters.targets import layer_of, misfits, targets
from torchtitan.config.sections.adapter import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.core.initialization import Constant, Init, Uniform, local_part
from torchtitan.core.tensor_storage import Deferred, Value
from torchtitan.models.dropout import Dropout
from torchtitan.models.hf.names import Form
from torchtitan.models.layers import autocast_dtype
from torchtitan.models.moe.experts import Experts
from torchtitan.parallelisms.plan import ParallelPlan
from torchtitan.parallelisms.steps import running_notes

MATRICES = ("w1", "w2", "w3")
"""Names of the matrices of experts."""


@dataclass(frozen=True)
class Strength:
    """Settings of a converted module.

    `scale`: factor of what A and B add. `learns`: it is multiplied by tanh of a trained number per linear. `alone`: the
    module has A and B and no base matrix.
    """

    rank: int
    scale: float
    learns: bool = False
    alone: bool = False


def plus_learned(linear: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add the output of A and B to the plain output: x [..., in] and y [N, out] for its N rows -> [..., out].

    `linear`: a LowRankLinear, or a stand-in with a rank's weights. y may be overwritten.

    The second product is added to y in place: with a separate tensor for it, a step of the debug Llama takes 4 %
    longer. It is out of place under selective recompute, which saves operator outputs for reuse, and in compiled
    graphs, which are functional.
    """
    x = x if linear.dropout is None else dropped(linear, x)
    inner, right = (
        F.linear(x.flatten(0, -2), linear.lora_A),
        linear.lora_B.t().to(y.dtype),
    )  # autocast does not cover addmm_
    if y.device.type == "cpu":  # in backward, products with few columns are several times slower than with few rows
        right = right.contiguous()
    if linear.lora_scaling is not None:
        inner = inner * linear.lora_scaling.tanh().to(inner.dtype)
    add = torch.addmm if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() else torch.Tensor.addmm_
    return add(y, inner, right, alpha=linear.low_rank.scale).unflatten(0, x.shape[:-1])


def dropped(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """Apply dropout to x [B, S, in], of which a tensor-parallel rank may have a shard of the tokens or features."""
    notes = running_notes()
    keys = None if notes is None else notes.shared.keys
    if linear.role == "sequence":
        keys = linear.border.here(keys)
    return linear.dropout(x, keys, first=linear.border.rank * x.shape[-1] if linear.role == "row" else 0)


class LowRankLinear(nn.Linear):
    """A linear with `lora_A`, `lora_B` and `low_rank`, a Strength, in addition to its frozen weight.

    `dropout`: applied to the input of A. `lora_scaling` [1]: present if the scale is trained. It starts at 1, and again
    after a restart: at 0, tanh is 0 and none of the three would get a gradient.
    """

    role = ""  # its role in the parallel plan, under tensor parallel
    folds: tuple[str, ...] = ("weight",)

    def add_parameters(self, strength: Strength) -> None:
        self.low_rank = strength
        self.dropout: Dropout | None = None
        new_empty = self.weight.detach().new_empty
        self.lora_A = nn.Parameter(new_empty(strength.rank, self.in_features))
        self.lora_B = nn.Parameter(new_empty(self.out_features, strength.rank))
        self.lora_scaling = nn.Parameter(new_empty(1)) if strength.learns else None
        if strength.alone:
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        rows = x.flatten(0, -2)
        if self.weight is not None:
            return plus_learned(self, x, F.linear(rows, self.weight, self.bias))
        y = rows.new_zeros(rows.shape[0], self.lora_B.shape[0], dtype=autocast_dtype(x.device.type) or x.dtype)
        return plus_learned(self, x, y if self.bias is None else y + self.bias.to(y.dtype))

    def own_init(self, name: str) -> Init | None:
        if name == "lora_A":
            return Uniform(self.in_features**-0.5)  # Kaiming's for a = sqrt(5), as torch initializes its linears
        if name == "lora_B" and self.low_rank.alone:  # if both were 0, neither would get a gradient
            return Uniform(self.low_rank.rank**-0.5)
        return {"lora_B": Constant(0.0), "lora_scaling": Constant(1.0)}.get(name)

    def tensor_placements(self, role: str, whole: Placement) -> dict[str, tuple[Placement, Placement]]:
        """Return the placements of the parameters under tensor parallel, see tensor_parallel.py."""
        self.role = role
        partial_grad = (Replicate(), Partial())
        if role in ("column", "head"):  # a rank has some outputs, whose gradients give a partial sum for A
            return {"lora_A": partial_grad, "lora_B": (Shard(0), Shard(0)), "lora_scaling": partial_grad}
        if role == "row":  # a rank has some inputs, and B gets a partial sum
            return {"lora_A": (Shard(1), Shard(1)), "lora_B": partial_grad, "lora_scaling": partial_grad}
        return {}

    def folded(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return `value`, the matrix [out, in], with the learned product added, in the same layout."""
        scale = self.low_rank.scale
        if (learned := self.lora_scaling) is not None:
            scale *= (learned.full_tensor() if isinstance(learned, DTensor) else learned).tanh().item()
        return plus_product(value, self.lora_B, self.lora_A, scale)


class LowRankExperts(Experts):
    """Experts with low-rank pairs for each of their matrices: `lora_A_w1`, `lora_B_w1` and so on."""

    folds = MATRICES

    def add_parameters(self, strength: Strength) -> None:
        self.low_rank = strength
        for name in MATRICES:
            matrix = getattr(self, name).detach()
            experts, inputs, outputs = matrix.shape
            self.register_parameter(f"lora_A_{name}", nn.Parameter(matrix.new_empty(experts, inputs, strength.rank)))
            self.register_parameter(f"lora_B_{name}", nn.Parameter(matrix.new_empty(experts, strength.rank, outputs)))

    @staticmethod
    def product(experts: Any, name: str, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Map x [rows, in] to [rows, out]. Rows are sorted by expert and end at `ends` [experts]."""
        inner = Experts.product(experts, f"lora_A_{name}", x, ends) * experts.low_rank.scale
        return Experts.product(experts, name, x, ends) + Experts.product(experts, f"lora_B_{name}", inner, ends)

    def own_init(self, name: str) -> Init | None:
        if name.startswith("lora_A_"):
            return Uniform(getattr(self, name).shape[1] ** -0.5)
        return Constant(0.0) if name.startswith("lora_B_") else None

    def folded(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return `value`, the matrices [experts, in, out], with the learned products added."""
        left, right = getattr(self, f"lora_A_{name}"), getattr(self, f"lora_B_{name}")
        return plus_product(value, left, right, self.low_rank.scale)


class LowRank(Adapter):
    """Adds one kind of low-rank pairs to the modules that the options target."""

    linear: type[LowRankLinear]
    experts: type[LowRankExperts] | None = None  # None: this kind does not support experts
    unties = False  # True if a head tied to the embedding has an adapter

    def convert(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        modules = dict(candidates(model))
        if problems := list(misfits({name: sizes_of(module) for name, module in modules.items()}, self.options)):
            raise JobError("; ".join(map(str, problems)))
        for name in targets(modules, self.options):
            self.convert_one(name, modules[name])
            self.replaced |= {f"{name}.{attribute}" for attribute in modules[name].folds}
        head, embedding = (getattr(model, name, None) for name in ("output", "tok_embeddings"))
        self.unties = isinstance(head, LowRankLinear) and embedding is not None and head.weight is embedding.weight
        return plan

    def read_folder(self, folder: Path, form: Form) -> dict[str, torch.Tensor]:
        return peft_folder.load(folder, self.options, form, self.shapes)

    def write_folder(self, folder: Path, form: Form, whole: Mapping[str, torch.Tensor], base: str) -> None:
        self.refuse_what_has_no_place()
        peft_folder.save(folder, {name: whole[name] for name in self.shapes}, self.options, form, base)

    def merged(self, parts: Sequence[nn.Module], original: Mapping[str, Deferred] | None = None) -> dict[str, Value]:
        if self.unties:
            raise JobError(
                "the head is the embedding's matrix and has an adapter, which the embedding does not see: folded in "
                "they would be two. Write the adapter alone (adapter.last_save_in_peft, or export without --merge)"
            )
        return super().merged(parts, original)

    @torch.no_grad()
    def metrics(self, parts: Sequence[nn.Module]) -> dict[str, float]:
        """Return mean, minimum and maximum of the trained scales over all linears."""
        if not self.options.train_scaling:
            return {}
        local_scales = [
            local_part(p)[0].float().tanh() for name, p in self._parameters(parts) if name.endswith("lora_scaling")
        ]
        values = torch.cat([torch.empty(0, device=next(parts[0].parameters()).device), *local_scales])
        sums = torch.stack((values.sum(), torch.ones_like(values).sum()))
        ends = torch.stack([torch.cat((signed, signed.new_tensor([-1.0]))).max() for signed in (values, -values)])
        sums, ends = sums.cpu(), ends.cpu()  # reduced over gloo, as they are read on the CPU
        if dist.is_initialized():  # replicas count several times in both sum and number
            dist.all_reduce(sums)
            dist.all_reduce(ends, dist.ReduceOp.MAX)
        mean, largest, smallest = (sums[0] / sums[1]).item(), ends[0].item(), -ends[1].item()
        return {"adapter_scaling_mean": mean, "adapter_scaling_min": smallest, "adapter_scaling_max": largest}

    def rate_of(self, name: str) -> float:
        return self.options.lr_ratio_b if "lora_B" in name else 1.0

    def convert_one(self, name: str, module: nn.Module) -> None:
        learns, alone = self.options.train_scaling, self.options.lora_only
        new_class = self.linear if not isinstance(module, Experts) else None if learns or alone else self.experts
        if new_class is None:
            raise JobError(
                f"adapter.kind = {self.options.kind!r} has no form for {name}, the stacked matrices of experts; leave "
                f'them out of adapter.target, or write kind = "lora"'
            )
        module.__class__ = new_class
        module.add_parameters(Strength(self.options.rank, 1.0 if learns else scale_of(self.options), learns, alone))
        if self.options.dropout:
            module.dropout = Dropout(self.options.dropout, place_of(name))


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that can have low-rank pairs: plain linears and stacks of experts, but no routers."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear or isinstance(module, Experts):
            yield name, module


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """Return the number of outputs and inputs."""
    return tuple(module.w1.shape[:0:-1]) if isinstance(module, Experts) else (module.out_features, module.in_features)


def place_of(name: str) -> int:
    """Return a number for a linear within its layer, which makes its random draws distinct."""
    return crc32(name.removeprefix(f"layers.{layer_of(name)}.").encode())


def scale_of(options: Options) -> float:
    return options.alpha / (options.rank**0.5 if options.rslora else options.rank)


@torch.no_grad()
def plus_product(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """Return weight [..., m, n] + scale left [..., m, r] right [..., r, n], laid out like `weight`.

    It is computed in float32 or wider and rounded once. Every rank calls it. Factors that are sharded along the same
    rows as `weight` are not gathered.
    """
    local, shape, offset = local_part(weight)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    left, right = (_part(tensor, dim, weight, local, offset).to(dtype) for tensor, dim in ((left, -2), (right, -1)))
    total = (local.to(dtype) + scale * (left @ right)).to(weight.dtype)
    if not isinstance(weight, DTensor):
        return total
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(total, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride)


def _part(
    tensor: torch.Tensor, dim: int, weight: torch.Tensor, local: torch.Tensor, offset: tuple[int, ...]
) -> torch.Tensor:
    """Return the part of a factor that this rank's shard of `weight` needs.

    That is its full inner dimension, and the span of `weight` along `dim` and along the experts.
    """
    if isinstance(tensor, DTensor):
        if _lies_alike(tensor, weight, dim):
            return tensor.to_local()
        tensor = tensor.full_tensor()
    dim %= weight.dim()
    expert_axes = range(weight.dim() - 2)
    for axis in (*expert_axes, dim):
        tensor = tensor.narrow(axis, offset[axis], local.shape[axis])
    return tensor


def _lies_alike(tensor: DTensor, weight: torch.Tensor, dim: int) -> bool:
    """Return True if both are sharded alike along `dim` (or the experts), and along no other shared dimension."""
    if not isinstance(weight, DTensor) or tensor.device_mesh != weight.device_mesh:
        return False
    inner_dim = tensor.dim() - (1 if dim == -2 else 2)
    if any(placement.is_shard(inner_dim) for placement in tensor.placements):
        return False
    other_dim = weight.dim() - (1 if dim == -2 else 2)
    return all(
        a == b or (a.is_replicate() and b.is_shard(other_dim))
        for a, b in zip(tensor.placements, weight.placements, strict=True)
    )
