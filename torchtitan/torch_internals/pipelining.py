"""torch's pipeline runtime and its stages."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, schedules

Action = schedules._Action
"""torch 2.13: an action of a rank's row in a schedule's table; `from_str` reads its text."""
ScheduleRuntime = schedules._PipelineScheduleRuntime
"""torch 2.13: the runtime of any table of actions, to subclass."""


def compute_order(schedule: str, stages: list[Any], microbatches: int) -> dict[int, list[Any]]:
    """torch 2.13: rank -> the compute actions of a schedule and its idle slots, which are None.

    The constructor of a schedule also adds all messages, in a second for 32 ranks.
    """
    base = schedules.get_schedule_class(schedule)
    without_messages = type(base.__name__, (base,), {"_prepare_schedule_with_comms": lambda self, actions: None})
    return without_messages(stages, microbatches).pipeline_order


class FrugalStage(PipelineStage):
    """torch 2.13: a stage whose buffers for received activations and gradients live from the receive to their use.

    torch keeps one for each microbatch as long as the stage: 8 GiB in the 405B job.
    """

    def _setup_forward_recv_info(self, *args: Any) -> None:
        super()._setup_forward_recv_info(*args)
        for infos in self.args_recv_info.values():
            _free_buffers(infos)

    def _setup_backward_recv_info(self, *args: Any) -> None:
        super()._setup_backward_recv_info(*args)
        for infos in self.grad_recv_info.values():
            _free_buffers(infos)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list:
        """Return the receives of a microbatch's activations."""
        self._make_buffers(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list:
        """Return the receives of a microbatch's gradients."""
        self._make_buffers(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Any, ...]:
        activations = super()._retrieve_recv_activations(fwd_chunk_id)
        _free_buffers(self.args_recv_info[fwd_chunk_id])
        return activations

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Any, ...]:
        gradients = super()._retrieve_recv_grads(bwd_chunk_id)
        _free_buffers(self.grad_recv_info[bwd_chunk_id])
        return gradients

    def _make_buffers(self, infos: Iterable[Any]) -> None:
        for info in infos:
            if not _is_input(info):
                info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)


def _free_buffers(infos: Iterable[Any]) -> None:
    for info in infos:
        if not _is_input(info):
            info.buffer = None


def _is_input(info: Any) -> bool:
    return getattr(info, "is_root_arg", True)  # torch 2.11 has no such attribute, and keeps its buffers
