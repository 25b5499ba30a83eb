"""The parts of a step's time, the factors that fit them to measurements, and the time of messages between ranks.

A message takes latency + bytes / bandwidth of the link inside or between machines. GPUs compute meanwhile. The ranks of
a CPU share its cores, and gloo sends with the cores that compute, so there nothing overlaps. Imports no torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, gcd, lcm, log2
from typing import NamedTuple

from torchtitan.core.hardware import CollectiveKind, Hardware, Link, MeasuredCollective
from torchtitan.parallelisms.degrees import RINGS, splits_features
from torchtitan.parallelisms.fsdp_messages import PIECE
from torchtitan.planner.plan import Plan, Workload

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
    "stragglers": "waiting for the slowest machine",
}
"""Parts of a step's time, in the order of tables."""
FACTORS = ("products", "attention", "memory", "messages", "tp", "async_tp", "ep", "fsdp", "stragglers", "float8")
"""Names of the factors: products, attention, operations bound by memory, all messages, exposed messages of tensor and
expert parallel, FSDP's messages beside computation, stragglers, and products in float8."""
FLOAT32, INT64 = 4, 8
"""Bytes of a number of the loss, and of a count of tokens."""
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
    """Factors of the time of some of FACTORS, of the computation of hardware by its name, and of the products of a chip
    by "products of CHIP"; 1 for others."""
    spread: float = 0.35
    """Relative error of a step's time that a prediction's interval covers."""
    evidence: str = "assumed"
    is_published: bool = False
    """True if the spread is of published runs, which small models, short steps and long pipelines are unlike."""

    def factor(self, name: str) -> float:
        return self.factors.get(name, 1.0)


class WeightCounts(NamedTuple):
    """Numbers of weights of a rank of tensor and expert parallel, and of the FSDP units that they are in."""

    dense: float
    experts: float
    """FSDP spreads them over fewer ranks than the others, if they are spread by expert parallel."""
    frozen_bytes: float = 0.0
    """Bytes of the weights under an adapter, which FSDP gathers and does not reduce. `dense` are its own then."""
    blocks: float = 1.0
    expert_units: float = 0.0
    """Units of experts alone: of each block with experts, if they are spread by expert parallel."""
    ends: float = 0.0
    """Units of the embedding and the head."""
    partial: float = 0.0
    """Trained weights that read tokens or heads that tensor parallel splits: each of its ranks computes a part of their
    gradients."""
    partial_parameters: float = 0.0


@dataclass(frozen=True)
class BlockTime:
    """Seconds of a block for one microbatch."""

    products: float
    """In forward. The gradients of the inputs take as much."""
    weight_grad: float
    """Products for the gradients of the weights that are trained."""
    attention: float
    moved: float
    """Operations that are bound by memory, in forward. Backward takes twice as much."""
    unpacked: float
    """To unpack a quantized base, in forward. Backward does it again."""
    replay: float
    """What backward computes again."""
    waited: Parts
    """Messages that a rank waits for in forward and backward, by axis."""
    weights: WeightCounts

    @cached_property
    def parts(self) -> Parts:
        """Seconds of forward and backward by part."""
        return Parts(
            self.waited,
            products=2 * self.products + self.weight_grad,
            attention=(1 + ATTENTION_BACKWARD) * self.attention,
            memory=3 * self.moved + 2 * self.unpacked,
            recompute=self.replay,
        )

    @cached_property
    def forward(self) -> float:
        return self.products + self.attention + self.moved + self.unpacked + sum(self.waited.values()) / 3

    @cached_property
    def input_grad(self) -> float:
        return self.parts.total() - self.forward - self.weight_grad


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


EXPOSED = {"tp": 1.0, "async_tp": 0.35, "cp": 1.0, "ep": 1.0, "overlapped_ep": 0.25, "fsdp": 0.45}
"""Share of the messages' time that a rank waits for, on GPUs. "fsdp": the share that they add to the computation
beside them, as they take cores and memory bandwidth from it."""


class MessageTime(NamedTuple):
    """Seconds of messages."""

    transfer: float = 0.0
    """To send their bytes."""
    latency: float = 0.0
    """To pass all hops. Computation does not hide it: all ranks of a ring wait for the slowest one."""

    @property
    def seconds(self) -> float:
        return self.transfer + self.latency

    def and_then(self, other: "MessageTime") -> "MessageTime":
        return MessageTime(self.transfer + other.transfer, self.latency + other.latency)

    def times(self, factor: float) -> "MessageTime":
        return MessageTime(factor * self.transfer, factor * self.latency)


Line = Link | MeasuredCollective
"""Figures with a latency and a reached bandwidth."""


@dataclass(frozen=True)
class Links:
    """The links of ranks, and the times of collectives over them."""

    inside: Link
    """To ranks of the same machine."""
    between: Link
    """To other machines."""
    machine: int
    """Ranks of the job in a machine."""
    measured: Sequence[MeasuredCollective] = ()
    """Rows for collectives. A message takes the nearest one of its kind, or else the figures of a link."""

    @classmethod
    def of(cls, hardware: Hardware) -> "Links":
        """Return the links between the ranks of whole machines."""
        rows = hardware.collectives.rows if hardware.collectives else ()
        return cls(hardware.machine_link, hardware.network_link, hardware.devices_per_machine, rows)

    def _figures(self, kind: CollectiveKind, group: float, members: float, size: float) -> tuple[Line, Line]:
        """Return the latency and bandwidth inside and between machines of a message of `size` bytes of a group.

        The group has `members` ranks in each machine.
        """
        if not self.measured:
            return self.inside, self.between
        figures: list[Line] = [self.inside, self.between]
        for index, (ranks, machines) in enumerate(((members, 1), (group, group / members))):
            if rows := [row for row in self.measured if row.kind == kind and (row.machines > 1) == (index == 1)]:
                figures[index] = min(rows, key=lambda row: row.distance(ranks, machines, size))
        return figures[0], figures[1]

    def _members(self, group: float, stride: int) -> int:
        """Return the number of ranks that each group with members `stride` ranks apart has in each of its machines.

        One, if some group has them unevenly: a group of 3 in machines of 8 is of the ranks 6, 7 and 8, too.
        """
        return 1 if self.machine % stride else gcd(int(group), self.machine // stride)

    def gather(
        self, size: float, group: float, stride: int, messages: float = 1, kind: CollectiveKind = "all_gather"
    ) -> MessageTime:
        """Return the time to gather `size` bytes in `messages` around a ring of ranks that are `stride` ranks apart.

        Members in the same machine share the machine's network cards. A reduce-scatter is a ring too.
        """
        if group <= 1 or size <= 0:
            return MessageTime()
        members = self._members(group, stride)
        link, network = self._figures(kind, group, members, size / messages)
        machines = group / members
        transfer = size * (members - 1) / members / link.reached_bandwidth
        if machines > 1:
            transfer = max(transfer, size * (machines - 1) / machines / members / network.reached_bandwidth)
        hops = (group - machines) * link.latency + (machines - 1) * network.latency
        return MessageTime(transfer, messages * hops)

    def all_reduce(self, size: float, group: float, stride: int, messages: float = 1) -> MessageTime:
        """Return the time to sum `size` bytes: twice the bytes of `gather`, along a tree of the machines and back."""
        if group <= 1 or size <= 0:
            return MessageTime()
        members = self._members(group, stride)
        link, network = self._figures("all_reduce", group, members, size / messages)
        hops = (members - 1) * link.latency + log2(group / members) * network.latency
        ring = self.gather(size, group, stride, messages, "all_reduce")
        return MessageTime(2 * ring.transfer, 2 * messages * hops)

    def exchange(self, size: float, group: float, stride: int, messages: float = 1) -> MessageTime:
        """Return the time of all-to-alls, where a rank sends its part of `size` bytes to each of the others.

        The group is as in `gather`, but every rank sends its parts for other machines itself, one after the other.
        """
        if group <= 1 or size <= 0:
            return MessageTime()
        members = self._members(group, stride)
        link, network = self._figures("all_to_all", group, members, size / messages)
        inside = size * (members - 1) / group / link.reached_bandwidth
        between = size * (group - members) / group / network.reached_bandwidth
        hops = (members - 1) * link.latency + (group - members) * network.latency
        return MessageTime(max(inside, between), messages * hops)

    def sent(self, kind: str, size: float, calls: float, group: Sequence[int]) -> MessageTime:
        """Return the time of `calls` messages of a kind. A rank of `group` sends `size` bytes in all.

        Kinds and bytes are as in `Traffic` (traffic.py).
        """
        if len(group) < 2 or kind in ("receive", "barrier"):
            return MessageTime()
        ranks, members = len(group), min(Counter(rank // self.machine for rank in group).values())
        links, total = replace(self, machine=members), size * ranks / (ranks - 1)
        if kind == "all_reduce":
            return links.all_reduce(total / 2, ranks, 1, calls)
        if kind in ("all_gather", "reduce_scatter"):
            return links.gather(total, ranks, 1, calls, "all_gather" if kind == "all_gather" else "reduce_scatter")
        if kind == "all_to_all":
            return links.exchange(total, ranks, 1, calls)
        return links.send(size, ranks, calls)

    def send(self, size: float, extent: int, messages: float = 1) -> MessageTime:
        """Return the time to send `size` bytes to a rank by the slowest link of `extent` neighbouring ranks."""
        link = self.between if self.machine % extent else self.inside
        return MessageTime(size / link.reached_bandwidth, messages * link.latency)


@dataclass
class MessageTimer:
    """Predicts the messages of one workload on one kind of hardware."""

    workload: Workload
    hardware: Hardware
    calibration: Calibration
    _links: dict[int, Links] = field(default_factory=dict, repr=False)
    """Links by the ranks of a machine."""

    def links_of(self, plan: Plan) -> Links:
        """Return the links between the plan's ranks."""
        machine = min(self.links.machine, plan.gpus)
        if machine not in self._links:
            self._links[machine] = replace(self.links, machine=machine)
        return self._links[machine]

    @cached_property
    def links(self) -> Links:
        """The links between the ranks of whole machines, with their factor."""
        factor = self.calibration.factor("messages")
        return Links.of(self.hardware.with_speeds(1 / factor, 1 / factor, factor))

    @property
    def overlap(self) -> bool:
        """True if messages travel while a rank computes."""
        return self.hardware.cores is None

    def turns(self, plan: Plan) -> float:
        """Return the number of ranks that take turns on a core; 1 if each has one."""
        return max(1.0, self.hardware.slowdown(plan.gpus))

    def _exposed(self, kind: str) -> float:
        return EXPOSED[kind] if self.overlap else 1.0

    def of_block(self, plan: Plan, has_experts: bool, tokens: float, replayed: float) -> dict[str, MessageTime]:
        """Return the messages of a block in forward and backward, for `tokens` of a rank, by axis.

        `replayed`: share of the block that backward replays.
        """
        args, b = self.workload.args, self.workload.compute_bytes
        messages: dict[str, MessageTime] = {}
        links, forwards = self.links_of(plan), 1 + replayed
        if plan.tp > 1:
            regions = 1 if has_experts else 2  # experts are in none
            messages["tp"] = self._region_border(plan, tokens).times(regions * (1 + forwards))
        if plan.cp > 1:
            forward, backward = self._attention_messages(plan, tokens)
            messages["cp"] = forward.times(forwards).and_then(backward)
        if plan.ep > 1 and has_experts:
            size = b * args.dim * tokens / plan.tp * args.top_k
            counts = links.exchange(INT64 * args.n_experts, plan.ep, 1)  # a replay has them already
            messages["ep"] = links.exchange(size, plan.ep, 1).times(2 * (1 + forwards)).and_then(counts)
        if has_experts and args.aux_loss_weight and plan.cp * plan.tp > 1:  # the ranks of a sequence
            both = "ep" if plan.ep == plan.cp * plan.tp else "sequence"  # axes with the same ranks have one name
            axis = both if plan.cp > 1 and plan.tp > 1 else "cp" if plan.cp > 1 else "tp"
            counts = links.all_reduce(INT64 * args.n_experts * plan.microbatch, plan.cp * plan.tp, 1)
            messages[axis] = messages.get(axis, MessageTime()).and_then(counts.times(forwards))
        turns = self.turns(plan)
        return {axis: message.times(turns) for axis, message in messages.items()}

    def _region_border(self, plan: Plan, tokens: float) -> MessageTime:
        """Return the time to gather the inputs of a tensor-parallel region, and to sum its results."""
        size, links = self.workload.compute_bytes * self.workload.args.dim * tokens, self.links_of(plan)
        return links.gather(size, plan.tp, 1).and_then(links.gather(size, plan.tp, 1, kind="reduce_scatter"))

    def of_ends(self, plan: Plan, tokens: float, embedding: bool, head: bool) -> MessageTime:
        """Return the messages of tensor parallel at the embedding and the head in forward and backward.

        The loss needs all logits or, if they stay split, the largest one of each token, and then the sum of their
        powers and the logit of its label.
        """
        if plan.tp == 1:
            return MessageTime()
        links, pieces = self.links_of(plan), self.workload.loss_pieces(plan)
        frozen = self.workload.base is not None  # the embedding needs no gradient then
        messages = self._region_border(plan, tokens).times(embedding * (0.5 if frozen else 1) + head)
        if head and not self.workload.loss_parallel:
            logits = self.workload.compute_bytes * tokens * self.workload.args.vocab_size
            messages = messages.and_then(links.gather(logits, plan.tp, 1, pieces))
        elif head:
            messages = messages.and_then(links.all_reduce(3 * FLOAT32 * tokens, plan.tp, 1, 2 * pieces))
        return messages.times(self.turns(plan))

    def sum_partial_gradients(self, plan: Plan, weights: WeightCounts) -> MessageTime:
        """Return the time to sum gradients that each tensor-parallel rank has a part of: in each pass, or in a pipeline
        at its end.
        """
        size = self.workload.reduced_bytes if plan.pp > 1 else self.workload.compute_bytes
        sums = self.links_of(plan).all_reduce(size * weights.partial, plan.tp, 1, weights.partial_parameters)
        return sums.times(self.turns(plan))

    def exposed_of_tp(self, messages: MessageTime) -> float:
        """Return the seconds that a rank waits for messages of tensor parallel that no product hides."""
        return self.calibration.factor("tp") * self._exposed("tp") * messages.seconds

    def waited(self, plan: Plan, has_experts: bool, tokens: float, replayed: float) -> Parts:
        """Return the seconds of the messages of `of_block` that a rank waits for."""
        tp, overlapped_ep = "async_tp" if plan.async_tp else "tp", "overlapped_ep" if plan.overlap_experts else "ep"
        factor, exposed = self.calibration.factor, self._exposed
        shares = {"tp": factor(tp) * exposed(tp), "cp": exposed("cp"), "ep": factor("ep") * exposed(overlapped_ep)}
        messages = self.of_block(plan, has_experts, tokens, replayed)
        waits = Parts({axis: shares[axis] * messages[axis].seconds for axis in shares if axis in messages})
        waits["tp"] += shares["tp"] * messages.get("sequence", MessageTime()).seconds
        return waits

    def _attention_messages(self, plan: Plan, tokens: float) -> tuple[MessageTime, MessageTime]:
        """Return the messages of context parallel in forward and backward, without those that backward replays.

        Ulysses exchanges queries, keys, values and results, and their gradients. It repeats the heads of keys until
        their number divides by the ranks. Others gather keys and values, and exchange their gradients, or pass both
        from rank to rank.
        """
        args, b, links = self.workload.args, self.workload.compute_bytes, self.links_of(plan)
        heads, key_heads = args.n_heads // plan.tp, max(1, getattr(args, "num_kv_heads", args.n_heads) // plan.tp)
        is_latent = hasattr(args, "kv_lora_rank")
        widths = args.qk_head_dim + args.v_head_dim if is_latent else 2 * args.head_dim  # of a key and a value
        if plan.cp_method == "ulysses":
            message = links.exchange(b * tokens * widths * (heads + lcm(key_heads, plan.cp)), plan.cp, plan.tp, 2)
            return message, message
        size = b * tokens * widths * getattr(args, "num_kv_heads", args.n_heads) / plan.tp
        if plan.cp_method in RINGS:
            hops, extent = plan.cp - 1, plan.tp * plan.cp
            message, gradients = (links.send(part * hops, extent, hops) for part in (size, size * FLOAT32 / b))
            return message, message.and_then(gradients)
        size *= plan.cp
        return links.gather(size, plan.cp, plan.tp), links.exchange(size, plan.cp, plan.tp)

    def send(self, plan: Plan, messages: float = 1) -> MessageTime:
        """Return the time from the end of a stage to its result's arrival on the next rank, for some messages."""
        size = self.workload.compute_bytes * self.workload.args.dim * self.workload.local_tokens(plan)
        message = self.links_of(plan).send(messages * size, plan.gpus, messages)
        return message.times(self.turns(plan))

    # FSDP

    def gather_weights(
        self, plan: Plan, dense: float, weights: WeightCounts, units: float, inner: int = 0
    ) -> MessageTime:
        """Return the time to gather `dense` bytes in this number of units, and the experts of `weights`.

        `inner`: number of ranks that share a second copy; 0 to gather from all shards.
        """
        links, experts = self.links_of(plan), self.workload.weight_bytes * self._sent_experts(plan, weights)
        group = inner or plan.shards * plan.cp
        if not weights.expert_units:
            message = links.gather(dense + experts, group, plan.tp, units)
        else:  # other experts have no second copy
            message = links.gather(dense, group, plan.tp, units)
            message = message.and_then(links.gather(experts, plan.expert_shards, plan.ep, weights.expert_units))
        return message.times(self.turns(plan))

    def reduce_gradients(self, plan: Plan, weights: WeightCounts) -> MessageTime:
        """Return the time to reduce the gradients of a rank's weights.

        Quantized reductions are all-to-alls, in two hops with second shards, and so are those on a CPU, in one hop.
        """
        workload, links = self.workload, self.links_of(plan)
        size = workload.message_bytes(workload.reduce_bits, workload.reduced_bytes)
        inner = 1 if isinstance(workload.reshard, str) else workload.reshard
        units, of_experts = weights.blocks + self._trained_ends(weights), self._sent_experts(plan, weights)

        def hops(numbers: float, units: float, group: float, stride: int, inner: int) -> MessageTime:
            if not workload.reduce_bits:
                if not self.overlap:  # ExchangeAndSum of parallelisms/data_parallel.py
                    return links.exchange(size * numbers, group, stride, units)
                return links.gather(size * numbers, group, stride, units, "reduce_scatter")
            messages = units * max(1, ceil(numbers / units / PIECE))
            if inner == 1:
                return links.exchange(size * numbers, group, stride, messages)
            first = links.exchange(size * numbers, inner, stride, messages)
            return first.and_then(links.exchange(size * numbers / inner, group / inner, stride * inner, messages))

        if not weights.expert_units:
            message = hops(weights.dense + of_experts, units, plan.shards * plan.cp, plan.tp, inner)
        else:
            message = hops(weights.dense, units, plan.shards * plan.cp, plan.tp, inner)
            message = message.and_then(hops(of_experts, weights.expert_units, plan.expert_shards, plan.ep, 1))
        return message.times(self.turns(plan))

    def _sent_experts(self, plan: Plan, weights: WeightCounts) -> float:
        """Return a rank's weights of experts in FSDP's messages. Stacks that it splits by experts are padded."""
        number, group = getattr(self.workload.args, "n_experts", 1), plan.shards * plan.cp
        is_padded = plan.ep == 1 and not splits_features(number, group)
        return weights.experts * (ceil(number / group) * group / number if is_padded else 1.0)

    def _trained_ends(self, weights: WeightCounts) -> float:
        return weights.ends * (self.workload.base is None)

    def sum_replicas(self, plan: Plan, weights: WeightCounts) -> MessageTime:
        """Return the time to sum the gradients of a rank's shards over replicas."""
        experts, stride = self._sent_experts(plan, weights) / plan.expert_shards, plan.tp * plan.cp * plan.shards
        size = self.workload.reduced_bytes * (weights.dense / (plan.shards * plan.cp) + experts)
        units = weights.blocks + weights.expert_units + self._trained_ends(weights)
        return self.links_of(plan).all_reduce(size, plan.replicas, stride, units).times(self.turns(plan))

    def small_sums(self, plan: Plan, weights: WeightCounts, stages: int) -> dict[str, MessageTime]:
        """Return the sums of a few numbers in a step: of the gradients' norm and, by stage, of the load of experts."""
        args, shards, links = self.workload.args, plan.shards * plan.cp, self.links_of(plan)
        has_experts = weights.experts > 0
        loads = stages * has_experts * (1 + (getattr(args, "aux_loss_weight", 0) > 0))
        size = INT64 * weights.blocks * getattr(args, "n_experts", 0) * has_experts
        axis = "fsdp" if plan.shards > 1 else "cp"  # the same ranks
        return {
            axis: links.all_reduce(FLOAT32 + size, shards, plan.tp, 1 + (plan.tp > 1) + loads),
            "tp": links.all_reduce(FLOAT32 + size, plan.tp, 1, 1 + loads),
            "replicas": links.all_reduce(size, plan.replicas, plan.tp * shards, loads),
            "pp": links.all_reduce(FLOAT32, plan.pp, plan.gpus // plan.pp),
            "ep": links.all_reduce(FLOAT32 * (weights.expert_units > 0), plan.ep, 1),
        }

    def exposed_beside(self, message: MessageTime, computed: float) -> float:
        """Return the seconds that messages add to `computed` seconds of computation, during which they travel.

        What takes longer than the computation is waited for, and the rest slows the computation.
        """
        if not self.overlap:
            return message.seconds
        slowed = self.calibration.factor("fsdp") * EXPOSED["fsdp"] * min(message.transfer, computed)
        return max(0.0, message.transfer - computed) + slowed + message.latency
