"""The time of a step under a plan, by a roofline for each layer. Imports no torch.

Products take FLOPs / (peak x share of their sizes), attention likewise, everything else bytes / memory bandwidth; what
backward recomputes counts again. Messages take latency + bytes / bandwidth of the link inside or between machines. FSDP
gathers while a layer computes: the longer of the two counts, and messages slow the computation beside them. Tensor,
context and expert parallel wait for their messages: their `exposed` share is added. A pipeline idles by its schedule:
`step_time` uses a lower bound of the bubble, `PipelineTimer` of search.py simulates it. With more machines the slowest
of them is slower.

The ranks of a CPU share its cores, and gloo sends with the cores that compute: all messages count in full. If more
ranks than cores take turns, a pipeline's idle ranks leave their turns to others.

Letters: T tokens of a microbatch on a rank, D width, m, n, k sizes of a product [m, k] x [k, n].
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import log2

from torchtitan.core.hardware import Curve, Hardware
from torchtitan.models.sizes import STACK, Sizes, split_side
from torchtitan.parallelisms.fsdp_messages import resharding
from torchtitan.parallelisms.pipeline.cut import schedule_traits
from torchtitan.planner.plan import Plan, Workload
from torchtitan.planner.time.block_kernels import elementwise, rounded
from torchtitan.planner.time.messages import (
    BlockTime,
    Calibration,
    MessageTime,
    MessageTimer,
    Parts,
    StepTime,
    WeightCounts,
)

COMPUTED = ("products", "attention", "memory", "recompute")
"""Parts during which messages of FSDP travel."""
EAGER_PASSES, COMPILED_PASSES = 1.0, 0.55
"""Memory traffic of elementwise operations, relative to eager kernels: the compiler fuses them."""
LEAST_PARAMETERS, LEAST_SECONDS, LEAST_EXPERT = 1e9, 0.05, 2048
MOST_GPUS, MOST_SHARDS, MOST_STAGES = 16384, 512, 16
"""Limits of the published rows: parameters of a model, seconds of a step, width of an expert, GPUs, ranks of an FSDP
group, pipeline ranks."""
UNPUBLISHED_SPREAD = 0.40
"""Relative error of a step's time without a published row like it. Assumed."""
STRAGGLING = 0.01
"""Share of a step that each doubling of the machines adds."""
ACTION_SECONDS = 1.5e-3
"""What an action of a pipeline's runtime takes on a CPU (docs/benchmarks.md). A GPU computes meanwhile."""
OPTIMIZER_PASSES = 7
"""Reads and writes of values of a parameter's size in an optimizer's step: AdamW's four reads and three writes."""


StageTime = tuple[float, float, float]
"""Seconds of forward, input gradient and weight gradient of a stage."""


@dataclass
class StepTimer:
    """Predicts steps of one workload on one kind of hardware. It remembers the blocks that it has computed."""

    workload: Workload
    hardware: Hardware
    calibration: Calibration = Calibration()
    _blocks: dict[object, BlockTime] = field(default_factory=dict, repr=False)
    _stages: dict[object, list[Counter[int]]] = field(default_factory=dict, repr=False)
    _stage_times: dict[object, list[StageTime]] = field(default_factory=dict, repr=False)
    _rank_weights: dict[object, set[WeightCounts]] = field(default_factory=dict, repr=False)

    def _computed(self, name: str) -> float:
        """Return the factor of products or attention."""
        of_chip = self.calibration.factor(f"{name} of {self.hardware.chip}")
        return self.calibration.factor(name) * self.calibration.factor(self.hardware.name) * of_chip

    def _curve(self, name: str, computes_float32: bool) -> Curve:
        """Return the curve of products or attention."""
        curve: Curve = getattr(
            self.hardware.float32 if computes_float32 and self.hardware.float32 else self.hardware, name
        )
        return curve

    @cached_property
    def messages(self) -> MessageTimer:
        return MessageTimer(self.workload, self.hardware, self.calibration)

    # Computation

    def _product(self, m: float, n: float, k: float, count: float = 1.0, dtype: str = "") -> float:
        """Return the seconds of `count` products [m, k] x [k, n]. `dtype`: other than `Workload.compute_dtype`."""
        dtype = dtype or self.workload.compute_dtype
        peak = getattr(self.hardware.peak, dtype) or self.hardware.peak.bfloat16
        curve = self._curve("products", dtype == "float32")
        factor = self._computed("products") * (self.calibration.factor("float8") if dtype == "float8" else 1)
        return factor * count * 2 * m * n * k / (peak * curve.share(m, n, k))

    def _linear(self, m: float, n: float, k: float, float8_share: float) -> float:
        """Return the mean seconds of a product [m, k] x [k, n] if this share of them is in float8."""
        in_float8 = float8_share * self._product(m, n, k, dtype="float8") if float8_share else 0.0
        return in_float8 + (1 - float8_share) * self._product(m, n, k)

    def _attention(self, plan: Plan, tokens: float) -> float:
        """Return the seconds of attention's two products in forward."""
        args, keys = self.workload.args, self.workload.most_keys(plan)
        widths = args.qk_head_dim + args.v_head_dim if hasattr(args, "kv_lora_rank") else 2 * args.head_dim
        peak = self.hardware.peak.bfloat16 if self.workload.compute_bytes == 2 else self.hardware.peak.float32
        flops = 2 * tokens * args.n_heads / plan.tp * widths * keys
        curve = self._curve("attention", self.workload.compute_bytes == 4)
        return self._computed("attention") * flops / (peak * curve.share(keys))

    def _moved(self, size: float, kernels: float = 1.0) -> float:
        """Return the seconds to move bytes of memory in kernels of equal sizes that compute little."""
        if size <= 0:
            return 0.0
        share = self.hardware.memory_bound.share(size / max(1.0, kernels))
        return self.calibration.factor("memory") * size / (self.hardware.memory_bandwidth * share)

    def _linears(self, plan: Plan, kind: int, tokens: float, local_tokens: float) -> float:
        """Return the seconds of a block's products in forward. Routers compute in float32 (models/moe/router.py)."""
        args, seconds, in_float8 = self.workload.args, 0.0, self.workload.float8_shares[kind]
        for name, (outputs, inputs) in self.workload.kinds[kind].items():
            side, share = split_side(name), in_float8.get(name, 0.0)
            if name == STACK:
                rows = local_tokens * args.top_k
                experts = args.n_experts / plan.ep
                seconds += self._product(max(1.0, rows / experts), outputs, inputs, 3 * min(experts, rows))
                seconds += self._product(local_tokens, args.n_experts, args.dim, dtype="float32")
            elif side is None:
                seconds += self._linear(local_tokens, outputs, inputs, share)
            else:
                n, k = (outputs / plan.tp, inputs) if side == 0 else (outputs, inputs / plan.tp)
                seconds += self._linear(tokens, n, k, share)
        return seconds

    def _low_rank(self, plan: Plan, sizes: Sizes, tokens: float) -> tuple[float, float, float]:
        """Return the seconds of an adapter's products in forward, the bytes they move, and the bytes unpacked."""
        base, b = self.workload.base, self.workload.compute_bytes
        if base is None:
            return 0.0, 0.0, 0.0
        seconds = values = 0.0
        rank = base.options.rank
        for _, outputs, inputs in base.factors(sizes, plan.tp):
            seconds += self._product(tokens, rank, inputs) + self._product(tokens, outputs, rank)
            values += tokens * (inputs + 2 * outputs)  # reads the input, reads and writes the frozen product
            values += 2 * tokens * inputs * (base.options.dropout > 0)
        frozen = base.frozen(sizes, plan.tp, 0.0)
        packed = frozen.stored if frozen.unpacked else 0.0  # read once, and written in the type of the products
        return seconds, b * values, packed + frozen.unpacked

    # Blocks, stages

    def stages(self, plan: Plan) -> list[Counter[int]]:
        """Return the number of blocks of each kind in every stage."""
        key = plan.pp, plan.stages_per_rank
        if key not in self._stages:
            self._stages[key] = plan.stages(self.workload)
        return self._stages[key]

    def blocks(self, plan: Plan, stage: Counter[int], replayed: float | None = None) -> list[tuple[BlockTime, int]]:
        """Return the time of each kind of block of a stage for one microbatch, and the number of these blocks.

        `replayed`: share of the blocks that backward replays; None: as the plan has it in a stage of this size.
        """
        share = plan.replayed_share(stage.total()) if replayed is None else replayed
        return [(self.block(plan, kind, share), count) for kind, count in stage.items()]

    def block(self, plan: Plan, kind: int, replayed: float) -> BlockTime:
        """Return the mean time of blocks of `Workload.kinds` for one microbatch, if this share of them is replayed."""
        key = kind, replayed, self._traits_of_blocks(plan)
        if key not in self._blocks:
            self._blocks[key] = self._block(plan, kind, replayed)
        return self._blocks[key]

    def _traits_of_blocks(self, plan: Plan) -> tuple[object, ...]:
        """Return what the time of a block depends on."""
        options = plan.recompute, plan.compiled, plan.async_tp, plan.cp_method, plan.overlap_experts
        return plan.tp, plan.cp, plan.ep, plan.microbatch, *options, plan.gpus

    def _block(self, plan: Plan, kind: int, replayed: float) -> BlockTime:
        sizes = self.workload.kinds[kind]
        tokens = plan.microbatch * self.workload.seq_len / plan.cp
        local_tokens = self.workload.local_tokens(plan)
        slowdown = self.hardware.slowdown(plan.gpus)
        products = weight_grad = slowdown * self._linears(plan, kind, tokens, local_tokens)
        low_rank, added_size, unpacked_size = self._low_rank(plan, sizes, tokens)
        if self.workload.base is not None:
            weight_grad = slowdown * low_rank
            products += weight_grad
        attention = slowdown * self._attention(plan, tokens)
        passes = COMPILED_PASSES if plan.compiled else EAGER_PASSES
        size, kernels = elementwise(self.workload, plan, kind, tokens, local_tokens)
        rounded_size, roundings = rounded(self.workload, plan, kind, tokens, local_tokens)
        unpacked = slowdown * self._moved(unpacked_size)
        moved = slowdown * self._moved(passes * size + added_size + rounded_size, passes * kernels + roundings)
        forward = products + attention + moved + unpacked
        cheap = moved + unpacked
        replay = {"op": cheap, "memory_budget": cheap, "half": cheap + products / 2}.get(
            plan.recompute, replayed * forward
        )
        return BlockTime(
            products=products,
            weight_grad=weight_grad,
            attention=attention,
            moved=moved,
            unpacked=unpacked,
            replay=replay,
            waited=self.messages.waited(plan, STACK in sizes, tokens, replayed),
            weights=self._block_weights(plan, kind),
        )

    def _block_weights(self, plan: Plan, kind: int) -> WeightCounts:
        """Return a block's weights on a rank, before FSDP shards them."""
        sizes = self.workload.kinds[kind]
        if base := self.workload.base:  # of a layer that is split, one of both matrices is on all ranks
            replicated = [
                base.options.rank * (i if split_side(name) == 0 else o) for name, (o, i) in base.adapted(sizes).items()
            ]
            frozen = base.frozen(sizes, plan.tp, 0.0).gathered
            return WeightCounts(
                base.added(sizes, plan.tp), 0.0, frozen, partial=sum(replicated), partial_parameters=len(replicated)
            )
        split = {name: outputs * inputs for name, (outputs, inputs) in sizes.items() if split_side(name) is not None}
        full = {name: outputs * inputs for name, (outputs, inputs) in sizes.items() if name not in split | {STACK: 0}}
        outputs, inputs = sizes.get(STACK, (0, 0))
        experts = 3 * outputs * inputs * getattr(self.workload.args, "n_experts", 0) / plan.ep
        travel = plan.ep > 1 and STACK in sizes
        summed = 0.0 if travel else experts  # all ranks have all experts and other tokens
        other_sizes = self.workload.partial_others[kind]
        return WeightCounts(
            dense=sum(split.values()) / plan.tp + sum(full.values()),
            experts=experts,
            expert_units=float(travel),
            partial=sum(full.values()) + sum(other_sizes) + summed,
            partial_parameters=len(full) + len(other_sizes) + 3 * (summed > 0),
        )

    def head(self, plan: Plan) -> tuple[float, float]:
        """Return the seconds of the output head's product and of the loss for one microbatch, in forward.

        Each of several chunks reads and writes the head's gradient in float32, half of which is counted here.
        """
        args = self.workload.args
        tokens = plan.microbatch * self.workload.seq_len / plan.cp
        slowdown = self.hardware.slowdown(plan.gpus)
        chunks = self.workload.loss_pieces(plan)
        product = slowdown * self._product(tokens / chunks, args.vocab_size / plan.tp, args.dim, chunks)
        passes = COMPILED_PASSES if plan.compiled else EAGER_PASSES
        has_grad = chunks > 1 and self.workload.base is None
        sums = 4 * chunks * self.workload.embedding_size / plan.tp if has_grad else 0.0
        logits = slowdown * self._moved(passes * 12 * tokens * self.workload.logits_width(plan) + sums)
        return product, logits

    def waited_at_ends(self, plan: Plan, embedding: bool, head: bool) -> float:
        """Return the seconds that tensor-parallel ranks wait at the embedding and the head for one microbatch."""
        tokens = plan.microbatch * self.workload.seq_len / plan.cp
        return self.messages.exposed_of_tp(self.messages.of_ends(plan, tokens, embedding, head))

    def _sum(
        self, plan: Plan, stages: Iterable[Counter[int]], embedding: bool, head: bool, replayed: float | None = None
    ) -> Parts:
        """Return the seconds of these stages for one microbatch by part. `replayed`: as of `blocks`.

        `embedding`, `head`: True if they are among the stages.
        """
        parts = Parts()
        for stage in stages:
            for block, count in self.blocks(plan, stage, replayed):
                for name, seconds in block.parts.items():
                    parts[name] += count * seconds
        parts["tp"] += self.waited_at_ends(plan, embedding, head)
        if head:
            product, logits = self.head(plan)
            parts["products"] += (2 + (self.workload.base is None)) * product
            parts["memory"] += 2 * logits
        return parts

    # Weights

    def rank_weights(self, plan: Plan) -> WeightCounts:
        """Return the weights of the pipeline rank that stores the most of them."""
        key = plan.pp, plan.schedule, plan.stages_per_rank, plan.tp, plan.ep
        if key not in self._rank_weights:
            self._rank_weights[key] = {self._weights(plan, numbers) for numbers in plan.stages_of_ranks}
        return max(self._rank_weights[key], key=lambda weights: self.stored(plan, weights))

    def _weights(self, plan: Plan, numbers: list[int]) -> WeightCounts:
        """Return how many weights the stages with these numbers have on a rank, before FSDP shards them.

        A pipeline has a copy of tied embeddings at both ends.
        """
        stages, args, is_last = self.stages(plan), self.workload.args, len(self.stages(plan)) - 1 in numbers
        blocks = [block for number in numbers for block in self.blocks(plan, stages[number])]
        units = (0 in numbers) + (is_last and (plan.pp > 1 or not args.tied_embeddings))
        ends = self.workload.embedding_size / plan.tp * units
        total = WeightCounts(
            *(sum(count * getattr(block.weights, field) for block, count in blocks) for field in WeightCounts._fields)
        )._replace(ends=units)
        if self.workload.base is not None:
            return total._replace(frozen_bytes=total.frozen_bytes + self.workload.weight_bytes * ends)
        with_norm = {"partial": total.partial + args.dim, "partial_parameters": total.partial_parameters + 1}
        return total._replace(dense=total.dense + ends, **(with_norm if is_last else {}))

    def stored(self, plan: Plan, weights: WeightCounts) -> float:
        """Return the number of the weights that this rank stores, as FSDP spreads them."""
        return weights.dense / (plan.shards * plan.cp) + weights.experts / plan.expert_shards

    # Steps

    def step_time(self, plan: Plan, with_fsdp: bool = True) -> StepTime:
        """Predict a step, with a lower bound of a pipeline's bubble. `with_fsdp`: with what does not hide of FSDP."""
        if plan.pp > 1:
            return self.finished(plan, self._pipeline_parts(plan), with_fsdp)
        parts = self._sum(plan, self.stages(plan), embedding=True, head=True)
        return self.finished(plan, parts, with_fsdp)

    def _pipeline_parts(self, plan: Plan) -> Parts:
        """Return the seconds of the rank that takes the longest, by part, with a lower bound of its bubble.

        A rank idles at least until the first microbatch has passed the stages before its first one, and, where
        gradients of inputs and weights are computed together, while the last one passes them in backward.
        """
        merged = plan.merges_backward or not schedule_traits(plan.schedule).split_backward
        times = self.stage_times(plan)
        totals = list(map(sum, times))
        idle = [0.0, *accumulate(totals if merged else [forward for forward, _, _ in times])]
        busy = [plan.microbatches * sum([totals[number] for number in rank]) for rank in plan.stages_of_ranks]
        least = max(seconds + idle[rank[0]] for seconds, rank in zip(busy, plan.stages_of_ranks, strict=True))
        slowest = self.rank_time(plan, busy.index(max(busy)))
        parts = Parts({name: seconds * plan.microbatches for name, seconds in slowest.items()})
        parts["bubble"] = self.bubble(plan, least, max(busy))
        return parts

    def bubble(self, plan: Plan, makespan: float, busy: float) -> float:
        """Return the seconds that the busiest rank of a pipeline idles.

        `makespan`: with as many ranks on a core all the time. An idle rank leaves it to them.
        """
        return max(0.0, makespan / self.messages.turns(plan) - busy)

    def least_seconds(self, layout: Plan) -> float:
        """Return a lower bound of a step for all schedules and replicas: an even share of the blocks, no bubble."""
        fastest = layout._replace(overlap_experts=layout.pp > 1 and layout.ep > 1)
        parts = self._sum(fastest, [self.all_blocks], embedding=True, head=True, replayed=layout.replayed_share())
        seconds = parts.total() * layout.microbatches * layout.passes / layout.pp
        return seconds * (1 + self._straggling(layout))

    @cached_property
    def all_blocks(self) -> Counter[int]:
        return Counter(self.workload.kind_of_layer)

    def rank_time(self, plan: Plan, rank: int) -> Parts:
        """Return the seconds of a pipeline rank's stages for one microbatch, by part."""
        stages, numbers = self.stages(plan), plan.stages_of_ranks[rank]
        return self._sum(plan, [stages[number] for number in numbers], 0 in numbers, len(stages) - 1 in numbers)

    def finished(self, plan: Plan, parts: Parts, with_fsdp: bool = True, simulated: bool = False) -> StepTime:
        """Return the time of a step by the parts of a batch, with FSDP, gradients of replicas and the optimizer."""
        weights = self.rank_weights(plan)
        of_batch = {"memory": parts["memory"] + self._accumulated(plan, weights) + self._cast(plan, weights)}
        of_batch["tp"] = parts["tp"] + self.messages.exposed_of_tp(self.messages.sum_partial_gradients(plan, weights))
        parts = Parts({name: seconds * plan.passes for name, seconds in (parts | of_batch).items()})
        local = self.stored(plan, weights)
        computed = sum(parts[name] for name in COMPUTED)
        if with_fsdp:
            replicas = self.messages.sum_replicas(plan, weights)
            parts["fsdp"] = self._fsdp(plan, weights, computed)
            parts["fsdp"] += self.messages.exposed_beside(replicas, computed / 2)  # in the backward
        slowdown = self.hardware.slowdown(plan.gpus)
        parts["optimizer"] = slowdown * self._moved((OPTIMIZER_PASSES + 2) * self.workload.stored_bytes * local)
        parts["stragglers"] = self._straggling(plan) * parts.total()
        parts = Parts({name: seconds for name, seconds in parts.items() if seconds > 0})
        seconds = parts.total()
        peak = self.hardware.peak.bfloat16 if self.workload.compute_bytes == 2 else self.hardware.peak.float32
        outside = self._outside(plan, seconds) if self.calibration.is_published else ""
        return StepTime(
            parts=parts,
            mfu=self.workload.flops * slowdown / (plan.gpus * peak * seconds),
            tokens_per_second=self.workload.tokens / (plan.gpus * seconds),
            spread=max(self.calibration.spread, UNPUBLISHED_SPREAD if outside else 0.0),
            outside=outside,
            simulated=simulated,
            bubble=parts["bubble"] / seconds,
        )

    def _straggling(self, plan: Plan) -> float:
        """Return the share of a step by which the slowest of the machines is late. It grows with their logarithm."""
        if not self.messages.overlap or plan.gpus <= self.hardware.devices_per_machine:
            return 0.0
        machines = plan.gpus / self.hardware.devices_per_machine
        return self.calibration.factor("stragglers") * STRAGGLING * log2(machines)

    @cached_property
    def _num_parameters(self) -> int:
        """Number of the model's parameters, which takes longer to count than the rest of a step's prediction."""
        return int(self.workload.args.num_parameters)

    def _outside(self, plan: Plan, seconds: float) -> str:
        """Return what no published row is like."""
        args, shards = self.workload.args, plan.shards * plan.cp
        limits = {
            f"a model below {LEAST_PARAMETERS / 1e9:.0f}B": self._num_parameters < LEAST_PARAMETERS,
            f"experts narrower than {LEAST_EXPERT:,}": getattr(args, "expert_dim", LEAST_EXPERT) < LEAST_EXPERT,
            f"more than {MOST_GPUS:,} GPUs": plan.gpus > MOST_GPUS,
            f"FSDP over more than {MOST_SHARDS} ranks": shards > MOST_SHARDS,
            f"PP above {MOST_STAGES}": plan.pp > MOST_STAGES,
            "ulysses": plan.cp > 1 and plan.cp_method == "ulysses",
            f"a step below {LEAST_SECONDS * 1000:.0f} ms": seconds < LEAST_SECONDS,
        }
        return ", ".join(name for name, is_outside in limits.items() if is_outside)

    def stage_times(self, plan: Plan) -> list[StageTime]:
        """Return the seconds of forward, input gradient and weight gradient of each stage, for one microbatch."""
        start = 0.0 if self.messages.overlap else ACTION_SECONDS
        merged = plan.merges_backward or not schedule_traits(plan.schedule).split_backward
        times = list(self._times_without_ends(plan))
        for number in {0, len(times) - 1}:
            forward, input_grad, weight_grad = times[number]
            waited = self.waited_at_ends(plan, number == 0, number == len(times) - 1)
            forward, input_grad = forward + waited / 2, input_grad + waited / 2
            if number == len(times) - 1:
                product, logits = self.head(plan)
                forward, input_grad = forward + product + logits, input_grad + product + logits
                weight_grad += product * (self.workload.base is None)
            times[number] = forward, input_grad, weight_grad
        if not start:
            return times
        started_again = 0.0 if merged else start
        return [
            (start + forward, start + input_grad, weight_grad + started_again)
            for forward, input_grad, weight_grad in times
        ]

    def _times_without_ends(self, plan: Plan) -> list[StageTime]:
        """Return the times of each stage's blocks. Plans that differ in schedule, replicas or loss share them."""
        key = plan.pp, plan.stages_per_rank, self._traits_of_blocks(plan)
        if key not in self._stage_times:
            self._stage_times[key] = times = []
            of_blocks: dict[object, StageTime] = {}  # most stages have equal blocks
            for stage in self.stages(plan):
                content = tuple(stage.items())
                if content not in of_blocks:
                    blocks = self.blocks(plan, stage)
                    of_blocks[content] = (
                        sum(count * block.forward for block, count in blocks),
                        sum(count * block.input_grad for block, count in blocks),
                        sum(count * block.weight_grad for block, count in blocks),
                    )
                times.append(of_blocks[content])
        return self._stage_times[key]

    def _accumulated(self, plan: Plan, weights: WeightCounts) -> float:
        """Return the seconds to add the gradients of a batch's microbatches, or passes, that are reduced together."""
        size = 2 * self.workload.reduced_bytes + self.workload.compute_bytes  # a sum is read and written
        sums = plan.microbatches - 1 if plan.pp > 1 else int(self.workload.gathers_once)
        added = sums * self._moved(size * (weights.dense + weights.experts)) if sums else 0.0
        return self.hardware.slowdown(plan.gpus) * added

    def _cast(self, plan: Plan, weights: WeightCounts) -> float:
        """Return the seconds to cast weights to the type of the computation and their gradients back, on one rank.

        FSDP casts shards alone. The embedding is read in its own type.
        """
        stored, computed = self.workload.stored_bytes, self.workload.compute_bytes
        if plan.gpus > 1 or stored == computed or self.workload.base is not None:
            return 0.0
        cast = weights.dense + weights.experts - self.workload.embedding_size * (weights.ends > 1)
        return self.hardware.slowdown(plan.gpus) * self._moved(2 * (stored + computed) * cast)

    def _fsdp(self, plan: Plan, weights: WeightCounts, computed: float) -> float:
        """Return the seconds of gathers and reductions that computation does not hide."""
        messages, copied = self._gathers(plan, weights), 0.0
        if not self.messages.overlap:
            again = plan.pp == 1 and bool(resharding(self.workload.reshard, plan.pp))
            dense = self._gathered(weights)
            dense += again * (dense - self.workload.ends_bytes / plan.tp)
            copied = plan.passes * self._copied(plan, weights, dense, weights.experts * (1 + again))
        elif plan.pp > 1:  # once in a batch, while the first microbatches fill the pipeline
            return 0.5 * messages.seconds
        computed /= plan.passes if self.workload.gathers_once else 1
        return self.messages.exposed_beside(messages, computed) + copied

    def _gathered(self, weights: WeightCounts) -> float:
        """Return the bytes that FSDP gathers of a rank's weights, without experts."""
        return self.workload.gathered_bytes * weights.dense + weights.frozen_bytes

    def _gathers(self, plan: Plan, weights: WeightCounts) -> MessageTime:
        """Return the gathers and reductions of a step.

        The embedding and the head stay gathered from forward to backward; blocks are gathered again, by default.
        """
        workload, passes, again = self.workload, plan.passes, resharding(self.workload.reshard, plan.pp)
        if workload.gathers_once:
            passes, again = 1, False
        dense = self._gathered(weights)
        messages = self.messages.gather_weights(plan, dense, weights, weights.blocks + weights.ends)
        if again and plan.pp == 1:
            blocks, inner = dense - workload.ends_bytes / plan.tp, 0 if isinstance(again, bool) else again
            messages = messages.and_then(self.messages.gather_weights(plan, blocks, weights, weights.blocks, inner))
        return messages.and_then(self.messages.reduce_gradients(plan, weights)).times(passes)

    def messages_of_step(self, plan: Plan, rank: int | None = None) -> dict[str, MessageTime]:
        """Return the messages of a step by axis, before computation hides any.

        `rank`: of the pipeline; None: the first of those with the most blocks, with the weights of the fullest rank.
        """
        weights, count = self.rank_weights(plan), plan.microbatches * plan.passes
        stages, ranks = self.stages(plan), plan.stages_of_ranks
        numbers = max(ranks, key=lambda numbers: sum(stages[number].total() for number in numbers))
        if rank is not None:
            numbers = ranks[rank]
            weights = self._weights(plan, numbers)
        neighbors = [near for number in numbers for near in (number - 1, number + 1) if 0 <= near < len(stages)]
        sends = sum(near not in numbers for near in neighbors)  # results forward, their gradients backward
        sent = {
            "fsdp": self._gathers(plan, weights),
            "replicas": self.messages.sum_replicas(plan, weights),
            "pp": self.messages.send(plan, sends * count) if sends else MessageTime(),
        }
        sums = self.messages.sum_partial_gradients(plan, weights).times(plan.passes)
        tokens = plan.microbatch * self.workload.seq_len / plan.cp
        ends = self.messages.of_ends(plan, tokens, 0 in numbers, len(stages) - 1 in numbers)
        sent["tp"] = ends.times(count).and_then(sums)
        for stage in (stages[number] for number in numbers):
            replayed = plan.replayed_share(stage.total())
            for kind, blocks in stage.items():
                has_experts = STACK in self.workload.kinds[kind]
                for axis, message in self.messages.of_block(plan, has_experts, tokens, replayed).items():
                    sent[axis] = sent.get(axis, MessageTime()).and_then(message.times(blocks * count))
        for axis, message in self.messages.small_sums(plan, weights, len(numbers)).items():
            sent[axis] = sent.get(axis, MessageTime()).and_then(message)
        return {axis: message for axis, message in sent.items() if message.seconds}

    def _copied(self, plan: Plan, weights: WeightCounts, dense: float, experts: float) -> float:
        """Return the seconds to copy weights out of gathered buffers, and gradients into those that are reduced.

        `dense`, `experts`: gathered bytes of weights that are no expert's, and gathered weights of experts. Gradients
        that are not quantized are summed by the rank that keeps them: each sum reads two parts and writes one.
        """
        moved = 0.0
        for gathered, numbers, group in (
            (dense, weights.dense, plan.shards * plan.cp),
            (self.workload.weight_bytes * experts, weights.experts, plan.expert_shards),
        ):
            reduced = self.workload.reduced_bytes * numbers
            sums = 0.0 if self.workload.reduce_bits else 3 * reduced * (1 - 1 / group)
            moved += (2 * (gathered + reduced) + sums) * (group > 1)  # copies are read and written
        return self.hardware.slowdown(plan.gpus) * self._moved(moved)
