"""Batches and losses that a program passes to the engine: checked on all ranks before any of them runs the model."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.core.errors import JobError
from torchtitan.guards.stop_conditions import Stops
from torchtitan.job import ResolvedJob
from torchtitan.losses.log_probs import LogProbObjective, LossFunction, try_function
from torchtitan.losses.objective import IGNORE_INDEX
from torchtitan.models.decoder import MEMORY_INPUTS
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process import distributed
from torchtitan.training.batches import Batch, BatchPreparer
from torchtitan.training.restore import TrainState
from torchtitan.training.step import StepData

MODEL_INPUTS = ("tokens", "labels", "positions", "document_ids", "keys", "lengths", *MEMORY_INPUTS)
"""Tensors of a batch that are no columns of a loss."""


class EngineError(JobError):
    """A call of the engine that cannot be made, in words for the program's author."""


@dataclass
class Pending:
    """Gradients that no optimizer step has used yet."""

    data: StepData
    loss: torch.Tensor
    batches: int
    is_last: bool
    is_fetched: bool
    """The step has data of the job, on which all ranks agreed before."""

    def followed_by(self, call: "Pending") -> "Pending":
        """Return the gradients of both calls. Only data of the job move its position."""
        before, after = self.data, call.data
        valid_tokens = before.valid_tokens + after.valid_tokens
        shares = before.valid_share * before.valid_tokens + after.valid_share * after.valid_tokens
        data = StepData(
            (),
            valid_tokens,
            shares / max(valid_tokens, 1) or before.valid_share,
            before.tokens + after.tokens,
            before.seconds + after.seconds,
            (call if call.is_fetched else self).data.position,
        )
        batches, is_fetched = self.batches + call.batches, self.is_fetched or call.is_fetched
        return Pending(data, self.loss + call.loss, batches, call.is_last, is_fetched)


class CallerBatches:
    """Prepares a program's batches for the model of a job, and computes with them."""

    def __init__(self, job: ResolvedJob, model: ParallelModel, preparer: BatchPreparer) -> None:
        self.model, self.preparer = model, preparer
        self.rows, self.isolates_documents = job.layout.batch_rows(), job.data.isolates_documents
        self.seq_len, self.multiple = job.config.training.seq_len, job.data.padding_multiple
        args, self.task = job.model.args, job.config.task.kind
        self.vocab_size, self.num_labels = args.vocab_size, preparer.spec.num_classes or args.vocab_size
        self.predicts_more = bool(getattr(args, "n_mtp_layers", 0))
        self._in_use: tuple[Any, Any] = None, None
        """The last loss function with its columns, and its objective."""

    def prepare(
        self,
        batch: Any,
        state: TrainState,
        stops: Stops,
        loss: LossFunction | None = None,
        entropy: bool = False,
        index: int = 0,
        normalizer: float | None = None,
        is_last: bool = True,
        call: str = "forward_backward",
    ) -> tuple[StepData, LogProbObjective | None]:
        """Return the data of a forward and backward on the device, and the objective of a loss function.

        `index`: of the batch among this rank's in the step. `call`: of the engine, with its `normalizer` and `is_last`,
        which all ranks pass alike. Raises EngineError on the ranks with a fault, and on all others if any has one.
        """
        is_own, objective = not isinstance(batch, StepData), None
        failure: Exception | None = None
        divisor: float | None = None
        microbatches: Sequence[Batch] = () if is_own else batch.microbatches
        agrees = is_own or normalizer is not None or not self._is_in_use(loss, entropy, microbatches)
        try:
            if normalizer is not None and not 0 < (divisor := float(normalizer)) < float("inf"):
                raise EngineError(f"normalizer: given {normalizer}; allowed: a number above 0")
            microbatches = [self._checked(batch)] if is_own else microbatches
            if loss is not None:
                objective = self._objective_of(loss, entropy, microbatches)
            elif call != "forward" and (missing := _missing(microbatches, self.preparer.keys)):
                raise EngineError(
                    f"batch: {missing[0]} missing, which the objective of task.kind = {self.task} reads; add it, or "
                    "pass a loss"
                )
        except Exception as error:  # any: the other ranks would wait for a rank that raises alone
            failure = error
        arguments = call, loss is None, entropy, divisor, is_last
        if failure is not None and not agrees:  # the same on all ranks, as the job's data have the same names
            raise failure
        data: StepData = batch
        if agrees:
            agreed = self._agree(microbatches, failure, state, stops, index, arguments)
            data = agreed if is_own else batch
        if objective is not None:
            self._in_use = (loss, objective.columns, entropy), objective
        names = {*self.preparer.keys, *MODEL_INPUTS, *(objective.targets if objective is not None else ())}
        microbatches = [{name: x for name, x in one.items() if name in names} for one in data.microbatches]
        return replace(data, microbatches=microbatches), objective

    def log_probs(self, batch: StepData | Batch, state: TrainState, stops: Stops) -> torch.Tensor:
        """Return the log-probability of each label of the whole samples, [B, S], on every rank of this batch."""
        if self.model.stateful_adapter is not None:
            raise EngineError("forward: an adapter with a memory would remember the batch; evaluate held-out data")
        data, _ = self.prepare(batch, state, stops, call="forward")
        objective = self._build(None, (), False)
        with self.model.objective(objective):
            self._evaluate(data.microbatches)
        if self.model.pp_group is None:
            return torch.cat(objective.collected)
        # only the rank of the last stage has any
        shape = sum(len(one["labels"]) for one in data.microbatches), data.microbatches[0]["labels"].shape[1]
        dtype = torch.promote_types(self.model.options.param_dtype, torch.float32)
        log_probs = torch.zeros(shape, dtype=dtype, device=self.model.device)
        if objective.collected:
            log_probs += torch.cat(objective.collected)
        dist.all_reduce(log_probs, group=self.model.pp_group)
        return log_probs

    def mean_loss(self, batches: Sequence[StepData | Batch], state: TrainState, stops: Stops) -> float:
        """Return the mean loss of the labels in the batches of all ranks, by the job's objective."""
        batches = list(batches)
        counts = distributed.sum_ints(*with_square(len(batches)))
        if not counts[0] or not are_equal(counts):
            raise EngineError(
                f"evaluate: given {len(batches)} batches here and {counts[0]} on all ranks; allowed: as many on each "
                "rank, at least 1; add batches whose labels are all -100"
            )
        total, valid_tokens = torch.zeros((), device=self.model.device), 0
        for batch in batches:
            data, _ = self.prepare(batch, state, stops, call="evaluate")
            total += self._evaluate(data.microbatches)
            valid_tokens += data.valid_tokens
        if not valid_tokens:
            raise EngineError("evaluate: no batch of any rank has a label, so there is no loss; all are -100")
        return float(self.model.sum_over_ranks(total)) / valid_tokens

    def _evaluate(self, microbatches: Sequence[Batch]) -> torch.Tensor:
        """Return this rank's share of the sum of losses, a scalar, without gradients and without dropout."""
        objective: Any = self.model.parts[0].loss
        names = {*MODEL_INPUTS, *objective.targets} - {"keys", "lengths"}
        batches = [{name: x for name, x in one.items() if name in names} for one in microbatches]
        return next(iter(self.model.evaluate(lambda: batches).values()))

    def _checked(self, batch: Any) -> Batch:
        """Return a program's batch with all tensors that the model reads. Raise EngineError for another one."""
        if self.preparer.spec.extra_keys:
            raise EngineError(f"task.kind = {self.task} reads documents in order; pass the batches of engine.data")
        if not isinstance(batch, Mapping):
            raise EngineError(
                f"batch: given a {type(batch).__name__}; allowed: what engine.data yields, or a mapping of names to "
                "tensors [B, S]: tokens, labels and columns of the loss"
            )
        for name, tensor in batch.items():
            if not isinstance(tensor, torch.Tensor):
                raise EngineError(f"batch: {name} is a {type(tensor).__name__}; allowed: a tensor [B, S] or [B]")
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise EngineError(f"batch: {name} has values that are not finite, as of a division by 0; mend them")
        if missing := [name for name in ("tokens", "labels") if name not in batch]:
            raise EngineError(f"batch: {' and '.join(missing)} missing; give tokens and labels, tensors [B, S]")
        tokens = batch["tokens"]
        self._check_shape(tuple(tokens.shape))
        for name, tensor in batch.items():
            is_column = name not in MODEL_INPUTS
            if tensor.shape[:2] != tokens.shape and not (is_column and tensor.shape == tokens.shape[:1]):
                shapes = f"{list(tokens.shape)}, as tokens have" + ", or one value a sample" * is_column
                raise EngineError(f"batch: {name} of shape {list(tensor.shape)}; allowed: {shapes}")
        self._check_ids("tokens", tokens, self.vocab_size)
        self._check_ids("labels", batch["labels"], self.num_labels)
        complete = {name: x.to(self.model.device) for name, x in batch.items()}
        complete |= {name: complete[name].long() for name in ("tokens", "labels")}
        if self.isolates_documents:  # one document a sample, unless the batch says otherwise
            device = self.model.device
            positions = torch.arange(tokens.shape[1], device=device).expand(tokens.shape)
            complete = {"positions": positions, "document_ids": torch.zeros_like(complete["tokens"])} | complete
        return complete

    def _check_ids(self, name: str, ids: torch.Tensor, count: int) -> None:
        """Raise EngineError unless ids are below `count`; labels may be IGNORE_INDEX."""
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise EngineError(f"batch: {name} of {ids.dtype}; allowed: whole numbers")
        is_outside = (ids < 0) | (ids >= count)
        if name == "labels":
            is_outside &= ids != IGNORE_INDEX
        if bool(is_outside.any()):
            ignored = ", or -100 where there is no label" * (name == "labels")
            raise EngineError(f"batch: {name} has {int(ids[is_outside][0])}; allowed: 0 to {count - 1}{ignored}")

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise EngineError unless the plan of the job takes batches of this shape."""
        length = self.seq_len if not self.multiple else None
        fits = len(shape) == 2 and shape[0] == self.rows and 0 < shape[1] <= self.seq_len
        fits = fits and (shape[1] == length or (length is None and shape[1] % self.multiple == 0))
        if not fits:
            lengths = f"{self.seq_len}" if length else f"a multiple of {self.multiple} up to {self.seq_len}"
            raise EngineError(
                f"batch: tokens of shape {list(shape)}; allowed: [{self.rows}, {lengths}], the samples of a forward of "
                "this rank (training.local_batch_size) and training.seq_len; pad samples and set their labels to -100"
            )

    def _is_in_use(self, loss: LossFunction | None, entropy: bool, microbatches: Sequence[Batch]) -> bool:
        """Return True without a loss function, or if it is the last one that all ranks have agreed on."""
        return loss is None or self._in_use[0] == (loss, _columns_of(microbatches), entropy)

    def _objective_of(self, loss: LossFunction, entropy: bool, microbatches: Sequence[Batch]) -> LogProbObjective:
        """Return the objective of a loss function; a new one is tried on the labels and columns first."""
        columns = _columns_of(microbatches)
        if self._in_use[0] == (loss, columns, entropy):
            return self._in_use[1]
        if not callable(loss):
            raise EngineError(f"loss: given a {type(loss).__name__}; allowed: a function of LossInputs")
        if self.predicts_more:
            raise EngineError(
                "a loss of your own would drop the loss of multi-token prediction, which the model adds to its task's; "
                "leave loss out, or set n_mtp_layers = 0 in model.overrides"
            )
        if microbatches:
            try_function(loss, microbatches[0], columns, entropy)
        return self._build(loss, columns, entropy)

    def _build(self, loss: LossFunction | None, columns: Sequence[str], entropy: bool) -> LogProbObjective:
        task_objective = self.preparer.objective
        objective = LogProbObjective(
            loss, self.model.gather_sequence, self.model.dims.cp, columns, entropy, task_objective.num_chunks
        )
        objective.logits_width, objective.device_type = task_objective.logits_width, task_objective.device_type
        return objective

    def _agree(
        self,
        microbatches: Sequence[Batch],
        failure: Exception | None,
        state: TrainState,
        stops: Stops,
        index: int,
        arguments: tuple[Any, ...],
    ) -> StepData:
        """Return the data of a program's batch with the counts of all ranks. Raise on all ranks if one has a fault, or
        other `arguments`.
        """
        labels = [one["labels"] for one in microbatches]
        counts_labels = not arguments[1] or arguments[0] == "forward"  # else terms of the task's loss, as pairs
        count = sum(
            int((one["labels"] != IGNORE_INDEX).sum()) if counts_labels else self.preparer.objective.count(one)
            for one in ([] if failure is not None else microbatches)
        )
        numbers = count, sum(x.numel() for x in labels), failure is not None, stops.requested
        # the ranks that work on the same samples have a place for the checksum of their batch
        dims, contents = self.preparer.dims, [0] * 2 * self.preparer.dims.dp
        at = 2 * self.preparer.dp_rank
        contents[at : at + 2] = with_square(_checksum_of(microbatches))
        sums = distributed.sum_ints(*map(int, numbers), *with_square(checksum_of(arguments)), *contents)
        valid_tokens, tokens, failed, stopping, *checksums = sums[:6]
        if failure is not None:
            raise failure
        if failed:
            raise EngineError("another rank's batch or loss was refused; it reports the reason")
        contents, readers = sums[6:], dims.model_parallel_size
        if not all(are_equal(contents[at : at + 2], readers) for at in range(0, len(contents), 2)):
            raise EngineError(
                "batch: ranks of one tensor, context or pipeline parallel group pass different ones; make each by "
                "engine.dp_rank, not by the rank"
            )
        if not are_equal(checksums):
            raise EngineError(
                f"{arguments[0]}: another rank makes another call, or passes another normalizer, is_last, entropy or "
                "loss; make the same calls with the same ones on all ranks"
            )
        stops.agreed = bool(stopping)
        valid_tokens, tokens = valid_tokens // readers, tokens // readers
        share = max(count, 1) / max(valid_tokens, 1)
        keyed = [self.preparer.with_random_keys(one, index, state.step) for one in microbatches]
        return StepData(keyed, valid_tokens, share, tokens, 0.0, state.position)


def checksum_of(arguments: Any) -> int:
    """Return a number of 24 bits for arguments that all ranks pass alike."""
    return zlib.crc32(repr(arguments).encode()) & 0xFFFFFF


def _checksum_of(microbatches: Sequence[Batch]) -> int:
    """Return a number of 24 bits for the tensors of batches, of any shape."""
    checksum = 0
    for name, tensor in ((name, one[name]) for one in microbatches for name in sorted(one)):
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        checksum = zlib.crc32(content.numpy().tobytes(), zlib.crc32(name.encode(), checksum))
    return checksum & 0xFFFFFF


def with_square(value: int) -> tuple[int, int]:
    return value, value**2


def are_equal(sums: Sequence[int], ranks: int | None = None) -> bool:
    """Return True if these `ranks`, or all, have the same number, from their sums of `with_square`."""
    total, squares = sums
    return total**2 == (ranks or dist.get_world_size()) * squares


def _missing(microbatches: Sequence[Batch], names: Sequence[str]) -> list[str]:
    return [name for one in microbatches for name in names if name not in one]


def _columns_of(microbatches: Sequence[Batch]) -> tuple[str, ...]:
    """Return the names of the tensors that only a loss function reads."""
    return tuple(sorted({name for one in microbatches for name in one} - set(MODEL_INPUTS)))
