"""A pipeline stage that runs its part segment by segment, with forward-backward pairs interleaved.

It uses torch's pipeline runtime for receives and FSDP actions, with these differences:
* Segments bypass module hooks, so the runtime's actions gather FSDP's parameters and reduce their gradients. FSDP's
  lazy initialization is forced, and its post-backward runs after every microbatch.
* Tensors to send are referenced until the send ends, not until the step ends. A pair sends each half's result without
  waiting for the other half.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FULL_BACKWARD,
    OVERLAP_F_B,
    REDUCE_GRAD,
)
from torch.distributed.pipelining.schedules import FORWARD as FORWARD_ACTION

from torchtitan.parallelisms.expert_parallel import run_local_experts
from torchtitan.parallelisms.pipeline.actions import Table
from torchtitan.parallelisms.pipeline.overlap.chunk import MAX_DEFERRED, Chunk, NodeLoop
from torchtitan.parallelisms.pipeline.overlap.exchange import Transport
from torchtitan.parallelisms.pipeline.overlap.segments import (
    BACKWARD,
    FORWARD,
    CountExchange,
    NodeLists,
    Program,
    RecomputePolicy,
    RowExchange,
    Step,
    Turn,
    in_order,
    interleave,
)
from torchtitan.parallelisms.pipeline.runtime import Stage, TableSchedule
from torchtitan.parallelisms.steps import Notes, RoutedExperts, Segment, StepwiseModel
from torchtitan.torch_internals.fsdp import initialize

SENDS_IN_FLIGHT = 2
"""Limit per stage and direction with gloo, where a send completes only in `wait`. Waiting is safe: the table has the
receive next to its send, before anything that is sent later."""

ARRIVED, RETURNED = "rows that arrived", "rows that go back"


def build_programs(part: StepwiseModel) -> list[Program]:
    """Return the programs of a model or a pipeline part of it that `require_steps` has checked."""
    return [
        Program(chain.name, tuple(expand_experts(chain.steps)), chain.recompute, chain.make_shared)
        for chain in part.chains()
    ]


def expand_experts(steps: Sequence[Segment | RoutedExperts]) -> list[Step]:
    """Expand a RoutedExperts step to an all-to-all (dispatch), the local experts, and the all-to-all back (combine).

    Later steps that do not need the result (shared experts) move in between, to run during the dispatch:

        attention | route and sort | (counts, dispatch) | shared experts | experts | (combine) | rest
    """
    at = next((index for index, step in enumerate(steps) if isinstance(step, RoutedExperts)), None)
    if at is None:
        return list(steps)
    experts, later_steps = steps[at], steps[at + 1 :]
    waits = {experts.target}
    concurrent = []
    for step in later_steps:
        assert isinstance(step, Segment), "a block has one step of routed experts"
        if waits.isdisjoint(step.inputs):
            concurrent.append(step)
        else:
            waits.update(step.outputs)

    def compute(notes: Notes, rows: torch.Tensor) -> torch.Tensor:
        return run_local_experts(experts.module, rows, notes["sizes"].received_counts)

    return [
        *steps[:at],
        CountExchange(),
        RowExchange("dispatch", experts.source, ARRIVED),
        *concurrent,
        Segment(experts.name, compute, (ARRIVED,), (RETURNED,)),
        RowExchange("combine", RETURNED, experts.target, back=True),
        *(step for step in later_steps if step not in concurrent),
    ]


class SegmentedStage(Stage):
    """A stage that runs the programs of its part.

    `context`: a function (input, **kwargs of the microbatch) -> notes.shared of the segments. `loss_gradient`: the
    gradient of the segments' own losses, to be set before a step. `segment_losses`: their values in the step.
    """

    def __init__(
        self,
        part: nn.Module,
        *args: Any,
        programs: Sequence[Program],
        context: Callable[..., Any],
        transport: Transport,
        policy: RecomputePolicy,
        **kwargs: Any,
    ):
        super().__init__(part, *args, **kwargs)
        self.transport, self.context = transport, context
        self.lists = NodeLists(programs, policy)
        self.loss_gradient: torch.Tensor | float = 1.0
        self.segment_losses: list[torch.Tensor] = []
        self.open_chunks: dict[int, Chunk] = {}  # by microbatch, from the forward to the end of the backward
        self.sending: dict[str, deque[tuple[dist.Work, torch.Tensor]]] = {FORWARD: deque(), BACKWARD: deque()}
        self.accumulates_locally = False
        if isinstance(part, FSDPModule):
            initialize(part)  # usually done by forward hooks

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self.segment_losses.clear()
        self.open_chunks.clear()

    # One microbatch

    def begin_forward(self, microbatch: int, args: tuple, kwargs: dict[str, Any] | None) -> Chunk:
        self._accumulate_locally()
        (x,) = args if self.is_first else self._retrieve_recv_activations(microbatch)
        stage_inputs = {
            name: value for name, value in (kwargs or {}).items() if self.is_last or name not in self.targets
        }
        with self.forward_context:
            shared = self.context(x, **stage_inputs)
        chunk = self.open_chunks[microbatch] = Chunk(
            self.lists,
            self.transport,
            x,
            shared,
            location=f"pipeline stage {self.stage_index}, microbatch {microbatch}",
            loss_gradient=self.loss_gradient,
            forward_context=self.forward_context,
        )
        return chunk

    def end_forward(self, microbatch: int) -> torch.Tensor:
        """Return hidden states [B, S, D] for the next stage or, in the last stage, the sum of losses, a scalar."""
        chunk = self.open_chunks[microbatch]
        self.segment_losses += chunk.losses
        output = chunk.output
        if not self.is_last:
            chunk.output = None  # no longer needed: its gradient comes from another stage
        return output

    def begin_backward(self, microbatch: int, loss: torch.Tensor | None) -> None:
        """Take the gradient of the output: from the loss, a scalar, or as received, [B, S, D]."""
        chunk = self.open_chunks[microbatch]
        if self.is_last:
            loss.backward()  # stops at the output, which is a leaf
            chunk.start_backward(None)
            return
        (gradient,) = self._retrieve_recv_grads(microbatch)
        chunk.start_backward(gradient)

    def end_backward(self, microbatch: int) -> torch.Tensor | None:
        """Return the gradient [B, S, D] of the input, or None for tokens. Some weight gradients may still be due."""
        chunk = self.open_chunks[microbatch]
        gradient, chunk.input_gradient = chunk.input_gradient, None
        self.accumulate_gradients()
        return gradient

    # Results are sent as soon as they are ready, so the runtime's send actions have nothing left to do

    def send_output(self, microbatch: int) -> None:
        if not self.is_last:
            self._send(FORWARD, self.open_chunks[microbatch].output, self.stage_index + 1)

    def send_input_gradient(self, microbatch: int) -> None:
        if not self.is_first:
            self._send(BACKWARD, self.open_chunks[microbatch].input_gradient, self.stage_index - 1)

    def _send(self, direction: str, tensor: torch.Tensor, stage: int) -> None:
        if self.stage_index_to_group_rank[stage] == self.group_rank:
            return
        works = self.sending[direction]
        while works and (works[0][0].is_completed() or self.device.type == "cpu" and len(works) >= SENDS_IN_FLIGHT):
            works.popleft()[0].wait()
        tensor = tensor.detach().contiguous()
        peer = self.stage_index_to_group_rank[stage]
        works.append((dist.isend(tensor, group=self.group, group_dst=peer), tensor))

    def get_fwd_send_ops(self, fwd_chunk_id):
        return []

    def get_bwd_send_ops(self, bwd_chunk_id):
        return []

    # FSDP

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        for works in self.sending.values():
            while works:
                works.popleft()[0].wait()
        super().perform_reduce_grad(grad_scale_factor)
        self.accumulates_locally = False

    def _accumulate_locally(self) -> None:
        """Keep the gradients on this rank until perform_reduce_grad."""
        if isinstance(self.submod, FSDPModule) and not self.accumulates_locally:
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
            self.accumulates_locally = True

    def accumulate_gradients(self) -> None:
        for unit in self._fsdp_units():
            unit.post_backward()  # with gradient sync off it only accumulates, in the reduction dtype


class SegmentedSchedule(TableSchedule):
    """The schedule that runs a table of SegmentedStages.

    `overlap`: interleave the two actions of a pair, and defer weight gradients to fill waits for all-to-alls.
    Otherwise everything runs one after the other.
    """

    def __init__(self, stages: list[SegmentedStage], table: Table, microbatches: int, overlap: bool = True):
        super().__init__(stages, table, microbatches)
        # with more than three stages, the runtime frees parameters that deferred weight gradients would still need
        freed = any(isinstance(stage.submod, FSDPModule) for stage in stages) and len(stages) > 3
        self.loop = NodeLoop(overlap, max_deferred=0 if freed else MAX_DEFERRED)
        self.stage_by_index = {stage.stage_index: stage for stage in stages}
        self.orders: dict[tuple, list[Turn]] = {}
        for kind in (FORWARD_ACTION, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, REDUCE_GRAD, OVERLAP_F_B):
            self.register_custom_function(kind, self._run_action)

    def _run_action(self, action: Any, context: Any) -> None:
        kind = action.computation_type
        if kind == BACKWARD_WEIGHT:
            self._weights(self.stage_by_index[action.stage_index], action.microbatch_index)
        elif kind == REDUCE_GRAD:
            self._reduce(self.stage_by_index[action.stage_index])
        elif kind != OVERLAP_F_B:
            self._run([action], context)
        elif self.loop.overlap:
            self._run(action.sub_actions, context)
        else:
            for part in action.sub_actions:
                self._run([part], context)

    def _run(self, actions: Sequence[Any], context: Any) -> None:
        """Run one action, or the forward and backward of a pair interleaved.

        Each sends its result as soon as possible, but the forward before the backward: receives are posted in the
        table's order.
        """
        sends = _OrderedCalls()
        begins = [self._begin(action, context, partial(sends.call, turn)) for turn, action in enumerate(actions)]
        self.loop.run(self._order(actions), *begins)
        for action in actions:
            stage, microbatch = self.stage_by_index[action.stage_index], action.microbatch_index
            if action.computation_type == FORWARD_ACTION:
                output = stage.end_forward(microbatch)
                self._maybe_compute_loss(stage, output, context.target_mbs, microbatch)
                if stage.stage_index + 1 in self.stage_by_index:
                    self.stage_by_index[stage.stage_index + 1].set_local_fwd_input(output, microbatch)
                continue
            gradient = stage.end_backward(microbatch)
            if stage.stage_index - 1 in self.stage_by_index:
                self.stage_by_index[stage.stage_index - 1].set_local_bwd_input((gradient,), microbatch)
            if action.computation_type == FULL_BACKWARD:
                self._weights(stage, microbatch)

    def _begin(self, action: Any, context: Any, send: Callable[[Callable[[], None]], None]) -> Callable[[], Chunk]:
        stage, microbatch = self.stage_by_index[action.stage_index], action.microbatch_index
        key = stage.stage_index, microbatch

        def forward() -> Chunk:
            self._assert_unsharded(stage)
            _wait(self.fwd_recv_ops.pop(key, []))
            chunk = stage.begin_forward(microbatch, context.arg_mbs[microbatch], context.kwarg_mbs[microbatch])
            chunk.on_output = lambda: send(lambda: stage.send_output(microbatch))
            return chunk

        def begin_backward() -> None:
            _wait(self.bwd_recv_ops.pop(key, []))
            stage.begin_backward(microbatch, self._maybe_get_loss(stage, microbatch))

        def backward() -> Chunk:
            self._assert_unsharded(stage)
            chunk = stage.open_chunks[microbatch]
            chunk.await_gradient = begin_backward
            chunk.on_input_gradient = lambda: send(lambda: stage.send_input_gradient(microbatch))
            return chunk

        return forward if action.computation_type == FORWARD_ACTION else backward

    def _order(self, actions: Sequence[Any]) -> list[Turn]:
        key = tuple((action.stage_index, action.computation_type) for action in actions)
        if key not in self.orders:
            lists = []
            for stage, kind in key:
                node_lists = self.stage_by_index[stage].lists
                lists.append(
                    {FORWARD_ACTION: node_lists.forward, FULL_BACKWARD: node_lists.backward}.get(
                        kind, node_lists.input_grads
                    )
                )
            self.orders[key] = in_order(*lists) if len(lists) == 1 else interleave(*lists)
        return self.orders[key]

    def _weights(self, stage: SegmentedStage, microbatch: int) -> None:
        self.loop.run_overdue(stage.open_chunks.pop(microbatch))
        stage.accumulate_gradients()

    def _reduce(self, stage: SegmentedStage) -> None:
        self.loop.run_deferred(lambda chunk: chunk.lists is stage.lists)
        stage.accumulate_gradients()
        stage.perform_reduce_grad(1)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class _OrderedCalls:
    """A queue of numbered calls. A call runs once it has been submitted and all lower numbers have run."""

    def __init__(self):
        self._next, self._early = 0, {}

    def call(self, number: int, function: Callable[[], None]) -> None:
        self._early[number] = function
        while self._next in self._early:
            self._early.pop(self._next)()
            self._next += 1
