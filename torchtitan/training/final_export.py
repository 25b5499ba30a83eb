"""Export a finished run's weights and adapter for other programs."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.adapters.interface import Adapter, full_tensor
from torchtitan.assembly import parts
from torchtitan.checkpoint import Checkpointer, CheckpointError, folders, load_weights
from torchtitan.checkpoint.folders import Best, best_in
from torchtitan.core.errors import JobError
from torchtitan.core.tensor_storage import Deferred, Value
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.launcher import run_folder
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process import distributed
from torchtitan.process.exit import ExportError, failure_kind
from torchtitan.process.ranks import Ranks
from torchtitan.training.batches import PeerStopped, UnreadableData

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 1800


class Exports:
    """The exports of a job: its weights without optimizer state, and its adapter in peft's layout."""

    def __init__(self, job: ResolvedJob, ranks: Ranks, vocabulary: Tokenizer):
        config = job.config
        self.job, self.config, self.ranks = job, config, ranks
        self.folder = Path(config.job.dump_folder)
        self.weights: Path | None = None  # the path, after they are written
        self.extra_files: dict[str, bytes] = {}
        if config.checkpoint.last_save_in_hf:  # fails before the run if the format cannot represent the model
            self.extra_files = parts.hf_extra_files(job.model, vocabulary, config.checkpoint.export_dtype)

    def write(
        self,
        model: ParallelModel,
        checkpointer: Checkpointer | None,
        step: int,
        validate: Callable[[], object] | None = None,
    ) -> None:
        """Write the exports of the job. Every rank calls it after the last step is saved. Raises ExportError.

        `validate`: the missing validation of the last step, called first. Its failure does not prevent the exports.
        """
        distributed.set_timeout(max(TIMEOUT_SECONDS, self.config.comm.init_timeout_seconds))  # while one rank writes
        try:
            if validate is not None:
                self._try(validate)
            self._write_all(model, checkpointer, step)
        except Exception as error:
            if failure_kind(error) == "peer":  # the rank that failed has logged the reason
                raise
            by_user = isinstance(error, JobError | OSError)
            reason = str(error) if by_user else f"{type(error).__name__}: {error}"
            remedy = run_folder.export_advice(self.folder, self.config.checkpoint)
            message = f"training is complete (step {step}), but the export failed: {reason}; {remedy}"
            raise ExportError(message) from error

    def _try(self, validate: Callable[[], object]) -> None:
        """Call `validate`. Only log a failure of all ranks; raise others, as other ranks are still validating."""
        try:
            validate()
        except Exception as error:
            on_all = self.ranks.world_size == 1 or isinstance(error, DataError | PeerStopped | UnreadableData)
            if failure_kind(error) == "peer":
                raise
            if not on_all:
                raise RuntimeError(
                    f"before it, the validation of the last step: {type(error).__name__}: {error}"
                ) from error
            logger.warning("the last step is saved, but could not be validated: %s: %s", type(error).__name__, error)

    def _write_all(self, model: ParallelModel, checkpointer: Checkpointer | None, step: int) -> None:
        if self.config.checkpoint.export_best and checkpointer is not None:
            step = self._take_best(model, checkpointer)
        if self.config.adapter.last_save_in_peft:
            self._write_adapter(model)
        if checkpointer is not None and self.config.checkpoint.last_save_model_only:
            self._write_weights(model, checkpointer, step)

    def _take_best(self, model: ParallelModel, checkpointer: Checkpointer) -> int:
        """Load the weights of the run's best checkpoint and return its step."""
        root, metric = checkpointer.folder, checkpointer.best_metric
        assert metric is not None  # the rules require it
        checkpointer.finish()
        best = checkpointer.main_peers.decide(
            lambda: best_in(root, metric),
            lambda best: [str(best.folder), best.value],
            lambda fields: Best(Path(fields[0]), fields[1]),
        )
        adapter: Adapter | None = model.adapter
        omitted = adapter.frozen_parameters if adapter and self.job.saving.saves_adapter_alone else ()
        step = load_weights(best.folder, model.parts, omitted)
        logger.info("exporting step %d, the best of the checkpoints: %s %.4g", step, metric.name, best.value)
        return step

    def _write_weights(self, model: ParallelModel, checkpointer: Checkpointer, step: int) -> None:
        options = self.config.checkpoint
        dtype = parts.DTYPES[options.export_dtype]
        self.weights = self.folder / ("model_hf" if options.last_save_in_hf else "model")
        if not options.last_save_in_hf:
            checkpointer.export_model(self.weights, dtype, step, plain_tensors(model))
            return
        try:
            with folders.replace_folder(self.weights, write=self.ranks.is_main) as folder:
                parts.model_spec(self.job.model).hf.save_hf(
                    folder,
                    plain_tensors(model),
                    self.job.model.args,
                    dtype=dtype,
                    write=self.ranks.is_main,
                    extra_files=self.extra_files,
                )
        except OSError as error:
            raise CheckpointError(f"the Hugging Face weights were not written: {error}") from error

    def _write_adapter(self, model: ParallelModel) -> None:
        adapter: Adapter = model.adapter
        tensors = distributed.gather_tensors(adapter.full_tensors(model.parts))  # a pipeline rank has only its layers
        if self.ranks.is_main:
            try:
                parts.save_peft(self.job.model, self.folder / "adapter", adapter, tensors)
            except OSError as error:
                raise CheckpointError(f"the adapter was not written: {error}") from error


def plain_tensors(model: ParallelModel) -> dict[str, Value]:
    """Return the plain model's tensors by name, with the adapter merged."""
    return dict(model.named_tensors()) if model.adapter is None else model.adapter.merged_tensors(model.parts)


def full_tensors(model: ParallelModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) of the plain model on every rank, with the adapter merged, in one order.

    Tensors are gathered one by one; those of another pipeline rank are received from it.
    """
    tensors, group = plain_tensors(model), model.pp_group
    if group is None:
        yield from ((name, _full(value)) for name, value in tensors.items())
        return
    for rank, names in enumerate(distributed.all_gather_json(list(tensors), group)):
        for name in names:
            local = _full(tensors[name]).contiguous() if rank == group.rank() else None
            about = None if local is None else [list(local.shape), str(local.dtype).removeprefix("torch.")]
            shape, dtype = distributed.all_gather_json(about, group)[rank]
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=model.device) if local is None else local
            dist.broadcast(tensor, group=group, group_src=rank)
            yield name, tensor


def _full(value: Value) -> torch.Tensor:
    return full_tensor(value.read() if isinstance(value, Deferred) else value.detach())
