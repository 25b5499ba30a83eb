"""The state of one microbatch in one stage (Chunk), and the loop that runs the nodes of a rank's chunks (NodeLoop)."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan.parallelisms.pipeline.overlap.exchange import SizesTransfer, SplitSizes, Transfer, Transport
from torchtitan.parallelisms.pipeline.overlap.segments import (
    BACKWARD,
    COMPUTE,
    DONE,
    FORWARD,
    INPUT,
    ISSUE,
    POST,
    RECOMPUTE,
    WAIT,
    WEIGHT,
    CountExchange,
    Node,
    NodeLists,
    Program,
    RowExchange,
    Turn,
)
from torchtitan.parallelisms.pipeline.split_backward import WeightGradients, backward_inputs
from torchtitan.parallelisms.steps import Notes, Segment, running
from torchtitan.process.exit import add_note

PHASES = {
    FORWARD: "forward",
    RECOMPUTE: "recomputation",
    BACKWARD: "backward",
    INPUT: "backward of the inputs",
    WEIGHT: "backward of the weights",
}
MAX_DEFERRED = 2
"""Weight gradients that may wait for a gap later than the table has them, each with its segment's activations. In a
simulation at p=4, m=16 with all-to-alls as long as the experts, 2 take 15 % off ZBV and 2 % off DualPipeV; more do not
help."""


class _BlockState:
    """The state of one block in a chunk: tensors, gradients, graphs and transfers in flight."""

    def __init__(self, program: Program, keeps_graphs: bool, saved_names: set[str], shared: Any):
        self.program, self.keeps_graphs, self.saved_names = program, keeps_graphs, saved_names
        self.notes = Notes(shared if program.make_shared is None else program.make_shared(shared))
        self.values: dict[str, torch.Tensor] = {}  # detached leaves
        self.grads: dict[str, torch.Tensor] = {}  # received by an all-to-all or from another stage
        self.graphs: dict[int, list[GradientEdge | None]] = {}  # edges of a segment's outputs and losses
        self.loss_grads: dict[int, list[torch.Tensor]] = {}
        self.weights: dict[int, WeightGradients] = {}
        self.rng_states: dict[int, list[torch.Tensor]] = {}
        self.saved_ops: dict[int, AbstractContextManager] = {}
        self.in_flight: dict[tuple[str, int], Transfer | SizesTransfer] = {}

    def gradient(self, name: str) -> torch.Tensor | None:
        """Remove and return the accumulated gradient of tensor `name`. Call it after the backward of all its users."""
        grad, leaf = self.grads.pop(name, None), self.values.get(name)
        if leaf is not None and leaf.grad is not None:
            grad = leaf.grad if grad is None else grad + leaf.grad
            leaf.grad = None
        return grad


class Chunk:
    """One microbatch in one stage.

    `x`: the stage's input, tokens [B, S] or hidden states [B, S, D]; a leaf that requires its gradient, if that is
    needed. `location`: for error messages. `loss_gradient`: the gradient of the segments' losses. `forward_context`:
    entered around every forward and recomputation (autocast), but not around backward.

    Callbacks: `await_gradient` runs before the first node that needs the output's gradient, and has to call
    start_backward. `on_output` and `on_input_gradient` run as soon as the tensor is ready.
    """

    def __init__(
        self,
        lists: NodeLists,
        transport: Transport,
        x: torch.Tensor,
        shared: Any = None,
        *,
        location: str = "",
        loss_gradient: torch.Tensor | float = 1.0,
        forward_context: AbstractContextManager | None = None,
    ):
        self.lists, self.policy, self.transport = lists, lists.policy, transport
        self.location, self.loss_gradient = location, loss_gradient
        self.forward_context = forward_context or nullcontext()
        self.device = x.device
        self.blocks = []
        for index, program in enumerate(lists.programs):
            with_graphs = torch.is_grad_enabled() and self.policy.keeps_graphs(lists.programs, index)
            saved_names = self.policy.saved_names(program) if torch.is_grad_enabled() else set()
            self.blocks.append(_BlockState(program, with_graphs, saved_names, shared))
        self.blocks[0].values[lists.programs[0].input] = x
        self.input = x if torch.is_grad_enabled() else None
        self.output: torch.Tensor | None = None
        self.input_gradient: torch.Tensor | None = None
        self.losses: list[torch.Tensor] = []
        self.await_gradient: Callable[[], None] | None = None
        self.on_output: Callable[[], None] | None = None
        self.on_input_gradient: Callable[[], None] | None = None

    def start_backward(self, output_gradient: torch.Tensor | None) -> None:
        """Start from the output's gradient [B, S, D]. None: the loss's backward has already accumulated it in the
        output, a leaf.
        """
        last = self.blocks[-1]
        if output_gradient is not None:
            last.grads[last.program.output] = output_gradient
        elif self.output is not None and self.output.grad is not None:
            last.grads[last.program.output] = self.output.grad
        self.output = None

    def run(self, node: Node) -> None:
        block, index = self.blocks[node.block], node.step
        if self.await_gradient and node.phase in (BACKWARD, INPUT):
            call, self.await_gradient = self.await_gradient, None
            call()
        if node.kind == DONE:
            self._done(node.phase)
        elif node.kind == COMPUTE:
            run = {FORWARD: self._forward, RECOMPUTE: self._recompute, WEIGHT: self._weight_grads}
            run.get(node.phase, self._backward)(block, index, node)
        elif node.kind == POST:
            block.in_flight[node.phase, index] = self.transport.issue_counts(block.notes["counts"])
        elif node.kind == ISSUE:
            self._issue(block, index, node.phase)
        elif node.kind == WAIT:
            self._wait(block, index, node)

    def _done(self, phase: str) -> None:
        if phase == INPUT:
            x, self.input = self.input, None
            if x.requires_grad:
                self.input_gradient = torch.zeros_like(x) if x.grad is None else x.grad
            for block in self.blocks:
                block.values.clear()
            if self.on_input_gradient:
                self.on_input_gradient()
        elif self.on_output:
            self.on_output()

    # Compute

    def _forward(self, block: _BlockState, index: int, node: Node) -> None:
        step = block.program.steps[index]
        context: AbstractContextManager = nullcontext()
        if torch.is_grad_enabled() and not block.keeps_graphs:
            if self.policy.preserve_rng_state:
                block.rng_states[index] = _random_state(self.device)
            if self.policy.mode == "selective" and self.policy.save_op is not None:
                context, block.saved_ops[index] = create_selective_checkpoint_contexts(self._choose)
        # Not under no_grad, even if the graph is dropped: requires_grad of the outputs is needed, and autocast would
        # cache cast weights that do not require gradients.
        with self.forward_context, context:
            outputs = _run(step, block)
        for name, output in zip(step.outputs, outputs, strict=False):
            self._set(block, node.block, name, output.detach().requires_grad_(output.requires_grad))
        self.losses += [loss.detach() for loss in outputs[len(step.outputs) :]]
        if block.keeps_graphs:
            self._keep_graph(block, index, outputs)
        self._drop_unused(block, index)

    def _choose(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if self.policy.save_op(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def _recompute(self, block: _BlockState, index: int, node: Node) -> None:
        step = block.program.steps[index]
        random = block.rng_states.pop(index, None)
        with _use_random_state(self.device, random), self.forward_context, block.saved_ops.pop(index, nullcontext()):
            outputs = _run(step, block)
        for name, output in zip(step.outputs, outputs, strict=False):
            # an existing leaf may already have its gradient, and a block's output is the next block's leaf
            if name not in block.values and name != block.program.output:
                block.values[name] = output.detach().requires_grad_(output.requires_grad)
        self._keep_graph(block, index, outputs)

    def _keep_graph(self, block: _BlockState, index: int, outputs: tuple[torch.Tensor, ...]) -> None:
        """Store the gradient edges of the outputs, not the outputs, which may be freed before the backward."""
        block.graphs[index] = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
        losses = outputs[len(block.program.steps[index].outputs) :]
        block.loss_grads[index] = [torch.ones_like(loss) * self.loss_gradient for loss in map(torch.detach, losses)]

    def _backward(self, block: _BlockState, index: int, node: Node) -> None:
        step = block.program.steps[index]
        edges = block.graphs.pop(index)
        grads = [block.gradient(name) for name in step.outputs] + block.loss_grads.pop(index)
        pairs = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge is not None and grad is not None]
        inputs = [block.values[name] for name in step.inputs]
        for name in step.outputs:
            block.values.pop(name, None)
        if node.phase == BACKWARD and pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
        elif node.phase == INPUT:
            later = backward_inputs(*(zip(*pairs, strict=True) if pairs else ((), ())), inputs)
            if later:
                block.weights[index] = later

    def has_weights(self, node: Node) -> bool:
        """Return True if weight gradients are still to be computed after the gradient of the inputs."""
        return node.step in self.blocks[node.block].weights

    def _weight_grads(self, block: _BlockState, index: int, node: Node) -> None:
        block.weights.pop(index).run()

    # Communication

    def _issue(self, block: _BlockState, index: int, phase: str) -> None:
        step = block.program.steps[index]
        sizes: SplitSizes = block.notes["sizes"]
        if phase == BACKWARD:
            rows, target = block.gradient(step.target), block.values.pop(step.target)
            rows = torch.zeros_like(target) if rows is None else rows
        else:
            rows = block.values[step.source].detach()
            self._drop_unused(block, index)
        splits = (sizes.send, sizes.receive)
        splits = splits if step.back == (phase == BACKWARD) else splits[::-1]
        block.in_flight[phase, index] = self.transport.issue(rows, *splits)

    def _wait(self, block: _BlockState, index: int, node: Node) -> None:
        step = block.program.steps[index]
        received = block.in_flight.pop((node.phase, index)).wait()
        if isinstance(step, CountExchange):
            block.notes["sizes"] = received
        elif node.phase == BACKWARD:
            old = block.grads.get(step.source)
            block.grads[step.source] = received if old is None else old + received
        else:
            assert isinstance(step, RowExchange)
            leaf = received.detach().requires_grad_(torch.is_grad_enabled())
            self._set(block, node.block, step.target, leaf)

    # Values

    def _set(self, block: _BlockState, number: int, name: str, leaf: torch.Tensor) -> None:
        is_output = name == block.program.output
        if is_output and number + 1 == len(self.blocks):
            self.output = leaf
            return
        if is_output:
            following = self.blocks[number + 1]
            following.values[following.program.input] = leaf
        if not is_output or torch.is_grad_enabled():
            block.values[name] = leaf

    def _drop_unused(self, block: _BlockState, index: int) -> None:
        """Drop tensors that neither later steps nor the backward need.

        If graphs are kept, a leaf that a segment reads must live to accumulate its gradient. The gradient of an
        all-to-all's input needs no leaf.
        """
        steps = block.program.steps
        step = steps[index]
        names = step.inputs + step.outputs if isinstance(step, Segment) else (step.source,)
        for name in names:
            users = block.program.users[name]
            over = all(user <= index for user in users)
            needs_leaf = block.keeps_graphs and any(isinstance(steps[user], Segment) for user in users)
            if over and not needs_leaf and name not in block.saved_names and name != block.program.output:
                block.values.pop(name, None)


def _run(step: Segment, block: _BlockState) -> tuple[torch.Tensor, ...]:
    with running(block.notes):
        outputs = step.run(block.notes, *(block.values[name] for name in step.inputs))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    names = step.outputs + step.losses
    assert len(outputs) == len(names), f"{step.name} gave {len(outputs)} tensors for {', '.join(names)}"
    return outputs


def _random_state(device: torch.device) -> list[torch.Tensor]:
    state = [torch.get_rng_state()]
    if device.type != "cpu":
        state.append(torch.get_device_module(device).get_rng_state(device))
    return state


def _set_random_state(device: torch.device, state: list[torch.Tensor]) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.get_device_module(device).set_rng_state(state[1], device)


@contextmanager
def _use_random_state(device: torch.device, state: list[torch.Tensor] | None) -> Iterator[None]:
    """Use the random state `state` inside this context, and restore the current one afterwards."""
    if state is None:
        yield
        return
    now = _random_state(device)
    _set_random_state(device, state)
    try:
        yield
    finally:
        _set_random_state(device, now)


class NodeLoop:
    """The loop that runs all nodes of a rank, on the calling thread.

    Without `overlap`, it waits for each all-to-all right after the issue, and computes weight gradients where the table
    has them. With `overlap`, weight gradients fill the gaps where nothing else runs between an issue and its wait.
    """

    def __init__(self, overlap: bool = True, max_deferred: int = MAX_DEFERRED):
        self.overlap, self.max_deferred = overlap, max_deferred if overlap else 0
        self.deferred: deque[tuple[Chunk, Node]] = deque()  # oldest first

    def run(self, order: Sequence[Turn], *begin: Callable[[], Chunk]) -> None:
        """Run the turns. `begin[i]` creates the chunk of microbatch i at its first turn.

        Exceptions get a note with the segment, stage and microbatch.
        """
        chunks: dict[int, Chunk] = {}
        uncovered: set[tuple] = set()  # all-to-alls in flight that no computation has overlapped yet
        waited: set[tuple] = set()
        for number, node in order:
            if number not in chunks:
                chunks[number] = begin[number]()
            chunk, transfer = chunks[number], (number, node.phase, node.block, node.step)
            if node.kind == WAIT:
                if transfer in waited:
                    continue
                if transfer in uncovered and self.deferred:
                    self._run(*self.deferred.popleft())
                    uncovered.clear()
                uncovered.discard(transfer)
            self._run(chunk, node)
            if node.kind == ISSUE and self.overlap:
                uncovered.add(transfer)
            elif node.kind == ISSUE:
                self._run(chunk, node._replace(kind=WAIT))
                waited.add(transfer)
            elif node.kind == COMPUTE and not node.light:
                uncovered.clear()
            if node.kind == COMPUTE and node.phase == INPUT and chunk.has_weights(node):
                self.deferred.append((chunk, node._replace(phase=WEIGHT)))

    def run_overdue(self, chunk: Chunk) -> None:
        """Run overdue weight gradients. Call it where the table has the weight gradients of `chunk`.

        With overlap, up to `max_deferred` of them stay deferred; without it, all of `chunk` run.
        """
        if not self.overlap:
            self.run_deferred(lambda other: other is chunk)
        while len(self.deferred) > self.max_deferred and self.overlap:
            self._run(*self.deferred.popleft())

    def run_deferred(self, is_due: Callable[[Chunk], bool]) -> None:
        """Run all weight gradients of the chunks for which `is_due` holds."""
        waiting, self.deferred = self.deferred, deque()
        for chunk, node in waiting:
            if is_due(chunk):
                self._run(chunk, node)
            else:
                self.deferred.append((chunk, node))

    def _run(self, chunk: Chunk, node: Node) -> None:
        try:
            chunk.run(node)
        except Exception as error:
            add_note(error, f"in segment {node.name} ({node.kind}, {PHASES[node.phase]}) of {chunk.location}")
            raise
