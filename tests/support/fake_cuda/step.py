"""One rank's training step of a job on the fake CUDA."""

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.support.fake_cuda import device, kernels  # first: see there

import torch  # isort: skip
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.adapters import quantized
from torchtitan.build import parts
from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.models import dropout, layers
from torchtitan.optimizers import moments
from torchtitan.parallelisms import data_parallel, parallel_dims, parallel_model
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.planner.traffic import group_of
from torchtitan.training.batches import zero_batch

VALID_TOKENS = 1000
allocate_sharded = parallel_model.allocate
OPERATORS = (quantized, "unpack_nf4"), (quantized, "unpack_int8"), (dropout, "drop_by_keys")
"""Custom operators, of which fake tensors see the shapes alone."""


class HostWaits(TorchDispatchMode):
    """Counts where a number or a copy comes to the host, and answers for the device: `count`, which only it would know,
    is the number of rows that every rank of an expert-parallel group sends to every other.
    """

    supports_higher_order_operators = True

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.name()
        if name in ("aten::nonzero", "aten::masked_select") and args[0].device.type == "cuda":
            device.waits("nonzero")
        if name == "aten::index" and any(t is not None and t.dtype == torch.bool for t in args[1]):
            device.waits("nonzero")
        if name == "aten::_local_scalar_dense" and isinstance(args[0], FakeTensor):
            if _torch_votes():
                return 1
            if args[0].device.type == "cuda":
                device.waits("number")
            return 1.0 if args[0].dtype.is_floating_point else self.count
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
        return func(*args, **kwargs)

    @staticmethod
    def _copy(non_blocking: bool) -> None:
        if not non_blocking:
            device.waits("copy")


def _on_device(args: tuple) -> bool:
    """Return True if any argument of a collective is a tensor on the device, or a list of these."""
    lists = [arg if isinstance(arg, (list, tuple)) else [arg] for arg in args]
    return any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for tensors in lists for x in tensors)


def _torch_votes() -> bool:
    """Return True while torch's pipelining exchanges shapes, once in the first step."""
    frames = traceback.extract_stack()[-10:]
    return any("pipelining/stage" in f.filename or f.name == "_warmup_p2p" for f in frames)


@contextmanager
def recorded_messages() -> Iterator[list[tuple[str, int, list[int], bool]]]:
    """Messages between two ranks as they are issued: isend or irecv, the peer in its group, the shape, and whether it
    is one of a batch, which NCCL coalesces and carries in another communicator than a plain one.
    """
    messages: list[tuple[str, int, list[int], bool]] = []
    originals = {name: getattr(c10d, name) for name in ("isend", "irecv", "batch_isend_irecv")}
    in_batch = False

    def one(name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(originals[name]).bind(tensor, *args, **kwargs).arguments
        messages.append((name, bound["group_dst" if name == "isend" else "group_src"], list(tensor.shape), in_batch))
        return originals[name](tensor, *args, **kwargs)

    def several(operations: list) -> Any:
        nonlocal in_batch
        in_batch = True
        try:
            return originals["batch_isend_irecv"](operations)
        finally:
            in_batch = False

    recording = {name: functools.partial(one, name) for name in ("isend", "irecv")} | {"batch_isend_irecv": several}
    for module in (c10d, dist):
        module.__dict__.update(recording)
    try:
        yield messages
    finally:
        for module in (c10d, dist):
            module.__dict__.update(originals)


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


MESH = ("__init__", "__getitem__", "_flatten", "_concatenate", "get_local_rank", "get_coordinate", "get_group")
MESH += ("_is_current_rank_part_of_mesh", "_get_mesh_tensor_from_full_mesh", "_create_sub_mesh", "_create_flatten_mesh")
DIMS = ("build_expert_mesh", "build_counts_group", "stage_groups", "expert_dp_mesh", "dp_mesh")


def install() -> None:
    """Make this process one that trains on the fake CUDA."""
    device.install()
    FakeTensorMode.avoid_device_init = True
    outside_fake(DeviceMesh, *(name for name in MESH if name in DeviceMesh.__dict__))
    outside_fake(parallel_dims.ParallelDims, *(name for name in DIMS if name in parallel_dims.ParallelDims.__dict__))
    ParallelModel.initialize = lambda self, names=None: None  # there are no values
    parallel_model.allocate = allocate
    data_parallel._without_recompute = lambda function: function
    torch.nn.Module.to = lambda self, *args, **kwargs: self
    torch.compile = kernels.compiled  # inductor has nothing to compile for
    for name in ("codebook", "code_table"):  # which are real tensors otherwise, and there is no real device
        setattr(moments, name, functools.cache(inspect.unwrap(getattr(moments, name))))
    for module, name in OPERATORS:  # run what they do
        setattr(module, name, getattr(module, name)._init_fn)


def allocate(part: torch.nn.Module, card: torch.device, offloaded: bool) -> None:
    """Do as parallel_model.allocate does, also for plain parameters, which `to_empty` cannot exchange for fake ones."""
    if any(isinstance(parameter, DTensor) for parameter in part.parameters()):
        return allocate_sharded(part, card, offloaded)
    allocated: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in allocated:
                empty = torch.empty_like(parameter, device="cpu" if offloaded else card)
                allocated[parameter] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, allocated[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=card) if buffer.is_meta else buffer.to(card))


@contextmanager
def job_on_rank(config: JobConfig, rank: int, world_size: int) -> Iterator[tuple[ParallelModel, Any, dict]]:
    """The job's model, optimizers and one batch, as rank `rank` of `world_size` would build them."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    dims = parts.dims(config, world_size)
    card = torch.device("cuda", 0)
    mesh = dims.build_mesh("cuda")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = parts.model(config, mesh, dims, card)
        optimizers = parts.optimizers(config, model)
        batch = zero_batch(config, dims, model.needs_keys)
        yield model, optimizers, {name: torch.empty_like(t, device=card) for name, t in batch.items()}


def train_step(model: ParallelModel, optimizers: Any, batch: dict[str, torch.Tensor], steps: bool = True) -> None:
    """Run a step of one microbatch; without `steps`, leave out the optimizer's."""
    model.forward_backward(batch, VALID_TOKENS)
    model.clip_gradients(1.0)
    if steps:
        optimizers.step()
    model.after_step()
    optimizers.zero_grad()


def rows_per_peer(config: JobConfig) -> int:
    """Return the rows per peer in one forward if tokens are spread evenly over the experts."""
    degrees, samples = config.parallelism, config.training.local_batch_size
    if degrees.pipeline_parallel_degree > 1:
        samples = degrees.pipeline_parallel_microbatch_size
    shards = degrees.context_parallel_degree * degrees.tensor_parallel_degree * degrees.expert_parallel_degree
    return samples * config.training.seq_len * getattr(parts.model_args(config), "top_k", 0) // shards


def host_waits(argv: list[str], rank: int, world_size: int) -> dict[str, int]:
    """Count host waits by place in the second step of the job `argv`; the first step infers shapes."""
    config = manager.load(argv)
    with job_on_rank(config, rank, world_size) as (model, optimizers, batch), HostWaits(rows_per_peer(config)):
        train_step(model, optimizers, batch)
        device.host_waits.clear()
        train_step(model, optimizers, batch)
    return dict(device.host_waits)


def step_costs(argv: list[str], rank: int, world_size: int) -> dict[str, Any]:
    """Return the costs of the whole second step of the job `argv`: see `_costs`."""
    return costs(argv, rank, world_size, steps=True)


def costs(argv: list[str], rank: int, world_size: int, steps: bool = False) -> dict[str, Any]:
    """Return the costs of forward, backward and clipping in the second step of the job `argv`: see `_costs`."""
    config = manager.load(argv)
    with job_on_rank(config, rank, world_size) as (model, optimizers, batch), HostWaits(rows_per_peer(config)):
        train_step(model, optimizers, batch)
        return _costs(model, lambda: train_step(model, optimizers, batch, steps))


def restart_costs(argv: list[str], rank: int, world_size: int) -> dict[str, Any]:
    """Return the costs of a restart of ReLoRA after the first step of the job `argv`: see `_costs`."""
    config = manager.load(argv)
    with job_on_rank(config, rank, world_size) as (model, optimizers, batch), HostWaits(rows_per_peer(config)):
        train_step(model, optimizers, batch)
        step = config.adapter.relora.every + 1
        return _costs(model, lambda: model.after_step(step, optimizers.optimizers))


def optimizer_costs(argv: list[str], rank: int, world_size: int) -> dict[str, Any]:
    """Return the costs of the optimizer's second step: see `_costs`. The gradients are not computed."""
    config = manager.load(argv)
    with job_on_rank(config, rank, world_size) as (model, optimizers, _), HostWaits(rows_per_peer(config)):
        for _, parameter in model.named_parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        optimizers.step()
        return _costs(model, optimizers.step)


def _costs(model: ParallelModel, work: Callable[[], None]) -> dict[str, Any]:
    """Return what `work` costs.

    `kernels`, `bytes` and `seconds`, an estimate for an H100: by place, with their sums under "all"; `host_waits`;
    `trained`: the rank's trained weights.
    """
    device.host_waits.clear()
    with kernels.Kernels() as counter:
        work()
    parameters = [p.to_local() if isinstance(p, DTensor) else p for _, p in model.named_parameters()]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    sums = {kind: {"all": counts.total(), **counts} for kind, counts in counter.by_place.items()}
    return sums | {"host_waits": dict(device.host_waits), "trained": trained}


def costs_with_fused_kernels(argv: list[str], rank: int, world_size: int) -> dict[str, Any]:
    """Return `costs` with attention and norms as the single kernels that a real GPU has for them."""
    layers.RMSNorm.forward = lambda self, x: _NormKernel.apply(x, self.weight.to(x.dtype))
    torch.nn.functional.scaled_dot_product_attention = _flash
    return costs(argv, rank, world_size)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None = None, *, is_causal: bool, **_: Any
) -> torch.Tensor:
    assert mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


class _NormKernel(torch.autograd.Function):
    """A norm [..., D] that reads and writes as often as torch's kernels."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return torch.add(grad, x), torch.empty_like(weight)


def flash_attention(argv: list[str], rank: int, world_size: int) -> list[str | None]:
    """Return torch's flash kernel, None for its own, before and after the job's model is built.

    The package of FlashAttention 3 is replaced by one without kernels.
    """
    register_flash_attention_impl("FA3", register_fn=SimpleNamespace)
    before = current_flash_attention_impl()
    with job_on_rank(manager.load(argv), rank, world_size):
        return [before, current_flash_attention_impl()]


def gathers_and_waits(argv: list[str], rank: int, world_size: int) -> list[tuple[str, int]]:
    """Return gathers of more than one number and host waits in the second step's forward, in order."""
    config = manager.load(argv)
    with job_on_rank(config, rank, world_size) as (model, optimizers, batch), HostWaits(rows_per_peer(config)):
        train_step(model, optimizers, batch)
        device.order.clear()
        with torch.no_grad():
            model.loss_sum(batch)
    return device.order


def gathers_and_reductions(argv: list[str], rank: int, world_size: int) -> list[tuple[str, int]]:
    """Return gathers and reductions of the second step with their numbers of elements, in order."""
    config = manager.load(argv)
    with job_on_rank(config, rank, world_size) as (model, optimizers, batch), HostWaits(rows_per_peer(config)):
        train_step(model, optimizers, batch)
        device.order.clear()
        train_step(model, optimizers, batch)
    return [event for event in device.order if event[0] != "wait"]


def sizes_of_groups(argv: list[str], rank: int, world_size: int) -> list[int]:
    """Return sizes of groups that exchange device tensors in a second step that is logged."""
    config = manager.load(argv)
    with job_on_rank(config, rank, world_size) as (model, optimizers, batch), HostWaits(rows_per_peer(config)):
        train_step(model, optimizers, batch)
        device.groups.clear()
        train_step(model, optimizers, batch)
        model.extra_metrics()
    return sorted({len(ranks) for ranks in device.groups})


def messages(argv: list[str], rank: int, world_size: int) -> list[tuple[str, int, list[int], bool]]:
    """Return the messages of rank `rank` in the second step of the job `argv`."""
    config = manager.load(argv)
    built, answers = job_on_rank(config, rank, world_size), HostWaits(rows_per_peer(config))
    with recorded_messages() as recorded, built as (model, _, batch), answers:
        model.forward_backward(batch, VALID_TOKENS)
        recorded.clear()  # the first step also exchanges shapes
        model.forward_backward(batch, VALID_TOKENS)
        model.pipeline.sum_tied_gradients()  # for weights with copies on two ranks
    return recorded


def messages_by_schedule(argv: list[str], stride: int, world_size: int) -> dict[str, list]:
    """Return messages of all pipeline ranks, `stride` apart, under each schedule of `--schedules=A,B`."""
    schedules, *job = argv
    return {
        schedule: [
            messages([*job, f"--parallelism.pipeline_parallel_schedule={schedule}"], rank, world_size)
            for rank in range(0, world_size, stride)
        ]
        for schedule in schedules.removeprefix("--schedules=").split(",")
    }
