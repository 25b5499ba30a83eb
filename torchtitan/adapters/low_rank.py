"""Low-rank adapters (arXiv:2106.09685): a frozen matrix W [out, in] gets A [rank, in] and B [out, rank].

The layer computes x W^T + scale (x A^T) B^T. B starts at zero, so the model starts unchanged. Any linear can have such
a pair. Stacked matrices of experts, W [experts, in, out], have A [experts, in, rank] and B [experts, rank, out]. A kind
of adapter is a pair of classes, for linears and for experts, see lora.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan.adapters import peft_folder
from torchtitan.adapters.interface import Adapter, full_tensor, merge_shards, require_complete_format
from torchtitan.adapters.targets import layer_of, misfits, target_linears
from torchtitan.config.sections.adapter import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.core.initialization import Constant, Init, Uniform, local_part
from torchtitan.core.tensor_storage import Deferred, Value
from torchtitan.models.dropout import Dropout
from torchtitan.models.hf.names import TensorMap
from torchtitan.models.layers import autocast_dtype
from torchtitan.models.moe.experts import Experts
from torchtitan.parallelisms.plan import ParallelPlan
from torchtitan.parallelisms.steps import running_notes
from torchtitan.torch_internals.dispatch import is_in_torch_dispatch_mode

MATRICES = ("w1", "w2", "w3")
"""Names of the matrices of experts."""


@dataclass
class LoRASettings:
    """Settings of a converted module: the rank and the `scale` of the product of A and B.

    `is_scale_trained`: the scale is multiplied by tanh of a trained number per linear. `without_base`: the module has A
    and B and no base matrix.
    """

    rank: int
    scale: float
    is_scale_trained: bool = False
    without_base: bool = False
    is_disabled: bool = False
    """The module computes as its base does, for now."""


def add_low_rank_output(linear: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add the output of A and B to the plain output: x [..., in] and y [N, out] for its N rows -> [..., out].

    `linear`: a LowRankLinear, or a stand-in with a rank's weights. y may be overwritten.

    The second product is added to y in place: with a separate tensor for it, a step of the debug Llama takes 4 %
    longer. It is out of place under selective recompute, which saves operator outputs for reuse, and in compiled
    graphs, which are functional.
    """
    if linear.settings.is_disabled:
        return y.unflatten(0, x.shape[:-1])
    x = x if linear.dropout is None else drop_inputs(linear, x)
    inner = F.linear(x.flatten(0, -2), linear.lora_A)
    right = linear.lora_B.t().to(y.dtype)  # autocast does not cover addmm_
    if y.device.type == "cpu":  # in backward, products with few columns are several times slower than with few rows
        right = right.contiguous()
    if linear.lora_scaling is not None:
        inner = inner * linear.lora_scaling.tanh().to(inner.dtype)
    add = torch.addmm if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() else torch.Tensor.addmm_
    return add(y, inner, right, alpha=linear.settings.scale).unflatten(0, x.shape[:-1])


def drop_inputs(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """Apply dropout to x [B, S, in], or to a tensor-parallel rank's shard of its tokens or features."""
    notes = running_notes()
    keys = None if notes is None else notes.shared.keys
    if linear.role == "sequence":
        keys = linear.border.local_tokens(keys)
    return linear.dropout(x, keys, first=linear.border.rank * x.shape[-1] if linear.role == "row" else 0)


class LowRankLinear(nn.Linear):
    """A linear with `lora_A`, `lora_B` and `settings` in addition to its frozen weight.

    `dropout`: applied to the input of A. `lora_scaling` [1]: present if the scale is trained. It starts at 1, and again
    after a restart: at 0, tanh is 0 and none of the three would get a gradient.
    """

    role = ""  # its role in the parallel plan, under tensor parallel
    mergeable: tuple[str, ...] = ("weight",)

    def add_low_rank_parameters(self, settings: LoRASettings) -> None:
        self.settings = settings
        self.dropout: Dropout | None = None
        new_empty = self.weight.detach().new_empty
        self.lora_A = nn.Parameter(new_empty(settings.rank, self.in_features))
        self.lora_B = nn.Parameter(new_empty(self.out_features, settings.rank))
        self.lora_scaling = nn.Parameter(new_empty(1)) if settings.is_scale_trained else None
        if settings.without_base:
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        rows = x.flatten(0, -2)
        if self.weight is not None:
            return add_low_rank_output(self, x, F.linear(rows, self.weight, self.bias))
        y = rows.new_zeros(rows.shape[0], self.lora_B.shape[0], dtype=autocast_dtype(x.device.type) or x.dtype)
        return add_low_rank_output(self, x, y if self.bias is None else y + self.bias.to(y.dtype))

    def parameter_init(self, name: str) -> Init | None:
        if name == "lora_A":
            return Uniform(self.in_features**-0.5)  # Kaiming's for a = sqrt(5), as torch initializes its linears
        if name == "lora_B" and self.settings.without_base:  # if both were 0, neither would get a gradient
            return Uniform(self.settings.rank**-0.5)
        return {"lora_B": Constant(0.0), "lora_scaling": Constant(1.0)}.get(name)

    def tensor_placements(self, role: str, default: Placement) -> dict[str, tuple[Placement, Placement]]:
        """Return the placements of the parameters under tensor parallel, see tensor_parallel.py."""
        self.role = role
        partial_grad = (Replicate(), Partial())
        if role in ("column", "head"):  # the gradients of a rank's outputs give a partial sum for A
            return {"lora_A": partial_grad, "lora_B": (Shard(0), Shard(0)), "lora_scaling": partial_grad}
        if role == "row":  # a rank has some inputs, and B gets a partial sum
            return {"lora_A": (Shard(1), Shard(1)), "lora_B": partial_grad, "lora_scaling": partial_grad}
        return {}

    def merged_weight(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return `value`, the matrix [out, in], with the learned product added, in the same layout."""
        scale = self.settings.scale
        if self.lora_scaling is not None:
            scale *= full_tensor(self.lora_scaling).tanh().item()
        return add_product(value, self.lora_B, self.lora_A, scale)


class LowRankExperts(Experts):
    """Experts with low-rank pairs for each of their matrices: `lora_A_w1`, `lora_B_w1` and so on."""

    mergeable = MATRICES

    def add_low_rank_parameters(self, settings: LoRASettings) -> None:
        self.settings = settings
        for name in MATRICES:
            matrix = getattr(self, name).detach()
            experts, inputs, outputs = matrix.shape
            self.register_parameter(f"lora_A_{name}", nn.Parameter(matrix.new_empty(experts, inputs, settings.rank)))
            self.register_parameter(f"lora_B_{name}", nn.Parameter(matrix.new_empty(experts, settings.rank, outputs)))

    @staticmethod
    def product(experts: Any, name: str, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Map x [rows, in] to [rows, out]. Rows are sorted by expert and end at `ends` [experts]."""
        if experts.settings.is_disabled:
            return Experts.product(experts, name, x, ends)
        inner = Experts.product(experts, f"lora_A_{name}", x, ends) * experts.settings.scale
        return Experts.product(experts, name, x, ends) + Experts.product(experts, f"lora_B_{name}", inner, ends)

    def parameter_init(self, name: str) -> Init | None:
        if name.startswith("lora_A_"):
            return Uniform(getattr(self, name).shape[1] ** -0.5)
        return Constant(0.0) if name.startswith("lora_B_") else None

    def merged_weight(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return `value`, the matrices [experts, in, out], with the learned products added."""
        down, up = getattr(self, f"lora_A_{name}"), getattr(self, f"lora_B_{name}")
        return add_product(value, down, up, self.settings.scale)


class LowRank(Adapter):
    """Adds one kind of low-rank pairs to the modules that the options target."""

    linear_class: type[LowRankLinear]
    experts_class: type[LowRankExperts] | None = None  # None: this kind does not support experts
    adapts_tied_head = False  # True if a head tied to the embedding has an adapter

    def convert(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        modules = dict(adaptable_modules(model))
        if problems := list(misfits({name: linear_shape(module) for name, module in modules.items()}, self.options)):
            raise JobError("; ".join(map(str, problems)))
        for name in target_linears(modules, self.options):
            self.convert_module(name, modules[name])
            self.replaced_parameters |= {f"{name}.{attribute}" for attribute in modules[name].mergeable}
        head, embedding = (getattr(model, name, None) for name in ("output", "tok_embeddings"))
        self.adapts_tied_head = (
            isinstance(head, LowRankLinear) and embedding is not None and head.weight is embedding.weight
        )
        return plan

    def read_folder(self, folder: Path, form: TensorMap) -> dict[str, torch.Tensor]:
        return peft_folder.load(folder, self.options, form, self.added_shapes)

    def write_folder(self, folder: Path, form: TensorMap, tensors: Mapping[str, torch.Tensor], base: str) -> None:
        require_complete_format(self)
        peft_folder.save(folder, {name: tensors[name] for name in self.added_shapes}, self.options, form, base)

    def merged_tensors(
        self, parts: Sequence[nn.Module], original: Mapping[str, Deferred] | None = None
    ) -> dict[str, Value]:
        if self.adapts_tied_head:
            raise JobError(
                "the head is the embedding's matrix and has an adapter, which the embedding does not see: folded in "
                "they would be two. Write the adapter alone (adapter.last_save_in_peft, or export without --merge)"
            )
        return super().merged_tensors(parts, original)

    @contextmanager
    def disabled(self, parts: Sequence[nn.Module]) -> Iterator[None]:
        if self.options.lora_only or self.trained_base_parameters:
            raise JobError(
                "the base model does not exist any more, as some of its parameters are trained too (adapter.lora_only, "
                "train_fully or train_dense_rest); load it by a job of its own"
            )
        settings = [module.settings for part in parts for module in part.modules() if _has_low_rank(module)]
        for setting in settings:
            setting.is_disabled = True
        try:
            yield
        finally:
            for setting in settings:
                setting.is_disabled = False

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

    def lr_multiplier(self, name: str) -> float:
        return self.options.lr_ratio_b if "lora_B" in name else 1.0

    def convert_module(self, name: str, module: nn.Module) -> None:
        options, is_stack = self.options, isinstance(module, Experts)
        new_class = self.experts_class if is_stack else self.linear_class
        if new_class is None or (is_stack and (options.train_scaling or options.lora_only)):
            raise JobError(
                f"adapter.kind = {options.kind!r} has no form for {name}, the stacked matrices of experts; leave "
                f'them out of adapter.target, or write kind = "lora"'
            )
        module.__class__ = new_class
        scale = 1.0 if options.train_scaling else lora_scale(options)
        module.add_low_rank_parameters(LoRASettings(options.rank, scale, options.train_scaling, options.lora_only))
        if options.dropout:
            module.dropout = Dropout(options.dropout, dropout_key(name))


def _has_low_rank(module: nn.Module) -> bool:
    return isinstance(module, LowRankLinear | LowRankExperts)


def adaptable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that can have low-rank pairs: plain linears and stacks of experts, but no routers."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear or isinstance(module, Experts):
            yield name, module


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """Return the number of outputs and inputs."""
    return tuple(module.w1.shape[:0:-1]) if isinstance(module, Experts) else (module.out_features, module.in_features)


def dropout_key(name: str) -> int:
    """Return a number for a linear within its layer, which makes its random draws distinct."""
    return crc32(name.removeprefix(f"layers.{layer_of(name)}.").encode())


def lora_scale(options: Options) -> float:
    return options.alpha / (options.rank**0.5 if options.rslora else options.rank)


def add_product(
    weight: torch.Tensor, left_factor: torch.Tensor, right_factor: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return weight [..., m, n] + scale times left_factor [..., m, r] right_factor [..., r, n], laid out like `weight`.

    Every rank calls it. Leading dimensions enumerate a stack of experts.
    """
    *experts, rows, columns = range(weight.dim())
    factors = (left_factor, (*experts, rows, None)), (right_factor, (*experts, None, columns))
    return merge_shards(weight, lambda shard, b, a: (b @ a).mul_(scale).add_(shard), *factors)
