"""Restore a run: from its checkpoint, from weights of other jobs or programs, with or without an adapter."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan.assembly import parts
from torchtitan.checkpoint import Checkpointer, CheckpointError, RandomState, base_weights, set_rng_state
from torchtitan.checkpoint.base_weights import SCHEDULE_START, counters_of, find_weights
from torchtitan.checkpoint.loading import AdapterState
from torchtitan.checkpoint.weight_sources import load_foreign
from torchtitan.config.changes import changes, refused, remedy
from torchtitan.datasets.loader import merge_states
from torchtitan.datasets.position import Position
from torchtitan.datasets.segments import SegmentPosition
from torchtitan.guards import Guards
from torchtitan.guards.stop_conditions import ValidationResults
from torchtitan.job import ResolvedJob
from torchtitan.lr_scheduling import LRSchedulers
from torchtitan.metrics.goodput import Goodput
from torchtitan.models.fake_quantized import FakeQuantizationStart
from torchtitan.models.hf.config import find_text_config
from torchtitan.models.hf.quantization import read_quantization
from torchtitan.parallelisms.parallel_model import ParallelModel, StatefulAdapter
from torchtitan.process import distributed
from torchtitan.process.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass
class TrainState:
    """The state that a step changes in addition to the model, the optimizers and the schedules."""

    step: int = 0
    tokens: int = 0
    position: Position | SegmentPosition | None = None
    """Data position after `step`. Data that a failed step has fetched are fetched again."""
    random: RandomState | None = None
    """Random state before the current step, so that a checkpoint saved within it repeats its draws."""
    schedule_start: int = 0
    """Step at which the schedule began; not 0 after a start from weights with counters."""
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """Loss and gradient norm of the last step that was applied."""
    grad_norm: torch.Tensor | None = None
    is_complete: bool = True
    """The model and the optimizers are at the end of `step`, on all ranks."""
    start_step: int = 0
    """The step that this process began after."""
    loader_state: dict[str, Any] | None = None
    """Data position of the checkpoint loaded last."""


class Restorer:
    """Restore a run on every rank from its own checkpoint, from other weights or from initial weights, and know the
    state of a checkpoint besides tensors.
    """

    def __init__(
        self,
        job: ResolvedJob,
        ranks: Ranks,
        model: ParallelModel,
        dp_rank: int,
        state: TrainState,
        schedulers: LRSchedulers,
        guards: Guards,
        findings: ValidationResults,
        goodput: Goodput,
    ) -> None:
        self.job, self.config, self.ranks, self.model = job, job.config, ranks, model
        self.dims, self.dp_rank, self.state, self.schedulers = model.dims, dp_rank, state, schedulers
        self.guards, self.findings, self.goodput = guards, findings, goodput
        self.base: dict[str, str] | None = None
        """A reference to the base model of an adapter that is saved alone."""
        self.adapter_is_fresh = False
        """The run has an adapter that is not trained yet."""
        self.resumed_step: int | None = None
        """The step of the run's own checkpoint that was loaded."""

    def trainer_state(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks, JSON-able."""
        state = {"step": self.state.step, "tokens": self.state.tokens, "lr_scheduler": self.schedulers.state_dict()}
        state[base_weights.SCHEDULE_START] = self.state.schedule_start
        if self.base is not None:
            state[base_weights.KEY] = self.base
        if guard := self.guards.steps.state_dict():
            state[self.guards.steps.name] = guard
        state |= self.findings.state_dict(self.state.step) | self.model.hooks.state_dict()
        return state | {"degrees": self.dims.all_degrees} | self.job.stored_part()

    def rank_state(self) -> dict[str, Any]:
        """Return this rank's state."""
        random, position = self.state.random or RandomState(), self.state.position
        return {"rng": random.to_json(), "dataloader": position.to_dict(), "seconds": self.goodput.state_dict()}

    def load_state(self, trainer: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        """Continue from a state saved on any number of ranks. Parts excluded from loading are absent."""
        state = self.state
        state.step, state.tokens = trainer["step"], trainer["tokens"]
        state.schedule_start = trainer.get(base_weights.SCHEDULE_START, 0)
        if "lr_scheduler" in trainer:
            self.schedulers.load_state_dict(trainer["lr_scheduler"])
        scheduled = {"step": state.step - state.schedule_start}
        self.model.hooks.load_state_dict(trainer | {FakeQuantizationStart.name: scheduled})
        self.findings.load_state_dict(state.step, trainer)
        self.goodput.load_state_dict(ranks[0].get("seconds", {}) if ranks else {})
        self.guards.steps.load_state_dict(trainer.get(self.guards.steps.name, {}))
        if ranks and all("dataloader" in rank for rank in ranks):
            state.loader_state = merge_states([rank["dataloader"] for rank in ranks])
        degrees = self.dims.all_degrees | trainer.get("degrees", {})  # an old checkpoint may lack some
        same_plan = len(ranks) == self.ranks.world_size and degrees == self.dims.all_degrees
        if same_plan and "rng" in ranks[self.ranks.rank]:
            set_rng_state(ranks[self.ranks.rank]["rng"])
        else:  # no saved generator belongs to this rank; do not repeat the numbers of step 0 either
            distributed.set_seed(self.config.debug.seed + state.step, self.dp_rank)

    def check_job(self, trainer: dict[str, Any], model_only: bool) -> None:
        """Compare the job with the job of a checkpoint before it is loaded.

        Raises CheckpointError for changes that alter the loss curve, except for those that the job allows.
        """
        if self.base is not None and not model_only:
            base_weights.refuse_other_base(trainer, self.base)
        changed = changes(trainer, self.job.stored_part(), model_only)
        if refused_changes := refused(changed, self.config.checkpoint.allow_config_change):
            details = "; ".join(f"{change}: {remedy(change)}" for change in refused_changes)
            raise CheckpointError(f"the checkpoint is of another job: {details}")
        if changed:
            logger.info("changed since the checkpoint: %s", ", ".join(map(str, changed)))

    def restore(self, checkpointer: Checkpointer | None) -> int | None:
        """Resume this folder's run, else start from `initial_load_path`, else draw initial weights.

        Returns the step resumed from, if any.
        """
        if checkpointer is None:
            self.model.initialize()
            self.adapter_is_fresh = self.model.adapter is not None
            return None
        options = self.config.checkpoint
        path = options.initial_load_path
        if isinstance(adapter := self.model.adapter, StatefulAdapter):
            mark_restored = partial(setattr, adapter, "state_restored")
            checkpointer.adapter_state = AdapterState(
                partial(adapter.state_tensors, self.model.parts), self._state_to_restore, mark_restored
            )
        if adapter_only := options.enable and self.job.saving.saves_adapter_alone:
            assert path is not None  # the rules require it: checkpoints only refer to the base
            self.base = checkpointer.main_peers.decide(partial(base_weights.describe_base, path))
            self._start_from(path, checkpointer)
        self.resumed_step = resumed = checkpointer.load() if options.enable else None
        if resumed is not None:
            logger.info("resumed from step %d in %s", resumed, checkpointer.folder)
            if path and not adapter_only:
                logger.info("checkpoint.initial_load_path = %s is not used: this folder's own checkpoints win", path)
        elif not path:
            self.model.initialize()
        elif not adapter_only:
            self._start_from(path, checkpointer)
        if resumed is None and self.config.adapter.initial_path:
            self.model.adapter.load_tensors(self.model.parts, parts.peft_tensors(self.job.model, self.model.adapter))
            logger.info("adapter started from %s", self.config.adapter.initial_path)
        is_trained = resumed is not None or checkpointer.loaded_adapter or self.config.adapter.initial_path
        self.adapter_is_fresh = self.model.adapter is not None and not is_trained
        return resumed

    def _state_to_restore(self, trainer: dict[str, Any], shapes: Mapping[str, list[int]]) -> dict[str, Any] | None:
        if trainer.get("degrees") != self.job.layout.dims.all_degrees:
            return None
        return self.model.adapter.tensors_to_restore(
            self.model.parts, shapes, self.job.layout.batch_rows(), self.model.device
        )

    def _start_from(self, path: str, checkpointer: Checkpointer) -> None:
        """Load the weights of another job or program. Parameters of an adapter keep their initial values."""
        options, adapter = self.config.checkpoint, self.model.adapter
        head = parts.tensor_map(self.job.model).head
        self.model.initialize(head | adapter.added_parameters if adapter else head)
        kind, location = find_weights(Path(path))
        if kind == "native":
            base_weights.refuse_adapter_alone(location)
            heads = parts.heads(self.job.model)
            checkpointer.initial_load(location, options.initial_load_model_only, options.initial_load_counters, heads)
            logger.info("started from %s", path)
        else:
            args, fresh = self.job.model.args_for_weights(location), adapter.added_parameters if adapter else ()
            model, parts_of_rank = self.config.model, self.model.parts
            missing = load_foreign(location, parts_of_rank, model.name, args, fresh, head, model.ignore_config_keys)
            if missing:
                logger.info(
                    "%s has no %s: the head starts from its initial weights", location, ", ".join(sorted(missing))
                )
            checkpointer.refuse_not_finite(Path(path))
            owner = {"hf": "Hugging Face", "torchtitan": "PyTorch's torchtitan"}[kind]
            packed = read_quantization(find_text_config(location) or {}) if kind == "hf" else None
            unpacked = f", dequantized from {packed.method}" if packed else ""
            logger.info("started from weights of %s in %s%s", owner, location, unpacked)
            if options.initial_load_counters and (counters := counters_of(kind, location)):
                checkpointer.hooks.load_state(counters._asdict() | {SCHEDULE_START: counters.step}, [])
        if adapter is not None and not checkpointer.loaded_adapter:
            adapter.init_from_base(self.model.parts)
