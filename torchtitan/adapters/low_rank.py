"""Low-rank adapters (arXiv:2106.09685): LoRA, rsLoRA by its scale (arXiv:2312.03732), DoRA, and with restarts ReLoRA.

A frozen matrix W [out, in] gets A [rank, in] and B [out, rank]. The layer computes x W^T + scale (x A^T) B^T. B starts
at zero, so the model starts unchanged. Any linear can have such a pair. Stacked matrices of experts, W [experts, in,
out], have A [experts, in, rank] and B [experts, rank, out]; those of gate and up, which read the same rows, may share
an A. A kind of adapter is a pair of classes, for linears and for experts.

ReLoRA (arXiv:2307.05695) merges the product of A and B into the frozen matrix at regular steps and starts again with a
new A and B = 0, so that many low-rank updates add up to a change of any rank. At the same time the optimizer state of A
and B is reset, or most of it. With a period of k steps both happen after steps k + 1, 2 k + 1, ... The learning rate of
these steps is exactly 0 (lr_schedules.py), so they move no weight, and the first step with new matrices has a small
rate. All random values are a function of (seed, restart, name), and the retained optimizer state is chosen over full
tensors, so the result does not depend on the parallel plan.

DoRA (arXiv:2402.09353) is LoRA for the directions of a matrix's rows, with a separately trained magnitude. The adapted
matrix W + scale B A gives the directions of the rows. The magnitude starts as the row norms of W, so the model starts
unchanged. The row norms of the adapted matrix are recomputed in each forward and count as constant in backward (section
4.3).
"""

import logging
import math
import re
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
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.optim import Optimizer

from torchtitan.adapters import peft_folder
from torchtitan.adapters.interface import Adapter, full_tensor, merge_shards, require_complete_format
from torchtitan.adapters.targets import (
    EXPERT_MATRICES,
    GATE_UP,
    expert_matrices,
    layer_of,
    lora_scale,
    misfits,
    packed_matrices,
    quantized_stacks,
    target_linears,
)
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.config.sections.model import Relora
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import Constant, Init, Uniform, clean_name, draw, local_part
from torchtitan.core.tensor_storage import Deferred, Value
from torchtitan.models.dropout import Dropout
from torchtitan.models.hf.names import TensorMap
from torchtitan.models.layers import autocast_dtype, autocast_off
from torchtitan.models.moe.layer import Experts
from torchtitan.parallelisms.plan import ParallelPlan
from torchtitan.parallelisms.steps import running_notes
from torchtitan.torch_internals import collectives
from torchtitan.torch_internals.dispatch import is_in_torch_dispatch_mode

logger = logging.getLogger(__name__)

MATRIX_NAMES = re.compile(r"\blora_[AB]")
"""Matches the names of A and B, but not the names of learned scales."""
MOMENTS = ("exp_avg", "exp_avg_sq")


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
    matrices: tuple[str, ...] = EXPERT_MATRICES
    """Those of a stack of experts that have a pair."""
    packed: tuple[str, ...] = ()
    """Those that are quantized (quantized.py)."""
    gate_up_rank: int = 0
    """Rank of the one A of gate and up; 0: each has its own."""


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
    """Experts with low-rank pairs for some of their matrices: `lora_A_w1`, `lora_B_w1` and so on.

    With settings.gate_up_rank w1 and w3 have one A, `lora_A_w13`.
    """

    frozen_product = staticmethod(Experts.product)

    @property
    def mergeable(self) -> tuple[str, ...]:
        return self.settings.matrices

    def add_low_rank_parameters(self, settings: LoRASettings) -> None:
        self.settings = settings
        for name in settings.matrices:
            matrix = getattr(self, name).detach()
            experts, inputs, outputs = matrix.shape
            down, up = factor_names(settings, name)
            rank = settings.gate_up_rank if down == SHARED_A else settings.rank
            if not hasattr(self, down):
                self.register_parameter(down, nn.Parameter(matrix.new_empty(experts, inputs, rank)))
            self.register_parameter(up, nn.Parameter(matrix.new_empty(experts, rank, outputs)))

    @staticmethod
    def product(
        experts: Any, name: str, x: torch.Tensor, ends: torch.Tensor, shared: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Map x [rows, in] to [rows, out]. Rows are sorted by expert and end at `ends` [experts]."""
        plain, settings = experts.frozen_product(experts, name, x, ends, shared), experts.settings
        if settings.is_disabled or name not in settings.matrices:
            return plain
        down, up = factor_names(settings, name)
        if down not in shared:
            shared[down] = Experts.product(experts, down, x, ends, shared) * settings.scale
        return plain + Experts.product(experts, up, shared[down], ends, shared)

    def parameter_init(self, name: str) -> Init | None:
        if name.startswith("lora_A_"):
            return Uniform(getattr(self, name).shape[1] ** -0.5)
        return Constant(0.0) if name.startswith("lora_B_") else None

    def merged_weight(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return `value`, the matrices [experts, in, out], with the learned products added."""
        down, up = (getattr(self, factor) for factor in factor_names(self.settings, name))
        return add_product(value, down, up, self.settings.scale)


SHARED_A = f"lora_A_{GATE_UP}"


def factor_names(settings: LoRASettings, matrix: str) -> tuple[str, str]:
    """Return the names of A and B of a matrix of experts."""
    is_shared = settings.gate_up_rank and matrix != "w2"
    return SHARED_A if is_shared else f"lora_A_{matrix}", f"lora_B_{matrix}"


class LowRank(Adapter):
    """Adds one kind of low-rank pairs to the modules that the options target."""

    linear_class: type[LowRankLinear]
    experts_class: type[LowRankExperts] | None = None  # None: this kind does not support experts
    adapts_tied_head = False  # True if a head tied to the embedding has an adapter

    def convert(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        modules = dict(adaptable_modules(model))
        if problems := list(misfits({name: linear_shape(module) for name, module in modules.items()}, self.options)):
            raise JobError("; ".join(map(str, problems)))
        targets = target_linears(modules, self.options)
        for name in [*targets, *quantized_stacks(modules.keys() - {*targets}, self.options)]:
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
        has_pair = name in target_linears([name], options)
        if new_class is None or (is_stack and has_pair and (options.train_scaling or options.lora_only)):
            raise JobError(
                f"adapter.kind = {options.kind!r} has no form for {name}, the stacked matrices of experts; leave "
                f'them out of adapter.target, or write kind = "lora"'
            )
        module.__class__ = new_class
        scale = 1.0 if options.train_scaling else lora_scale(options)
        settings = LoRASettings(options.rank, scale, options.train_scaling, options.lora_only)
        if is_stack:
            matrices = expert_matrices(name, options) if has_pair else ()
            settings.matrices, settings.packed = (
                tuple(matrix for matrix in names if matrix in module.matrix_names)
                for names in (matrices, packed_matrices(name, options))
            )
            settings.gate_up_rank = options.gate_up_rank
        module.add_low_rank_parameters(settings)
        if options.dropout and not is_stack:
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


def add_product(
    weight: torch.Tensor, left_factor: torch.Tensor, right_factor: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return weight [..., m, n] + scale times left_factor [..., m, r] right_factor [..., r, n], laid out like `weight`.

    Every rank calls it. Leading dimensions enumerate a stack of experts.
    """
    *experts, rows, columns = range(weight.dim())
    factors = (left_factor, (*experts, rows, None)), (right_factor, (*experts, None, columns))
    return merge_shards(weight, lambda shard, b, a: (b @ a).mul_(scale).add_(shard), *factors)


# LoRA, with the restarts of ReLoRA, and DoRA


class LoRA(LowRank):
    linear_class, experts_class = LowRankLinear, LowRankExperts
    by_token = True

    def __init__(self, options: Options, seed: int = 0):
        super().__init__(options, seed)
        self.restarts = None if options.relora.every is None else Restarts(options.relora, seed)

    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        if self.restarts is not None:
            self.restarts.after_step(step, parts, optimizers)

    def metrics(self, parts: Sequence[nn.Module]) -> dict[str, float]:
        return super().metrics(parts) | {f"adapter_{name}": count for name, count in self.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.restarts is None else {"merges": self.restarts.merges, "resets": self.restarts.resets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.restarts is not None:
            self.restarts.merges, self.restarts.resets = state.get("merges", 0), state.get("resets", 0)


class Restarts:
    """The restarts of one run: their schedule, their number so far, and the reset itself."""

    def __init__(self, options: Relora, seed: int):
        self.options, self.seed = options, seed
        self.merges = self.resets = 0

    @torch.no_grad()
    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        if is_due(step, self.options.every):
            self.merges += 1
            for name, module in low_rank_modules(parts):
                merge_product(module)
                restart_matrices(module, f"{self.seed}/restart {self.merges}/{name}")
        if self.options.reset != "none" and is_due(step, self.options.reset_every or self.options.every):
            self.resets += 1
            self.reset_moments(parts, optimizers)

    def reset_moments(self, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Zero all moments of A and B, or a fraction `prune_ratio` of them, and of no other parameter."""
        names = {
            p: clean_name(name) for part in parts for name, p in part.named_parameters() if MATRIX_NAMES.search(name)
        }
        zeros: list[torch.Tensor] = []
        elements = 0
        for optimizer in optimizers:
            for parameter in (p for p in optimizer.state if p in names):
                state = optimizer.state[parameter]
                key = f"{self.seed}/reset {self.resets}/{names[parameter]}"
                for moment, mask in self.retained_masks(state, key).items():
                    local = local_part(state[moment])[0]
                    local.mul_(mask)
                    zeros.append((local == 0).sum())
                    elements += local.numel()
                if self.options.reset_step:
                    state["step"] = state["step"] * 0
        assert len(zeros) == len(MOMENTS) * len(names), (len(zeros), len(names))
        total = int(torch.stack(zeros).sum()) if zeros else 0  # the only wait for the device
        share = 100 * total / max(elements, 1)
        logger.info(
            "restart %d: %.1f %% of the moments of %d matrices are 0 on this rank", self.resets, share, len(names)
        )

    def retained_masks(self, state: dict[str, Any], key: str) -> dict[str, torch.Tensor]:
        """Return a mask for each moment: 1 where this rank's shard of it is retained, 0 elsewhere.

        By default both share one mask, chosen by the second moment: a first moment without its second would be divided
        by nearly zero.
        """
        if self.options.mask == "joint":
            return dict.fromkeys(MOMENTS, self._retained_mask(state["exp_avg_sq"], key))
        return {moment: self._retained_mask(state[moment], f"{key}/{moment}") for moment in MOMENTS}

    def _retained_mask(self, moment: torch.Tensor, key: str) -> torch.Tensor:
        local, _, offset = local_part(moment)
        if self.options.reset == "zero":
            return torch.zeros_like(local)
        if self.options.reset == "random":
            drawn = torch.empty_like(moment, dtype=torch.float32)
            draw(drawn, Uniform(1.0), key)
            return (local_part(drawn)[0] > 2 * self.options.prune_ratio - 1).to(local.dtype)
        full_tensor = moment.full_tensor() if isinstance(moment, DTensor) else moment
        spans = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
        return largest_mask(full_tensor, self.options.prune_ratio)[spans].to(local)


def is_due(step: int, period: int | None) -> bool:
    """Return True if a restart follows this step, a 1-based number in the schedule."""
    return period is not None and step > 1 and step % period == 1


def largest_mask(values: torch.Tensor, prune_ratio: float) -> torch.Tensor:
    """Return a mask of the same shape: 0 at the floor(prune_ratio n) smallest magnitudes, 1 elsewhere.

    The number of zeros is exact, and of equal values the first are retained. (A threshold would retain none of equal
    values, and torch.quantile is limited to 2^24 elements.)
    """
    count = values.numel() - math.floor(prune_ratio * values.numel())
    order = values.float().abs().flatten().argsort(descending=True, stable=True)
    return torch.zeros(values.numel(), device=values.device).index_fill_(0, order[:count], 1.0).view(values.shape)


def low_rank_modules(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, LowRankLinear | LowRankExperts):
                yield clean_name(name), module


def merge_product(module: LowRankLinear | LowRankExperts) -> None:
    """Merge A and B into the frozen matrices, in place, as optimizers and compiled graphs hold these tensors."""
    for name in module.mergeable:
        matrix = getattr(module, name)
        local_part(matrix)[0].copy_(local_part(module.merged_weight(name, matrix))[0])


def restart_matrices(module: LowRankLinear | LowRankExperts, key: str) -> None:
    """Reinitialize A and set B to zero."""
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith("lora_"):
            init = module.parameter_init(name)
            assert isinstance(init, Uniform | Constant)
            draw(parameter, init, f"{key}.{name}")


@torch.no_grad()
def adapted_row_norms(linear: Any) -> torch.Tensor:
    """Return the row norms [out] of the adapted matrix, in float32 or wider.

    `linear` may be a stand-in with a rank's weights.
    """
    dtype = torch.promote_types(linear.weight.dtype, torch.float32)
    weight, b, a = (tensor.to(dtype) for tensor in (linear.weight, linear.lora_B, linear.lora_A))
    with autocast_off(linear.weight.device.type):
        squares = torch.addmm(weight, b, a, alpha=linear.settings.scale).square().sum(1)
    if linear.rows_are_sharded:
        squares = collectives.all_reduce(squares, "sum", linear.border.group)
        squares = collectives.wait_tensor(squares)
    return squares.sqrt()


class DoRALinear(LowRankLinear):
    """A LowRankLinear with a trained row magnitude, `lora_magnitude` [out]."""

    rows_are_sharded = False  # True if each rank of the group of `border` has a part of every row

    def add_low_rank_parameters(self, settings: LoRASettings) -> None:
        super().add_low_rank_parameters(settings)
        self.lora_magnitude = nn.Parameter(self.weight.detach().new_empty(self.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = add_low_rank_output(self, x, F.linear(x.flatten(0, -2), self.weight))
        if not self.settings.is_disabled:
            y = y * (self.lora_magnitude / adapted_row_norms(self)).to(y.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def parameter_init(self, name: str) -> Init | None:
        return Constant(1.0) if name == "lora_magnitude" else super().parameter_init(name)

    def tensor_placements(self, role: str, default: Placement) -> dict[str, tuple[Placement, Placement]]:
        placements = super().tensor_placements(role, default)
        if role in ("column", "head"):
            placements["lora_magnitude"] = (Shard(0), Shard(0))
        elif role == "row":  # each rank scales its partial sum by it
            placements["lora_magnitude"] = (Replicate(), Partial())
            self.rows_are_sharded = True
        return placements

    @torch.no_grad()
    def init_from_base(self) -> None:
        """Initialize the trained magnitudes to the row norms of W."""
        local, _, offset = local_part(self.lora_magnitude)
        local.copy_(row_norms(self.weight).narrow(0, offset[0], local.shape[0]))

    def merged_weight(self, name: str, value: torch.Tensor) -> torch.Tensor:
        matrix = super().merged_weight(name, value)
        rows = (self.lora_magnitude, (0,)), (row_norms(matrix), (0,))
        return merge_shards(matrix, lambda shard, magnitude, norm: shard * (magnitude / norm)[:, None], *rows)


class DoRA(LowRank):
    linear_class, by_token = DoRALinear, True


def row_norms(matrix: torch.Tensor) -> torch.Tensor:
    """Return the row norms [out] of a matrix [out, in], in full on every rank. Every rank calls it."""
    local, shape, offset = local_part(matrix)
    squares = torch.zeros(shape[0], dtype=torch.promote_types(matrix.dtype, torch.float32), device=local.device)
    squares.narrow(0, offset[0], local.shape[0]).add_(local.to(squares.dtype).square().sum(1))
    if isinstance(matrix, DTensor):
        for axis, placement in enumerate(matrix.placements):
            if not placement.is_replicate():
                dist.all_reduce(squares, group=matrix.device_mesh.get_group(axis))
    return squares.sqrt()
