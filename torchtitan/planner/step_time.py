"""The time of a step under a plan, by a roofline for each layer. Imports no torch.

Products take FLOPs / (peak x share of their sizes), attention likewise, everything else bytes / memory bandwidth; what
backward recomputes counts again. Messages take latency + bytes / bandwidth of the link inside or between machines. FSDP
gathers while a layer computes: the longer of the two counts. Tensor, context and expert parallel wait for their
messages: their `exposed` share is added. A pipeline idles by its schedule: `step_time` uses a lower bound of the
bubble, `PipelineTimer` of search.py simulates it.

Letters: T tokens of a microbatch on a rank, D width, m, n, k sizes of a product [m, k] x [k, n].
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from torchtitan.core.hardware import ASSUMED, Curve, Hardware, Link
from torchtitan.models.sizes import STACK, Sizes, split_side
from torchtitan.parallelisms.pipeline.cut import schedule_traits
from torchtitan.planner.plan import Plan, Workload
from torchtitan.planner.time_parts import BlockTime, Calibration, Parts, StepTime, Weights

COMPUTED = ("products", "attention", "memory", "recompute")
"""Parts during which messages of FSDP travel."""
EXPOSED = {"tp": 1.0, "async_tp": 0.35, "cp": 1.0, "ep": 1.0, "overlapped_ep": 0.25}
"""Share of the messages' time that a rank waits for."""
RING = 0.3
"""Additional time of ring attention for the share of the keys that come from other ranks."""
EAGER_PASSES, COMPILED_PASSES = 1.0, 0.55
"""Memory traffic of elementwise operations, relative to eager kernels: the compiler fuses them."""
LEAST_PARAMETERS, MOST_STAGES, LEAST_SECONDS = 8e9, 16, 0.05
"""Limits of the published rows: parameters of a model, pipeline ranks, seconds of a step."""
UNPUBLISHED_SPREAD = 0.40
"""Relative error of a step's time without a published row like it. Assumed."""
OPTIMIZER_PASSES = 7
"""Reads and writes of values of a parameter's size in an optimizer's step: AdamW's four reads and three writes."""


@dataclass
class StepTimer:
    """Predicts steps of one workload on one kind of hardware. It remembers the blocks that it has computed."""

    workload: Workload
    hardware: Hardware
    calibration: Calibration = Calibration()
    _blocks: dict[object, BlockTime] = field(default_factory=dict, repr=False)
    _stages: dict[object, list[Counter[int]]] = field(default_factory=dict, repr=False)
    _rank_weights: dict[object, set[Weights]] = field(default_factory=dict, repr=False)

    def _factor(self, name: str) -> float:
        return self.calibration.factors.get(name, 1.0)

    def _computed(self, name: str, curve: Curve) -> float:
        """Return the factor of a kind of computation. A measured curve has the hardware's factor alone."""
        of_kind = self._factor(name) if curve.evidence == ASSUMED else 1.0
        return of_kind * (self._factor(self.hardware.name) if name != "memory" else 1.0)

    # Computation

    def _product(self, m: float, n: float, k: float, count: float = 1.0) -> float:
        """Return the seconds of `count` products [m, k] x [k, n]."""
        peak = getattr(self.hardware.peak, self.workload.dtype) or self.hardware.peak.bfloat16
        curve = self.hardware.products
        factor = self._computed("products", curve) * (self._factor("float8") if self.workload.dtype == "float8" else 1)
        return factor * count * 2 * m * n * k / (peak * curve.share(m, n, k))

    def _attention(self, plan: Plan, tokens: float) -> float:
        """Return the seconds of attention's two products in forward."""
        args, keys = self.workload.args, self.workload.mean_keys
        widths = args.qk_head_dim + args.v_head_dim if hasattr(args, "kv_lora_rank") else 2 * args.head_dim
        peak = self.hardware.peak.bfloat16 if self.workload.compute_bytes == 2 else self.hardware.peak.float32
        flops = 2 * tokens * args.n_heads / plan.tp * widths * keys
        ring = 1 + self._factor("ring") * RING * plan.ring * (1 - 1 / plan.cp)
        curve = self.hardware.attention
        return self._computed("attention", curve) * ring * flops / (peak * curve.share(keys))

    def _moved(self, size: float) -> float:
        """Return the seconds to move bytes of memory in kernels that compute little."""
        if size <= 0:
            return 0.0
        curve = self.hardware.memory_bound
        return self._computed("memory", curve) * size / (self.hardware.memory_bandwidth * curve.share(size))

    def _linears(self, plan: Plan, sizes: Sizes, tokens: float, local_tokens: float) -> float:
        """Return the seconds of a block's products in forward."""
        args, seconds = self.workload.args, 0.0
        for name, (outputs, inputs) in sizes.items():
            side = split_side(name)
            if name == STACK:
                rows = local_tokens * args.top_k
                experts = args.n_experts / plan.ep
                seconds += self._product(max(1.0, rows / experts), outputs, inputs, 3 * min(experts, rows))
            elif side is None:
                seconds += self._product(local_tokens, outputs, inputs)
            else:
                n, k = (outputs / plan.tp, inputs) if side == 0 else (outputs, inputs / plan.tp)
                seconds += self._product(tokens, n, k)
        return seconds

    def _elementwise(self, plan: Plan, sizes: Sizes, tokens: float, local_tokens: float) -> float:
        """Return the bytes that a block's norms, residuals, rotations and gates move in eager forward."""
        args, b = self.workload.args, self.workload.compute_bytes
        heads = (args.n_heads + getattr(args, "num_kv_heads", args.n_heads)) / plan.tp
        head_dim = getattr(args, "head_dim", 0) or args.qk_head_dim
        values = 10 * args.dim * local_tokens + 8 * heads * head_dim * tokens
        if STACK in sizes:
            rows = local_tokens * args.top_k
            values += rows * (8 * args.dim + 5 * args.expert_dim)
        else:
            width = sizes.get("feed_forward.w1", (4 * args.dim, 0))[0] / plan.tp
            values += (5 if "feed_forward.w3" in sizes else 2) * width * tokens
        return b * values

    # Messages

    def _link(self, extent: int) -> Link:
        """Return the slowest link of a group that spans `extent` neighbouring ranks."""
        inside = extent <= self.hardware.devices_per_machine
        return self.hardware.machine_link if inside else self.hardware.network_link

    def _gather(self, size: float, group: float, stride: int) -> float:
        """Return the seconds to gather `size` bytes over a group with members `stride` ranks apart.

        Members in the same machine share the machine's network cards.
        """
        if group <= 1:
            return 0.0
        members = max(1, min(group, self.hardware.devices_per_machine // stride))
        link = self.hardware.machine_link
        inside = link.seconds(size * (members - 1) / members, 1) if members > 1 else 0.0
        if members == group:
            return inside
        network = self.hardware.network_link
        machines = group / members
        return max(inside, network.seconds(size * (machines - 1) / machines / members, 1))

    def _waited(self, plan: Plan, sizes: Sizes, tokens: float, local_tokens: float) -> Parts:
        """Return the seconds of messages that a block waits for, in forward and backward."""
        args, b = self.workload.args, self.workload.compute_bytes
        waited = Parts()
        replays = 1 + (plan.recompute == "full")
        if plan.tp > 1:
            calls = 4 * (1 + replays) - 4 * (replays - 1) / 2
            size = b * args.dim * tokens * (plan.tp - 1) / plan.tp
            kind = "async_tp" if plan.async_tp else "tp"
            waited["tp"] = self._factor(kind) * EXPOSED[kind] * calls * self._link(plan.tp).seconds(size)
        if plan.cp > 1:
            keys = 2 * getattr(args, "num_kv_heads", args.n_heads) / plan.tp * getattr(args, "head_dim", 128)
            size = b * keys * tokens * (plan.cp - 1)
            waited["cp"] = EXPOSED["cp"] * (1 + replays) * self._link(plan.tp * plan.cp).seconds(size)
        if plan.ep > 1 and STACK in sizes:
            waited["ep"] = self._factor("ep") * self._all_to_all(plan, local_tokens) * 2 * (1 + replays)
        return waited

    def _all_to_all(self, plan: Plan, local_tokens: float) -> float:
        """Return the exposed seconds to send each token to its experts, or back."""
        size = self.workload.compute_bytes * self.workload.args.dim * local_tokens * self.workload.args.top_k
        near = min(plan.ep, self.hardware.devices_per_machine) / plan.ep
        far = self.hardware.network_link.seconds(size * (1 - near), plan.ep * (1 - near) ** 0.5) if near < 1 else 0.0
        inside = self.hardware.machine_link.seconds(size * near)
        return EXPOSED["overlapped_ep" if plan.overlap_experts else "ep"] * max(far, inside)

    # Blocks, stages

    def stages(self, plan: Plan) -> list[Counter[int]]:
        """Return the number of blocks of each kind in every stage."""
        key = plan.pp, plan.stages_per_rank
        if key not in self._stages:
            self._stages[key] = plan.stages(self.workload)
        return self._stages[key]

    def block(self, plan: Plan, kind: int) -> BlockTime:
        """Return the time of a block of `Workload.kinds` for one microbatch."""
        key = (
            *(kind, plan.tp, plan.cp, plan.ep, plan.microbatch, plan.recompute, plan.compiled, plan.async_tp),
            *(plan.ring, plan.overlap_experts),
        )
        if key not in self._blocks:
            self._blocks[key] = self._block(plan, self.workload.kinds[kind])
        return self._blocks[key]

    def _block(self, plan: Plan, sizes: Sizes) -> BlockTime:
        tokens = plan.microbatch * self.workload.seq_len / plan.cp
        local_tokens = tokens / plan.tp
        products = self._linears(plan, sizes, tokens, local_tokens)
        attention = self._attention(plan, tokens)
        passes = COMPILED_PASSES if plan.compiled else EAGER_PASSES
        moved = self._moved(passes * self._elementwise(plan, sizes, tokens, local_tokens))
        forward = products + attention + moved
        share = {"none": 0.0, "full": 1.0}.get(plan.recompute)
        if share is None:
            share = 1 / int(plan.recompute) if plan.recompute.isdecimal() else 0.0
        replay = {"op": moved, "memory_budget": moved, "half": moved + products / 2}.get(
            plan.recompute, share * forward
        )
        dense = sum(
            outputs * inputs / (1 if split_side(name) is None else plan.tp)
            for name, (outputs, inputs) in sizes.items()
            if name != STACK
        )
        outputs, inputs = sizes.get(STACK, (0, 0))
        experts = 3 * outputs * inputs * getattr(self.workload.args, "n_experts", 0) / plan.ep
        return BlockTime(
            products=products,
            attention=attention,
            moved=moved,
            replay=replay,
            waited=self._waited(plan, sizes, tokens, local_tokens),
            weights=Weights(dense, experts),
        )

    def head(self, plan: Plan) -> tuple[float, float]:
        """Return the seconds of the output head's product and of the loss for one microbatch, in forward."""
        args = self.workload.args
        tokens = plan.microbatch * self.workload.seq_len / plan.cp
        product = self._product(tokens, args.vocab_size / plan.tp, args.dim)
        passes = COMPILED_PASSES if plan.compiled else EAGER_PASSES
        logits = self._moved(passes * 12 * tokens * args.vocab_size / plan.tp)
        return product, logits

    def _sum(self, plan: Plan, stages: Iterable[Counter[int]], with_head: bool) -> Parts:
        """Return the seconds of these stages for one microbatch by part."""
        parts = Parts()
        for kinds in stages:
            for kind, count in kinds.items():
                block = self.block(plan, kind)
                for name, seconds in block.parts.items():
                    parts[name] += count * seconds
        if with_head:
            product, logits = self.head(plan)
            parts["products"] += 3 * product
            parts["memory"] += 2 * logits
        return parts

    # Weights

    def rank_weights(self, plan: Plan) -> Weights:
        """Return the weights of the pipeline rank that stores the most of them."""
        key = plan.pp, plan.schedule, plan.stages_per_rank, plan.tp, plan.ep
        if key not in self._rank_weights:
            self._rank_weights[key] = {self._weights(plan, plan.stages_of_rank(rank)) for rank in range(plan.pp)}
        return max(self._rank_weights[key], key=lambda weights: self.stored(plan, weights))

    def _weights(self, plan: Plan, numbers: list[int]) -> Weights:
        """Return the weights of some stages. A pipeline has a copy of tied embeddings at both ends."""
        stages = self.stages(plan)
        blocks = [(self.block(plan, kind), count) for number in numbers for kind, count in stages[number].items()]
        has_head = len(stages) - 1 in numbers and (plan.pp > 1 or not self.workload.args.tied_embeddings)
        ends = self.workload.embedding_size / plan.tp * ((0 in numbers) + has_head)
        dense = sum(count * block.weights.dense for block, count in blocks)
        return Weights(dense + ends, sum(count * block.weights.experts for block, count in blocks))

    def stored(self, plan: Plan, weights: Weights) -> float:
        """Return the number of the weights that this rank stores, as FSDP spreads them."""
        return weights.dense / (plan.shards * plan.cp) + weights.experts / plan.expert_shards

    # Steps

    def step_time(self, plan: Plan, with_fsdp: bool = True) -> StepTime:
        """Predict a step, with a lower bound of a pipeline's bubble. `with_fsdp`: with what does not hide of FSDP."""
        if plan.pp > 1:
            return self.finished(plan, self._pipeline_parts(plan), with_fsdp)
        parts = self._sum(plan, self.stages(plan), with_head=True)
        return self.finished(plan, Parts({name: seconds * plan.passes for name, seconds in parts.items()}), with_fsdp)

    def _pipeline_parts(self, plan: Plan) -> Parts:
        """Return the seconds of the rank that takes the longest, by part, with a lower bound of its bubble.

        A rank idles at least until the first microbatch has passed the stages before its first one, and, where
        gradients of inputs and weights are computed together, while the last one passes them in backward.
        """
        merged = plan.merges_backward or not schedule_traits(plan.schedule).split_backward
        times = self.stage_times(plan)
        idle = [0.0, *accumulate(sum(stage) if merged else stage[0] for stage in times)]
        numbers = [plan.stages_of_rank(rank) for rank in range(plan.pp)]
        busy = [plan.microbatches * sum(sum(times[number]) for number in rank) for rank in numbers]
        least = max(seconds + idle[min(rank)] for seconds, rank in zip(busy, numbers, strict=True))
        slowest = self.rank_time(plan, busy.index(max(busy)))
        parts = Parts({name: seconds * plan.microbatches for name, seconds in slowest.items()})
        parts["bubble"] = least - max(busy)
        return parts

    def least_seconds(self, layout: Plan) -> float:
        """Return a lower bound of a step for all schedules and replicas: an even share of the blocks, no bubble."""
        fastest = replace(layout, overlap_experts=layout.pp > 1 and layout.ep > 1)
        parts = self._sum(fastest, [self.all_blocks], with_head=True)
        return parts.total() * layout.microbatches * layout.passes / layout.pp

    @cached_property
    def all_blocks(self) -> Counter[int]:
        return Counter(self.workload.kind_of_layer)

    def rank_time(self, plan: Plan, rank: int) -> Parts:
        """Return the seconds of a pipeline rank's stages for one microbatch, by part."""
        stages, numbers = self.stages(plan), plan.stages_of_rank(rank)
        return self._sum(plan, [stages[number] for number in numbers], len(stages) - 1 in numbers)

    def finished(self, plan: Plan, parts: Parts, with_fsdp: bool = True, simulated: bool = False) -> StepTime:
        """Add FSDP, gradients of replicas and the optimizer to a step's parts."""
        weights = self.rank_weights(plan)
        local = self.stored(plan, weights)
        computed = sum(parts[name] for name in COMPUTED)
        if with_fsdp:
            parts["fsdp"] = self._fsdp(plan, weights, computed)
        if with_fsdp and plan.replicas > 1:
            reduced = 2 * self._gather(4 * local, plan.replicas, plan.tp * plan.cp * plan.shards)
            parts["fsdp"] += max(0.0, reduced - 0.5 * computed) + 0.05 * reduced
        parts["optimizer"] = self._moved((OPTIMIZER_PASSES + 2) * self.workload.stored_bytes * local)
        parts = Parts({name: seconds for name, seconds in parts.items() if seconds > 0})
        seconds = parts.total()
        peak = self.hardware.peak.bfloat16 if self.workload.compute_bytes == 2 else self.hardware.peak.float32
        outside = self._outside(plan, seconds) if self.calibration.is_published else ""
        return StepTime(
            parts=parts,
            mfu=self.workload.flops / (plan.gpus * peak * seconds),
            tokens_per_second=self.workload.tokens / (plan.gpus * seconds),
            spread=max(self.calibration.spread, UNPUBLISHED_SPREAD if outside else 0.0),
            outside=outside,
            simulated=simulated,
            bubble=parts["bubble"] / seconds,
        )

    def _outside(self, plan: Plan, seconds: float) -> str:
        """Return what no published row is like."""
        if self.workload.args.num_parameters < LEAST_PARAMETERS:
            return f"a model below {LEAST_PARAMETERS / 1e9:.0f}B"
        if plan.pp > MOST_STAGES:
            return f"PP above {MOST_STAGES}"
        return f"a step below {LEAST_SECONDS * 1000:.0f} ms" if seconds < LEAST_SECONDS else ""

    def stage_times(self, plan: Plan) -> list[tuple[float, float, float]]:
        """Return the seconds of forward, input gradient and weight gradient of each stage, for one microbatch."""
        times = []
        stages = self.stages(plan)
        for number, kinds in enumerate(stages):
            blocks = [(self.block(plan, kind), count) for kind, count in kinds.items()]
            forward = sum(count * block.forward for block, count in blocks)
            input_grad = sum(count * block.input_grad for block, count in blocks)
            weight_grad = sum(count * block.products for block, count in blocks)
            if number == len(stages) - 1:
                product, logits = self.head(plan)
                forward, input_grad, weight_grad = (
                    forward + product + logits,
                    input_grad + product + logits,
                    weight_grad + product,
                )
            times.append((forward, input_grad, weight_grad))
        return times

    def send_seconds(self, plan: Plan) -> float:
        """Return the seconds from the end of a stage to its result's arrival on the next rank."""
        tokens = plan.microbatch * self.workload.seq_len / plan.cp / plan.tp
        extent = plan.tp * plan.cp * plan.shards * plan.replicas * plan.pp
        return self._link(extent).seconds(self.workload.compute_bytes * self.workload.args.dim * tokens)

    def _fsdp(self, plan: Plan, weights: Weights, computed: float) -> float:
        """Return the seconds of gathers and reductions that computation does not hide."""
        gather, reduce = (self._exchange(plan, weights, size) for size in (self.workload.compute_bytes, 4))
        if plan.pp > 1:  # once in a step, while the first microbatches fill the pipeline
            return 0.5 * (gather + reduce)
        total = plan.passes * (2 * gather + reduce)
        blocks = max(1, self.workload.args.n_layers)
        return max(0.0, total - computed) + total / blocks

    def _exchange(self, plan: Plan, weights: Weights, size: int) -> float:
        """Return the seconds to gather a rank's weights, or to reduce their gradients, in values of `size` bytes."""
        dense = self._gather(size * weights.dense, plan.shards * plan.cp, plan.tp)
        return dense + self._gather(size * weights.experts, plan.expert_shards, max(plan.tp, plan.ep))
