"""Enumerate plans of a job. Which of them are legal is decided by the rules of jobs alone, later. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchtitan.parallelisms.pipeline.cut import SCHEDULES
from torchtitan.planner.plan import Plan, Workload

MOST_ROWS = 16
"""Largest number of rows of a forward pass."""
RECOMPUTE = ("none", "op", "full")
CP_METHODS = ("allgather", "ulysses", "alltoall")
"""Methods of context parallel. "ring" sends and stores as much as "alltoall"."""
SMALLER_CHUNKS = 4
"""Number of smaller chunks of the loss in one of the default size."""
FEWEST_TOKENS = 2048
"""Smallest part of a sequence that context parallel leaves to a rank."""


def powers_of_2(most: int) -> list[int]:
    return [2**power for power in range(max(1, most).bit_length())]


@dataclass(frozen=True)
class Space:
    """The plans of a workload on some GPUs."""

    workload: Workload
    gpus: int
    machine: int
    """GPUs in a machine. Tensor parallel stays inside."""
    compiled: tuple[bool, ...]
    """True if plans may compile the model, False if they may not, the faster one first."""
    async_tp: bool
    """True if plans may use async tensor parallel."""

    def layouts(self) -> Iterator[Plan]:
        """Yield plans that differ in degrees, rows or recompute: fully sharded, a pipeline without a schedule."""
        for degrees in self._degrees():
            rows = self.workload.rows // degrees.shards
            for microbatch in powers_of_2(min(rows, MOST_ROWS * self.workload.rows_per_sample)):
                if rows % microbatch or microbatch % self.workload.rows_per_sample:
                    continue
                count = rows // microbatch
                if degrees.pp > 1:
                    batched = replace(degrees, microbatch=microbatch, microbatches=count)
                else:
                    batched = replace(degrees, microbatch=microbatch, passes=count)
                for recompute in RECOMPUTE:
                    for async_tp in sorted({False, self.async_tp and degrees.tp > 1}):
                        yield replace(batched, recompute=recompute, async_tp=async_tp)

    def _degrees(self) -> Iterator[Plan]:
        experts = getattr(self.workload.args, "n_experts", 0) if getattr(self.workload.args, "expert_layers", 0) else 1
        for tp in powers_of_2(min(self.machine, self.gpus)):
            for cp in powers_of_2(min(self.gpus // tp, self.workload.seq_len // FEWEST_TOKENS)):
                for pp in powers_of_2(min(self.gpus // tp // cp, self.workload.args.n_layers)):
                    shards, remainder = divmod(self.gpus, tp * cp * pp)
                    if remainder or self.workload.rows % shards:
                        continue
                    for ep in powers_of_2(experts):
                        if (shards * cp * tp) % ep == 0:
                            yield Plan(
                                tp=tp,
                                cp=cp,
                                pp=pp,
                                ep=ep,
                                shards=shards,
                                compiled=self.compiled[0],
                                loss_chunks=0,
                            )

    def variants(self, layout: Plan) -> Iterator[Plan]:
        """Yield a layout's plans with each method of context parallel, with and without compilation."""
        for compiled in self.compiled:
            for method in CP_METHODS if layout.cp > 1 else CP_METHODS[:1]:
                yield replace(layout, compiled=compiled, cp_method=method)

    def leanest(self, layout: Plan) -> Plan:
        """Return the plan of a layout that needs the least memory: 1F1B stores the fewest activations."""
        return replace(layout, schedule="1F1B") if layout.pp > 1 else layout

    def with_loss_chunks(self, plan: Plan) -> Iterator[Plan]:
        """Yield a plan with the chunks of the loss that a job has by default, with whole logits and smaller chunks.

        Logits that a job does not split by default need less memory whole than in chunks, mostly.
        """
        yield replace(plan, loss_chunks=0)
        chunks = self.workload.loss_pieces(replace(plan, loss_chunks=0))
        if chunks > 1:
            yield from (replace(plan, loss_chunks=number) for number in (1, SMALLER_CHUNKS * chunks))

    def scheduled(self, layout: Plan) -> Iterator[Plan]:
        """Yield a layout's plans with each schedule and number of stages, fully sharded."""
        if layout.pp == 1:
            yield layout
        else:
            yield from self._scheduled(layout)

    def replicated(self, plan: Plan) -> Iterator[Plan]:
        """Yield a fully sharded plan with more and more replicas, which need more and more memory."""
        for replicas in powers_of_2(plan.shards):
            if plan.shards % replicas == 0:
                yield replace(plan, replicas=replicas, shards=plan.shards // replicas)

    def _scheduled(self, plan: Plan) -> Iterator[Plan]:
        n_layers = self.workload.args.n_layers
        total = n_layers + sum(self.workload.ends)
        for traits in SCHEDULES.values():
            cuts: dict[int, int | None] = {traits.stages_per_rank: None} if traits.fixed_stages else {}
            for per_stage in range(total, 0, -1) if not traits.fixed_stages else ():
                stages, remainder = divmod(-(-total // per_stage), plan.pp)
                if not remainder and stages > 1:
                    cuts[stages] = per_stage
            for stages, layers_per_stage in cuts.items():
                if stages * plan.pp > n_layers:
                    continue
                for overlap in sorted({False, traits.name == "DualPipeV" and plan.ep > 1}):
                    yield replace(
                        plan,
                        schedule=traits.name,
                        stages_per_rank=stages,
                        layers_per_stage=layers_per_stage,
                        overlap_experts=overlap,
                    )
