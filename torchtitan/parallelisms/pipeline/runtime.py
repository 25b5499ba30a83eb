"""The pipeline runtime on torch's: one class for every schedule, driven by a table of actions.

Everything of torch's that is private or may move is in this file. What ours does otherwise:
* The loss is computed inside the last stage's forward and kept by microbatch, in whatever order they come.
* Recompute's full backward, or a split one: under FSDP's mixed precision, gradients of a split backward would add up in
  the parameters' type, and here they are handed to FSDP's float32 sum after every microbatch.
* Gradients of a split backward are laid out as their parameters are.
* Gradients of replicas are summed in the last local batch of a step only.
* Buffers of received activations and gradients live from the receive to their use. torch's live as long as the stage,
  one for each microbatch: 8 GiB in the 405B job.
* An exception keeps its type and says which stage and microbatch it comes from.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from torchtitan.parallelisms.data_parallel import fsdp_modules
from torchtitan.parallelisms.pipeline.actions import Table
from torchtitan.process.exit import add_note

# Before it raises, the runtime prints the whole table, a line for each action; the exception says where it was.
logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)


STAGE_METHODS = (
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
    "_setup_forward_recv_info",
    "_setup_backward_recv_info",
    "get_fwd_recv_ops",
    "get_bwd_recv_ops",
)
STAGE_ATTRIBUTES = ("args_recv_info", "grad_recv_info", "buffer", "tensor_meta", "is_root_arg")
"""Of torch's stage, needed here; a test says so when torch moves them."""


@contextmanager
def named(stage: int, microbatch: int, direction: str) -> Iterator[None]:
    """Whatever is raised inside, without torch's wrapping and with the place in its notes."""
    try:
        yield
    except Exception as error:
        wrapped = type(error) is RuntimeError and isinstance(error.__cause__, Exception)
        inner = error.__cause__ if wrapped else error
        add_note(inner, f"in pipeline stage {stage}, microbatch {microbatch}, {direction}")
        raise inner from inner.__cause__


def targets_of(part: nn.Module) -> tuple[str, ...]:
    """The tensors of a batch that only the loss reads."""
    return getattr(getattr(part, "loss", None), "targets", ("labels",))


def microbatches_of(
    extra_inputs: Mapping[str, torch.Tensor], tokens: Sequence[torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """Split tensors [B, ...] to match the microbatches of tokens [b, S]. A tensor with one row belongs to
    all samples.
    """
    sizes = [len(piece) for piece in tokens]
    pieces_of = {
        name: [tensor] * len(sizes) if len(tensor) == 1 else tensor.split(sizes)
        for name, tensor in extra_inputs.items()
    }
    return [{name: pieces[index] for name, pieces in pieces_of.items()} for index in range(len(sizes))]


class Stage(PipelineStage):
    """`part`: a piece of the model that takes (tokens or hidden states, **kwargs). Only the last one is given what the
    loss reads.

    `forward_context`: entered around every forward (autocast), but not around backward.
    """

    def __init__(
        self, part: nn.Module, *args: object, forward_context: AbstractContextManager | None = None, **kwargs: object
    ):
        super().__init__(part, *args, **kwargs)
        self.forward_context = forward_context or nullcontext()
        self.sums_over_replicas = True
        self.targets = targets_of(part)

    # Buffers of what is received

    def _setup_forward_recv_info(self, *args):
        super()._setup_forward_recv_info(*args)
        for infos in self.args_recv_info.values():
            _forget_buffers(infos)

    def _setup_backward_recv_info(self, *args):
        super()._setup_backward_recv_info(*args)
        for infos in self.grad_recv_info.values():
            _forget_buffers(infos)

    def get_fwd_recv_ops(self, fwd_chunk_id):
        self._make_buffers(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id):
        self._make_buffers(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id):
        activations = super()._retrieve_recv_activations(fwd_chunk_id)
        _forget_buffers(self.args_recv_info[fwd_chunk_id])
        return activations

    def _retrieve_recv_grads(self, bwd_chunk_id):
        gradients = super()._retrieve_recv_grads(bwd_chunk_id)
        _forget_buffers(self.grad_recv_info[bwd_chunk_id])
        return gradients

    def _make_buffers(self, infos) -> None:
        for info in infos:
            if not info.is_root_arg:
                info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)

    # One microbatch

    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, save_forward_output=True):
        stage_inputs = {
            name: tensor for name, tensor in (kwargs or {}).items() if self.is_last or name not in self.targets
        }
        with named(self.stage_index, fwd_chunk_id, "forward"), self.forward_context:
            return super().forward_one_chunk(fwd_chunk_id, args, stage_inputs, save_forward_output)

    def backward_one_chunk(self, bwd_chunk_id, *args, **kwargs):
        with named(self.stage_index, bwd_chunk_id, "backward"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id, *args, **kwargs):
        with named(self.stage_index, bwd_chunk_id, "backward of the weights"):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        lay_out_gradients(self.submod.parameters())
        for group in self._fsdp_groups():
            group.post_backward()  # with synchronisation off it only adds to the sum, in the type of the reduction

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Sum gradients over ranks and free what was gathered, once per local batch, after this stage's
        last backward.
        """
        assert grad_scale_factor == 1
        if not isinstance(self.submod, FSDPModule):
            return
        self.submod.set_is_last_backward(True)
        self.submod.set_reshard_after_backward(True)
        self.submod.set_requires_gradient_sync(True)
        self.submod.set_requires_all_reduce(self.sums_over_replicas)
        for group in self._fsdp_groups():
            group.post_backward()
        self.submod._get_fsdp_state()._root_post_backward_final_callback()

    def _fsdp_groups(self) -> list:
        groups = [module._get_fsdp_state()._fsdp_param_group for module in fsdp_modules(self.submod)]
        return [group for group in groups if group is not None]  # a middle part has no parameters beside its blocks'


def lay_out_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give gradients the memory layout of their parameters, as autograd does. torch's split backward keeps gradients as
    they come out of their products, perhaps transposed, and fused optimizers read both in the order of memory: on a CPU
    without a word, so that entries get one another's steps.
    """
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and not grad.is_contiguous():
            parameter.grad = grad.contiguous()


def _forget_buffers(infos) -> None:
    for info in infos:
        if not info.is_root_arg:
            info.buffer = None


class TableSchedule(_PipelineScheduleRuntime):
    """Runs `table`, the actions of all ranks. A stage that is last gives the sum of a microbatch's losses.

    Attributes of the next step: `valid_tokens`, by which losses are divided; `loss`, of this rank after the step.
    """

    def __init__(self, stages: list[Stage], table: Table, microbatches: int):
        super().__init__(stages, microbatches, loss_fn=self._share_of_loss, scale_grads=False)
        self.valid_tokens = 1
        self.loss: torch.Tensor | None = None
        self._shares: dict[int, torch.Tensor] = {}
        self.pipeline_order = {
            rank: [_Action.from_str(str(action)) for action in row] for rank, row in enumerate(table)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)

    def run(self, tokens: torch.Tensor, kwargs: dict[str, torch.Tensor], valid_tokens: int) -> torch.Tensor | None:
        """Forward and backward of a local batch, tokens [B, S] and what else the model takes; the share of the loss, a
        scalar, None where the last stage is not.
        """
        self.valid_tokens, self.loss = valid_tokens, None
        self._shares.clear()
        self.step(tokens, return_outputs=False, **kwargs)
        return self.loss

    def _split_inputs(self, args, kwargs=None):
        (tokens,) = args
        pieces = tokens.chunk(self._n_microbatches)
        return [(piece,) for piece in pieces], microbatches_of(kwargs or {}, pieces)

    def _share_of_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss / self.valid_tokens

    # torch's three take the microbatches of the last stage to come in order, which a table need not do

    def _maybe_compute_loss(self, stage, output, target_mbs, mb_index, *args) -> None:
        if stage.is_last:
            share = self._shares[mb_index] = self._share_of_loss(output)
            self.loss = share.detach().clone() if self.loss is None else self.loss + share.detach()

    def _maybe_get_loss(self, stage, mb_index) -> torch.Tensor | None:
        return self._shares.pop(mb_index) if stage.is_last else None

    def _update_losses(self, stages, losses) -> None:
        assert not self._shares
