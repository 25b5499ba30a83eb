"""The table of combinations: every plan here trains equal to one device.

Each row is run on gloo ranks by test_combinations.py, which compares loss and every gradient with the plain model.
docs/features.md and docs/combinations.md are made from it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

DROPPING = ("gpt2", "granite", "gpt_neox", "gptj", "phi", "seed_oss", "starcoder2", "classifier")
"""Models with dropout."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A job's layout and options, run by one row of the table."""

    ranks: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    method: str = "allgather"  # rotate method of context parallel
    balance: bool = True
    sequence_parallel: bool = True
    loss_parallel: bool = True
    schedule: str = "1F1B"
    overlap: bool = False  # overlap the all-to-alls of expert parallel
    microbatch_size: int = 2  # samples a microbatch of a pipeline; 1 gives more of them than fill the pipeline
    accumulation: int = 1
    recompute: str = "none"  # none, full, op, 2 (every 2nd layer), memory_budget
    compile: str = "no"  # no, block, model
    float8: str = "none"  # none, tensorwise, rowwise: type of the products in linears
    qat: str = "none"  # formats of weights and inputs of linears in quantization-aware training, as "int4 int8"
    precision: str = "float64"  # float64, float32 (one row a layout), bfloat16 (mixed)
    loss_chunks: int = 1
    reshard: bool = True
    second_shards: int = 0  # ranks that share a second copy of the parameters for backward
    prefetch: int = 0
    cpu_offload: bool = False
    gather_int8: bool = False
    reduce_bits: int = 0
    document_mask: bool = False
    multi_token_prediction: int = 0  # depths
    noise: bool = False  # on embeddings, in training
    rope: str = "plain"  # a kind of rope_scaling
    groups: bool = False  # attention inside groups, in training
    adapter: str = "none"  # trained instead of the model's own parameters (tests/support/adapted.py)
    optimizer: str = "none"  # takes steps, in the rows of tests/plans/combinations_optimizers.py
    model: str = "llama3"
    task: str = "pretrain"

    def __str__(self) -> str:
        default = Combination()
        parts = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k) and k != "ranks"]
        return f"{self.ranks}r " + " ".join(parts)

    @property
    def layout(self) -> tuple[int, ...]:
        """The parallel degrees of all axes."""
        return self.dp_replicate, self.dp_shard, self.cp, self.tp, self.pp, self.ep

    @property
    def layers(self) -> int:
        """Number of layers: enough for two stages a rank, and one more that makes the cut uneven."""
        return 3 if self.pp == 1 else 2 * self.pp + 1

    @property
    def remembers(self) -> bool:
        """True if a batch is read with a cache of the previous one, row by row."""
        return "neurocache" in self.adapter

    @property
    def backend(self) -> str:
        """The compiler's backend: kernels (inductor), which takes half a minute, or tracing and autograd only.

        A memory budget for recompute needs a backend that partitions the graph.
        """
        plain = self.model == "llama3" and self.adapter == "none"
        if (self.recompute == "memory_budget" and self.ranks == 1) or (self.compile == "model" and plain):
            return "inductor"
        return "aot_eager_decomp_partition" if self.recompute == "memory_budget" else "aot_eager"

    @property
    def evaluated(self) -> bool:
        """True if the loss in evaluation is compared too.

        Not for compiled rows, as a second compilation takes long, nor for dropout, noise and groups, which act in
        training only. Layouts with many rows are evaluated only in rows without recompute, which has no effect.
        """
        rare = self.pp > 2 or self.ep > 1 or self.precision == "bfloat16" or self.cpu_offload
        drops = self.model in DROPPING or "dropout" in self.adapter or self.noise or self.groups
        return self.compile == "no" and not (drops or self.remembers) and (rare or self.recompute == "none")


LAYOUTS = {
    "one rank": dict(ranks=1),
    "FSDP 2": dict(ranks=2, dp_shard=2),
    "DDP 2": dict(ranks=2, dp_replicate=2),
    "FSDP 4": dict(ranks=4, dp_shard=4),
    "HSDP 2x2": dict(ranks=4, dp_replicate=2, dp_shard=2),
}
RECOMPUTE = ("none", "full", "op", "2")


METHODS = ("allgather", "ring", "alltoall", "ulysses")
SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
COMPOSED = {
    "TP 2": dict(ranks=2, tp=2),
    "CP 2": dict(ranks=2, cp=2),
    "PP 2": dict(ranks=2, pp=2),
    "FSDP 2 x TP 2": dict(ranks=4, dp_shard=2, tp=2),
    "FSDP 2 x CP 2": dict(ranks=4, dp_shard=2, cp=2),
    "PP 2 x FSDP 2": dict(ranks=4, pp=2, dp_shard=2),
    "PP 2 x TP 2": dict(ranks=4, pp=2, tp=2),
    "PP 2 x CP 2": dict(ranks=4, pp=2, cp=2),
    "CP 2 x TP 2": dict(ranks=4, cp=2, tp=2),
    "DDP 2 x TP 2": dict(ranks=4, dp_replicate=2, tp=2),
    "PP 2 x DDP 2": dict(ranks=4, pp=2, dp_replicate=2),
}
EIGHT = {
    "PP 2 x FSDP 2 x TP 2": dict(ranks=8, pp=2, dp_shard=2, tp=2),
    "PP 2 x CP 2 x TP 2": dict(ranks=8, pp=2, cp=2, tp=2),
    "PP 2 x HSDP 2x2": dict(ranks=8, pp=2, dp_replicate=2, dp_shard=2),
    "FSDP 2 x CP 2 x TP 2": dict(ranks=8, dp_shard=2, cp=2, tp=2),
    "HSDP 2x2 x TP 2": dict(ranks=8, dp_replicate=2, dp_shard=2, tp=2),
    "PP 4 x FSDP 2": dict(ranks=8, pp=4, dp_shard=2),
    "PP 2 x FSDP 2 x CP 2": dict(ranks=8, pp=2, dp_shard=2, cp=2),
    "PP 2 x DDP 2 x TP 2": dict(ranks=8, pp=2, dp_replicate=2, tp=2),
    "PP 2 x DDP 2 x CP 2": dict(ranks=8, pp=2, dp_replicate=2, cp=2),
    "DDP 2 x CP 2 x TP 2": dict(ranks=8, dp_replicate=2, cp=2, tp=2),
    "HSDP 2x2 x CP 2": dict(ranks=8, dp_replicate=2, dp_shard=2, cp=2),
    "PP 2 x FSDP 2 x CP 2 x TP 2": dict(ranks=16, pp=2, dp_shard=2, cp=2, tp=2),
}


OFFLOADED = ("FSDP 2 x TP 2", "FSDP 2 x CP 2")


def table() -> list[Combination]:
    """Return all rows of the table."""
    rows = data_parallel() + tensor_and_context_parallel() + pipelines() + experts() + eight_ranks() + adapters()
    rows += float8() + gpt2() + roberta() + neurocache() + embedding_noise() + rope_scaling() + group_attention()
    rows += windows_of_some_layers() + gated_families() + with_states() + rewards() + fake_quantization()
    return once_in_float32(dict.fromkeys(row if row.pp > 1 else replace(row, microbatch_size=2) for row in rows))


def once_in_float32(rows: Iterable[Combination]) -> list[Combination]:
    """Return the rows with the first in float64 of each layout in float32, if the layout has several.

    In float32 too: whole models that the compiler turns into kernels. Its kernels for float64 are exact to 1e-9 only.
    """
    by_layout: dict[tuple[int, ...], list[Combination]] = {}
    for row in rows:
        if row.compile == "model" and row.backend == "inductor" and row.precision == "float64":
            row = replace(row, precision="float32")
        by_layout.setdefault(row.layout, []).append(row)
    for layout_rows in by_layout.values():
        index = next(i for i, row in enumerate(layout_rows) if row.precision == "float64")
        if len(layout_rows) > 1:
            layout_rows[index] = replace(layout_rows[index], precision="float32")
    return [row for layout_rows in by_layout.values() for row in layout_rows]


def quantized_collectives() -> list[Combination]:
    """Rows with parameters gathered in int8 and gradients reduced in int8 or int4, under every plan that may have it.

    With experts gradients alone: with weights in int8 a router chooses others for some tokens, which a rule refuses.
    """
    gathers, reduces = dict(gather_int8=True), dict(reduce_bits=8)
    both = gathers | reduces
    return [
        *(Combination(**LAYOUTS["FSDP 2"], **options) for options in (gathers, reduces, both, dict(reduce_bits=4))),
        Combination(**LAYOUTS["FSDP 2"], **both, recompute="full", accumulation=2, precision="bfloat16"),
        Combination(**LAYOUTS["FSDP 2"], **both, recompute="op", cpu_offload=True, prefetch=2),
        Combination(**LAYOUTS["FSDP 2"], **both, compile="block", reshard=False),
        Combination(**LAYOUTS["FSDP 4"], **both, second_shards=2, recompute="2", accumulation=2),
        Combination(**LAYOUTS["HSDP 2x2"], **both, accumulation=2),
        Combination(**COMPOSED["FSDP 2 x CP 2"], **both, second_shards=2),
        Combination(**COMPOSED["PP 2 x FSDP 2"], **both, model="llama3.2", schedule="ZBVZeroBubble"),
        Combination(**COMPOSED["FSDP 2 x TP 2"], **both, model="llama3.2"),
        Combination(**COMPOSED["FSDP 2 x TP 2"], **both, sequence_parallel=False, recompute="op"),
        Combination(**EXPERT_LAYOUTS["FSDP 4"], **reduces, second_shards=2, model="deepseek"),
        Combination(ranks=8, dp_replicate=2, dp_shard=4, **both, second_shards=2),
    ]


def tensor_and_context_parallel() -> list[Combination]:
    """Rows with tensor parallel, context parallel and both."""
    rows = []
    for name in ("TP 2", "FSDP 2 x TP 2", "CP 2", "FSDP 2 x CP 2", "CP 2 x TP 2"):
        layout = COMPOSED[name]
        rows += [Combination(**layout, recompute=mode) for mode in RECOMPUTE]
        rows += [Combination(**layout, accumulation=2, recompute="2", loss_chunks=3)]
        rows += [Combination(**layout, microbatch_size=1, recompute="full", loss_chunks=2, document_mask=True)]
        rows += [Combination(**layout, precision="bfloat16")]
        rows += [Combination(**layout, compile="block")] if layout["ranks"] > 2 else []
    for layout in (COMPOSED["TP 2"], COMPOSED["FSDP 2 x TP 2"]):
        rows += [Combination(**layout, sequence_parallel=False)]
        rows += [Combination(**layout, loss_parallel=False, loss_chunks=2)]
        rows += [Combination(**layout, sequence_parallel=False, loss_parallel=False, microbatch_size=1)]
        rows += [Combination(**layout, model=model) for model in ("llama3.2", "mistral", "qwen2", "qwen3")]
    rows += [Combination(**COMPOSED["TP 2"], compile="block", recompute=mode) for mode in ("full", "op")]
    rows += [Combination(**COMPOSED["CP 2"], compile="block", recompute="memory_budget")]
    rows += [Combination(ranks=4, tp=4, model="llama2"), Combination(ranks=4, dp_replicate=2, tp=2)]
    rows += [Combination(**COMPOSED[name], cpu_offload=True, recompute="2") for name in OFFLOADED]
    for method in METHODS:
        for balance in (True, False):
            rows += [Combination(ranks=2, cp=2, method=method, balance=balance, microbatch_size=1)]
        rows += [Combination(ranks=2, cp=2, method=method, document_mask=True, recompute="op")]
        rows += [Combination(ranks=2, cp=2, method=method, recompute="full", precision="bfloat16")]
        rows += [Combination(ranks=4, cp=4, method=method, document_mask=True)]
        rows += [Combination(ranks=4, dp_shard=2, cp=2, method=method, accumulation=2)]
        rows += [Combination(ranks=4, dp_replicate=2, cp=2, method=method)]
        rows += [Combination(ranks=4, cp=2, tp=2, method=method, document_mask=True, microbatch_size=1)]
    rows += [Combination(ranks=2, cp=2, method="ulysses", compile="block")]
    return list(dict.fromkeys(rows))


def pipelines() -> list[Combination]:
    """Rows with pipelines of every schedule, on two and four ranks, alone and with other axes."""
    rows = []
    for schedule in SCHEDULES:
        pp2 = dict(ranks=2, pp=2, schedule=schedule)
        rows += [Combination(**pp2, recompute=mode) for mode in RECOMPUTE]
        rows += [Combination(**pp2, microbatch_size=1, accumulation=2, loss_chunks=2, document_mask=True)]
        rows += [Combination(**pp2, precision="bfloat16", recompute="full")]
        rows += [Combination(**pp2, model="llama3.2")]
        rows += [Combination(ranks=4, pp=4, schedule=schedule, recompute="full")]
        for name in ("PP 2 x FSDP 2", "PP 2 x TP 2", "PP 2 x CP 2", "PP 2 x DDP 2"):
            rows += [Combination(**COMPOSED[name], schedule=schedule)]
        rows += [Combination(**COMPOSED["PP 2 x FSDP 2"], schedule=schedule, recompute="op", precision="bfloat16")]
        rows += [Combination(**COMPOSED["PP 2 x TP 2"], schedule=schedule, recompute="full", microbatch_size=1)]
    rows += [Combination(**COMPOSED["PP 2"], schedule=s, compile="block") for s in ("1F1B", "Interleaved1F1B")]
    rows += [Combination(**COMPOSED["PP 2 x FSDP 2"], cpu_offload=True, schedule=s) for s in ("1F1B", "DualPipeV")]
    rows += [Combination(**COMPOSED["PP 2 x TP 2"], compile="block", recompute="full")]
    rows += [Combination(**COMPOSED["PP 2"], compile="block", recompute="memory_budget")]
    rows += [Combination(**COMPOSED["PP 2 x FSDP 2"], compile="block", schedule="Interleaved1F1B")]
    rows += [Combination(**COMPOSED["PP 2 x FSDP 2"], model="llama3.2", schedule=s) for s in ("1F1B", "ZBVZeroBubble")]
    rows += [Combination(**COMPOSED["PP 2 x TP 2"], model="llama3.2", accumulation=2)]
    rows += [Combination(**COMPOSED["PP 2"], model="qwen3", schedule=s) for s in ("1F1B", "DualPipeV")]
    rows += [Combination(**COMPOSED[name], model="qwen2") for name in ("PP 2", "CP 2")]
    rows += [Combination(**COMPOSED["CP 2"], model="qwen3", method=method) for method in ("allgather", "ulysses")]
    windowed = dict(model="mistral", microbatch_size=1)
    rows += [Combination(ranks=2, cp=2, method="allgather", balance=b, **windowed) for b in (True, False)]
    rows += [
        Combination(**COMPOSED["CP 2"], method=m, document_mask=True, **windowed) for m in ("allgather", "ulysses")
    ]
    rows += [Combination(**COMPOSED["CP 2"], model="mistral", recompute=mode) for mode in ("full", "op")]
    rows += [Combination(**COMPOSED[name], model="mistral") for name in ("PP 2", "FSDP 2 x CP 2", "PP 2 x TP 2")]
    for schedule in ("1F1B", "ZBVZeroBubble"):
        rows += [Combination(**COMPOSED["PP 2 x FSDP 2"], schedule=schedule, accumulation=2, recompute="full")]
        rows += [Combination(**COMPOSED["PP 2 x DDP 2"], schedule=schedule, accumulation=2)]
        rows += [Combination(**COMPOSED["PP 2 x TP 2"], schedule=schedule, sequence_parallel=False)]
    return rows


MOE = ("deepseek", "qwen3_moe")
EXPERT_LAYOUTS = {
    "FSDP 2": dict(ranks=2, dp_shard=2, ep=2),
    "CP 2": dict(ranks=2, cp=2, ep=2),
    "TP 2": dict(ranks=2, tp=2, ep=2),
    "FSDP 4": dict(ranks=4, dp_shard=4, ep=2),
    "all of FSDP 4": dict(ranks=4, dp_shard=4, ep=4),
    "HSDP 2x2": dict(ranks=4, dp_replicate=2, dp_shard=2, ep=2),
    "FSDP 2 x TP 2": dict(ranks=4, dp_shard=2, tp=2, ep=2),
    "FSDP 2 x CP 2": dict(ranks=4, dp_shard=2, cp=2, ep=4),
    "PP 2 x FSDP 2": dict(ranks=4, pp=2, dp_shard=2, ep=2),
    "PP 2 x TP 2": dict(ranks=4, pp=2, tp=2, ep=2),
    "TP 4, two copies": dict(ranks=4, tp=4, ep=2),
}


def experts() -> list[Combination]:
    """Rows with expert parallel, in every layout and schedule."""
    rows = []
    for model in MOE:
        rows += [Combination(ranks=1, model=model, recompute=mode) for mode in RECOMPUTE]
        compiled = dict(model=model, compile="block", recompute="full" if model == "qwen3_moe" else "none")
        rows += [Combination(**compiled), Combination(**EXPERT_LAYOUTS["FSDP 2"], **compiled)]
        rows += [Combination(**LAYOUTS[name], model=model) for name in ("FSDP 2", "DDP 2", "HSDP 2x2")]
        rows += [Combination(**COMPOSED[name], model=model) for name in ("TP 2", "CP 2", "PP 2", "FSDP 2 x TP 2")]
        for layout in EXPERT_LAYOUTS.values():
            if model == "deepseek" or layout.get("tp") != 4:  # the small Qwen has 2 key/value heads
                rows += [Combination(**layout, model=model, microbatch_size=1, document_mask=True, loss_chunks=2)]
        for mode in ("full", "op"):
            rows += [Combination(**EXPERT_LAYOUTS["FSDP 2"], model=model, recompute=mode, accumulation=2)]
        rows += [Combination(ranks=2, tp=2, sequence_parallel=False, model=model)]
    for name in ("CP 2", "TP 2", "PP 2 x FSDP 2"):
        rows += [Combination(**EXPERT_LAYOUTS[name], model="deepseek", compile="block", recompute="2", accumulation=2)]
    rows += multi_token()
    layout = EXPERT_LAYOUTS["PP 2 x FSDP 2"] | dict(model="deepseek", microbatch_size=1)
    for schedule in SCHEDULES:
        rows += [Combination(**layout, schedule=schedule, recompute=mode) for mode in ("none", "full", "op")]
        twice = 1 if schedule == "DualPipeV" else 2  # DualPipeV needs all the microbatches in one pass
        rows += [Combination(**layout, schedule=schedule, overlap=True, accumulation=twice)]
    for mode in ("full", "full_keep_comm", "op", "2"):
        rows += [Combination(**layout, schedule="DualPipeV", overlap=True, recompute=mode)]
    overlap = dict(schedule="DualPipeV", overlap=True, document_mask=True, loss_chunks=2)
    rows += [Combination(**EXPERT_LAYOUTS["PP 2 x TP 2"], **overlap, model="qwen3_moe", recompute="full_keep_comm")]
    rows += [Combination(**EXPERT_LAYOUTS["PP 2 x TP 2"], **overlap, model="deepseek", microbatch_size=1)]
    rows += [Combination(ranks=4, pp=2, cp=2, ep=2, **overlap, model="qwen3_moe", recompute="full")]
    return rows + families_with_experts()


def families_with_experts() -> list[Combination]:
    """Rows of the families that share the decoder of those above: what differs between them, under every axis."""
    rows = []
    for model in ("mixtral", "qwen2_moe", "glm4_moe", "gpt_oss"):
        exact = dict(model=model, microbatch_size=1, document_mask=True)
        rows += [Combination(**EXPERT_LAYOUTS[name], **exact) for name in ("FSDP 2", "CP 2", "TP 2", "HSDP 2x2")]
        rows += [Combination(**COMPOSED["TP 2"], model=model, sequence_parallel=False, recompute="op")]
        overlap = dict(schedule="DualPipeV", overlap=True)
        rows += [Combination(**EXPERT_LAYOUTS["PP 2 x FSDP 2"], **exact, **overlap)]
        rows += [Combination(**EXPERT_LAYOUTS["FSDP 2"], model=model, adapter="lora", recompute="full")]
    # fewer experts than shards
    rows += [
        Combination(ranks=8, dp_shard=4, cp=2, model="mixtral", accumulation=2, recompute="full", adapter=adapter)
        for adapter in ("none", "lora")
    ]
    rows += [Combination(ranks=8, dp_shard=8, model="mixtral")]
    for model in ("glm4_moe_lite", "mistral4", "minimax_m2", "afmoe", "gemma4_moe"):
        exact = dict(model=model, microbatch_size=1)
        rows += [Combination(**LAYOUTS["DDP 2"], **exact), Combination(**COMPOSED["PP 2"], **exact)]
        rows += [
            Combination(**EXPERT_LAYOUTS[name], **exact, document_mask=True) for name in ("FSDP 2", "CP 2", "TP 2")
        ]
        rows += [Combination(**EXPERT_LAYOUTS["FSDP 2"], model=model, adapter="lora", recompute="full")]
    return rows + attention_sinks() + attention_in_chunks()


def attention_in_chunks() -> list[Combination]:
    """Rows of Llama 4, whose chunks begin again in each document and cross the borders of ranks."""
    exact = dict(model="llama4", microbatch_size=1, document_mask=True)
    rows = [Combination(**EXPERT_LAYOUTS[name], **exact) for name in ("FSDP 2", "TP 2")]
    rows += [Combination(**LAYOUTS["DDP 2"], model="llama4"), Combination(**COMPOSED["PP 2"], **exact)]
    rows += [Combination(**COMPOSED["CP 2"], **exact, method=method) for method in ("allgather", "ulysses")]
    return rows + [Combination(**EXPERT_LAYOUTS["FSDP 2"], model="llama4", adapter="lora", recompute="full")]


def attention_sinks() -> list[Combination]:
    """Rows of gpt-oss with attention that others compute in other ways: by regions, by heads, compiled, split."""
    rows = [Combination(**COMPOSED["CP 2"], model="gpt_oss", method=method) for method in ("allgather", "ulysses")]
    rows += [Combination(ranks=1, model="gpt_oss", compile="block", document_mask=True, recompute="full")]
    rows += [Combination(**EXPERT_LAYOUTS["TP 2"], model="gpt_oss", compile="block")]
    rows += [Combination(**COMPOSED["PP 2"], model="gpt_oss", schedule="ZBVZeroBubble")]
    rows += [Combination(**LAYOUTS["DDP 2"], model="gpt_oss", precision="bfloat16")]
    return rows + [Combination(**EXPERT_LAYOUTS["PP 2 x TP 2"], model="gpt_oss", recompute="op")]


def multi_token() -> list[Combination]:
    """Rows with multi-token prediction."""
    one, two = (dict(model="deepseek", multi_token_prediction=depths) for depths in (1, 2))
    exact = dict(microbatch_size=1, document_mask=True, loss_chunks=2)
    rows = [Combination(**one, recompute=mode) for mode in ("full", "2")]
    rows += [Combination(**two, **exact, recompute="op", accumulation=2)]
    rows += [Combination(**one, compile="model", accumulation=2)]
    rows += [Combination(**LAYOUTS["FSDP 2"], **one, recompute="full", accumulation=2)]
    rows += [Combination(**LAYOUTS["FSDP 2"], **two, recompute="op", prefetch=2, cpu_offload=True)]
    rows += [Combination(**LAYOUTS["DDP 2"], **two, microbatch_size=1, accumulation=2)]
    rows += [Combination(**LAYOUTS["HSDP 2x2"], **one, accumulation=2)]
    rows += [Combination(**EXPERT_LAYOUTS["FSDP 2"], **two, **exact)]
    rows += [Combination(**EXPERT_LAYOUTS["FSDP 2"], **one, compile="block", loss_chunks=2)]
    rows += [Combination(**EXPERT_LAYOUTS["FSDP 4"], **one, recompute=mode) for mode in ("full", "op")]
    return rows


def adapters() -> list[Combination]:
    return (
        scale_adapters()
        + low_rank_adapters()
        + trained_scale()
        + factors_only()
        + dora_adapters()
        + adapter_dropout()
        + quantized_bases()
        + partial_training()
        + frozen_in_bfloat16()
    )


def frozen_in_bfloat16() -> list[Combination]:
    """Rows with frozen weights in bfloat16 and trained ones in float32, as every mixed row with an adapter has them."""
    narrow, lora = dict(precision="bfloat16", microbatch_size=1), dict(precision="bfloat16", adapter="lora")
    rows = [Combination(**LAYOUTS["HSDP 2x2"], **lora), Combination(**LAYOUTS["FSDP 2"], **lora, cpu_offload=True)]
    rows += [Combination(**LAYOUTS["FSDP 2"], **lora, accumulation=2, recompute="op", compile="block")]
    rows += [Combination(**COMPOSED[name], **lora) for name in ("CP 2", "FSDP 2 x TP 2", "PP 2", "PP 2 x FSDP 2")]
    rows += [Combination(**layout, **narrow, adapter="dora") for layout in (LAYOUTS["one rank"], COMPOSED["TP 2"])]
    for adapter in ("unfrozen", "unfrozen, last"):
        rows += [Combination(**layout, **narrow, adapter=adapter) for layout in (LAYOUTS["FSDP 2"], COMPOSED["PP 2"])]
    return rows + [Combination(**COMPOSED["TP 2"], **narrow, adapter="qlora", model="mistral")]


def partial_training() -> list[Combination]:
    """Rows that train some of the model's own parameters: some of each module, or none in some pipeline stages."""
    first_part, last = (dict(adapter=name, microbatch_size=1) for name in ("unfrozen", "unfrozen, last"))
    rows = [Combination(**LAYOUTS["FSDP 2"], **row_options, recompute="full") for row_options in (first_part, last)]
    rows += [
        Combination(**COMPOSED["TP 2"], **first_part),
        Combination(**COMPOSED["TP 2"], **last, sequence_parallel=False),
    ]
    rows += [Combination(**COMPOSED["PP 2"], **first_part, schedule=schedule) for schedule in ("1F1B", "ZBVZeroBubble")]
    rows += [Combination(**COMPOSED["PP 2"], **last)]
    return rows


def scale_adapters() -> list[Combination]:
    """Rows with an adapter of one number a block, which cover the paths that its gradient takes."""
    scale, exact = dict(adapter="scale"), dict(adapter="scale", microbatch_size=1)
    rows = [Combination(**LAYOUTS[name], **exact) for name in ("one rank", "FSDP 2", "DDP 2")]
    rows += [Combination(**LAYOUTS["FSDP 2"], **scale, recompute=mode, accumulation=2) for mode in ("full", "op", "2")]
    rows += [Combination(**LAYOUTS["FSDP 2"], **scale, cpu_offload=True)]
    rows += [Combination(**layout, **scale, compile="block") for layout in (LAYOUTS["one rank"], COMPOSED["TP 2"])]
    rows += [Combination(**COMPOSED[name], **exact) for name in ("TP 2", "CP 2", "PP 2")]
    rows += [Combination(**COMPOSED["TP 2"], **exact, sequence_parallel=False)]
    rows += [Combination(**COMPOSED["PP 2"], **exact, model="llama3.2", schedule=s) for s in ("1F1B", "ZBVZeroBubble")]
    rows += [Combination(**COMPOSED["PP 2 x FSDP 2"], **scale, schedule="DualPipeV", recompute="full")]
    overlap = dict(schedule="DualPipeV", overlap=True, model="deepseek")
    rows += [Combination(**EXPERT_LAYOUTS["PP 2 x FSDP 2"], **exact, **overlap, recompute="op")]
    return rows


def low_rank_adapters() -> list[Combination]:
    """Rows with LoRA."""
    lora, exact = dict(adapter="lora"), dict(adapter="lora", microbatch_size=1)
    rows = [Combination(**LAYOUTS[name], **exact) for name in ("one rank", "FSDP 2", "DDP 2", "HSDP 2x2")]
    rows += [Combination(**LAYOUTS["FSDP 2"], **lora, recompute=mode, accumulation=2) for mode in ("full", "op", "2")]
    rows += [Combination(**LAYOUTS[name], **lora, precision="bfloat16") for name in ("one rank", "FSDP 2", "DDP 2")]
    rows += [Combination(**LAYOUTS["FSDP 2"], **lora, cpu_offload=True, prefetch=2)]
    rows += [Combination(**LAYOUTS[name], **lora, compile="block", recompute="2") for name in ("one rank", "FSDP 2")]
    for layout in (COMPOSED["TP 2"], COMPOSED["FSDP 2 x TP 2"]):
        rows += [Combination(**layout, **exact, loss_chunks=2), Combination(**layout, **lora, sequence_parallel=False)]
    rows += [Combination(**COMPOSED["TP 2"], **lora, recompute=mode) for mode in ("full", "op")]
    rows += [Combination(**COMPOSED["TP 2"], **lora, precision="bfloat16", model="llama3.2")]
    rows += [Combination(**COMPOSED["TP 2"], **lora, loss_parallel=False, model="llama3.2")]
    rows += [Combination(ranks=2, cp=2, **exact, method=method, document_mask=True) for method in METHODS]
    # biases of queries, keys and values, in every kind of adapted linear
    rows += [Combination(**COMPOSED["TP 2"], adapter=kind, model="qwen2") for kind in ("lora", "dora", "qlora")]
    rows += [Combination(**COMPOSED["CP 2 x TP 2"], **lora)]
    for schedule in SCHEDULES:
        rows += [Combination(**COMPOSED["PP 2"], **exact, schedule=schedule)]
    rows += [Combination(**COMPOSED["PP 2"], **lora, schedule=s, recompute="full") for s in ("1F1B", "DualPipeV")]
    rows += [Combination(**COMPOSED["PP 2"], **lora, model="llama3.2", schedule=s) for s in ("1F1B", "ZBVZeroBubble")]
    rows += [Combination(**COMPOSED["PP 2 x FSDP 2"], **exact, schedule="ZBVZeroBubble")]
    rows += [Combination(**COMPOSED["PP 2 x TP 2"], **lora, schedule="DualPipeV")]
    for model in MOE:
        rows += [Combination(ranks=1, **lora, model=model, compile="block")]
        rows += [Combination(**LAYOUTS["FSDP 2"], **exact, model=model)]
        rows += [Combination(**EXPERT_LAYOUTS[name], **exact, model=model) for name in ("FSDP 2", "CP 2", "TP 2")]
        rows += [Combination(**COMPOSED["TP 2"], **lora, model=model, sequence_parallel=False)]
    rows += [Combination(**EXPERT_LAYOUTS["FSDP 2"], **lora, model="deepseek", recompute="full", accumulation=2)]
    rows += [Combination(**EXPERT_LAYOUTS["FSDP 4"], **exact, model="deepseek")]
    overlap = dict(schedule="DualPipeV", overlap=True, model="deepseek")
    rows += [Combination(**EXPERT_LAYOUTS["PP 2 x FSDP 2"], **exact, **overlap)]
    rows += [Combination(**EXPERT_LAYOUTS["PP 2 x TP 2"], **lora, **overlap, recompute="full_keep_comm")]
    one_a = dict(adapter="lora, one A", microbatch_size=1)
    rows += [Combination(**EXPERT_LAYOUTS[name], **one_a, model="qwen3_moe") for name in ("FSDP 4", "CP 2", "TP 2")]
    rows += [Combination(**LAYOUTS["FSDP 2"], **one_a, model="gpt_oss", recompute="op")]
    return rows + [Combination(**EXPERT_LAYOUTS["PP 2 x FSDP 2"], **one_a, **overlap)]


def trained_scale() -> list[Combination]:
    """Rows with one trained scale for each linear; tensor-parallel ranks have parts of its gradient."""
    options = dict(adapter="lora, tanh(s)", microbatch_size=1)
    rows = [Combination(**LAYOUTS[name], **options) for name in ("FSDP 2", "DDP 2")]
    rows += [Combination(**COMPOSED[name], **options) for name in ("TP 2", "PP 2")]
    rows += [Combination(**COMPOSED["TP 2"], **options, sequence_parallel=False, recompute="full", compile="block")]
    return rows


def factors_only() -> list[Combination]:
    """Rows with linears that consist of A and B only, without a frozen matrix."""
    options = dict(adapter="lora only", microbatch_size=1)
    rows = [Combination(**LAYOUTS[name], **options) for name in ("one rank", "FSDP 2", "DDP 2")]
    rows += [Combination(**COMPOSED[name], **options) for name in ("TP 2", "CP 2", "PP 2")]
    rows += [Combination(**COMPOSED["TP 2"], **options, model="deepseek", sequence_parallel=False, recompute="op")]
    rows += [Combination(**LAYOUTS["FSDP 2"], adapter="lora only", precision="bfloat16", recompute="full")]
    rows += [Combination(ranks=1, adapter="lora only", compile="block")]
    return rows


def dora_adapters() -> list[Combination]:
    """Rows with DoRA, which takes norms of full rows; a rank may hold parts of rows."""
    dora, exact = dict(adapter="dora"), dict(adapter="dora", microbatch_size=1)
    rows = [Combination(**LAYOUTS[name], **exact) for name in ("one rank", "FSDP 2", "DDP 2")]
    rows += [Combination(**COMPOSED[name], **exact) for name in ("TP 2", "PP 2", "FSDP 2 x TP 2")]
    rows += [Combination(**COMPOSED["TP 2"], **dora, sequence_parallel=False)]
    rows += [Combination(**COMPOSED["TP 2"], **dora, recompute="full", compile="block")]
    rows += [Combination(**LAYOUTS["FSDP 2"], **dora, precision="bfloat16", recompute="op")]
    rows += [Combination(**COMPOSED["TP 2"], **exact, model="deepseek")]
    return rows


def adapter_dropout() -> list[Combination]:
    """Rows with dropout on the input of A, keyed by token, layer and feature, so that no plan changes a mask."""
    lora, exact = dict(adapter="lora_dropout"), dict(adapter="lora_dropout", microbatch_size=1)
    rows = [Combination(**LAYOUTS["FSDP 2"], **exact, recompute="op", accumulation=2)]
    rows += [Combination(**LAYOUTS["DDP 2"], **exact, accumulation=2)]
    rows += [Combination(**LAYOUTS["FSDP 2"], **lora, recompute="full", precision="bfloat16")]
    rows += [Combination(ranks=1, **lora, compile="block", recompute="full")]
    rows += [Combination(**COMPOSED["TP 2"], **exact, recompute="2")]
    rows += [Combination(**COMPOSED["TP 2"], **lora, sequence_parallel=False, recompute="full")]
    rows += [Combination(**COMPOSED["TP 2"], adapter="dora_dropout", microbatch_size=1)]
    rows += [Combination(ranks=2, cp=2, **exact, method=method, document_mask=True) for method in ("ring", "ulysses")]
    rows += [Combination(**COMPOSED["PP 2"], **exact, schedule=s) for s in ("1F1B", "ZBVZeroBubble", "DualPipeV")]
    rows += [Combination(**COMPOSED["PP 2"], **lora, schedule="DualPipeV", recompute="full")]
    latent = exact | dict(model="deepseek")
    rows += [Combination(**EXPERT_LAYOUTS[name], **latent) for name in ("FSDP 2", "CP 2", "TP 2")]
    rows += [Combination(**LAYOUTS["FSDP 2"], **latent, multi_token_prediction=2, recompute="full")]
    overlap = dict(schedule="DualPipeV", overlap=True, recompute="op")
    rows += [Combination(**EXPERT_LAYOUTS["PP 2 x FSDP 2"], **latent, **overlap)]
    return rows


def neurocache() -> list[Combination]:
    """Rows with a cache of earlier batches; each row of a batch continues a sequence."""
    cache = dict(adapter="neurocache", accumulation=4)
    rows = [Combination(**cache, recompute=mode) for mode in ("none", "full", "op")]
    rows += [Combination(**cache, compile="block"), Combination(**cache, compile="model")]
    rows += [Combination(**LAYOUTS[name], **cache, recompute="full") for name in ("FSDP 2", "DDP 2")]
    rows += [Combination(**LAYOUTS["HSDP 2x2"], **cache | {"accumulation": 2})]
    rows += [Combination(**COMPOSED["TP 2"], **cache, recompute=mode) for mode in ("none", "op")]
    rows += [Combination(**COMPOSED["TP 2"], **cache, sequence_parallel=False, model="opt")]
    rows += [Combination(**COMPOSED["CP 2"], **cache, method=method) for method in METHODS]
    rows += [Combination(**COMPOSED["PP 2"], **cache, recompute="full")]
    rows += [Combination(**COMPOSED["FSDP 2 x TP 2"], **cache)]
    lora = cache | {"adapter": "neurocache, lora"}
    rows += [Combination(**layout, **lora) for layout in (LAYOUTS["one rank"], COMPOSED["TP 2"], COMPOSED["CP 2"])]
    rows += [Combination(**LAYOUTS["FSDP 2"], **lora, model="opt")]
    rows += [Combination(**COMPOSED["PP 2"], **lora, schedule="GPipe", model="mistral")]
    rows += [Combination(**COMPOSED["PP 2"], **cache | {"adapter": "neurocache, two readers"})]
    shared = cache | {"adapter": "neurocache, shared"}
    rows += [Combination(**COMPOSED["TP 2"], **shared, sequence_parallel=sequence) for sequence in (True, False)]
    rows += [Combination(**COMPOSED["TP 2"], **shared, microbatch_size=1, model="opt", recompute="full")]
    rows += [Combination(**COMPOSED["CP 2 x TP 2"], **shared)]
    rows += [Combination(**COMPOSED["TP 2"], **cache | {"adapter": "neurocache, one for all"}, microbatch_size=1)]
    authors = cache | {"adapter": "neurocache, authors' heads"}
    layouts = [LAYOUTS["FSDP 2"], COMPOSED["CP 2"], COMPOSED["PP 2"]]
    rows += [Combination(**layout, **authors, microbatch_size=1, recompute="full") for layout in layouts]
    rows += [Combination(**authors, compile="block")]
    return rows + neurocache_with_adapters()


def neurocache_with_adapters() -> list[Combination]:
    """Rows with another adapter in addition to a cache, on quantized bases too.

    In bfloat16 the lookup returns the entire cache: if rounding chose other entries, gradients would differ by more
    than rounding.
    """
    rows, exact = [], dict(accumulation=4, microbatch_size=1)
    layouts = [LAYOUTS["FSDP 2"], COMPOSED["TP 2"]]
    for kind in ("dora", "qlora", "lora_int8"):  # packs of 4 bits are cut between blocks of 16 inputs
        model = "mistral" if kind == "qlora" else "llama3"
        rows += [Combination(**layout, **exact, adapter=f"neurocache, {kind}", model=model) for layout in layouts]
    rows += [Combination(**layout, **exact, adapter="neurocache") for layout in layouts]
    narrow = dict(accumulation=4, precision="bfloat16", adapter="neurocache, all found")
    rows += [Combination(**layout, **narrow) for layout in layouts]
    return rows


def embedding_noise() -> list[Combination]:
    """Rows with noise on embeddings, scaled by the length of each record, under every plan."""
    exact = dict(noise=True, microbatch_size=1)
    rows = [Combination(**COMPOSED["CP 2 x TP 2"], **exact)]
    rows += [Combination(**LAYOUTS["FSDP 2"], **exact, recompute="full", accumulation=2)]
    rows += [Combination(**LAYOUTS["DDP 2"], noise=True, precision="bfloat16")]
    rows += [Combination(**COMPOSED["TP 2"], **exact, model=model) for model in ("llama3", "gpt2")]
    rows += [Combination(**COMPOSED["TP 2"], **exact, sequence_parallel=False, adapter="lora")]
    rows += [Combination(ranks=2, cp=2, **exact, method=method, document_mask=True) for method in ("ring", "ulysses")]
    rows += [Combination(**COMPOSED["PP 2"], **exact, schedule=s) for s in ("1F1B", "DualPipeV")]
    rows += [Combination(**COMPOSED["PP 2"], **exact, model="opt")]
    overlap = dict(schedule="DualPipeV", overlap=True, model="deepseek")
    rows += [Combination(**EXPERT_LAYOUTS["PP 2 x FSDP 2"], **exact, **overlap)]
    return rows


def rope_scaling() -> list[Combination]:
    """Rows with rotary scaling for longer contexts; ranks hold parts of the positions."""
    rows = []
    for kind, model in (("linear", "mistral"), ("ntk", "qwen3"), ("yarn", "llama3"), ("llama3", "qwen3_moe")):
        exact = dict(rope=kind, model=model, microbatch_size=1)
        rows += [Combination(**COMPOSED["TP 2"], **exact), Combination(**COMPOSED["CP 2"], **exact, document_mask=True)]
    for kind, model in (("yarn", "mistral"), ("yarn", "qwen3"), ("linear", "llama3")):
        rows += [Combination(**COMPOSED["CP 2"], rope=kind, model=model, method="ulysses", recompute="full")]
    rows += [Combination(**COMPOSED["CP 2"], rope="yarn", method="ring"), Combination(**COMPOSED["PP 2"], rope="yarn")]
    rows += [Combination(**COMPOSED["CP 2 x TP 2"], rope="yarn", recompute="op")]
    return rows


def windows_of_some_layers() -> list[Combination]:
    """Rows with layers that have a window and others that have none; pipeline stages have different ones."""
    gemma, exact = dict(model="gemma3"), dict(model="gemma3", microbatch_size=1)
    rows = [Combination(**LAYOUTS[name], **gemma) for name in ("FSDP 2", "DDP 2")]
    rows += [Combination(ranks=1, **gemma, compile="block", recompute="op")]
    rows += [Combination(**LAYOUTS["FSDP 2"], **gemma, precision="bfloat16", recompute="full", document_mask=True)]
    rows += [Combination(**COMPOSED["TP 2"], **gemma, recompute="op")]
    rows += [Combination(**COMPOSED["TP 2"], **exact, sequence_parallel=False, document_mask=True)]
    rows += [
        Combination(**COMPOSED["TP 2"], **exact, adapter="lora"),
        Combination(**COMPOSED["TP 2"], **gemma, rope="linear"),
    ]
    rows += [Combination(**COMPOSED["CP 2"], **exact, document_mask=True, method=m) for m in ("allgather", "ulysses")]
    rows += [
        Combination(**COMPOSED["CP 2"], **exact, balance=False),
        Combination(**COMPOSED["CP 2"], **gemma, recompute="full"),
    ]
    rows += [Combination(**COMPOSED["PP 2"], **exact, schedule=s) for s in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")]
    rows += [Combination(**COMPOSED["PP 2"], **gemma, schedule="DualPipeV", recompute="full", document_mask=True)]
    rows += [Combination(**COMPOSED[name], **gemma) for name in ("FSDP 2 x TP 2", "PP 2 x CP 2", "CP 2 x TP 2")]
    return rows


GATED = ("falcon", "gemma2", "glm", "glm4", "granite", "olmo2", "olmo3", "phi", "phi3", "phi4", "seed_oss", "smollm3")
GATED += ("stablelm", "arcee", "gemma", "gpt_neox", "starcoder2", "nemotron", "cohere", "cohere2", "hunyuan_v1_dense")
GATED += ("apertus", "gptj", "gemma4")
"""Families that are a Llama with other options."""


def gated_families() -> list[Combination]:
    """Rows of each family that differs from others in its sizes' options alone."""
    layouts = (LAYOUTS["FSDP 2"], LAYOUTS["DDP 2"], *(COMPOSED[name] for name in ("TP 2", "CP 2", "PP 2")))
    rows = [Combination(**layout, model=model, microbatch_size=1) for model in GATED for layout in layouts]
    rows += [Combination(**LAYOUTS["FSDP 2"], model=model, recompute="op", adapter="lora") for model in GATED]
    return rows + capped()


def capped() -> list[Combination]:
    """Rows with capped attention scores and logits: those of a part of the vocabulary, of the tokens, of the loss."""
    gemma, exact = dict(model="gemma2"), dict(model="gemma2", microbatch_size=1, document_mask=True)
    rows = [Combination(ranks=1, **gemma, compile="block", recompute="op")]
    rows += [Combination(**LAYOUTS["FSDP 2"], **gemma, precision="bfloat16", recompute="full", loss_chunks=2)]
    rows += [Combination(**COMPOSED["TP 2"], **exact, loss_chunks=2, recompute="op", sequence_parallel=False)]
    rows += [Combination(**COMPOSED["TP 2"], **gemma, loss_chunks=3, loss_parallel=False)]
    rows += [Combination(**COMPOSED["TP 2"], **gemma, loss_chunks=2, adapter="lora")]  # of the head too
    rows += [Combination(**COMPOSED["CP 2"], **exact, method=m) for m in ("allgather", "ulysses")]
    rows += [Combination(**COMPOSED["CP 2"], **gemma, balance=False, recompute="full", loss_chunks=2)]
    rows += [Combination(**COMPOSED["PP 2"], **exact, schedule=s, loss_chunks=2) for s in ("1F1B", "ZBVZeroBubble")]
    rows += [Combination(**COMPOSED["PP 2"], **gemma, schedule="DualPipeV", recompute="full")]
    return rows + [Combination(**COMPOSED[name], **exact) for name in ("FSDP 2 x TP 2", "PP 2 x TP 2", "CP 2 x TP 2")]


def with_states() -> list[Combination]:
    """Rows of families with a state, which passes over the parts of a sequence and ends with documents."""
    rows = [Combination(ranks=1, model="falcon_h1", compile="block", document_mask=True)]
    for model in ("qwen3_5", "qwen3_next", "falcon_h1"):
        plain, exact = dict(model=model), dict(model=model, microbatch_size=1, document_mask=True)
        rows += [Combination(**LAYOUTS[name], **plain) for name in ("FSDP 2", "DDP 2")]
        rows += [Combination(**LAYOUTS["FSDP 2"], **exact, recompute="op", accumulation=2)]
        rows += [Combination(**COMPOSED[name], **plain) for name in ("TP 2", "CP 2", "PP 2")]
        rows += [Combination(**COMPOSED["TP 2"], **exact, sequence_parallel=False, recompute="op")]
        rows += [Combination(**COMPOSED["CP 2"], **exact, balance=balance) for balance in (True, False)]
        rows += [Combination(**COMPOSED["CP 2 x TP 2"], **exact), Combination(**COMPOSED["PP 2 x CP 2"], **exact)]
        rows += [Combination(**COMPOSED["FSDP 2 x TP 2"], **plain, recompute="full")]
        rows += [Combination(**layout, **plain, adapter="lora") for layout in (LAYOUTS["FSDP 2"], COMPOSED["TP 2"])]
    for method in METHODS[1:]:
        rows += [
            Combination(**COMPOSED["CP 2"], model=model, method=method, document_mask=True)
            for model in ("qwen3_5", "falcon_h1")
        ]
    rows += [Combination(**COMPOSED["CP 2"], model="qwen3_5", recompute=mode) for mode in ("full", "op")]
    rows += [Combination(**COMPOSED["PP 2"], model="qwen3_5", schedule=s) for s in ("ZBVZeroBubble", "DualPipeV")]
    experts = dict(model="qwen3_next", microbatch_size=1, document_mask=True)
    rows += [Combination(**EXPERT_LAYOUTS[name], **experts) for name in ("FSDP 2", "CP 2", "TP 2", "HSDP 2x2")]
    overlap = dict(schedule="DualPipeV", overlap=True)
    rows += [Combination(**EXPERT_LAYOUTS["PP 2 x FSDP 2"], **experts, **overlap)]
    separate = dict(model="qwen3_5_moe", microbatch_size=1, document_mask=True)
    rows += [Combination(**LAYOUTS[name], **separate) for name in ("FSDP 2", "DDP 2")]
    rows += [Combination(**COMPOSED[name], **separate) for name in ("TP 2", "CP 2", "PP 2")]
    rows += [Combination(**EXPERT_LAYOUTS["TP 2"], **separate)]
    rows += [Combination(**LAYOUTS["FSDP 2"], model="qwen3_5_moe", adapter="lora", recompute="op")]
    return rows + layers_of_kinds()


def layers_of_kinds() -> list[Combination]:
    """Rows of families in which layers with a state alternate with attention, and of their experts."""
    rows = []
    for model in ("granite4", "lfm2", "lfm2_moe", "nemotron_h"):
        plain, exact = dict(model=model), dict(model=model, microbatch_size=1, document_mask=True)
        rows += [Combination(**LAYOUTS[name], **exact) for name in ("FSDP 2", "DDP 2")]
        rows += [Combination(**COMPOSED[name], **plain) for name in ("CP 2", "PP 2")]
        rows += [Combination(**COMPOSED["TP 2"], **exact, sequence_parallel=False, recompute="op")]
        rows += [Combination(**COMPOSED["CP 2 x TP 2"], **exact)]
        rows += [Combination(**LAYOUTS["FSDP 2"], **plain, adapter="lora", recompute="full")]
    for model in ("granite4", "lfm2_moe", "nemotron_h"):
        exact = dict(model=model, microbatch_size=1, document_mask=True)
        rows += [Combination(**EXPERT_LAYOUTS[name], **exact) for name in ("FSDP 2", "CP 2", "TP 2")]
    return rows


def group_attention() -> list[Combination]:
    """Rows with attention inside groups; tensor parallel splits the heads, and context parallel the groups."""
    exact = dict(groups=True, microbatch_size=1)
    rows = [Combination(**COMPOSED["CP 2 x TP 2"], **exact)]
    rows += [Combination(**LAYOUTS["FSDP 2"], **exact, recompute=mode, accumulation=2) for mode in ("full", "op")]
    rows += [Combination(**LAYOUTS["DDP 2"], groups=True, precision="bfloat16", document_mask=True)]
    rows += [Combination(**COMPOSED["TP 2"], **exact, model=model) for model in ("llama3", "qwen3", "deepseek")]
    rows += [Combination(**COMPOSED["TP 2"], **exact, sequence_parallel=False, document_mask=True)]
    rows += [Combination(**COMPOSED["CP 2"], **exact, document_mask=True, balance=balance) for balance in (True, False)]
    rows += [Combination(**COMPOSED["PP 2"], **exact, schedule=s) for s in ("1F1B", "ZBVZeroBubble")]
    rows += [Combination(**LAYOUTS["FSDP 2"], groups=True, compile="block", adapter="lora")]
    return rows


def float8() -> list[Combination]:
    """Rows with linears that multiply in float8; weights are gathered in float8 too with one scale."""
    rows = []
    for recipe in ("tensorwise", "rowwise"):
        exact = dict(float8=recipe, microbatch_size=1)
        rows += [Combination(**LAYOUTS["FSDP 2"], **exact, accumulation=2, recompute="full")]
        rows += [Combination(**COMPOSED[name], **exact) for name in ("TP 2", "CP 2", "FSDP 2 x TP 2", "PP 2 x FSDP 2")]
        rows += [Combination(**COMPOSED["PP 2"], **exact, schedule="ZBVZeroBubble")]
        for layout in (LAYOUTS["FSDP 2"], COMPOSED["TP 2"]):
            rows += [Combination(**layout, float8=recipe, precision="bfloat16")]
    one_scale, scales = dict(float8="tensorwise"), dict(float8="rowwise")
    rows += [Combination(**one_scale, recompute="op"), Combination(**scales, compile="block", recompute="op")]
    rows += [Combination(**LAYOUTS["FSDP 2"], **one_scale, compile="block")]
    rows += [Combination(**COMPOSED["TP 2"], **scales, compile="block")]
    rows += [Combination(**LAYOUTS[name], **one_scale, recompute="op") for name in ("DDP 2", "HSDP 2x2")]
    rows += [Combination(**LAYOUTS["FSDP 2"], **one_scale, reshard=False, prefetch=1, accumulation=2)]
    rows += [Combination(**LAYOUTS["FSDP 2"], **one_scale, cpu_offload=True)]
    rows += [Combination(**LAYOUTS["FSDP 4"], **one_scale, second_shards=2)]
    rows += [Combination(**LAYOUTS["FSDP 2"], **one_scale, adapter="unfrozen")]
    rows += [Combination(**COMPOSED["TP 2"], **one_scale, sequence_parallel=False, model="gpt2")]
    rows += [Combination(**COMPOSED["TP 2"], **scales, model="qwen3", recompute="op")]
    rows += [Combination(**COMPOSED["CP 2 x TP 2"], **scales), Combination(**one_scale, precision="bfloat16")]
    rows += [Combination(**COMPOSED["PP 2"], **one_scale, schedule=s, recompute="full") for s in ("1F1B", "DualPipeV")]
    rows += [Combination(**COMPOSED["PP 2 x TP 2"], **one_scale)]
    rows += [Combination(**LAYOUTS["FSDP 2"], **scales, model="opt")]
    rows += [Combination(**EXPERT_LAYOUTS[name], **one_scale, model="deepseek") for name in ("FSDP 2", "TP 2")]
    rows += [Combination(**EXPERT_LAYOUTS["FSDP 2"], **scales, model="qwen3_moe")]
    overlap = dict(schedule="DualPipeV", overlap=True, model="deepseek")
    rows += [Combination(**EXPERT_LAYOUTS["PP 2 x FSDP 2"], **one_scale, **overlap)]
    return rows


def fake_quantization() -> list[Combination]:
    """Rows of quantization-aware training; all in float64, where no plan rounds a number to the other side."""
    both, tp = "int4 int8", COMPOSED["TP 2"]
    return [
        Combination(qat="int4 none", recompute="op"),
        Combination(**LAYOUTS["FSDP 2"], qat=both, accumulation=2, recompute="full", loss_chunks=3),
        Combination(**LAYOUTS["FSDP 2"], qat="int4 none", adapter="unfrozen"),
        Combination(**tp, qat=both, recompute="op"),
        Combination(**tp, qat="int4 fp8", sequence_parallel=False, loss_parallel=False),
        Combination(**tp, qat="fp8 fp8", model="gpt2", recompute="full"),
        Combination(**tp, qat="nvfp4 nvfp4", model="llama3.2", loss_chunks=2),
        Combination(**COMPOSED["CP 2"], qat="nvfp4 nvfp4", document_mask=True),
        Combination(**COMPOSED["PP 2"], qat="mxfp4 mxfp4", schedule="ZBVZeroBubble", microbatch_size=1),
        Combination(**COMPOSED["FSDP 2 x TP 2"], qat="nvfp4 nvfp4", accumulation=2),
        Combination(**EXPERT_LAYOUTS["FSDP 2"], qat="int8 int8", model="deepseek", microbatch_size=1),
    ]


def gpt2() -> list[Combination]:
    """Norms with means, biases, learned positions, dropout, of attention's probabilities too, and a tied head with all
    of it.
    """
    drops = dict(model="gpt2")
    rows = [Combination(**drops, recompute=mode) for mode in RECOMPUTE]
    rows += [Combination(**drops, compile="block", recompute="full")]
    rows += [Combination(**drops, compile="model"), Combination(**drops, precision="bfloat16", accumulation=2)]
    rows += [Combination(**LAYOUTS[name], **drops, accumulation=2, recompute="full") for name in ("FSDP 2", "DDP 2")]
    rows += [
        Combination(**COMPOSED[name], **drops) for name in ("TP 2", "CP 2", "PP 2", "FSDP 2 x TP 2", "PP 2 x TP 2")
    ]
    rows += [Combination(**COMPOSED["TP 2"], **drops, sequence_parallel=False, document_mask=True, recompute="op")]
    rows += [Combination(**COMPOSED["TP 2"], **drops, compile="block")]
    rows += [Combination(**COMPOSED["CP 2"], **drops, document_mask=True, balance=False)]
    rows += [Combination(**COMPOSED["CP 2 x TP 2"], **drops, microbatch_size=1)]
    rows += [
        Combination(**COMPOSED["PP 2"], **drops, schedule=s, recompute="full") for s in ("ZBVZeroBubble", "DualPipeV")
    ]
    rows += [Combination(**COMPOSED["PP 2 x FSDP 2"], **drops, microbatch_size=1, accumulation=2)]
    # norms after attention and feed-forward, and an embedding that is narrower than the model
    rows += [Combination(**layout, model="opt") for layout in (LAYOUTS["FSDP 2"], LAYOUTS["DDP 2"])]
    composed = ("TP 2", "CP 2", "PP 2", "PP 2 x FSDP 2", "FSDP 2 x TP 2", "PP 2 x TP 2")
    rows += [Combination(**COMPOSED[name], model="opt") for name in composed]
    rows += [Combination(**layout, **drops, adapter="lora") for layout in (LAYOUTS["FSDP 2"], COMPOSED["TP 2"])]
    return rows


def roberta() -> list[Combination]:
    """Rows with masked language modelling and with classification, of GPT-2 too."""
    options, exact = dict(model="roberta", task="masked_lm"), dict(microbatch_size=1, document_mask=True)
    rows = [
        Combination(ranks=2, cp=2, method=method, balance=b, **options, **exact)
        for method in METHODS
        for b in (True, False)
    ]
    rows += [Combination(**COMPOSED[name], **options, **exact) for name in ("TP 2", "PP 2", "PP 2 x CP 2")]
    rows += [Combination(**COMPOSED["FSDP 2 x TP 2"], **options, **exact, loss_chunks=2)]
    rows += [Combination(**options, compile="block"), Combination(**options, precision="bfloat16", recompute="op")]
    rows += [Combination(**LAYOUTS[name], **options, accumulation=2, recompute="full") for name in ("FSDP 2", "DDP 2")]
    rows += [Combination(**COMPOSED["TP 2"], **options, sequence_parallel=False, compile="block")]
    rows += [Combination(**layout, **options, adapter="lora") for layout in (LAYOUTS["FSDP 2"], COMPOSED["TP 2"])]
    classes = dict(model="roberta", task="seq_cls", microbatch_size=1, loss_chunks=2)
    rows += [Combination(**classes), Combination(**LAYOUTS["FSDP 2"], **classes, accumulation=2)]
    rows += [
        Combination(**COMPOSED[name], **classes) for name in ("TP 2", "CP 2", "PP 2", "PP 2 x CP 2", "PP 2 x TP 2")
    ]
    rows += [Combination(**COMPOSED["CP 2"], model="roberta", task="seq_cls", method="ring", recompute="full")]
    rows += [Combination(**COMPOSED["PP 2"], model="roberta", task="seq_cls", schedule="DualPipeV")]
    rows += [Combination(**layout, model="gpt2", task="seq_cls") for layout in (LAYOUTS["FSDP 2"], COMPOSED["TP 2"])]
    return rows


def rewards() -> list[Combination]:
    """Rows of reward models: pairs whose answers end at different places."""
    options = dict(task="reward", document_mask=True)
    rows = [Combination(**LAYOUTS["FSDP 2"], **options, model="qwen2", accumulation=2, recompute="full")]
    rows += [Combination(**LAYOUTS["DDP 2"], **options, model="gemma2", loss_chunks=2)]
    rows += [Combination(**COMPOSED["PP 2"], **options, model="qwen3")]
    rows += [Combination(**COMPOSED["PP 2"], **options, schedule="DualPipeV")]
    return rows


def other_models() -> list[Combination]:
    """Rows with batch entries of tasks outside the package: tensors of whole samples, pairs. Not in docs/features.md:
    tests/support/other_families.py.
    """
    classes = dict(model="classifier", microbatch_size=1, loss_chunks=2)
    rows = [Combination(**COMPOSED[name], **classes) for name in ("CP 2", "PP 2 x TP 2")]
    pairs = dict(model="pairs", microbatch_size=1)
    rows += [Combination(**LAYOUTS[name], **pairs, accumulation=2, loss_chunks=2) for name in ("FSDP 2", "DDP 2")]
    rows += [Combination(**COMPOSED[name], **pairs) for name in ("TP 2", "PP 2", "PP 2 x FSDP 2", "PP 2 x TP 2")]
    rows += [Combination(**COMPOSED["PP 2"], **pairs, schedule="DualPipeV", loss_chunks=2)]
    return rows


def quantized_bases() -> list[Combination]:
    """Rows with quantized bases; each rank has to quantize its shard to the same bits as the full matrix."""
    qlora, exact = dict(adapter="qlora"), dict(adapter="qlora", microbatch_size=1)
    rows = [Combination(**LAYOUTS[name], **exact) for name in ("one rank", "FSDP 2", "DDP 2")]
    rows += [Combination(**COMPOSED["PP 2"], **exact, schedule=s) for s in ("1F1B", "ZBVZeroBubble", "DualPipeV")]
    rows += [Combination(**COMPOSED[name], **exact, model="qwen3_moe") for name in ("TP 2", "FSDP 2 x TP 2")]
    rows += [Combination(**COMPOSED["TP 2"], **qlora, model="qwen3_moe", sequence_parallel=False, recompute="op")]
    rows += [Combination(**LAYOUTS[name], **qlora, precision="bfloat16") for name in ("one rank", "FSDP 2")]
    rows += [Combination(**LAYOUTS["FSDP 2"], **qlora, recompute="full", accumulation=2, cpu_offload=True)]
    rows += [Combination(**LAYOUTS["FSDP 2"], **qlora, compile="block", recompute="2")]
    eight = dict(adapter="lora_int8", microbatch_size=1)
    rows += [Combination(**LAYOUTS[name], **eight) for name in ("FSDP 2", "DDP 2")]
    rows += [Combination(**COMPOSED["TP 2"], **eight), Combination(**COMPOSED["FSDP 2 x TP 2"], **eight)]
    rows += [Combination(**COMPOSED["PP 2"], **eight, schedule="ZBVZeroBubble")]
    rows += [Combination(**COMPOSED["TP 2"], **eight, model="deepseek", recompute="op")]
    rows += [Combination(**LAYOUTS["FSDP 2"], adapter="lora_int8", precision="bfloat16", compile="block")]
    return rows + quantized_bases_with_options() + quantized_experts()


def quantized_experts() -> list[Combination]:
    """Rows with quantized stacks of experts, of which FSDP shards experts, or outputs if there are few."""
    four, eight = (dict(adapter=kind, microbatch_size=1) for kind in ("qlora, experts", "lora_int8, all experts"))
    rows = [Combination(**EXPERT_LAYOUTS[name], **four, model="qwen3_moe") for name in ("FSDP 2", "HSDP 2x2")]
    rows += [Combination(**EXPERT_LAYOUTS["FSDP 2 x TP 2"], **eight, model="mixtral", recompute="op")]
    rows += [Combination(**EXPERT_LAYOUTS["CP 2"], **eight, model="gpt_oss", recompute="full")]
    rows += [Combination(**LAYOUTS["DDP 2"], **eight, model="nemotron_h")]
    rows += [Combination(**COMPOSED["PP 2"], **eight, model="deepseek", schedule="ZBVZeroBubble")]
    overlap = dict(model="qwen3_moe", schedule="DualPipeV", overlap=True)
    rows += [Combination(**EXPERT_LAYOUTS["PP 2 x FSDP 2"], **four, **overlap)]
    rows += [Combination(**EXPERT_LAYOUTS["FSDP 2"], adapter="qlora, experts", model="qwen3_moe", compile="block")]
    return rows + [Combination(ranks=8, dp_shard=8, **four, model="mixtral")]


def quantized_bases_with_options() -> list[Combination]:
    """Rows with adapter dropout and with a trained scale on quantized bases."""
    rows = []
    for kind in ("qlora", "lora_int8"):
        drops, scaled = (dict(adapter=kind + option, microbatch_size=1) for option in ("_dropout", ", tanh(s)"))
        rows += [Combination(**LAYOUTS["FSDP 2"], **drops, recompute="op", accumulation=2)]
        rows += [Combination(**COMPOSED["TP 2"], **drops, model="qwen3_moe")]
        rows += [Combination(**COMPOSED["PP 2"], **drops, schedule="ZBVZeroBubble")]
        rows += [Combination(**LAYOUTS["FSDP 2"], **scaled), Combination(**COMPOSED["PP 2"], **scaled)]
        rows += [Combination(**COMPOSED["TP 2"], **scaled, model="qwen3_moe", sequence_parallel=False)]
    return rows


def eight_ranks() -> list[Combination]:
    """Rows with several axes, on eight and sixteen ranks."""
    rows = [Combination(**layout) for layout in EIGHT.values()]
    rows += [Combination(**EIGHT["PP 2 x FSDP 2 x TP 2"], schedule=s, recompute="full") for s in SCHEDULES[3:]]
    rows += [Combination(**EIGHT["PP 2 x CP 2 x TP 2"], schedule="DualPipeV", method="ulysses", document_mask=True)]
    rows += [Combination(**EIGHT["PP 2 x CP 2 x TP 2"], schedule="ZBVZeroBubble", method="ring", microbatch_size=1)]
    rows += [Combination(**EIGHT["FSDP 2 x CP 2 x TP 2"], recompute="op", precision="bfloat16", accumulation=2)]
    rows += [Combination(**EIGHT["PP 2 x HSDP 2x2"], schedule="Interleaved1F1B", accumulation=2)]
    rows += [Combination(**EIGHT["PP 2 x FSDP 2 x TP 2"], ep=4, model="deepseek", schedule="ZBVZeroBubble")]
    rows += [Combination(**EIGHT["PP 2 x FSDP 2 x CP 2"], ep=2, model="qwen3_moe", recompute="full")]
    eight = EIGHT["PP 2 x FSDP 2 x TP 2"] | dict(schedule="DualPipeV", overlap=True, model="deepseek")
    rows += [Combination(**eight, ep=2, recompute="full_keep_comm"), Combination(**eight, ep=4)]
    rows += [Combination(**EIGHT["FSDP 2 x CP 2 x TP 2"], ep=8, model="deepseek", microbatch_size=1)]
    return rows


def data_parallel() -> list[Combination]:
    """Rows on one rank, and with FSDP, DDP and HSDP, by recompute and further options."""
    rows = []
    for name, layout in LAYOUTS.items():
        rows += [Combination(**layout)]
        rows += [Combination(**layout, microbatch_size=1, recompute="full", accumulation=2, loss_chunks=2)]
        if name == "FSDP 4":  # the other options do not depend on the number of shards; FSDP 2 covers them
            continue
        rows += [Combination(**layout, recompute=mode) for mode in RECOMPUTE[1:]]
        rows += [Combination(**layout, accumulation=2, recompute="2", loss_chunks=3)]
        rows += [Combination(**layout, precision="bfloat16")]
        rows += [Combination(**layout, document_mask=True, recompute="op")]
        rows += [Combination(**layout, compile="block", recompute="2", accumulation=2)]
        rows += [Combination(**layout, cpu_offload=True, recompute="2")]
    for layout in (LAYOUTS["one rank"], LAYOUTS["FSDP 2"], LAYOUTS["DDP 2"]):
        modes = ("none", "full", "op", "memory_budget") if layout["ranks"] == 1 else ("op", "memory_budget")
        rows += [Combination(**layout, compile="block", recompute=mode) for mode in modes]
        rows += [Combination(**layout, precision="bfloat16", recompute=mode) for mode in ("full", "op")]
    mixed = dict(compile="block", precision="bfloat16", document_mask=True, loss_chunks=2)
    rows += [Combination(**LAYOUTS[name], **mixed) for name in ("one rank", "FSDP 2")]
    rows += [
        # as many samples a pass as DDP's rows, so that the compiler can reuse their kernels
        Combination(ranks=1, compile="model", accumulation=2, recompute="2"),
        Combination(ranks=1, compile="model", precision="bfloat16"),
        Combination(ranks=2, dp_replicate=2, compile="model"),
        Combination(ranks=4, dp_replicate=2, dp_shard=2, compile="block", recompute="memory_budget"),
        Combination(ranks=2, dp_shard=2, reshard=False),
        Combination(ranks=2, dp_shard=2, prefetch=2, recompute="full"),
        Combination(ranks=2, dp_shard=2, cpu_offload=True, accumulation=2, precision="bfloat16"),
        Combination(ranks=4, dp_replicate=2, dp_shard=2, reshard=False, prefetch=1, accumulation=2),
        Combination(ranks=4, dp_shard=4, second_shards=2, accumulation=2, precision="bfloat16"),
        Combination(ranks=4, dp_shard=4, second_shards=2, recompute="op", prefetch=2),
        Combination(ranks=4, dp_shard=2, cp=2, second_shards=2, recompute="full"),
        Combination(ranks=4, dp_shard=4, ep=2, second_shards=2, model="deepseek"),
        Combination(ranks=8, dp_replicate=2, dp_shard=4, second_shards=2, compile="block"),
    ]
    rows += quantized_collectives()
    for model in ("llama2", "llama3.1", "llama3.2", "mistral", "qwen2", "qwen3"):
        rows += [Combination(ranks=2, dp_shard=2, model=model), Combination(ranks=2, dp_replicate=2, model=model)]
    for model in ("llama3.2", "mistral", "qwen2", "qwen3"):
        rows += [Combination(ranks=1, model=model, compile="block", recompute="op")]
    return rows
