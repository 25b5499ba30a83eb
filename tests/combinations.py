"""The table of combinations: every plan here trains equal to one device.

Each row is run on gloo ranks by test_combinations.py, which compares loss and every gradient with the plain model.
The README's feature matrix is made from it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Combination:
    ranks: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    accumulation: int = 1
    recompute: str = "none"  # none, full, op, 2 (every 2nd layer), memory_budget
    compile: str = "no"  # no, block, model
    precision: str = "float32"  # float32, float64, bfloat16 (mixed)
    loss_chunks: int = 1
    reshard: bool = True
    prefetch: int = 0
    cpu_offload: bool = False
    document_mask: bool = False
    model: str = "llama3"

    def __str__(self) -> str:
        default = Combination()
        parts = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k) and k != "ranks"]
        return f"{self.ranks}r " + " ".join(parts)


LAYOUTS = {
    "one rank": dict(ranks=1),
    "FSDP 2": dict(ranks=2, dp_shard=2),
    "DDP 2": dict(ranks=2, dp_replicate=2),
    "FSDP 4": dict(ranks=4, dp_shard=4),
    "HSDP 2x2": dict(ranks=4, dp_replicate=2, dp_shard=2),
}
RECOMPUTE = ("none", "full", "op", "2")


def table() -> list[Combination]:
    rows = []
    for name, layout in LAYOUTS.items():
        rows += [Combination(**layout, recompute=mode) for mode in RECOMPUTE]
        rows += [Combination(**layout, accumulation=2, recompute="2", loss_chunks=3)]
        rows += [Combination(**layout, precision="float64", recompute="full", accumulation=2, loss_chunks=2)]
        rows += [Combination(**layout, precision="bfloat16")]
        rows += [Combination(**layout, document_mask=True, recompute="op")]
        rows += [Combination(**layout, compile="block", recompute="2", accumulation=2)]
        if name != "FSDP 4":
            rows += [Combination(**layout, cpu_offload=True, recompute="2")]
    for layout in (LAYOUTS["one rank"], LAYOUTS["FSDP 2"], LAYOUTS["DDP 2"]):
        rows += [Combination(**layout, compile="block", recompute=mode) for mode in ("none", "full", "op")]
        rows += [Combination(**layout, compile="block", recompute="memory_budget")]
        rows += [Combination(**layout, compile="block", precision="bfloat16", document_mask=True, loss_chunks=2)]
        rows += [Combination(**layout, precision="bfloat16", recompute=mode) for mode in ("full", "op")]
    rows += [
        Combination(ranks=1, compile="model"),
        Combination(ranks=1, compile="model", accumulation=2, recompute="2"),
        Combination(ranks=1, compile="model", precision="bfloat16"),
        Combination(ranks=2, dp_replicate=2, compile="model"),
        Combination(ranks=4, dp_replicate=2, dp_shard=2, compile="block", recompute="memory_budget"),
        Combination(ranks=2, dp_shard=2, reshard=False),
        Combination(ranks=2, dp_shard=2, prefetch=2, recompute="full"),
        Combination(ranks=2, dp_shard=2, cpu_offload=True, accumulation=2, precision="bfloat16"),
        Combination(ranks=4, dp_replicate=2, dp_shard=2, reshard=False, prefetch=1, accumulation=2),
    ]
    for model in ("llama2", "llama3.1", "llama3.2"):
        rows += [Combination(ranks=2, dp_shard=2, model=model), Combination(ranks=2, dp_replicate=2, model=model)]
        rows += [Combination(ranks=1, model=model, compile="block", recompute="op")]
    return rows
