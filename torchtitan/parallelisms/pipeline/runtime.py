"""The pipeline runtime: a subclass of torch's that runs every schedule from its table.

Differences from torch's runtime:
* The loss is computed inside the last stage's forward and stored by microbatch, in any order of microbatches.
* After a split backward, each microbatch's weight gradients are added to FSDP's accumulator in the reduction dtype
  (float32). torch would accumulate them in the dtype of the parameters.
* Gradients of a split backward get the memory layout of their parameters.
* HSDP replicas all-reduce gradients only in the last local batch of a step.
* Buffers for received activations and gradients live from the receive to their use (FrugalStage).
* An exception keeps its type and gets a note with its stage and microbatch.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

from torchtitan.parallelisms.data_parallel import fsdp_modules
from torchtitan.parallelisms.pipeline.actions import Table
from torchtitan.process.exit import add_note
from torchtitan.torch_internals.fsdp import Unit, finish_backward, fsdp_units
from torchtitan.torch_internals.pipelining import Action as TorchAction
from torchtitan.torch_internals.pipelining import FrugalStage, ScheduleRuntime

# Before it raises, the runtime logs the whole table, one line per action. The exception's note is enough.
logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)


@contextmanager
def annotate_errors(stage: int, microbatch: int, direction: str) -> Iterator[None]:
    """Re-raise exceptions without torch's RuntimeError wrapper, and with a note of stage, microbatch and direction."""
    try:
        yield
    except Exception as error:
        wrapped = type(error) is RuntimeError and isinstance(error.__cause__, Exception)
        inner = error.__cause__ if wrapped else error
        add_note(inner, f"in pipeline stage {stage}, microbatch {microbatch}, {direction}")
        raise inner from inner.__cause__


def loss_targets(part: nn.Module) -> tuple[str, ...]:
    """Return the names of the batch's tensors that only the loss reads."""
    return getattr(getattr(part, "loss", None), "targets", ("labels",))


def split_microbatches(
    extra_inputs: Mapping[str, torch.Tensor], tokens: Sequence[torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """Split tensors [B, ...] like the microbatches of tokens [b, S]. A tensor with one row applies to all samples."""
    sizes = [len(piece) for piece in tokens]
    pieces_of = {
        name: [tensor] * len(sizes) if len(tensor) == 1 else tensor.split(sizes)
        for name, tensor in extra_inputs.items()
    }
    return [{name: pieces[index] for name, pieces in pieces_of.items()} for index in range(len(sizes))]


class Stage(FrugalStage):
    """A pipeline stage around `part`, which is called with (tokens or hidden states, **kwargs).

    Only the last stage gets the tensors for the loss. `forward_context`: entered around every forward (autocast), but
    not around backward.
    """

    def __init__(
        self, part: nn.Module, *args: object, forward_context: AbstractContextManager | None = None, **kwargs: object
    ):
        super().__init__(part, *args, **kwargs)
        self.forward_context = forward_context or nullcontext()
        self.reduces_over_replicas = True

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the batch's tensors that only the loss reads, which may change between steps."""
        return loss_targets(self.submod)

    # One microbatch

    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, save_forward_output=True):
        stage_inputs = {
            name: tensor for name, tensor in (kwargs or {}).items() if self.is_last or name not in self.targets
        }
        with annotate_errors(self.stage_index, fwd_chunk_id, "forward"), self.forward_context:
            return super().forward_one_chunk(fwd_chunk_id, args, stage_inputs, save_forward_output)

    def backward_one_chunk(self, bwd_chunk_id, *args, **kwargs):
        with annotate_errors(self.stage_index, bwd_chunk_id, "backward"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id, *args, **kwargs):
        with annotate_errors(self.stage_index, bwd_chunk_id, "backward of the weights"):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        make_gradients_contiguous(self.submod.parameters())
        for unit in self._fsdp_units():
            unit.post_backward()  # with gradient sync off it only accumulates, in the reduction dtype

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce gradients over ranks and reshard, once per local batch, after this stage's last backward."""
        assert grad_scale_factor == 1
        if not isinstance(self.submod, FSDPModule):
            return
        self.submod.set_is_last_backward(True)
        self.submod.set_reshard_after_backward(True)
        self.submod.set_requires_gradient_sync(True)
        self.submod.set_requires_all_reduce(self.reduces_over_replicas)
        for unit in self._fsdp_units():
            unit.post_backward()
        finish_backward(self.submod)

    def _fsdp_units(self) -> list[Unit]:
        return [unit for module in fsdp_modules(self.submod) for unit in fsdp_units(module)]


def make_gradients_contiguous(parameters: Iterable[nn.Parameter]) -> None:
    """Give gradients the memory layout of their parameters, as autograd does.

    torch's split backward stores gradients as matrix products return them, sometimes transposed. Fused optimizers read
    gradient and parameter in memory order, so entries would get the wrong updates, on a CPU without an error.
    """
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and not grad.is_contiguous():
            parameter.grad = grad.contiguous()


class ActionObserver(Protocol):
    """Is told when an action of a rank begins and ends."""

    def begin(self, action: TorchAction) -> None: ...

    def end(self, action: TorchAction) -> None: ...


class _ObservedActions(list):
    """Actions in whose loop, which is torch's, an observer is told of each."""

    def __init__(self, actions: Sequence[TorchAction], observer: ActionObserver) -> None:
        super().__init__(actions)
        self.observer = observer

    def __iter__(self) -> Iterator[TorchAction]:
        for action in super().__iter__():
            self.observer.begin(action)
            yield action
            self.observer.end(action)


class TableSchedule(ScheduleRuntime):
    """The runtime of `table`, the actions of all ranks. The last stage returns the sum of a microbatch's losses.

    `divisor`: of the losses in this step. `loss`: this rank's loss after the step.
    """

    def __init__(self, stages: list[Stage], table: Table, microbatches: int):
        super().__init__(stages, microbatches, loss_fn=self._share_of_loss, scale_grads=False)
        self.divisor = 1.0
        self.loss: torch.Tensor | None = None
        self._shares: dict[int, torch.Tensor] = {}
        self.pipeline_order = {
            rank: [TorchAction.from_str(str(action)) for action in row] for rank, row in enumerate(table)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
        self.observer: ActionObserver | None = None

    def _step_microbatches(self, *args, **kwargs) -> None:
        order = self.pipeline_order_with_comms
        actions = order[self.rank]
        if self.observer is not None:
            order[self.rank] = _ObservedActions(actions, self.observer)
        try:
            super()._step_microbatches(*args, **kwargs)
        finally:
            order[self.rank] = actions

    def run(self, tokens: torch.Tensor, kwargs: dict[str, torch.Tensor], divisor: float) -> torch.Tensor | None:
        """Run forward and backward of a local batch: tokens [B, S], and the model's further inputs as `kwargs`.

        Returns this rank's share of the loss, a scalar, or None on ranks without the last stage.
        """
        self.divisor, self.loss = divisor, None
        self._shares.clear()
        self.step(tokens, return_outputs=False, **kwargs)
        return self.loss

    def _split_inputs(self, args, kwargs=None):
        (tokens,) = args
        pieces = tokens.chunk(self._n_microbatches)
        return [(piece,) for piece in pieces], split_microbatches(kwargs or {}, pieces)

    def _share_of_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss / self.divisor

    # these replace three methods of torch that require the last stage's microbatches to run in order

    def _maybe_compute_loss(self, stage, output, target_mbs, mb_index, *args) -> None:
        if stage.is_last:
            share = self._shares[mb_index] = self._share_of_loss(output)
            self.loss = share.detach().clone() if self.loss is None else self.loss + share.detach()

    def _maybe_get_loss(self, stage, mb_index) -> torch.Tensor | None:
        return self._shares.pop(mb_index) if stage.is_last else None

    def _update_losses(self, stages, losses) -> None:
        assert not self._shares
