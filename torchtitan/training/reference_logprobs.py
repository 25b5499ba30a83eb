"""Log-probabilities of answers under a run's reference: the model that it began from, or another one.

They are computed before the first step, for all pairs that the steps and validations of the job will read, and saved
with the run. They never change, so no second model is in memory during training. Values are looked up by a digest of a
row, so they do not depend on the order of the data or the parallel plan. They are saved every few seconds, and a start
that was stopped or killed continues from there.
"""

import gc
import hashlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from torchtitan.assembly.data import JobDatasets
from torchtitan.checkpoint import base_weights
from torchtitan.checkpoint.base_weights import find_weights
from torchtitan.config.options import show
from torchtitan.config.sections.model import Adapter
from torchtitan.core.errors import JobError
from torchtitan.core.files import require_file
from torchtitan.core.machine_errors import raise_if_of_the_machine
from torchtitan.datasets.loader import HeldOutBatches, trim_to_longest
from torchtitan.datasets.sources import DataError
from torchtitan.job import ResolvedJob
from torchtitan.launcher.run_folder import REFERENCE_FILE
from torchtitan.losses.objective import IGNORE_INDEX
from torchtitan.losses.preference import Preference
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process.heartbeat import Progress
from torchtitan.process.ranks import Ranks
from torchtitan.training.batches import Batch, BatchPreparer
from torchtitan.training.inference_model import load_reference_model, rebuild_initial_model
from torchtitan.training.reporting import ReferenceProgress

logger = logging.getLogger(__name__)

FILE = REFERENCE_FILE
LATER_SIZES: dict[str, Any] = {"head_width": None, "attention_bias": False, "mlp_bias": False}
LATER_SIZES |= {"query_growth": 0.0, "query_period": 1, "attention_factor": None, "truncate": True}
LATER_SIZES |= {"window_layers": "", "rotary_factor": 1.0, "longrope": None}
"""Sizes of models that were added when there were files, and the values with which they do not count."""
LATER_SIZES_OF: dict[str, tuple[str, ...]] = dict.fromkeys(("Qwen2MoEArgs", "Qwen3MoEArgs"), ("sliding_window",))
LATER_SIZES_OF |= dict.fromkeys(("Qwen2Args", "Qwen3Args"), ("sliding_window", "n_classes"))
LATER_SIZES_OF |= dict.fromkeys(("LlamaArgs", "Gemma2Args"), ("n_classes",))
LATER_SIZES_OF |= {"GraniteArgs": ("attention_dropout",)}
"""The same for classes of sizes: sizes that do not count if they are 0, and that other classes always had."""
LATER_OPTIONS = ("save", "last_save_in_peft", "relora", "quantized_experts")
"""Options of [adapter] that do not change the model before the first step, or that were added when there were files."""
MODEL, IDENTITY, ROWS = "model", "identity", "rows"
"""Keys of the file's metadata: the path of the reference, a digest of all that its values depend on, and the number of
rows of training data that it covers, from the first one on. A file of an earlier version has only the first key, and
covers all data of its run."""
DIGEST_BYTES = 16
SAVE_SECONDS = 5
PAIRS_OF_A_CHUNK = 16
"""Number of pairs of a rank, after which ranks exchange their values and rank 0 saves them."""


class References:
    """Log-probabilities by row: `digests` [n, DIGEST_BYTES] uint8 and `values` [n] float32."""

    def __init__(self, digests: np.ndarray, values: np.ndarray) -> None:
        rows = (digest.tobytes() for digest in digests)
        self.values = dict(zip(rows, values.tolist(), strict=True))

    def add(self, batch: Batch) -> Batch:
        """Add `reference` [B]: 0 for rows without labels, which pad a step or a batch.

        Raises DataError for rows without a value.
        """
        has_labels = (batch["labels"] != IGNORE_INDEX).any(-1).tolist()
        rows = zip(digests_of(batch), has_labels, strict=True)
        try:
            values = [self.values[digest.tobytes()] if counts else 0.0 for digest, counts in rows]
        except KeyError:
            raise DataError(
                f"{FILE} in job.dump_folder does not have all pairs: the data have changed since the run began; "
                "bring back the old data, or start again in another job.dump_folder"
            ) from None
        return batch | {"reference": torch.tensor(values, dtype=torch.float32)}

    def missing(self, batch: Batch) -> torch.Tensor:
        """Return a mask [P] of the pairs with a labelled answer without a value."""
        has_labels = (batch["labels"] != IGNORE_INDEX).any(-1)
        unknown = torch.tensor([digest.tobytes() not in self.values for digest in digests_of(batch)])
        return (has_labels & unknown).view(-1, 2).any(1)

    def update(self, digests: np.ndarray, values: np.ndarray) -> None:
        for digest, value in References(digests, values).values.items():
            self.values.setdefault(digest, value)

    def write(self, path: Path, metadata: dict[str, str]) -> None:
        digests = np.frombuffer(b"".join(self.values), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        values = np.fromiter(self.values.values(), dtype=np.float32, count=len(self.values))
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".tmp")
        save_file({"digests": digests, "values": values}, unfinished, metadata)
        unfinished.rename(path)


def digests_of(batch: Batch) -> np.ndarray:
    """Return digests [B, DIGEST_BYTES] uint8 of the tokens and labels of each row, without padding at its end."""
    rows = zip(batch["tokens"].cpu().numpy(), batch["labels"].cpu().numpy(), strict=True)
    ends = (1 + np.flatnonzero(labels != IGNORE_INDEX).max(initial=-1) for labels in batch["labels"].cpu().numpy())
    read = [(tokens[:end], labels[:end]) for (tokens, labels), end in zip(rows, ends, strict=True)]
    hashes = [hashlib.sha256(tokens.tobytes() + labels.tobytes()).digest()[:DIGEST_BYTES] for tokens, labels in read]
    return np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(-1, DIGEST_BYTES)


def load_references(
    job: ResolvedJob,
    ranks: Ranks,
    model: ParallelModel,
    preparer: BatchPreparer,
    step: int,
    progress: Progress,
    state: dict[str, Any] | None = None,
) -> References | None:
    """Load and compute the values for the steps after `step` and all validations. Every rank calls it.

    `state`: the data position of a resumed run. Returns None for an objective without a reference. Raises JobError if a
    resumed run has lost its values, or needs further ones that can no longer be computed.
    """
    if not isinstance(preparer.objective, Preference) or "reference" not in preparer.objective.targets:
        return None
    config = job.config
    path = Path(config.job.dump_folder, FILE)
    saved, metadata = _load(path, _name_of(config.dpo.reference), step)
    if step and ROWS not in metadata:
        return saved  # an earlier version has computed the values of all pairs
    pair_data = PairData(job, preparer, step, state)
    if step and state is not None and pair_data.rows <= int(metadata[ROWS]):
        pair_data.steps = 0  # an earlier start has computed the pairs of all steps
    identity = _identity(job)
    if not step and metadata and metadata[IDENTITY] != identity:
        logger.info("reference  %s was computed by another model; all pairs are computed again", path)
        saved, metadata = References(np.zeros((0, DIGEST_BYTES), np.uint8), np.zeros(0, np.float32)), {}
    covered = int(metadata.get(ROWS, 0))
    # a resumed run keeps the identity of the model that computed its values
    about = {MODEL: _name_of(config.dpo.reference), IDENTITY: metadata.get(IDENTITY, identity), ROWS: str(covered)}
    reference_pass = _ReferencePass(job, preparer, saved, progress, path if ranks.is_main else None, about)
    if not step or metadata[IDENTITY] == identity:
        reference_pass.compute(pair_data, None if step or config.dpo.reference is not None else model, model)
    elif reference_pass.lacks_any(pair_data):
        raise JobError(
            f"{path} lacks pairs that the run will read, and the reference has changed since it was written: bring "
            "back the weights that the run started from (checkpoint.initial_load_path, dpo.reference), or its "
            "training.steps and data"
        )
    if ranks.is_main and (reference_pass.computed or covered < pair_data.rows):
        saved.write(path, about | {ROWS: str(max(pair_data.rows, covered))})
    return saved


def _load(path: Path, model_name: str, step: int) -> tuple[References, dict[str, str]]:
    """Read the values of earlier starts and the file's metadata.

    Raises JobError if a resumed run has lost the file, or names another reference.
    """
    try:
        require_file(path, missing_ok=True)
        with safe_open(path, "numpy") as file:
            metadata = dict(file.metadata() or {})
            saved = References(file.get_tensor("digests"), file.get_tensor("values"))
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise_if_of_the_machine(error, path, with_rights=False)
        if not step:
            return References(np.zeros((0, DIGEST_BYTES), np.uint8), np.zeros(0, np.float32)), {}
        raise JobError(
            f"{path}: the reference log-probabilities of the run cannot be read ({error}); bring the file back, or "
            "start again in another job.dump_folder"
        ) from None
    if step:
        _refuse_other_model(path, metadata.get(MODEL, model_name), model_name)
    return saved, metadata if step else {IDENTITY: ""} | metadata


def _name_of(path: str | None) -> str:
    """Return the absolute path of a reference model; empty for the run's own model."""
    return "" if path is None else str(Path(path).absolute())


def _refuse_other_model(path: Path, before: str, today: str) -> None:
    """Raise JobError if a resumed run names another reference than before."""
    if before != today:
        used = show(before) if before else "unset"
        raise JobError(
            f"dpo.reference: given {show(today or None)}; allowed: {used}, as when {path} was made of the run's pairs; "
            "bring it back, or start again in another job.dump_folder"
        )


def _identity(job: ResolvedJob) -> str:
    """Return a digest of all that log-probabilities depend on.

    These are the sizes, adapter and precision of the model, and the path and size of its weights.
    """
    config, training = job.config, job.config.training
    start = config.dpo.reference or config.checkpoint.initial_load_path
    weights = [path for path in (start, config.adapter.initial_path) if path]
    adapter = {name: value for name, value in asdict(config.adapter).items() if name not in LATER_OPTIONS}
    values: list[Any] = [sizes_of_identity(job.model.args), adapter, config.debug.seed]
    values += [training.dtype, training.mixed_precision_param]
    values += ["bfloat16"] * (training.frozen_dtype == "bfloat16")  # a new entry, as files of earlier versions lack it
    if config.adapter.quantized_experts != Adapter().quantized_experts:
        values.append(config.adapter.quantized_experts)
    values += map(_path_and_size, weights)
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def sizes_of_identity(args: Any) -> dict[str, Any]:
    """Return the sizes of a model that its references depend on, with the names that they have in existing files."""
    sizes = asdict(args, dict_factory=_without_later_sizes)
    later = LATER_SIZES_OF.get(type(args).__name__, ())
    return {name: size for name, size in sizes.items() if name not in later or size}


def _without_later_sizes(sizes: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: size for name, size in sizes if name not in LATER_SIZES or size != LATER_SIZES[name]}


def _path_and_size(path: str) -> tuple[str, int]:
    try:
        return str(find_weights(Path(path))[1].resolve()), base_weights.base_bytes(path)
    except JobError:  # an adapter's folder, or no weights at all, which their reader reports
        return str(Path(path).resolve()), sum(file.stat().st_size for file in Path(path).glob("*") if file.is_file())


class PairData:
    """One rank's data for the steps after `step`, from the data position `state`, and for validations."""

    def __init__(self, job: ResolvedJob, preparer: BatchPreparer, step: int, state: dict[str, Any] | None) -> None:
        self.datasets = JobDatasets(job.with_options({"data.pad_to": "seq_len"}))
        self.layout, self.preparer, self.state = job.layout, preparer, state
        self.vocabulary = job.tokenizer()
        self.steps = max(0, job.schedule.steps - step)
        self.held_out = self.datasets.held_out(self.vocabulary, preparer.dp_rank, preparer.objective)
        before = 0 if state is None else state["samples"]
        self.rows = before + self.steps * job.layout.rows
        """Number of training rows read up to the last step."""
        self.validation = self.held_out.samples if isinstance(self.held_out, HeldOutBatches) else 0
        """Number of rows that validations read."""

    @property
    def pairs(self) -> int:
        """The number of different pairs, at most."""
        read = self.steps * self.layout.samples
        return min(read, self.datasets.samples_per_pass()) + self.validation // self.layout.rows_per_sample

    def chunks(self) -> Iterator[tuple[int, Batch]]:
        """Yield (rows of a batch, chunk of several batches [n, S]); the number of chunks is the same on all ranks."""
        loader = self.datasets.training_loader(self.vocabulary, self.preparer.dp_rank, self.state)
        batches = islice(loader, self.steps * self.layout.batches_per_step)
        try:
            yield from _in_chunks(batches, self.layout.batch_rows())
        finally:
            loader.close()
        if self.held_out is not None:
            try:
                yield from _in_chunks(iter(self.held_out), self.layout.batch_rows("validation"))
            finally:
                self.held_out.close()


def _in_chunks(batches: Iterator[Batch], rows: int) -> Iterator[tuple[int, Batch]]:
    size = max(1, 2 * PAIRS_OF_A_CHUNK // rows)
    for first in batches:
        chunk = list(chain([first], islice(batches, size - 1)))
        yield rows, {name: torch.cat([batch[name] for batch in chunk]) for name in first}


class _ReferencePass:
    """Compute the values missing in `references`, chunk by chunk, and save them at `path`.

    All ranks compute the same number of batches of a chunk.
    """

    def __init__(
        self,
        job: ResolvedJob,
        preparer: BatchPreparer,
        references: References,
        progress: Progress,
        path: Path | None,
        metadata: dict[str, str],
    ) -> None:
        self.job, self.preparer, self.references, self.progress = job, preparer, references, progress
        self.path, self.metadata, self.multiple = path, metadata, job.data.padding_multiple
        self.saved_at, self.computed = time.monotonic(), False

    def lacks_any(self, pair_data: PairData) -> bool:
        return any(_max_over_ranks(int(self.references.missing(chunk).sum())) for _, chunk in pair_data.chunks())

    def compute(self, pair_data: PairData, reference: ParallelModel | None, model: ParallelModel) -> None:
        """Compute all missing values. `reference`: if None, it is built next to `model` once a pair is missing."""
        with ReferenceProgress(pair_data.pairs, len(self.references.values) // 2, self.path is not None) as report:
            try:
                for rows, chunk in pair_data.chunks():
                    self.progress.enter("load")
                    missing = self.references.missing(chunk)
                    most = _max_over_ranks(int(missing.sum()))
                    if not most:
                        continue
                    reference = self._build(model) if reference is None else reference
                    self.computed = True
                    self._compute_pairs(reference, _pad_chunk(chunk, missing, most, rows // 2), rows, report)
            except KeyboardInterrupt:
                self._save()
                raise
        if reference is not None and reference is not model:
            del reference
            gc.collect()  # FSDP modules have reference cycles, and training collects only young objects

    def _build(self, model: ParallelModel) -> ParallelModel:
        other = self.job.config.dpo.reference
        return rebuild_initial_model(self.job, model) if other is None else load_reference_model(self.job, other, model)

    @torch.no_grad()
    def _compute_pairs(self, model: ParallelModel, pairs: Batch, rows: int, report: ReferenceProgress) -> None:
        """Compute the values of `pairs` in batches of `rows` rows; `rows` divides their number."""
        objectives = [part.loss for part in model.parts]
        model.train(False)
        try:
            for first in range(0, len(pairs["tokens"]), rows):
                batch = {name: tensor[first : first + rows] for name, tensor in pairs.items()}
                batch = trim_to_longest(batch, self.multiple) if self.multiple else batch
                for objective in objectives:
                    objective.asked = []
                model.loss_sum(self.preparer.to_device(batch | {"reference": torch.zeros(rows)}))
                logs = [
                    log.float().flatten().cpu().numpy() for part_objective in objectives for log in part_objective.asked
                ]
                values = np.concatenate(logs) if logs else np.full(rows, np.nan, dtype=np.float32)
                self.references.update(*_gather_over_ranks(digests_of(batch), values))
                self.progress.enter("load")
                report.show(len(self.references.values) // 2)
                if time.monotonic() - self.saved_at > SAVE_SECONDS:
                    self._save()
        finally:
            for objective in objectives:
                objective.asked = None
            model.train()

    def _save(self) -> None:
        if self.path is not None:
            self.references.write(self.path, self.metadata)
        self.saved_at = time.monotonic()


def _max_over_ranks(count: int) -> int:
    most = torch.tensor([count])
    if dist.get_world_size() > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def _pad_chunk(chunk: Batch, missing: torch.Tensor, most: int, per_batch: int) -> Batch:
    """Return the missing pairs of a chunk, longest first, padded with other pairs to full batches.

    All ranks get the same number of batches.
    """
    documents = chunk["document_ids"]
    lengths = (documents == documents[:, :1]).sum(1).view(-1, 2).amax(1)
    order = (lengths + missing * (1 + documents.shape[1])).argsort(descending=True, stable=True)
    count = -(-most // per_batch) * per_batch
    chosen = order.repeat(-(-count // len(order)))[:count]
    rows = (chosen[:, None] * 2 + torch.arange(2)).flatten()
    return {name: tensor[rows] for name, tensor in chunk.items()}


def _gather_over_ranks(digests: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gather the digests and values of all ranks. Drop the NaN of pipeline ranks without the last stage."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        local = torch.from_numpy(digests.copy()), torch.from_numpy(values)
        per_rank = [[torch.empty_like(tensor) for _ in range(dist.get_world_size())] for tensor in local]
        for gathered, tensor in zip(per_rank, local, strict=True):
            dist.all_gather(gathered, tensor)
        digests, values = (torch.cat(gathered).numpy() for gathered in per_rank)
    has_value = ~np.isnan(values)
    return digests[has_value], values[has_value]
