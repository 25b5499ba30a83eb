"""The rows of the table of combinations for optimizers: every optimizer under every kind of plan.

test_optimizer_plans.py runs them on gloo ranks and compares the weights after three steps with the plain model's.
AdamWBF16, which needs weights in bfloat16, is compared bit for bit in test_moments.py.
"""

from typing import Any

from tests.plans.combinations import COMPOSED, EXPERT_LAYOUTS, LAYOUTS, Combination

LOW = dict(rank=4, update_gap=2, scale=1.0)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {}),
    "SGD": ("SGD", dict(momentum=0.9)),
    "Lion": ("Lion", {}),
    "Adafactor": ("Adafactor", dict(beta1=0.9)),
    "AdamW8bit": ("AdamW8bit", {}),
    "Muon": ("Muon", dict(precision="float32")),
    "GaLore": ("GaLore", LOW),
    "GaLore (right)": ("GaLore", LOW | dict(side="right", formula="galore_torch")),
    "GaLore (flip)": ("GaLore", LOW | dict(on_conflict="flip", formula="galore_torch")),
    "GaLore (reverse_std)": ("GaLore", LOW | dict(side="reverse_std", basis="svd", state_on_refresh="rotate")),
    "GaLore (full, 8 bits)": ("GaLore", LOW | dict(side="full", inner="adamw_8bit", basis="rsvd")),
    "GaLore (Adafactor)": ("GaLore", LOW | dict(inner="adafactor", basis="power", stagger=True)),
    "GaLore (8 bits)": ("GaLore", LOW | dict(rank=2, inner="adamw_8bit")),
    "Fira": ("GaLore", LOW | dict(residual="fira")),
    "APOLLO": ("APOLLO", LOW),
    "APOLLO-Mini": ("APOLLO", dict(rank=1, per="tensor", scale=11.3)),
}
"""What a row may name -> optimizer and its options."""
FLIPPED, LARGE = "GaLore (flip)", ("AdamW8bit", "Muon", "GaLore", "GaLore (full, 8 bits)", "Fira")
FOUR_SHARDS = ("AdamW8bit", "Muon", "GaLore", "Fira")
"""One that steps in a shard, in blocks of it, and those that gather the matrix, or its norms."""


def optimizers() -> list[Combination]:
    """Return the rows of all optimizers."""
    exact, rows = dict(precision="float64"), []
    for kind in KINDS:
        plans = [*(LAYOUTS[name] for name in ("FSDP 2", "DDP 2")), *(COMPOSED[name] for name in ("TP 2", "PP 2"))]
        rows += [Combination(**plan, **exact, optimizer=kind) for plan in plans if kind != FLIPPED]
    for kind in LARGE:
        larger = LAYOUTS["HSDP 2x2"], COMPOSED["FSDP 2 x TP 2"]
        rows += [Combination(**plan, **exact, optimizer=kind) for plan in larger]
    rows += [Combination(**LAYOUTS["FSDP 4"], **exact, optimizer=kind) for kind in FOUR_SHARDS]
    rows += [Combination(**LAYOUTS["FSDP 2"], **exact, optimizer=FLIPPED)]
    rows += [Combination(**LAYOUTS["FSDP 2"], **exact, optimizer="GaLore", accumulation=4)]
    for kind in ("AdamW8bit", "Muon", "GaLore"):
        rows += [Combination(**COMPOSED["CP 2"], **exact, optimizer=kind)]
        rows += [Combination(**EXPERT_LAYOUTS["FSDP 2"], **exact, optimizer=kind, model="deepseek")]
    for layout in (LAYOUTS["FSDP 2"], COMPOSED["TP 2"]):
        rows += [Combination(**layout, **exact, optimizer="GaLore (8 bits)", adapter="lora")]
        rows += [Combination(**layout, **exact, optimizer="Muon", adapter="lora")]
    return rows
