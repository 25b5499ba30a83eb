"""Rehearse one step of one rank of any world in this process, and count all live storages and all messages.

Model, optimizer and batch consist of tensors with shapes but without values, and messages are not sent. A rehearsal
does not compile and spreads tokens evenly over a layer's experts. For a GPU it uses attention that stores no scores,
the chunks of the loss and the buffers of replicas that a GPU has.
"""

import dataclasses
import gc
import logging
import multiprocessing
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.adapters import spec_of
from torchtitan.assembly import observers, parts
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config.sections.training import LRScheduler
from torchtitan.core.cadence import NO_LIMIT
from torchtitan.core.callbacks import Callback
from torchtitan.job import ResolvedJob
from torchtitan.job.layout import JobLayout
from torchtitan.job.model import JobModel
from torchtitan.lr_schedules import CONSTANT
from torchtitan.models.attention import AttentionKernel, ChunkKernel
from torchtitan.models.layers import Float8Linear
from torchtitan.optimizers.build import Optimizers
from torchtitan.parallelisms.context_parallel import ContextParallelAttention
from torchtitan.parallelisms.parallel_model import Batch, ParallelModel
from torchtitan.parallelisms.sequence_layout import Tokens, all_parts, replace_parts
from torchtitan.planner.memory.live_tensors import ACTIVATIONS, BACKWARD, Bytes, FakeValues, LiveTensors
from torchtitan.planner.time.traffic import INNER, OUTER, FewMicrobatches, Group, Traffic, axes_of
from torchtitan.process import workers
from torchtitan.process.host import host
from torchtitan.process.ranks import Ranks
from torchtitan.torch_internals.dispatch import FakeTensor, FakeTensorMode, attention_for_cpu, unset_fake_temporarily
from torchtitan.torch_internals.fake_world import FakeStore, clear_sharding_prop_cache
from torchtitan.training.batches import zero_batch
from torchtitan.training.callbacks import CallbackRunner
from torchtitan.training.engine import Engine
from torchtitan.training.restore import TrainState
from torchtitan.training.step import (
    AFTER_UPDATE,
    CLIPPING,
    FORWARD_BACKWARD,
    OPTIMIZER,
    StepData,
    StepObserver,
    TrainingStep,
    training_step,
)

PARAMETERS, FROZEN, BUFFERS = "parameters", "frozen parameters", "buffers and caches"
GRADIENTS, OPTIMIZER_STATE, LOSS = "gradients", "optimizer state", "logits and loss"
REFERENCE = "parameters of the reference"
Moments = dict[str, Bytes]
"""Part of a step -> bytes by kind at the peak of their sum."""
Sent = Counter[tuple[str, str, str]]
"""Calls and bytes that a rank sends in a step, by (axis of the mesh, kind of message, "calls" or "bytes")."""
ANY_COUNT = 1000
"""An arbitrary number of valid tokens, the divisor of losses."""
WITHOUT_VALUES = FakeTensorMode(allow_non_fake_inputs=True)
"""The fake mode that all rehearsals in a process share, because a cached tensor without values belongs to the mode
in which it was created. The process must not train afterwards.
"""


def answer(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros in host memory for a tensor of any shape without values, a copy of another one."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if isinstance(tensor, FakeTensor) else tensor.cpu()


host.computing, host.copy = unset_fake_temporarily, answer  # no effect outside of a fake mode


class Flash(AttentionKernel):
    """A GPU's attention kernel, flash or flex: it stores neither scores nor a mask."""

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> None:
        """Do nothing: the kernel has no mask of any shape."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if sinks is not None:
            return super().forward(q, k, v, None, sinks)
        width = v.shape[-1]  # the result is as wide as the values, even if keys are wider
        return attention_for_cpu(q[..., :width], k[..., :width], v)[0]


@dataclasses.dataclass
class Rehearsed:
    """The result for one step of a rank: memory in each part of the step, and messages."""

    moments: Moments
    sent: Sent
    groups: dict[str, Group]
    """Axis along which something is sent -> this rank's group."""

    def extended_by(self, times: float, few: "Rehearsed", more: "Rehearsed") -> "Rehearsed":
        """Return this rehearsal plus `times` the difference between `more` and `few`.

        Memory and messages grow linearly with the layers, and messages with the batches.
        """
        moments = {
            name: _extended(kinds, times, few.moments[name], more.moments[name]) for name, kinds in self.moments.items()
        }
        return Rehearsed(moments, _extended(self.sent, times, few.sent, more.sent), self.groups)


def _extended(kinds: Counter, times: float, few: Counter, more: Counter) -> Counter:
    """Return kinds + times * (more - few), also where that is negative."""
    return Counter({kind: kinds[kind] + times * (more[kind] - few[kind]) for kind in kinds | few | more})


def rehearse(job: ResolvedJob, rank: int) -> Rehearsed:
    """Rehearse a step that is not the first; return the peak memory of each part of the step, and its messages.

    The parts are forward and backward, clipping, and the optimizer's step. If a reference model runs before the first
    step, it is one more part. This machine need not have a device of the job's type.
    """
    job, cpu = job.with_options({"compile.enable": False}), torch.device("cpu")
    with warnings.catch_warnings(), _quiet(), _alone_as(rank, job.world_size):
        warnings.simplefilter("ignore")
        options = dataclasses.replace(ModelBuilder(job).parallel_options(), for_gloo=job.device_type == "cpu")
        without_values: dict[str, Any] = dict(init_weights=False, storage=WITHOUT_VALUES)
        model = ModelBuilder(job).model(job.layout.dims.build_mesh("cpu"), cpu, options=options, **without_values)
        optimizers, batch = parts.optimizers(job.config.optimizer, model), zero_batch(job, model.needs_keys)
        return Rehearsal(job, model, optimizers, batch).measure(LiveTensors())


WITHOUT_END = {
    "training.steps": NO_LIMIT,
    "metrics.log_freq": NO_LIMIT,
    "metrics.histogram_freq": 0,
    "metrics.save_for_all_ranks": False,
    "guard.replica_check_interval": 0,
    "guard.replay_every": 0,
    # these may not suit that number of steps, and change nothing in a rehearsed step
    "checkpoint.best_metric": None,
    "lr_scheduler": LRScheduler(decay_type=CONSTANT, warmup_steps=0),
}
"""Options of a rehearsed job: no step is its last one, and steps are logged only if the rehearsal asks for it."""


class Rehearsal:
    """The trainer's step of a job with a model without values on one rank. `batch`: of each forward and backward.

    `callbacks`: to run in all steps.
    """

    def __init__(
        self,
        job: ResolvedJob,
        model: ParallelModel,
        optimizers: Optimizers,
        batch: Batch,
        callbacks: Mapping[str, Callback] | None = None,
    ) -> None:
        self.job, self.model, self.optimizers, self.batch = job, model, optimizers, batch
        self.groups = self._groups()  # before any step, because meshes compute with tensors that have values
        passes = job.layout.batches_per_step
        self.times = [passes - 1, 1] if passes > 1 else [1]
        """The passes of a step that each pass of the rehearsal stands for: a third one is like the second."""
        ranks = Ranks(rank=1, world_size=job.world_size)  # the first one would write metrics.jsonl
        endless = job.with_options(WITHOUT_END)
        self.training_step = training_step(
            endless,
            ranks,
            model,
            optimizers,
            parts.lr_schedulers(endless, optimizers, 0),
            observers.guards(endless.config.guard, Path(job.config.job.dump_folder), model, optimizers),
            observers.metrics(endless, model.device, ranks, None, 0, model.adapter),
            TrainState(step=1, start_step=1),
            CallbackRunner(model, callbacks or {}, job.config.optimizer.early_step_in_backward),
        )
        few = [batch] * len(self.times)
        self.data = StepData(few, ANY_COUNT, valid_share=1.0, tokens=ANY_COUNT, seconds=0.0, position=None)

    def measure(self, live: LiveTensors) -> Rehearsed:
        """Rehearse a step, the second one if forward and backward retain memory. `live` counts the memory."""
        config = self.job.config
        imitate(self.job.device_type, self.model.parts)
        _count_state(live, self.model.parts)
        ref_model = self._reference()
        values = FakeValues(rows_of_experts(self.job.layout, self.job.model), self.job.layout.ep)
        with WITHOUT_VALUES, values, live.watching():
            reference_moments = {} if ref_model is None else _run_reference(ref_model, self.batch, live)
            del ref_model
            gc.collect()  # FSDP's modules are in reference cycles
            if self.training_step.callbacks.by_name:
                self.training_step.callbacks.start(RehearsedEngine(self.job, self.training_step))
            # the state of an optimizer that steps in backward, or the caches of an adapter
            if config.optimizer.early_step_in_backward or spec_of(config.adapter).stateful:
                self.step(live)
                _name_retained_memory(live, self.optimizers)
            result = self.step(live)
            return dataclasses.replace(result, moments=result.moments | reference_moments)

    def _reference(self) -> ParallelModel | None:
        """Return the separate reference model of a preference loss, or None if the job has none."""
        job, model = self.job, self.model
        if job.config.dpo.reference is None or "reference" not in ModelBuilder(job).objective().targets:
            return None
        ref_model = ModelBuilder(job).model(
            model.mesh, model.device, policy=model, init_weights=False, storage=WITHOUT_VALUES
        )
        imitate(job.device_type, ref_model.parts)
        return ref_model

    def run(self, observer: StepObserver, logged: bool = False) -> None:
        """Run a step."""
        metrics = self.training_step.metrics
        metrics.options = dataclasses.replace(metrics.options, log_freq=1 if logged else NO_LIMIT)
        self.training_step.observer = observer
        self.training_step.run(self.data)

    def step(self, live: LiveTensors, replays: bool = True) -> Rehearsed:
        """Run a step and return its memory and messages. `replays`: run only some microbatches of a pipeline and count
        them for all (time/traffic.py), which real ranks cannot.

        Memory that the step leaves allocated, such as the optimizer state of a first step, counts in all its parts, as
        later steps have it from their start.
        """
        start = live.now.copy()
        with Traffic() as traffic:
            measurement = _Measurement(self, live, traffic, replays)
            self.run(measurement)
        moments, sent = measurement.moments, measurement.sent
        for part in moments.keys() - {OPTIMIZER}:
            moments[part].update({kind: size - start[kind] for kind, size in live.now.items()})
        names = {axis for axis, _, _ in sent}
        return Rehearsed(moments, sent, {axis: ranks for axis, ranks in self.groups.items() if axis in names})

    def _groups(self) -> dict[str, Group]:
        """Return axis -> this rank's group. For axes with the same ranks, `Traffic` uses the last name."""
        model = self.model
        meshes = [model.expert_mesh] if model.expert_mesh is not None else []
        axes = {"world": tuple(range(model.dims.world_size))}
        if model.dims.cp > 1 and model.dims.tp > 1:  # the last axes of the mesh, over which a layer's load is summed
            size = model.dims.cp * model.dims.tp
            first = dist.get_rank() // size * size
            axes["sequence"] = tuple(range(first, first + size))
        for mesh in (*meshes, model.dims.dp_mesh(model.mesh), model.mesh):
            axes |= axes_of(mesh)
        shards, size = model.dims.dp_mesh(model.mesh), model.options.reshard_after_forward
        if not isinstance(size, bool):
            ranks = dist.get_process_group_ranks(shards.get_group(shards.ndim - 1))
            first = ranks.index(dist.get_rank()) // size * size
            axes[INNER] = tuple(ranks[first : first + size])
            axes[OUTER] = tuple(ranks[ranks.index(dist.get_rank()) % size :: size])
        return axes


class RehearsedEngine(Engine):
    """The engine that callbacks find in a rehearsal: job, model and step, without data, tokenizer and checkpoints.

    The folder of its job is a temporary one.
    """

    def __init__(self, job: ResolvedJob, step: TrainingStep) -> None:
        self._folder = TemporaryDirectory()
        self.job, self.is_in_script = job.with_options({"job.dump_folder": self._folder.name}), False
        self.ranks = Ranks(rank=dist.get_rank(), world_size=job.world_size)
        self.training_step, self.state, self.callbacks = step, step.state, step.callbacks
        self.model, self.optimizers, self.metrics, self.pending = step.model, step.optimizers, step.metrics, None

    def generate(
        self, prompts: Sequence[str], max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0
    ) -> list[str]:
        """Return an empty text for each prompt."""
        return [""] * len(prompts)

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send a tensor of any shape as an engine does, and return one without values."""
        super().sum_over_ranks(tensor)
        return torch.zeros(tensor.shape)

    def stop(self, reason: str) -> None:
        """Do nothing: a rehearsal has no end."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"an engine has no {name} in a rehearsal")


class _Measurement(StepObserver):
    """Measures the memory and the messages of the parts of a step. Numbers for the host, which guards and log sum over
    gloo, are not counted.
    """

    def __init__(self, rehearsal: Rehearsal, live: LiveTensors, traffic: Traffic, replays: bool) -> None:
        self.rehearsal, self.live, self.traffic = rehearsal, live, traffic
        self.moments: Moments = {}
        self.sent: Sent = Counter()
        self.times = iter(rehearsal.times)
        pipeline, self.few = rehearsal.model.pipeline, None
        if replays and pipeline is not None and pipeline.segments is None:
            length = rehearsal.data.microbatches[0]["tokens"].shape[1] // rehearsal.model.dims.cp
            self.few = FewMicrobatches(pipeline.schedule_of(length), live, traffic)
        live.forget_peak()

    def begin(self, part: str) -> None:
        self.traffic.exchanges.clear()
        if part == FORWARD_BACKWARD:
            if self.few is not None:
                self.few.begin_pass()
        else:
            self.live.forget_peak()
        if part == OPTIMIZER:
            self.live.begin(OPTIMIZER_STATE)

    def end(self, part: str) -> None:
        if part == FORWARD_BACKWARD:
            if self.few is not None:
                self.few.end_pass()
            self._count_messages(next(self.times))
        elif part in (CLIPPING, OPTIMIZER, AFTER_UPDATE):
            self._count_messages()
        if part in (FORWARD_BACKWARD, CLIPPING, OPTIMIZER):
            self.moments[part] = self.live.peak
        if part == OPTIMIZER:
            # the first step makes its state between its temporaries, and a later one has all of it from the start
            self.live.forget_peak()
            self.rehearsal.optimizers.step()
            self.moments[part] = max(self.moments[part], self.live.peak, key=Counter.total)
            self.live.end()

    def _count_messages(self, times: int = 1) -> None:
        axes = self.rehearsal.groups
        for (kind, axis), (calls, size) in self.traffic.totals(axes).items():
            if "ep" in axes and kind == "all_to_all" and axes[axis] == axes["ep"]:
                axis = "ep"  # has the same ranks as another axis, perhaps all ranks
            if kind != "receive":  # counted where it is sent
                self.sent[axis, kind, "calls"] += times * calls
                self.sent[axis, kind, "bytes"] += times * size  # type: ignore[assignment]


def _run_reference(ref_model: ParallelModel, batch: Batch, live: LiveTensors) -> Moments:
    """Return the memory while the reference model computes its log-probabilities, before the first step."""
    for part in ref_model.parts:
        for parameter in part.parameters():
            live.add(parameter, REFERENCE)
    live.forget_peak()
    ref_model.train(False)
    with torch.no_grad():
        ref_model.loss_sum(batch)
    return {"asking the reference": live.peak}


def _name_retained_memory(live: LiveTensors, optimizers: Optimizers) -> None:
    """Count the memory that the first step leaves as optimizer state, or else as buffers."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for tensor in filter(torch.is_tensor, state.values()):
                live.add(tensor, OPTIMIZER_STATE)
    live.rename({ACTIVATIONS, BACKWARD}, BUFFERS)


def _count_state(live: LiveTensors, parts: list[nn.Module]) -> None:
    """Count parameters and buffers now, and gradients and the loss when they are created, each as a separate kind."""

    def gradient(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # else an optimizer step in backward has freed it
            live.add(parameter.grad, GRADIENTS)

    for part in parts:
        for parameter in part.parameters():
            live.add(parameter, PARAMETERS if parameter.requires_grad else FROZEN)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(gradient)
        for buffer in part.buffers():
            live.add(buffer, BUFFERS)
        if part.loss is not None:
            part.loss.register_forward_pre_hook(lambda *_: live.begin(LOSS))
            part.loss.register_forward_hook(lambda *_: live.end())


def imitate(device: str, parts: list[nn.Module]) -> None:
    """Let parts on the CPU use the attention and float8 products of `device`, and its chunks of the loss."""
    for part in parts:
        if part.loss is not None:
            part.loss.device_type = device
        for kernel in all_parts(part.kernels):
            if isinstance(kernel, ContextParallelAttention):
                kernel.device_type = device
        if device == "cuda":
            part.set_attention_kernels(replace_parts(kernel, _flash) for kernel in part.kernels)
        for module in part.modules():
            if isinstance(module, Float8Linear):
                module.use_kernel = device == "cuda"


def _flash(kernel: nn.Module) -> nn.Module:
    """Return the kernel of a GPU in place of plain attention."""
    if type(kernel) is AttentionKernel or type(kernel) is ChunkKernel:
        return Flash(kernel.backend, kernel.causal, kernel.window)
    return kernel


def rows_of_experts(layout: JobLayout, model: JobModel) -> int:
    """Return the number of rows for experts in one forward pass of a rank, before they are exchanged."""
    rows = layout.microbatch_rows if layout.pp > 1 else layout.batch_rows()
    return rows * layout.training.seq_len // (layout.cp * layout.tp) * getattr(model.args, "top_k", 0)


@contextmanager
def _alone_as(rank: int, world_size: int) -> Iterator[None]:
    """Set up a fake process group with only this rank, which sends no messages."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_sharding_prop_cache()  # else the next rank's equal meshes get this rank's groups


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable logging inside the block."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


# Several rehearsals at once, each in its own process

T = TypeVar("T")


def run_in_processes(function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> list[T]:
    """Call workers.run_in_processes for a function that rehearses."""

    def fork_server() -> Any:
        # With an accelerator, autograd has threads after its first backward and then refuses to work in a fork; CUDA
        # refuses after its first use. So processes are forked from a server that has only imported the modules.
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, function.__module__])
        _start_fork_server()
        return context

    make_context = fork_server if torch.accelerator.is_available() else None
    return workers.run_in_processes(function, tasks, "a rehearsal", _begin, make_context)


def _start_fork_server() -> None:
    """Start multiprocessing's server away from the current folder, which comes first on its path: another package of
    our name there would be preloaded. The processes that it forks return to the current folder.
    """
    folder = os.open(".", os.O_RDONLY)
    try:
        os.chdir("/")
        forkserver.ensure_running()
    finally:
        os.chdir(folder)
        os.close(folder)


def _begin() -> None:
    """Set up a worker process. It uses one thread, because a fork has none of its parent's threads and must not wait
    for them. GPUs are hidden, because autograd would allocate memory on them.
    """
    workers.begin_worker()
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
