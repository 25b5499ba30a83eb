"""ParallelModel: this rank's share of a model under any combination of parallelisms, with one interface to run it.

The trainer, tests and benchmarks build and run models through it.

Step hooks run once per optimizer step, after the optimizer, e.g. to update the biases of experts or restart an adapter.
The state of a hook is saved with the trainer's state under the hook's name.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from torchtitan.core.random_draws import clean_name, initialize
from torchtitan.core.tensor_storage import draw_stores
from torchtitan.parallelisms.context_parallel import build_layout, gather_sequence, shard_sequence
from torchtitan.parallelisms.data_parallel import fsdp_modules, set_last_microbatch
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.parallelisms.expert_parallel import ExpertBalance, LoadBalancing
from torchtitan.parallelisms.gradients import clip_gradients
from torchtitan.parallelisms.parallelize import (
    ParallelOptions,
    needs_casts,
    parallelize,
    recompute_policy,
    uses_fully_shard,
)
from torchtitan.parallelisms.pipeline.overlap.exchange import AllToAll
from torchtitan.parallelisms.pipeline.pipeline_parallel import (
    Pipeline,
    PipelineOptions,
    SegmentOptions,
    cut_model,
    tied_names,
)
from torchtitan.parallelisms.plan import ParallelPlan, declaration_holds
from torchtitan.parallelisms.quantized_collectives import gather_in_float8
from torchtitan.parallelisms.sequence_layout import default_positions
from torchtitan.parallelisms.steps import require_steps
from torchtitan.process import distributed
from torchtitan.process.host import host

Batch = dict[str, torch.Tensor]


class StepHook(Protocol):
    name: str
    """Key of its state in a checkpoint. Unique among hooks, and not a key of the trainer's state (step, tokens, ...).
    """

    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Run after the `step`-th step of the learning rate schedule, on every rank. `parts`: this rank's parts of the
        model."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able and the same on all ranks; empty if there is nothing to save."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; empty if the checkpoint has no state of this hook."""
        ...


class StatefulAdapter:
    """The hooks of an adapter with state that lives across batches, for example a cache of the documents being read.

    Every rank calls all of them, in the same order. `parts`: this rank's parts of the model,
    more than one under an interleaved pipeline schedule.
    """

    def check_parts(self, parts: Iterable[nn.Module]) -> None:
        """Raise JobError if pipeline stages separate layers that share state."""

    def before_training(
        self,
        parts: Sequence[nn.Module],
        run_batch: Callable[[Batch], object],
        replay: Callable[[int], Iterable[Batch]],
        calibration: Callable[[int], Iterable[Batch]] | None,
    ) -> None:
        """Initialize or rebuild the state before the first step of a start, and after a rollback.

        The model is in evaluation mode. `run_batch` runs its forward and then `after_batch`. `replay(n)` returns the
        batches with the last n tokens of each row's current document, none in a new run. `calibration(n)` returns the
        first n segments of the training data; it is None unless the adapter is untrained.
        """

    def after_batch(self, parts: Sequence[nn.Module]) -> None:
        """Run after the forward and backward of each batch, or after its forward in evaluation."""

    def evaluation_variants(self, parts: Iterable[nn.Module]) -> Iterator[str]:
        """Set up each variant of evaluation in turn and yield the suffix of its loss's name.

        The first is the model's default and has an empty suffix.
        """
        yield ""

    state_restored = False
    """True from the load of a checkpoint until `before_training` if `tensors_to_restore` were filled from it."""

    def state_tensors(self, parts: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
        """Return this rank's state for a checkpoint, as tensors of any shape; empty if checkpoints do not hold it."""
        return {}

    def tensors_to_restore(
        self, parts: Iterable[nn.Module], shapes: Mapping[str, list[int]], rows: int, device: torch.device
    ) -> dict[str, torch.Tensor] | None:
        """Return the tensors of `state_tensors` to fill from a checkpoint, or None if they do not fit it.

        A misfit is no error: the state is then rebuilt by `before_training`. `shapes`: as saved by this rank under an
        equal plan. `rows`: rows of a batch. `device`: the compute device.
        """
        return {}


class StepHooks(list[StepHook]):
    """The step hooks, in execution order."""

    def append(self, hook: StepHook) -> None:
        assert hook.name not in {other.name for other in self}, f"a second hook called {hook.name}"
        super().append(hook)

    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        for hook in self:
            hook.after_step(step, parts, optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Return the states by hook name, of the hooks that have one."""
        return {hook.name: state for hook in self if (state := hook.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for hook in self:
            hook.load_state_dict(state.get(hook.name, {}))


def parallel_parts(
    model: nn.Module,
    mesh: DeviceMesh,
    dims: ParallelDims,
    plan: ParallelPlan,
    options: ParallelOptions,
    pipeline: PipelineOptions | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> tuple[list[nn.Module], list[int], int]:
    """Return this rank's parts of the model, parallelized and still on the meta device, their stage indices, and the
    total number of stages.
    """
    parts, stages, local_stages = [model], [[]], [0]
    if dims.pp > 1:
        assert pipeline is not None
        stages = pipeline.stages(model, plan, dims.pp)
        local_stages = pipeline.stages_of_rank(dims.axis_rank(mesh, "pp"), dims.pp, len(stages))
        parts = cut_model(model, stages, local_stages, plan)
    if runs_by_segments(dims, options):
        require_steps(model, plan)
        options = replace(options, recompute="none")  # the segments recompute by themselves
    for part in parts:
        parallelize(part, mesh, dims, plan, options, expert_mesh)
    return parts, local_stages, len(stages)


def _may_join_documents(model: nn.Module, adapter: Any, dims: ParallelDims, options: ParallelOptions) -> bool:
    """Return True if tokens may be left out: model and adapter declare it, and a forward may have any number."""
    of_any_size = dims.tp == dims.cp == dims.pp == dims.ep == 1 and not (options.compile_model or options.compile_loss)
    return (
        of_any_size
        and (adapter is None or computes_by_token(adapter))
        and getattr(model, "may_join_documents", False)
        and declaration_holds(model, "may_join_documents", "forward")
    )


INSTALLING = ("convert", "convert_module", "linear_class", "experts_class")
"""Names of an adapter (adapters/low_rank.py) that decide what it installs."""


def computes_by_token(adapter: Any) -> bool:
    """Return True if an adapter declares that it computes each token alone. One with state reads whole batches."""
    is_declared = getattr(adapter, "by_token", False) and declaration_holds(adapter, "by_token", *INSTALLING)
    return is_declared and not isinstance(adapter, StatefulAdapter)


def runs_by_segments(dims: ParallelDims, options: ParallelOptions) -> bool:
    """Return True if the pipeline overlaps the all-to-alls of experts, so that parts run segment by segment."""
    return options.overlap and dims.ep > 1 and dims.pp > 1


def allocate(part: nn.Module, device: torch.device, offloaded: bool) -> None:
    """Allocate storage for a part on the meta device; for parameters in host memory, if they are offloaded."""
    part.to_empty(device="cpu" if offloaded else device)
    for module in part.modules():  # buffers are not offloaded: nothing would copy them to the device
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


class ParallelModel:
    """This rank's share of a model. `parts` holds the full model or, in a pipeline, one part for each local stage.

    `model`: on the meta device, in the dtypes of the stored parameters, with its loss attached. `balance`: for a model
    with experts. `adapter`: the one installed in the model (adapters/interface.py). `init_weights`: draw the initial
    weights from `seed` and the parameters' names; otherwise they are NaN until `initialize` or a load fills them.
    `storage`: a context for the allocation of parameters, such as FakeTensorMode.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        dims: ParallelDims,
        plan: ParallelPlan,
        options: ParallelOptions,
        *,
        device: torch.device,
        seed: int,
        pipeline: PipelineOptions | None = None,
        balance: LoadBalancing | None = None,
        adapter: Any = None,
        init_weights: bool = True,
        storage: AbstractContextManager = nullcontext(),  # noqa: B008
    ):
        self.mesh, self.dims, self.options, self.device = mesh, dims, options, device
        self.cp_rank = dims.axis_rank(mesh, "cp")  # cached: slicing a mesh of thousands of ranks takes milliseconds
        self.pp_group = mesh["pp"].get_group() if dims.pp > 1 else None
        mixed = needs_casts(model, options.param_dtype) and not uses_fully_shard(model, dims, options)
        self.autocast = torch.autocast(device.type, options.param_dtype, enabled=mixed)
        tied = tied_names(model)
        self.needs_keys: bool = getattr(model, "needs_keys", False)  # True if training needs the tokens' random keys
        may_join = device.type == "cpu" and balance is None
        self.joins_documents = may_join and _may_join_documents(model, adapter, dims, options)
        self.expert_mesh = dims.build_expert_mesh(mesh.device_type)
        self.parts, stages, num_stages = parallel_parts(model, mesh, dims, plan, options, pipeline, self.expert_mesh)
        self.stateful_adapter = adapter if isinstance(adapter, StatefulAdapter) else None
        if self.stateful_adapter is not None:
            self.stateful_adapter.check_parts(self.parts)
        for part in self.parts:
            part.tied_names = tied  # checkpoints save a parameter with two names once
            with storage:
                allocate(part, device, options.cpu_offload)
            if options.gathers_float8:
                gather_in_float8(part)
        self.adapter, self.seed = adapter, seed
        self.initialize() if init_weights else self._fill_with_nan()
        self.pipeline = None
        if dims.pp > 1:
            self.pipeline = self._build_pipeline(pipeline, stages, num_stages, tied)

        self.balance = None
        if balance is not None:
            copies = 1 if options.sequence_parallel else dims.tp
            self.balance = ExpertBalance(self.parts, balance, mesh, dims, copies)
        self.hooks = StepHooks()
        for hook in (self.balance, adapter):
            if hook is not None:
                self.hooks.append(hook)

    def _build_pipeline(
        self, pipeline: PipelineOptions | None, stages: list[int], num_stages: int, tied: dict[str, str]
    ) -> Pipeline:
        """Return the pipeline over this rank's parts. `stages`: their indices, out of `num_stages`."""
        options = self.options
        segments = self._segment_options() if runs_by_segments(self.dims, options) else None
        full_backward = options.recompute != "none" or options.compile_model
        return Pipeline(
            self.parts,
            stages,
            num_stages,
            self.mesh["pp"],
            pipeline,
            device=self.device,
            hidden_dtype=options.param_dtype,
            sequence_shards=self.dims.tp if options.sequence_parallel else 1,
            forward_context=self.autocast,
            merge_backward=full_backward and segments is None,
            tied=tied,
            segments=segments,
        )

    def _segment_options(self) -> SegmentOptions:
        """Return the settings of a pipeline that hides the all-to-alls of experts."""
        options = self.options
        policy = recompute_policy(options.recompute, options.selective_option, options.preserve_rng_state)
        # an NCCL communicator runs collectives one after the other; gloo needs no second group
        counts = None if self.device.type == "cpu" else self.dims.build_counts_group(self.expert_mesh)
        return SegmentOptions(policy, AllToAll(self.expert_mesh["ep"].get_group(), counts))

    def initialize(self, names: Collection[str] | None = None) -> None:
        """Draw the initial weights of all parameters, or only of `names` (in the unwrapped model with its adapter)."""
        for part in self.parts:
            initialize(part, self.seed, part.init_rule, drawn_as=part.tied_names, names=names)
            draw_stores(part, self.seed, part.init_rule, names)
        if self.adapter is not None and names is None:  # otherwise the base is loaded later; the loader does this then
            self.adapter.init_from_base(self.parts)

    @torch.no_grad()
    def _fill_with_nan(self) -> None:
        """Fill the parameters with NaN, so that a load can detect values that it did not fill."""
        for _, parameter in self.named_parameters():
            if parameter.is_floating_point():
                parameter.fill_(math.nan)

    def train(self, mode: bool = True) -> None:
        for part in self.parts:
            part.train(mode)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters with their names in the unwrapped model."""
        for part in self.parts:
            yield from ((clean_name(name), parameter) for name, parameter in part.named_parameters())

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors that are saved: parameters, and persistent buffers (the biases of experts)."""
        for part in self.parts:
            yield from ((clean_name(name), tensor) for name, tensor in part.state_dict(keep_vars=True).items())

    def forward_backward(
        self, batch: Batch, valid_tokens: int, is_last: bool = True, normalizer: float | None = None
    ) -> torch.Tensor:
        """Accumulate the gradients of sum of losses / `valid_tokens` (the global number), and return this rank's share
        of that loss, a scalar. Shares are summed over dp and cp, equal over tp, and 0 on all but one pipeline rank.
        `normalizer`: divides the sum of losses in place of `valid_tokens`, which the experts' balance still uses.

        `batch`: [B, S] tensors, the same on the tp, cp and pp ranks of a data-parallel rank: tokens and labels;
        positions and document_ids for attention within documents; random keys of the tokens for dropout; lengths for
        noise. Positions may be [1, S] and default to 0..S-1. `is_last`: True for the last batch of gradient
        accumulation in a step.
        """
        batch = self._shard_batch(batch)
        if self.balance is not None:
            self.balance.before_backward(valid_tokens)
        divisor = valid_tokens if normalizer is None else normalizer
        if self.pipeline is not None:
            share = self.pipeline.train_step(batch, divisor, is_last=is_last)
        else:
            set_last_microbatch(self.parts[0], is_last, self.dims.dp_replicate > 1)
            with self.autocast:
                share = self.parts[0](**batch) / divisor
            share.backward()
        self._after_batch()
        return share.detach()

    @contextmanager
    def objective(self, loss: nn.Module) -> Iterator[None]:
        """Compute this `loss`, an objective (losses/objective.py), in place of the task's."""
        before = [part.loss for part in self.parts]
        for part in self.parts:
            part.loss = loss
        try:
            yield
        finally:
            for part, task_loss in zip(self.parts, before, strict=True):
                part.loss = task_loss

    def gather_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the tokens of the context-parallel ranks, x [B, s, ...] -> [B, S, ...]. Differentiable: all ranks must
        compute the same from the result, as each takes the gradient of its tokens from its own.
        """
        if self.dims.cp == 1:
            return x
        layout = build_layout(self.dims.cp, self.options.cp_method, self.options.cp_load_balance)
        return gather_sequence(x, layout, self.mesh["cp"].get_group())

    @torch.no_grad()
    def loss_sum(self, batch: Batch, update_state: bool = True) -> torch.Tensor:
        """Return this rank's share of the sum of losses, a scalar, for a `batch` as in `forward_backward`.
        `update_state`: let an adapter with state remember the batch."""
        batch = self._shard_batch(batch)
        if self.pipeline is not None:
            loss = self.pipeline.eval_step(batch)
        else:
            with self.autocast:
                loss = self.parts[0](**batch)
        if update_state:
            self._after_batch()
        return loss

    def evaluate(self, batches: Callable[[], Iterable[Batch]]) -> dict[str, torch.Tensor]:
        """Evaluate all batches and return this rank's share of the sum of losses, a scalar, for each variant.

        An adapter may define several variants, by name. The only variant of a model without them is "".
        """
        adapter = self.stateful_adapter
        variants = iter(("",)) if adapter is None else adapter.evaluation_variants(self.parts)
        self.train(False)
        losses = {name: sum(map(self.loss_sum, batches()), torch.zeros((), device=self.device)) for name in variants}
        self.train()
        for module in chain.from_iterable(map(fsdp_modules, self.parts)):
            module.reshard()  # the next reader of parameters expects their shards
        return losses

    @torch.no_grad()
    def next_token_logits(self, tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] that follow position last [B] of each sample of tokens [B, S].

        Arguments are the same on all ranks, and all ranks call it. It supports neither pipeline nor context parallel.
        """
        assert self.dims.pp == self.dims.cp == 1
        with self.autocast:
            return self.parts[0](tokens=tokens, positions=default_positions(tokens), last=last)

    @host.computes
    def sum_over_ranks(self, shares: torch.Tensor) -> torch.Tensor:
        """Sum losses of any shape over all ranks. Those of a tp group are equal and count once.

        The sum runs on the CPU with gloo: the caller needs the values there, and NCCL would create a communicator of
        all ranks only for this.
        """
        shares = host.copy(shares).clone()  # on a CPU there is no copy, and the sum is in place
        if self.dims.world_size > 1:
            torch.distributed.all_reduce(shares)
        return shares / self.dims.tp

    def prepare_adapter(
        self,
        replay: Callable[[int], Iterable[Batch]],
        calibration: Callable[[int], Iterable[Batch]] | None = None,
    ) -> None:
        """Let an adapter with state read training batches before the next step."""
        if self.stateful_adapter is not None:
            self.train(False)
            self.stateful_adapter.before_training(self.parts, self.loss_sum, replay, calibration)
            self.train()

    def _after_batch(self) -> None:
        if self.stateful_adapter is not None:
            self.stateful_adapter.after_batch(self.parts)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip the gradient in place and return its norm over the full model, a scalar. Call it once per step, after
        the last backward.
        """
        if self.pipeline is None:
            return clip_gradients(self.parts[0].parameters(), max_norm)
        self.pipeline.sum_tied_gradients()
        parameters = chain.from_iterable(part.parameters() for part in self.parts)
        return clip_gradients(parameters, max_norm, self.pp_group, self.pipeline.tied_copies)

    def after_step(self, step: int = 0, optimizers: Sequence[Optimizer] = (), updated: bool = True) -> None:
        """Run the hooks after the `step`-th optimizer step of the schedule.

        With `updated=False` the update was skipped: the biases of experts do not move either, and their counts are
        dropped.
        """
        if self.balance is not None:
            self.balance.moves_biases = updated
        self.hooks.after_step(step, self.parts, optimizers)

    def extra_metrics(self) -> dict[str, float]:
        """Return metrics of the last step, equal on all ranks. All ranks call it; it synchronizes with the device."""
        of_adapter = self.adapter.metrics(self.parts) if self.adapter is not None else {}
        of_adapter |= self._loss_metrics()
        return of_adapter | (self.balance.metrics(self.device) if self.balance is not None else {})

    def _loss_metrics(self) -> dict[str, float]:
        """Return the additional measurements of the objective, averaged over all ranks since the last call."""
        names = self.parts[0].loss.measured
        if not names:
            return {}
        sums = torch.zeros(len(names) + 1, device=self.device)
        for part in self.parts:
            part_sums = part.loss.take_sums()
            sums += 0 if part_sums is None else part_sums
        *totals, count = distributed.sum_floats(*sums.tolist())
        return {name: value / max(count, 1) for name, value in zip(names, totals, strict=True)}

    def not_finite_layers(self) -> list[str]:
        """Return the layers with NaN or infinity, in order, if the model tracks them. All ranks call it."""
        return self.balance.not_finite() if self.balance is not None else []

    def _shard_batch(self, batch: Batch) -> Batch:
        """Return this rank's tokens of the samples with their positions: those under context parallel, or those that
        matter to the loss."""
        batch = {"positions": default_positions(batch["tokens"])} | batch
        if self.joins_documents:
            return self.parts[0].loss.join_documents(batch)
        if self.dims.cp == 1:
            return batch
        return shard_sequence(batch, self.cp_rank, self.dims.cp, self.options.cp_method, self.options.cp_load_balance)
