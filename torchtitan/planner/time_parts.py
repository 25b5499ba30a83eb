"""The parts of a step's time, and the factors that fit them to measurements. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

PARTS = {
    "products": "matrix products",
    "attention": "attention",
    "memory": "elementwise operations",
    "recompute": "recompute",
    "tp": "tensor parallel, exposed",
    "cp": "context parallel, exposed",
    "ep": "expert parallel, exposed",
    "bubble": "pipeline bubble",
    "fsdp": "FSDP and replicas, exposed",
    "optimizer": "optimizer",
}
"""Parts of a step's time, in the order of tables."""
FACTORS = ("products", "attention", "memory", "messages", "tp", "async_tp", "ring", "ep", "float8")
"""Names of the factors: products, attention, operations bound by memory, all messages, exposed messages of tensor and
expert parallel, attention over the keys of other ranks in a ring, and products in float8."""
ATTENTION_BACKWARD = 2.5
"""Products in the backward of a fused attention kernel relative to its forward: five and two."""


class Parts(dict[str, float]):
    """Seconds by what takes them; 0 for what does not."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def total(self) -> float:
        return sum(self.values())


@dataclass(frozen=True)
class Calibration:
    """Factors that fit the formula to measured steps."""

    factors: Mapping[str, float] = field(default_factory=dict)
    """Factors of the time of some of FACTORS, and of the computation of some hardware by its name; 1 for others."""
    spread: float = 0.35
    """Relative error of a step's time that a prediction's interval covers."""
    evidence: str = "assumed"
    is_published: bool = False
    """True if the spread is of published runs, which small models, short steps and long pipelines are unlike."""

    def factor(self, name: str) -> float:
        return self.factors.get(name, 1.0)


class Weights(NamedTuple):
    """Numbers of weights of a rank of tensor and expert parallel."""

    dense: float
    experts: float
    """FSDP spreads them over fewer ranks than the others, if they are spread by expert parallel."""


class BlockTime(NamedTuple):
    """Seconds of a block for one microbatch."""

    products: float
    """In forward. The gradients of the inputs take as much, and the gradients of the weights too."""
    attention: float
    moved: float
    """Operations that are bound by memory, in forward. Backward takes twice as much."""
    replay: float
    """What backward computes again."""
    waited: Parts
    """Messages that a rank waits for in forward and backward, by axis."""
    weights: Weights

    @property
    def parts(self) -> Parts:
        """Seconds of forward and backward by part."""
        return Parts(
            self.waited,
            products=3 * self.products,
            attention=(1 + ATTENTION_BACKWARD) * self.attention,
            memory=3 * self.moved,
            recompute=self.replay,
        )

    @property
    def forward(self) -> float:
        return self.products + self.attention + self.moved + sum(self.waited.values()) / 3

    @property
    def input_grad(self) -> float:
        return self.parts.total() - self.forward - self.products


@dataclass(frozen=True)
class StepTime:
    """The prediction of a step. `parts` add up to `seconds`."""

    parts: Parts
    mfu: float
    tokens_per_second: float
    """Of one GPU."""
    spread: float
    simulated: bool = False
    """True if the pipeline's bubble was simulated."""
    outside: str = ""
    """What no published row is like, if the interval is wider for it."""
    bubble: float = 0.0
    """Share of the step that a pipeline's slowest rank idles."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def low(self) -> float:
        return self.seconds / (1 + self.spread)

    @property
    def high(self) -> float:
        return self.seconds * (1 + self.spread)

    @property
    def bound_by(self) -> str:
        """Name of the largest part next to products and attention; "products" if it is under a tenth of the step."""
        overhead = {name: seconds for name, seconds in self.parts.items() if name not in ("products", "attention")}
        name = max(overhead, key=lambda part: overhead[part], default="products")
        return name if overhead.get(name, 0.0) >= 0.1 * self.seconds else "products"
