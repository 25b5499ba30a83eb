"""One rank's training step of a job on the fake CUDA."""

import functools
import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchtitan.planner.fake_cuda import device, kernels  # first: see there

import torch  # isort: skip
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan.adapters import quantized
from torchtitan.assembly import parts
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.job import ResolvedJob
from torchtitan.models import dropout, layers
from torchtitan.optimizers import moments
from torchtitan.parallelisms import data_parallel, degrees, parallel_model, quantized_collectives
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.planner.memory.live_tensors import FakeValues
from torchtitan.planner.time.traffic import group_of
from torchtitan.torch_internals.dispatch import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torchtitan.torch_internals.fake_world import FakeStore
from torchtitan.training.batches import zero_batch

allocate_sharded = parallel_model.allocate
OPERATORS = (quantized, "unpack_nf4"), (quantized, "unpack_int8"), (dropout, "drop_by_keys")
"""Custom operators, of which fake tensors see the shapes alone."""


class HostWaits(FakeValues):
    """Counts where a number or a copy comes to the host, and gives the numbers that only a device would know."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func.name()
        if name in ("aten::nonzero", "aten::masked_select") and args[0].device.type == "cuda":
            device.note_wait("nonzero")
        if name == "aten::index" and any(t is not None and t.dtype == torch.bool for t in args[1]):
            device.note_wait("nonzero")
        is_number = name == "aten::_local_scalar_dense" and isinstance(args[0], FakeTensor)
        if is_number and args[0].device.type == "cuda" and not _torch_votes():
            device.note_wait("number")
        if name == "c10d::barrier":
            device.note_wait("barrier")
        if name == "c10d::_allgather_base_":
            device.order.append(("gather", args[0].numel()))
        if name == "c10d::_reduce_scatter_base_":
            device.order.append(("reduction", args[1].numel()))
        if name.startswith("c10d::"):
            device.groups |= {ranks for ranks in [group_of(func, args)] if _on_device(args)}
        target = kwargs.get("device")
        if name == "aten::_to_copy" and target is not None and torch.device(target).type != args[0].device.type:
            self._copy(kwargs.get("non_blocking", False))
        if name == "aten::copy_" and args[0].device.type != args[1].device.type:
            self._copy(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return super().call(func, args, kwargs)

    @staticmethod
    def _copy(non_blocking: bool) -> None:
        if not non_blocking:
            device.note_wait("copy")


def _on_device(args: tuple) -> bool:
    """Return True if any argument of a collective is a tensor on the device, or a list of these."""
    lists = [arg if isinstance(arg, (list, tuple)) else [arg] for arg in args]
    return any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for tensors in lists for x in tensors)


def _torch_votes() -> bool:
    """Return True while torch's pipelining exchanges shapes, once in the first step."""
    frames = traceback.extract_stack()[-10:]
    return any("pipelining/stage" in f.filename or f.name == "_warmup_p2p" for f in frames)


def outside_fake(owner: Any, *names: str) -> None:
    """Make methods work with the ranks' real numbers, outside of the fake mode."""
    for name in names:
        original = owner.__dict__[name]
        wrapped = isinstance(original, (staticmethod, classmethod))
        function = original.__func__ if wrapped else original

        @functools.wraps(function)
        def call(*args, _function=function, **kwargs):
            with unset_fake_temporarily():
                return _function(*args, **kwargs)

        setattr(owner, name, type(original)(call) if wrapped else call)


MESH: tuple[str, ...] = (
    "__init__",
    "__getitem__",
    "_flatten",
    "_concatenate",
    "get_local_rank",
    "get_coordinate",
    "get_group",
)
MESH += ("_is_current_rank_part_of_mesh", "_get_mesh_tensor_from_full_mesh", "_create_sub_mesh", "_create_flatten_mesh")
DIMS = ("build_expert_mesh", "build_counts_group", "stage_groups", "expert_dp_mesh", "dp_mesh")


def install() -> None:
    """Make this process one that trains on the fake CUDA."""
    device.install()
    device.replace(FakeTensorMode, avoid_device_init=True)
    outside_fake(DeviceMesh, *(name for name in MESH if name in DeviceMesh.__dict__))
    outside_fake(degrees.ParallelDims, *(name for name in DIMS if name in degrees.ParallelDims.__dict__))
    outside_fake(data_parallel, "get_post_forward_mesh_info")
    outside_fake(quantized_collectives, "reduction_hops")
    device.replace(ParallelModel, initialize=lambda self, names=None: None)  # there are no values
    device.replace(parallel_model, allocate=allocate)
    device.replace(data_parallel, without_selective_recompute=lambda function: function)
    device.replace(torch.nn.Module, to=lambda self, *args, **kwargs: self)
    device.replace(torch, compile=kernels.compiled)  # inductor has nothing to compile for
    for name in ("codebook", "code_table"):  # which are real tensors otherwise, and there is no real device
        setattr(moments, name, functools.cache(inspect.unwrap(getattr(moments, name))))
    for module, name in OPERATORS:  # run what they do
        setattr(module, name, getattr(module, name)._init_fn)


def allocate(part: torch.nn.Module, device: torch.device, offloaded: bool) -> None:
    """Do as parallel_model.allocate does, also for plain parameters, which `to_empty` cannot exchange for fake ones."""
    if any(isinstance(parameter, DTensor) for parameter in part.parameters()):
        return allocate_sharded(part, device, offloaded)
    allocated: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in allocated:
                empty = torch.empty_like(parameter, device="cpu" if offloaded else device)
                allocated[parameter] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, allocated[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device))


def use_fused_norms() -> None:
    """Make a norm the single kernel that a real GPU has for it."""
    device.replace(layers.RMSNorm, forward=lambda self, x: _NormKernel.apply(x, self.weight.to(x.dtype)))


class _NormKernel(torch.autograd.Function):
    """A norm [..., D] that reads, writes and saves what torch's kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.add(grad, x), torch.empty_like(weight)


@contextmanager
def job_on_rank(
    job: ResolvedJob, rank: int, mode: FakeTensorMode | None = None
) -> Iterator[tuple[ParallelModel, Any, dict]]:
    """The job's model, optimizers and one batch, as rank `rank` would build them.

    `mode`: one that no other job of this process has used, by default a new one.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=job.world_size, store=FakeStore())
    card = torch.device("cuda", 0)
    mesh = job.layout.dims.build_mesh("cuda")
    with mode or FakeTensorMode(allow_non_fake_inputs=True):
        model = ModelBuilder(job).model(mesh, card)
        optimizers = parts.optimizers(job.config.optimizer, model)
        batch = zero_batch(job, model.needs_keys)
        yield model, optimizers, {name: torch.empty_like(t, device=card) for name, t in batch.items()}
