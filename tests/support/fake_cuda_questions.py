"""What tests/planner/test_fake_cuda.py and scripts/gpu_roof.py ask of a step of a job on the fake CUDA."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torchtitan.planner.fake_cuda import device, kernels  # first: see there

import torch  # isort: skip
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl
from torch.utils.flop_counter import flop_registry

from torchtitan.config import manager
from torchtitan.job import ResolvedJob
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.planner.fake_cuda.step import HostWaits, job_on_rank, use_fused_norms
from torchtitan.planner.rehearsal import rows_of_experts

VALID_TOKENS = 1000


def train_step(model: ParallelModel, optimizers: Any, batch: dict[str, torch.Tensor], steps: bool = True) -> None:
    """Run a step of one microbatch; without `steps`, leave out the optimizer's."""
    model.forward_backward(batch, VALID_TOKENS)
    model.clip_gradients(1.0)
    if steps:
        optimizers.step()
    model.after_step()
    optimizers.zero_grad()


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


@contextmanager
def built(argv: list[str], rank: int, world_size: int) -> Iterator[tuple[ParallelModel, Any, dict]]:
    """Build the job `argv` on the fake CUDA, and count host waits. Yield model, optimizers and a batch."""
    job = ResolvedJob(manager.load(argv), world_size, "cuda")
    with job_on_rank(job, rank) as parts, HostWaits(rows_of_experts(job.layout, job.model), job.layout.ep):
        yield parts


def host_waits(argv: list[str], rank: int, world_size: int) -> dict[str, int]:
    """Count host waits by place in the second step of the job `argv`; the first step infers shapes."""
    with built(argv, rank, world_size) as (model, optimizers, batch):
        train_step(model, optimizers, batch)
        device.host_waits.clear()
        train_step(model, optimizers, batch)
    return dict(device.host_waits)


def step_costs(argv: list[str], rank: int, world_size: int) -> dict[str, Any]:
    """Return the costs of the whole second step of the job `argv`: see `_costs`."""
    return costs(argv, rank, world_size, steps=True)


def costs(argv: list[str], rank: int, world_size: int, steps: bool = False) -> dict[str, Any]:
    """Return the costs of forward, backward and clipping in the second step of the job `argv`: see `_costs`."""
    with built(argv, rank, world_size) as (model, optimizers, batch):
        train_step(model, optimizers, batch)
        return _costs(model, lambda: train_step(model, optimizers, batch, steps))


def restart_costs(argv: list[str], rank: int, world_size: int) -> dict[str, Any]:
    """Return the costs of a restart of ReLoRA after the first step of the job `argv`: see `_costs`."""
    with built(argv, rank, world_size) as (model, optimizers, batch):
        train_step(model, optimizers, batch)
        step = manager.load(argv).adapter.relora.every + 1
        return _costs(model, lambda: model.after_step(step, optimizers.optimizers))


def optimizer_costs(argv: list[str], rank: int, world_size: int) -> dict[str, Any]:
    """Return the costs of the optimizer's second step: see `_costs`. The gradients are not computed."""
    with built(argv, rank, world_size) as (model, optimizers, _):
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
    use_fused_norms()
    F.scaled_dot_product_attention = _flash
    return costs(argv, rank, world_size)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None = None, *, is_causal: bool, **_: Any
) -> torch.Tensor:
    """Attend with values padded to the width of the keys, which this kernel needs."""
    assert mask is None
    width = v.shape[-1]
    v = v if width == k.shape[-1] else F.pad(v, (0, k.shape[-1] - width))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0][..., :width]


class _SiluKernel(torch.autograd.Function):
    """silu of x [..., F], which reads, writes and saves what torch's kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.add(grad, *ctx.saved_tensors)


class _MemoryBound(kernels.Kernels):
    """Counts kernels that compute neither products nor attention."""

    multiplies = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.multiplies = func._overloadpacket in flop_registry or "grouped_mm" in func.name()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def add(self, place: str, size: int, seconds: float) -> None:
        if not self.multiplies:
            super().add(place, size, seconds)
        self.multiplies = False


def memory_bound_costs(argv: list[str], rank: int, world_size: int) -> tuple[int, int]:
    """Return kernels and bytes of forward and backward without products and attention. Norms and silu are kernels."""
    use_fused_norms()
    F.scaled_dot_product_attention, F.silu = _flash, _SiluKernel.apply
    with built(argv, rank, world_size) as (model, _, batch), _MemoryBound() as counter:
        model.forward_backward(batch, VALID_TOKENS)
    return counter.by_place["kernels"].total(), counter.by_place["bytes"].total()


def flash_attention(argv: list[str], rank: int, world_size: int) -> list[str | None]:
    """Return torch's flash kernel, None for its own, before and after the job's model is built.

    The package of FlashAttention 3 is replaced by one without kernels.
    """
    register_flash_attention_impl("FA3", register_fn=SimpleNamespace)
    before = current_flash_attention_impl()
    with built(argv, rank, world_size):
        return [before, current_flash_attention_impl()]


def gathers_and_waits(argv: list[str], rank: int, world_size: int) -> list[tuple[str, int]]:
    """Return gathers of more than one number and host waits in the second step's forward, in order."""
    with built(argv, rank, world_size) as (model, optimizers, batch):
        train_step(model, optimizers, batch)
        device.order.clear()
        with torch.no_grad():
            model.loss_sum(batch)
    return device.order


def gathers_and_reductions(argv: list[str], rank: int, world_size: int) -> list[tuple[str, int]]:
    """Return gathers and reductions of the second step with their numbers of elements, in order."""
    with built(argv, rank, world_size) as (model, optimizers, batch):
        train_step(model, optimizers, batch)
        device.order.clear()
        train_step(model, optimizers, batch)
    return [event for event in device.order if event[0] != "wait"]


def sizes_of_groups(argv: list[str], rank: int, world_size: int) -> list[int]:
    """Return sizes of groups that exchange device tensors in a second step that is logged."""
    with built(argv, rank, world_size) as (model, optimizers, batch):
        train_step(model, optimizers, batch)
        device.groups.clear()
        train_step(model, optimizers, batch)
        model.extra_metrics()
    return sorted({len(ranks) for ranks in device.groups})


def messages(argv: list[str], rank: int, world_size: int) -> list[tuple[str, int, list[int], bool]]:
    """Return the messages of rank `rank` in the second step of the job `argv`."""
    with recorded_messages() as recorded, built(argv, rank, world_size) as (model, _, batch):
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
