"""The frozen model under an adapter of low rank, by the sizes of its linear layers. Imports no torch.

A frozen weight has neither a gradient nor optimizer state, and its layer does not store its input for backward. FSDP
gathers it and reduces nothing. What is trained are matrices A [rank, in] and B [out, rank] of each adapted layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan.adapters import NONE
from torchtitan.adapters.targets import QUANTIZED_MULTIPLES, packed_bytes, target_linears
from torchtitan.config.sections.model import Adapter
from torchtitan.job import ResolvedJob
from torchtitan.job.model import JobModel
from torchtitan.models.sizes import HEAD, Sizes, linears, split_side

BYTES = {"float32": 4, "bfloat16": 2}
KINDS = ("lora", *QUANTIZED_MULTIPLES)
"""Kinds of adapters that the formulas describe."""


class FrozenBytes(NamedTuple):
    """Bytes of frozen parameters."""

    stored: float
    gathered: float
    """In the type of the computation; packed ones stay packed."""
    unpacked: float = 0.0
    """Of those that are packed, in the type of the computation."""


def adapter_obstacle(model: JobModel) -> str:
    """Return why the formulas do not describe the job's choice of trained parameters; empty if they do."""
    options, remedy = model.adapter, "`torchtitan estimate` predicts its memory"
    if model.training.unfrozen:
        return f"training.unfrozen: the formulas are of jobs that train all weights or an adapter; {remedy}"
    if options.kind == NONE:
        return ""
    if options.kind not in KINDS:
        return f"adapter.kind = {options.kind!r}: the formulas are of {', '.join(KINDS)}; {remedy}"
    if model.has_experts:
        return f"adapter.kind = {options.kind!r} in a model with experts: the formulas have none; {remedy}"
    for name in ("train_fully", "train_dense_rest", "lora_only", "layers"):
        if getattr(options, name):
            return f"adapter.{name}: the formulas are of adapters in all layers of a frozen model; {remedy}"
    targets = target_linears(linears(model.args), options)
    by_layer = {
        tuple(name.split(".", 2)[2] for name in targets if name.startswith(f"layers.{layer}."))
        for layer in range(model.args.n_layers)
    }
    if HEAD in targets or len(by_layer) > 1:
        return f"adapter.target = {options.target}: the formulas are of the same targets in all layers; {remedy}"
    return ""


@dataclass(frozen=True)
class FrozenBase:
    """The frozen model under a job's adapter."""

    options: Adapter
    stored_bytes: int
    """Bytes of a frozen weight that is not packed."""
    compute_bytes: int

    @classmethod
    def of(cls, job: ResolvedJob) -> "FrozenBase | None":
        """Return the frozen model of a job; None if it trains all weights."""
        if job.config.adapter.kind == NONE:
            return None
        stored = job.saving.frozen_dtype or job.layout.training.dtype
        return cls(job.config.adapter, BYTES[stored], BYTES[job.model.compute_dtype])

    @property
    def is_packed(self) -> bool:
        return self.options.kind in QUANTIZED_MULTIPLES

    def adapted(self, sizes: Sizes) -> Sizes:
        """Return the adapted ones of a block's linear layers."""
        names = target_linears([f"layers.0.{name}" for name in sizes], self.options)
        return {name: sizes[name] for name in sizes if f"layers.0.{name}" in names}

    def factors(self, sizes: Sizes, tp: int) -> Iterator[tuple[str, float, float]]:
        """Yield the name, outputs and inputs of each adapted layer of a block on a tensor-parallel rank."""
        for name, (outputs, inputs) in self.adapted(sizes).items():
            side = split_side(name)
            yield name, outputs / (tp if side == 0 else 1), inputs / (tp if side == 1 else 1)

    def added(self, sizes: Sizes, tp: int) -> float:
        """Return the weights of a block's matrices A and B on a tensor-parallel rank."""
        return sum(self.options.rank * (outputs + inputs) for _, outputs, inputs in self.factors(sizes, tp))

    def frozen(self, sizes: Sizes, tp: int, other_parameters: float) -> FrozenBytes:
        """Return the bytes of a block's frozen weights on a tensor-parallel rank.

        `other_parameters`: their number in no linear layer's matrix.
        """
        packed, weights, unpacked = 0.0, other_parameters, 0.0
        adapted = self.adapted(sizes) if self.is_packed else {}
        for name, (outputs, inputs) in sizes.items():
            share = 1 / (tp if split_side(name) is not None else 1)
            if name in adapted:
                packed += packed_bytes(self.options.kind, outputs, inputs) * share
                unpacked += outputs * inputs * share
            else:
                weights += outputs * inputs * share
        return FrozenBytes(
            packed + self.stored_bytes * weights,
            packed + self.compute_bytes * weights,
            self.compute_bytes * unpacked,
        )
