"""Pipeline parallelism: the model is cut into parts, and a local batch runs through them in microbatches.

A part is a copy of the model without the modules of other stages, so parameters keep their names. All pipeline ranks
read the same batch. So only hidden states and their gradients are sent, not positions, document ids or labels. Message
shapes are computed in advance, without the shape inference of torch.distributed.pipelining.

Every schedule is a table of actions for one runtime (runtime.py). With recompute, input and weight gradients are
computed together, as a split backward would recompute every layer once per weight.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan.core.random_draws import clean_name
from torchtitan.parallelisms.data_parallel import fsdp_modules
from torchtitan.parallelisms.pipeline.actions import (
    WEIGHT_GRAD,
    Table,
    count_stages,
    load_schedule_csv,
    stage_ranks,
    with_full_backward,
)
from torchtitan.parallelisms.pipeline.cut import (
    check_stage_modules,
    check_stages,
    choose_num_stages,
    forward_order,
    model_modules,
    num_microbatches,
    schedule_traits,
    stage_modules,
    stages_of_rank,
)
from torchtitan.parallelisms.pipeline.overlap.exchange import Transport
from torchtitan.parallelisms.pipeline.overlap.segments import RecomputePolicy
from torchtitan.parallelisms.pipeline.overlap.stage import SegmentedSchedule, SegmentedStage, build_programs
from torchtitan.parallelisms.pipeline.runtime import (
    Stage,
    TableSchedule,
    annotate_errors,
    loss_targets,
    split_microbatches,
)
from torchtitan.parallelisms.pipeline.simulator import simulate
from torchtitan.parallelisms.pipeline.tables import build_table
from torchtitan.parallelisms.plan import ParallelPlan, match_modules

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The pipeline options of a job. The methods raise ValueError if the options are infeasible."""

    hidden_dim: int
    local_batch_size: int
    microbatch_size: int = 1
    schedule: str = "1F1B"
    csv: str | Path | None = None  # file with a custom table; it replaces `schedule`
    layers_per_stage: int | None = None
    embedding_cost: int = 1
    head_cost: int = 1
    modules: Sequence[Sequence[str]] | None = None  # module names of each stage; None: cut by cost

    @property
    def microbatches(self) -> int:
        return num_microbatches(self.local_batch_size, self.microbatch_size)

    def stages(self, model: nn.Module, plan: ParallelPlan, pp: int) -> list[list[str]]:
        """Return the module names of every stage of the model."""
        num_layers = len(match_modules(model, plan.blocks))
        if self.modules is not None:
            names = model_modules(num_layers, plan.blocks, plan.embedding, plan.head)
            check_stage_modules(self.modules, names, plan.blocks)
            stages = [list(stage) for stage in self.modules]
            if self.csv is None:
                check_stages(self.schedule, pp, len(stages))
            return stages
        if self.csv is not None:
            num_stages = count_stages(self.table(pp, None))
        else:
            num_stages = choose_num_stages(
                self.schedule, pp, num_layers, self.layers_per_stage, self.embedding_cost, self.head_cost
            )
        return stage_modules(
            num_layers,
            num_stages,
            self.embedding_cost,
            self.head_cost,
            blocks=plan.blocks,
            embedding=plan.embedding,
            head=plan.head,
        )

    def table(self, pp: int, num_stages: int | None, pairs: bool = False) -> Table:
        """Return the schedule's table. `pairs`: keep forward-backward pairs that may overlap as one action."""
        if self.csv is not None:
            return load_schedule_csv(self.csv, pp, num_stages, self.microbatches)
        return build_table(self.schedule, pp, self.microbatches, num_stages // pp, overlap=pairs)

    def stages_of_rank(self, rank: int, pp: int, num_stages: int) -> list[int]:
        if self.csv is None:
            return stages_of_rank(rank, pp, num_stages, schedule_traits(self.schedule).style)
        owners = stage_ranks(self.table(pp, num_stages))
        return [stage for stage, owner in sorted(owners.items()) if owner == rank]


@dataclass(frozen=True)
class SegmentOptions:
    """Settings to run parts segment by segment, with the all-to-alls of experts overlapped (docs/dualpipev.md)."""

    policy: RecomputePolicy  # recompute policy of the segments
    transport: Transport


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map the second and further names of each shared parameter to its first. Call it on the full model, before the
    cut.
    """
    first: dict[nn.Parameter, str] = {}
    named_parameters = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named_parameters:
        first.setdefault(parameter, clean_name(name))
    return {clean_name(name): first[p] for name, p in named_parameters if clean_name(name) != first[p]}


def cut_model(
    model: nn.Module, stages: Sequence[Sequence[str]], local_stages: Sequence[int], plan: ParallelPlan | None = None
) -> list[nn.Module]:
    """Return a copy of `model`, on the meta device, for each of `local_stages`.

    Modules of other stages are None, or deleted from a ModuleDict. Modules of no stage (rotary angles, loss) are in
    every part, except those that the plan attaches to the embedding or to a block.
    """
    attached: dict[str, tuple[str, ...]] = {} if plan is None else {plan.embedding: plan.with_embedding}
    for module, block in () if plan is None else plan.with_block:
        attached[block] = (*attached.get(block, ()), module)
    stages = [[*stage, *(name for end in stage for name in attached.get(end, ()))] for stage in stages]
    everything = {name for stage in stages for name in stage}
    parts = []
    for index in local_stages:
        removed = everything.difference(stages[index])
        # the memo maps removed modules to None, as copying a large model's other stages would take long
        part = copy.deepcopy(model, {id(model.get_submodule(name)): None for name in removed})
        for name in removed:
            parent_name, _, child = name.rpartition(".")
            parent = part.get_submodule(parent_name)
            if isinstance(parent, nn.ModuleDict):
                del parent[child]
            else:
                setattr(parent, child, None)
        parts.append(part)
    return parts


class Pipeline:
    """This rank's parts and the schedule that runs them.

    `parts`: parallelized, with storage and initial weights. `hidden_dtype`: of the hidden states sent between stages;
    `sequence_shards`: number of shards of their sequence (1 without sequence parallel). `forward_context`: entered
    around forwards, for autocast. `merge_backward`: compute input and weight gradients together, as recompute and
    compiled blocks need it. `tied`: from tied_names. `segments`: run the parts by segments.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        stage_indices: Sequence[int],
        num_stages: int,
        mesh: DeviceMesh,
        options: PipelineOptions,
        *,
        device: torch.device,
        hidden_dtype: torch.dtype,
        sequence_shards: int = 1,
        forward_context: AbstractContextManager | None = None,
        merge_backward: bool = False,
        tied: Mapping[str, str] | None = None,
        segments: SegmentOptions | None = None,
    ):
        self.segments = segments
        self.parts, self.stage_indices, self.num_stages = list(parts), list(stage_indices), num_stages
        self.options, self.device = options, device
        self.hidden_dtype, self.sequence_shards = hidden_dtype, sequence_shards
        self.forward_context = forward_context or nullcontext()
        self.tied = dict(tied or {})
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.table = options.table(mesh.size(), num_stages, pairs=segments is not None)
        if merge_backward:
            self.table = self._merge_backward(self.table)
        owners = stage_ranks(self.table)
        self.ranks = [owners[stage] for stage in range(num_stages)]
        assert self.stage_indices == [stage for stage, rank in enumerate(self.ranks) if rank == self.rank]
        self.schedules: dict[int, TableSchedule] = {}  # by sequence length

    # Training

    def train_step(self, batch: Mapping[str, torch.Tensor], divisor: float, is_last: bool = True) -> torch.Tensor:
        """Run forward and backward of one local batch and accumulate its gradients.

        `batch`: tensors [B, S], the same on all pipeline ranks: tokens, labels, positions, which may be [1, S], and
        optionally document_ids. Returns sum of losses / divisor on the rank of the last stage, 0 on others.
        `is_last`: True for the last local batch of a step, after which replicas all-reduce gradients.
        """
        tokens, extra_inputs = self._inputs(batch)
        if len(tokens) != self.options.local_batch_size:
            raise ValueError(
                f"a batch of {len(tokens)} samples for a pipeline that takes {self.options.local_batch_size} "
                f"({self.options.microbatches} microbatches of {self.options.microbatch_size}); give it that many"
            )
        schedule = self.schedule_of(tokens.shape[1])
        for stage in schedule._stages:
            stage.reduces_over_replicas = is_last
        loss = schedule.run(tokens, extra_inputs, divisor)
        return self._zero_loss(self.device) if loss is None else loss

    def _inputs(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        extra_inputs = {name: tensor for name, tensor in batch.items() if name != "tokens" and tensor is not None}
        return batch["tokens"].contiguous(), extra_inputs

    def schedule_of(self, seq_len: int) -> TableSchedule:
        """Return the runtime for batches of `seq_len` tokens of this rank, created at the first call."""
        if seq_len not in self.schedules:
            size = self.options.microbatch_size
            tokens = torch.empty((size, seq_len), dtype=torch.long, device="meta")
            # torch sends gradients back only if this requires them; earlier stages would silently get none
            hidden = self._hidden(size, seq_len, "meta").requires_grad_()
            loss = self._zero_loss("meta").requires_grad_()
            stages = [
                self._stage(
                    part,
                    index,
                    self.num_stages,
                    self.device,
                    input_args=tokens if index == 0 else hidden,
                    output_args=loss if index == self.num_stages - 1 else hidden,
                    group=self.group,
                    forward_context=self.forward_context,
                )
                for index, part in zip(self.stage_indices, self.parts, strict=True)
            ]
            run = TableSchedule if self.segments is None else SegmentedSchedule
            self.schedules[seq_len] = run(stages, self.table, self.options.microbatches)
        return self.schedules[seq_len]

    def _stage(self, part: nn.Module, stage: int, *args: object, **kwargs: object) -> Stage:
        if self.segments is None:
            return Stage(part, stage, *args, **kwargs)
        return SegmentedStage(
            part,
            stage,
            *args,
            programs=build_programs(part),
            context=part.context,
            transport=self.segments.transport,
            policy=self.segments.policy,
            **kwargs,
        )

    def _hidden(self, samples: int, seq_len: int, device: torch.device | str) -> torch.Tensor:
        """Return empty hidden states as sent between stages: [B, S, D], or [B, S / shards, D] under sequence
        parallel.
        """
        shape = (samples, seq_len // self.sequence_shards, self.options.hidden_dim)
        return torch.empty(shape, dtype=self.hidden_dtype, device=device)

    def _zero_loss(self, device: torch.device | str) -> torch.Tensor:
        """Return a zero loss in the dtype of losses (see losses/objective.py)."""
        return torch.zeros((), dtype=torch.promote_types(self.hidden_dtype, torch.float32), device=device)

    def _merge_backward(self, table: Table) -> Table:
        joined = with_full_backward(table)
        if any(action.kind == WEIGHT_GRAD for row in table for action in row):
            before, after = (simulate(t).bubble_share for t in (table, joined))
            logger.info(
                "recompute or compile: gradients of input and weights are taken together, so the pipeline idles "
                "%.1f %% of a step instead of %.1f %% (if forward, input and weight gradient take equally long)",
                100 * after,
                100 * before,
            )
        return joined

    # Evaluation

    @torch.no_grad()
    def eval_step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the sum of losses, 0 on ranks without the last stage. `batch` is as in train_step, of any size [B, S].

        It does not use torch's eval, which supports only the shapes of training and fails if adjacent stages share a
        rank.
        """
        tokens, extra_inputs = self._inputs(batch)
        pieces = tokens.split(self.options.microbatch_size)
        pieces_of = split_microbatches(extra_inputs, pieces)
        part_of = dict(zip(self.stage_indices, self.parts, strict=True))
        targets = loss_targets(self.parts[0])
        total: torch.Tensor | None = None
        inputs: dict[tuple[int, int], torch.Tensor] = {(0, index): piece for index, piece in enumerate(pieces)}
        receiving: dict[tuple[int, int], dist.Work] = {}
        sending: list[tuple[dist.Work, torch.Tensor]] = []  # tensors must live until they are sent
        for stage, index in forward_order(self.ranks, len(pieces)):
            last = stage == self.num_stages - 1
            sender, receiver = self.ranks[stage], self.ranks[-1 if last else stage + 1]
            if sender == self.rank:
                if (stage, index) in receiving:
                    receiving.pop((stage, index)).wait()
                kwargs = {name: part for name, part in pieces_of[index].items() if last or name not in targets}
                with annotate_errors(stage, index, "evaluation"), self.forward_context:
                    out = part_of[stage](inputs.pop((stage, index)), **kwargs)
                if last:
                    total = out if total is None else total + out
                elif receiver == self.rank:
                    inputs[stage + 1, index] = out
                else:
                    out = out.contiguous()
                    sending.append((dist.isend(out, group=self.group, group_dst=receiver), out))
            elif receiver == self.rank and not last:
                buffer = inputs[stage + 1, index] = self._hidden(*pieces[index].shape, self.device)
                receiving[stage + 1, index] = dist.irecv(buffer, group=self.group, group_src=sender)
        for work, _ in sending:
            work.wait()
        for part in self.parts:  # they stay gathered after a forward, but later readers of parameters expect shards
            for module in fsdp_modules(part):
                module.reshard()
        return self._zero_loss(self.device) if total is None else total

    # Tied weights: the first part has the embedding, the last part a copy of it as its head

    @property
    def tied_copies(self) -> set[nn.Parameter]:
        """Return this rank's copies of tied weights. Norm and checkpoint skip them: the first part has the values."""
        return {parameter for name, parameter in self._parameters().items() if name in self.tied}

    @torch.no_grad()
    def sum_tied_gradients(self) -> None:
        """Set the gradients of both copies to their sum, bit-identical. Call it once per step, after the last
        backward.
        """
        first, last = self.ranks[0], self.ranks[-1]
        if self.rank not in (first, last):
            return
        parameters = self._parameters()
        for copy_name, name in self.tied.items():
            if not parameters[name if name in parameters else copy_name].requires_grad:
                continue
            grads = [_local_gradient(parameters[n]) for n in (name, copy_name) if n in parameters]
            if first == last:
                grads[0] += grads[1]
                grads[1].copy_(grads[0])
            else:
                (grad,) = grads
                peer = last if self.rank == first else first
                local_grad = grad.to(self.device).contiguous()
                other = torch.empty_like(local_grad)
                # not batch_isend_irecv: NCCL would use the communicator of all pipeline ranks, and creating that needs
                # the other ranks, which are not here
                send = partial(dist.isend, local_grad, group=self.group, group_dst=peer)
                receive = partial(dist.irecv, other, group=self.group, group_src=peer)
                for message in (send, receive) if self.rank == first else (receive, send):
                    message().wait()
                grad += other.to(grad.device)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {clean_name(name): parameter for part in self.parts for name, parameter in part.named_parameters()}


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's shard of the gradient, to be changed in place. Both copies have the same placements."""
    grad = parameter.grad
    assert grad is not None, "sum_tied_gradients comes after backward"
    if not isinstance(grad, DTensor):
        return grad
    assert grad.placements == parameter.placements
    return grad.to_local()
