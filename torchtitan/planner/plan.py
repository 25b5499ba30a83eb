"""A plan: the distribution of a job's model and batch over GPUs, and its recompute. Imports no torch.

A plan never changes the training: model, sequence length and samples of a step are the same in all plans of a job.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from typing import Any, NamedTuple

from torchtitan.adapters import NONE
from torchtitan.config.sections.model import Compile, Parallelism
from torchtitan.job import ResolvedJob
from torchtitan.job.layout import JobLayout
from torchtitan.job.model import JobModel
from torchtitan.losses.tasks import auto_chunks
from torchtitan.models.flops import causal_keys, flops_per_token, latent_flops_per_token, mean_over_layers
from torchtitan.models.sizes import STACK, Sizes
from torchtitan.parallelisms.degrees import NEEDS_DEGREE, expert_shards
from torchtitan.parallelisms.fsdp_messages import BITS, BLOCK, block_bytes
from torchtitan.parallelisms.pipeline.cut import schedule_traits, split_layers, stages_of_rank
from torchtitan.planner.frozen_base import BYTES, FrozenBase, adapter_obstacle
from torchtitan.planner.memory.rank_layout import float8_weights, multiplies_in_float8
from torchtitan.planner.memory.rank_weights import is_split, size_of_other

Changes = dict[str, Any]
"""Options of a job by dotted name."""


def _parts_of_layer(args: Any, layer: int) -> set[str]:
    """Return the parts of a layer that have matrices: attention and a feed-forward or experts, or one of the two."""
    return {name.partition(".")[0] for name in args.block_linears(layer)}


def planning_obstacle(model: JobModel) -> str:
    """Return why the formulas do not describe a job of this model; empty if they do."""
    name, task = model.model.name, model.task.kind
    if not hasattr(model.args, "block_linears"):
        return f"model.name = {name!r}: the formulas are of decoders; `torchtitan estimate` predicts its memory"
    if any(len(_parts_of_layer(model.args, layer)) < 2 for layer in range(model.args.n_layers)):
        reason = "the formulas do not describe layers of one part alone; `torchtitan estimate` predicts its memory"
        return f"model.name = {name!r}: {reason}"
    if getattr(model.args, "n_state_layers", 0):
        reason = "the formulas do not describe layers with a state; `torchtitan estimate` predicts its memory"
        return f"model.name = {name!r}: {reason}"
    if hasattr(model.args, "global_head_dim"):
        reason = "the formulas do not describe heads of two widths; `torchtitan estimate` predicts its memory"
        return f"model.name = {name!r}: {reason}"
    if getattr(model.args, "moe_interval", 1) > 1:
        reason = "the formulas do not describe experts in every n-th layer; `torchtitan estimate` predicts its memory"
        return f"model.name = {name!r}: {reason}"
    if getattr(model.args, "attention_dropout", 0.0):
        reason = "the formulas do not describe the probabilities that attention_dropout keeps; set it to 0 in "
        return f"model.name = {name!r}: {reason}model.overrides, or use `torchtitan estimate`"
    remedy = "leave it out, or use `torchtitan estimate`"
    if getattr(model.args, "n_mtp_layers", 0):
        return f"n_mtp_layers in model.overrides: the formulas do not describe multi-token prediction; {remedy}"
    if model.model.s2_group_size:
        return f"model.s2_group_size: the formulas do not describe attention in shifted groups; {remedy}"
    if obstacle := adapter_obstacle(model):
        return obstacle
    if task not in ("pretrain", "sft"):
        return f"task.kind = {task!r}: the formulas are of next-token losses; use `torchtitan bench`"
    return ""


def pipeline_obstacle(job: ResolvedJob) -> str:
    """Return why the formulas do not describe the pipeline of the job's own plan; empty if they do."""
    for option in ("pipeline_parallel_schedule_csv", "module_fqns_per_model_part"):
        if job.layout.pp > 1 and getattr(job.layout.parallelism, option) is not None:
            return f"parallelism.{option}: the formulas are of named schedules and usual stages"
    is_adapted = job.config.adapter.kind != NONE
    return "the formulas describe adapters without a pipeline" if is_adapted and job.layout.pp > 1 else ""


@lru_cache(1024)
def _stages_of_ranks(schedule: str, pp: int, stages_per_rank: int) -> list[list[int]]:
    """Return the numbers of each pipeline rank's stages. A search asks for them for every plan that it looks at."""
    style = schedule_traits(schedule).style
    return [stages_of_rank(rank, pp, pp * stages_per_rank, style) for rank in range(pp)]


@dataclass(frozen=True)
class Workload:
    """The computation of a step under any plan: the model, the sequence length and the rows of a step."""

    args: Any
    seq_len: int
    rows: int
    """Sequences of a step on all GPUs."""
    rows_per_sample: int
    compute_bytes: int
    """Bytes of a computed value."""
    stored_bytes: int
    """Bytes of a stored parameter."""
    dtype: str
    """Type of the factors of products, a field of `Peak` in core/hardware.py; float8 for those of `float8_shares`."""
    float8_exclude: tuple[str, ...] = ()
    """training.float8_exclude."""
    rounds_rows: bool = False
    """True if float8 has a scale for each row and column, and so rounds gradients of outputs twice."""
    ends: tuple[int, int] = (1, 1)
    """Layers that the first and last stage of a pipeline have less than others."""
    reshard: str | int = "default"
    """parallelism.fsdp_reshard_after_forward."""
    gather_bits: int = 0
    """Bits of FSDP's quantized gathers; 0: not quantized."""
    float8_share: float = 0.0
    """Share of the weights, without experts, that FSDP gathers in float8."""
    reduced_bytes: int = 4
    """Bytes of a gradient when it is reduced, if that is not quantized."""
    reduce_bits: int = 0
    gathers_once: bool = False
    """Weights are gathered and gradients reduced once in a step and not in every pass, as by Megatron's distributed
    optimizer; no job here has it."""
    sequence_parallel: bool = True
    """True if tensor parallel splits the tokens between its regions."""
    loss_parallel: bool = True
    """True if tensor parallel splits the logits."""
    balances_context: bool = True
    """True if each context-parallel rank has early and late tokens, which see few and many keys."""
    base: FrozenBase | None = None
    """The frozen model under an adapter; None if all weights are trained."""

    @classmethod
    def of(cls, job: ResolvedJob, samples: int) -> "Workload":
        """Return the computation of a job's step of `samples` samples."""
        layout, args, computes = job.layout, job.model.args, job.model.compute_dtype
        training, degrees = layout.training, layout.parallelism
        layers = range(args.n_layers)
        dense = sum(o * i for layer in layers for name, (o, i) in args.block_linears(layer).items() if name != STACK)
        ends = args.vocab_size * args.dim * (1 if args.tied_embeddings else 2)
        return cls(
            args=args,
            seq_len=training.seq_len,
            rows=samples * layout.rows_per_sample,
            rows_per_sample=layout.rows_per_sample,
            compute_bytes=BYTES[computes],
            stored_bytes=BYTES[training.dtype],
            dtype="float8" if training.float8 != "none" else computes,
            float8_exclude=tuple(training.float8_exclude),
            rounds_rows=training.float8 == "rowwise",
            ends=layout.end_costs,
            reshard=degrees.fsdp_reshard_after_forward,
            gather_bits=BITS[degrees.fsdp_quantized_gather],
            float8_share=sum(float8_weights(layout, args, layer) for layer in layers) / (dense + ends),
            reduced_bytes=BYTES[training.mixed_precision_reduce],
            reduce_bits=BITS[degrees.fsdp_quantized_reduce],
            sequence_parallel=not degrees.disable_sequence_parallel,
            loss_parallel=not degrees.disable_loss_parallel,
            balances_context=degrees.context_parallel_load_balancer == "headtail",
            base=FrozenBase.of(job),
        )

    @property
    def gathered_bytes(self) -> float:
        """Mean bytes of a weight, which is no expert's, when FSDP gathers it."""
        return self.message_bytes(self.gather_bits, self.compute_bytes - (self.compute_bytes - 1) * self.float8_share)

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight when FSDP gathers it and it is not in float8: of experts, the embedding and the head."""
        return self.message_bytes(self.gather_bits, self.compute_bytes)

    @property
    def ends_bytes(self) -> float:
        """Bytes of the embedding and the head when FSDP gathers them."""
        return self.weight_bytes * self.embedding_size * (1 if self.args.tied_embeddings else 2)

    @staticmethod
    def message_bytes(bits: int, exact: float) -> float:
        """Return the bytes of a value in a quantized message; `exact`: if 0 bits."""
        return block_bytes(bits) / BLOCK if bits else exact

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len

    @cached_property
    def flops(self) -> float:
        """FLOPs of a step on all GPUs, with causal attention and without recomputation (models/flops.py)."""
        count_flops = latent_flops_per_token if hasattr(self.args, "kv_lora_rank") else flops_per_token
        flops = count_flops(self.args, self.seq_len)
        if self.base is not None:
            added = sum(self.base.added(self.args.block_linears(layer), 1) for layer in range(self.args.n_layers))
            flops = flops.with_adapter(added, self.args.num_matmul_parameters)
        return flops.causal * self.tokens

    @cached_property
    def kinds(self) -> list[Sizes]:
        """The sizes of the linear layers of each kind of block."""
        kinds: list[Sizes] = []
        for layer in range(self.args.n_layers):
            sizes = self.args.block_linears(layer)
            if sizes not in kinds:
                kinds.append(sizes)
        return kinds

    @cached_property
    def kind_of_layer(self) -> list[int]:
        return [self.kinds.index(self.args.block_linears(layer)) for layer in range(self.args.n_layers)]

    @cached_property
    def float8_shares(self) -> list[dict[str, float]]:
        """The share of the blocks of each kind in which a linear multiplies in float8, by the linear's name."""
        shares: list[dict[str, float]] = []
        for kind, sizes in enumerate(self.kinds):
            layers = [layer for layer, of_layer in enumerate(self.kind_of_layer) if of_layer == kind]
            shares.append(
                {
                    name: sum(multiplies_in_float8(f"layers.{n}.{name}", size, self.float8_exclude) for n in layers)
                    / len(layers)
                    for name, size in sizes.items()
                    if self.dtype == "float8"
                }
            )
        return shares

    @property
    def compute_dtype(self) -> str:
        """Type of the factors of products that are not in float8."""
        return "bfloat16" if self.compute_bytes == BYTES["bfloat16"] else "float32"

    @cached_property
    def partial_others(self) -> list[list[float]]:
        """Elements of the parameters of each kind of block that tensor parallel does not split, except matrices."""
        sizes_by_kind = []
        for kind, sizes in enumerate(self.kinds):
            layer = self.kind_of_layer.index(kind)
            names = [name for name in self.args.block_others(layer) if not is_split(self.args, name)]
            sizes_by_kind.append([size_of_other(self.args, name, sizes, 1) for name in names])
        return sizes_by_kind

    @cached_property
    def mean_keys(self) -> float:
        """Mean number of keys of a query."""
        return mean_over_layers(self.args, self.seq_len, causal_keys)

    def most_keys(self, plan: "Plan") -> float:
        """Return the mean number of keys of a query on the context-parallel rank with the most."""
        if self.balances_context or plan.cp == 1 or plan.cp_method == "ulysses":
            return self.mean_keys
        earlier = mean_over_layers(self.args, self.seq_len * (plan.cp - 1) // plan.cp, causal_keys)
        return plan.cp * self.mean_keys - (plan.cp - 1) * earlier  # of the last part of the sequence

    def local_tokens(self, plan: "Plan") -> float:
        """Return the tokens of a forward pass on a rank between regions of tensor parallel."""
        tokens = plan.microbatch * self.seq_len / plan.cp
        return tokens / plan.tp if self.sequence_parallel else tokens

    def logits_width(self, plan: "Plan") -> float:
        """Return the logits of a token on a rank."""
        return float(self.args.vocab_size / (plan.tp if self.loss_parallel else 1))

    def loss_pieces(self, plan: "Plan") -> int:
        """Return the number of chunks of the head and the loss for one microbatch: one if the plan does not say."""
        if plan.loss_chunks != 0:
            return plan.loss_chunks or 1
        return auto_chunks(plan.microbatch * self.seq_len // plan.cp, int(self.logits_width(plan)), "cuda")

    @property
    def embedding_size(self) -> int:
        """Weights of the embedding, and of the head."""
        return int(self.args.vocab_size * self.args.dim)


class Plan(NamedTuple):
    """Degrees, pipeline, batch and recompute of a job. Plans are ordered by their fields.

    A tuple, because a search makes and compares a hundred thousand.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    shards: int = 1
    """Data-parallel shards."""
    replicas: int = 1
    schedule: str = ""
    """Schedule of the pipeline; empty without one."""
    stages_per_rank: int = 1
    layers_per_stage: int | None = None
    """Option that gives `stages_per_rank`; None: the schedule's default."""
    microbatch: int = 1
    """Rows of a forward pass."""
    microbatches: int = 1
    """Microbatches of a pipeline; 1 without one."""
    passes: int = 1
    """Batches in a step; their gradients are summed."""
    recompute: str = "op"
    """none, full, memory_budget, op (keep matrix products and attention), or a number n: every n-th block. half: op,
    but every second product is recomputed, as the published runs of PyTorch's torchtitan of 2024 and 2025 did; no job
    here has it."""
    compiled: bool = False
    loss_chunks: int | None = None
    """training.loss_chunks; None: the whole logits, as in published runs of others."""
    async_tp: bool = False
    cp_method: str = "allgather"
    """parallelism.context_parallel_rotate_method."""
    overlap_experts: bool = False

    @classmethod
    def of(cls, job: ResolvedJob, samples: int) -> "Plan":
        """Return the plan of a job without faults with `samples` samples in a step."""
        layout, recompute = job.layout, job.config.activation_checkpoint
        degrees, local, pp = layout.parallelism, layout.training.local_batch_size, layout.pp
        schedule, stages = "", 1
        if pp > 1:
            schedule = schedule_traits(degrees.pipeline_parallel_schedule).name
            stages = layout.num_stages(job.model.args.n_layers) // pp
        mode = recompute.selective_ac_option if recompute.mode == "selective" else recompute.mode
        return cls(
            tp=layout.tp,
            cp=layout.cp,
            pp=pp,
            ep=layout.ep,
            shards=layout.shards,
            replicas=layout.replicas,
            schedule=schedule,
            stages_per_rank=stages,
            layers_per_stage=degrees.pipeline_parallel_layers_per_stage,
            microbatch=layout.microbatch_rows if pp > 1 else layout.batch_rows(),
            microbatches=layout.microbatches if pp > 1 else 1,
            passes=max(1, samples // (local * layout.shards * layout.replicas)),
            recompute={"full_keep_comm": "full"}.get(mode, mode),
            compiled=layout.compiles_model,
            loss_chunks=layout.training.loss_chunks,
            async_tp=degrees.enable_async_tensor_parallel,
            cp_method=degrees.context_parallel_rotate_method,
            overlap_experts=degrees.pipeline_parallel_expert_parallel_overlap,
        )

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.shards * self.replicas

    @property
    def expert_shards(self) -> float:
        """Ranks over which FSDP spreads a rank's experts. Expert parallel takes its ranks from shards, CP and TP."""
        return expert_shards(self.shards, self.cp, self.tp, self.ep)

    @property
    def merges_backward(self) -> bool:
        """True if gradients of inputs and weights are computed together, as recompute and compile need it."""
        return self.recompute != "none" or self.compiled

    def replayed_share(self, blocks: int | None = None) -> float:
        """Return the share of a stage's blocks that backward replays in whole, messages too.

        None: of a stage without a remainder, the smallest share.
        """
        if not self.recompute.isdecimal():
            return float(self.recompute == "full")
        period = int(self.recompute)
        return ceil(blocks / period) / blocks if blocks else 1 / period

    @property
    def layout(self) -> tuple[int, int, int, int, str, int]:
        """Degrees and schedule, without what plans of the same layout may vary."""
        return self.tp, self.cp, self.pp, self.ep, self.schedule, self.stages_per_rank

    def changes(self, layout: JobLayout, samples: int) -> Changes:
        """Return the options that give a job this plan with `samples` samples in a step. `layout`: its own.

        Options that do nothing while their degree is 1, which the rules refuse, get their defaults then.
        """
        per_sample = layout.rows_per_sample
        local = self.microbatch * self.microbatches // per_sample
        mode = self.recompute if self.recompute in ("none", "full", "memory_budget") else "selective"
        degrees = {
            "tensor_parallel_degree": self.tp,
            "context_parallel_degree": self.cp,
            "pipeline_parallel_degree": self.pp,
        }
        defaults = Parallelism()
        idle = [name for degree, names in NEEDS_DEGREE.items() if degrees[degree] == 1 for name in names]
        values: Changes = {f"parallelism.{name}": getattr(defaults, name) for name in idle}
        values |= {f"parallelism.{name}": degree for name, degree in degrees.items()}
        values |= {
            "parallelism.expert_parallel_degree": self.ep,
            "parallelism.data_parallel_shard_degree": self.shards,
            "parallelism.data_parallel_replicate_degree": self.replicas,
            "parallelism.enable_async_tensor_parallel": self.async_tp,
            "parallelism.pipeline_parallel_expert_parallel_overlap": self.overlap_experts,
            "training.local_batch_size": local,
            "training.global_batch_size": samples,
            "activation_checkpoint.mode": mode,
        }
        if mode == "selective":
            values["activation_checkpoint.selective_ac_option"] = self.recompute
        if self.loss_chunks is not None:
            values["training.loss_chunks"] = self.loss_chunks
        if self.pp > 1:
            values |= {
                "parallelism.pipeline_parallel_schedule": self.schedule,
                "parallelism.pipeline_parallel_schedule_csv": None,
                "parallelism.module_fqns_per_model_part": None,
                "parallelism.pipeline_parallel_layers_per_stage": self.layers_per_stage,
                "parallelism.pipeline_parallel_microbatch_size": self.microbatch // per_sample,
            }
        if self.cp > 1:
            values["parallelism.context_parallel_rotate_method"] = self.cp_method
        return values | self._compilation(layout)

    def _compilation(self, layout: JobLayout) -> Changes:
        """Return the options that compile the model, or do not, if the job's do not do that."""
        options = layout.compile
        if self.compiled == layout.compiles_model:
            return {}
        if not self.compiled:
            return {"compile.enable": False}
        components = Compile().components if not options.enable else sorted({*options.components, "model"})
        return {"compile.enable": True, "compile.components": components}

    def stages(self, workload: Workload) -> list[Counter[int]]:
        """Return the number of blocks of each kind in every stage."""
        counts = split_layers(workload.args.n_layers, self.pp * self.stages_per_rank, *workload.ends)
        starts = [sum(counts[:stage]) for stage in range(len(counts))]
        kinds = workload.kind_of_layer
        return [Counter(kinds[start : start + count]) for start, count in zip(starts, counts, strict=True)]

    @property
    def stages_of_ranks(self) -> list[list[int]]:
        """Numbers of each pipeline rank's stages, ascending."""
        return [[0]] if self.pp == 1 else _stages_of_ranks(self.schedule, self.pp, self.stages_per_rank)

    @property
    def options_text(self) -> str:
        """Recompute, compilation and chunks of the loss."""
        chunks = {None: [], 0: [], 1: ["whole logits"]}.get(self.loss_chunks, [f"loss in {self.loss_chunks} chunks"])
        return ", ".join([self.recompute_text, "compiled" if self.compiled else "eager", *chunks])

    @property
    def recompute_text(self) -> str:
        texts = {"op": "selective op", "none": "no recompute", "full": "full recompute"}
        texts |= {"memory_budget": "recompute by memory budget", "2": "recompute of every second block"}
        return texts.get(self.recompute, f"recompute {self.recompute}")

    def __str__(self) -> str:
        degrees = {"replicas": self.replicas, "FSDP": self.shards, "TP": self.tp, "CP": self.cp, "EP": self.ep}
        parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        if self.cp > 1 and self.cp_method != "allgather":
            parts[-1 - (self.ep > 1)] += f" {self.cp_method}"
        if self.pp > 1:
            parts.append(f"PP {self.pp} {self.schedule}" + f" x{self.stages_per_rank}" * (self.stages_per_rank > 1))
        if self.overlap_experts:
            parts.append("overlap")
        return ", ".join(parts) or "one GPU"

    @property
    def batch(self) -> str:
        """The rows of a data-parallel rank: passes x microbatches x rows of one."""
        factors = [self.passes, self.microbatches, self.microbatch]
        return (
            " x ".join(str(factor) for factor in factors[:-1] if factor > 1)
            + " x " * (max(factors[:-1]) > 1)
            + str(self.microbatch)
        )
