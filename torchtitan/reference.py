"""What a run's reference says of its pairs, the model that it began from or another: one pass over the data before the
first step, kept with the run.

An answer's log-probability under the reference never changes, so no second model is kept, whatever is trained, and it
costs a third of an epoch once. Another model is there during the pass alone, beside that of the run. Values are found
by the content of a row, so that neither order nor plan matters to them, and a resume reads them back.
"""

import gc
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from torchtitan import build
from torchtitan.build_data import pass_loaders
from torchtitan.checkpoint.kinds import find_weights
from torchtitan.config.job import JobConfig
from torchtitan.config.options import show
from torchtitan.datasets.sources import DataError
from torchtitan.errors import JobError
from torchtitan.feed import Batch, Feed
from torchtitan.files import require_file
from torchtitan.loss import IGNORE_INDEX
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.preferences import Preference
from torchtitan.progress import Progress
from torchtitan.ranks import Ranks
from torchtitan.run_folder import REFERENCE
from torchtitan.weights import fill, opened

logger = logging.getLogger(__name__)

FILE = REFERENCE
MODEL = "model"
"""Of the file's metadata: the model that was asked."""
DIGEST_BYTES = 16


class References:
    """Values by row, of `digests` [n, DIGEST_BYTES] uint8 and `values` [n] float32."""

    def __init__(self, digests: np.ndarray, values: np.ndarray) -> None:
        rows = (digest.tobytes() for digest in digests)
        self.known = dict(zip(rows, values.tolist(), strict=True))

    def add(self, batch: Batch) -> Batch:
        """With `reference` [B]; 0 for rows without labels, which fill up a step or a batch. DataError for rows that the
        pass has not met.
        """
        learned = (batch["labels"] != IGNORE_INDEX).any(-1).tolist()
        rows = zip(digests_of(batch), learned, strict=True)
        try:
            values = [self.known[digest.tobytes()] if counts else 0.0 for digest, counts in rows]
        except KeyError:
            raise DataError(
                f"{FILE} in job.dump_folder does not have all pairs: the data are others than when the run began; "
                "bring them back, or start anew in another job.dump_folder"
            ) from None
        return batch | {"reference": torch.tensor(values, dtype=torch.float32)}


def digests_of(batch: Batch) -> np.ndarray:
    """[B, DIGEST_BYTES] uint8, of what each row reads and learns, whatever padding stands behind it."""
    rows = zip(batch["tokens"].cpu().numpy(), batch["labels"].cpu().numpy(), strict=True)
    ends = (1 + np.flatnonzero(labels != IGNORE_INDEX).max(initial=-1) for labels in batch["labels"].cpu().numpy())
    read = [(tokens[:end], labels[:end]) for (tokens, labels), end in zip(rows, ends, strict=True)]
    hashes = [hashlib.sha256(tokens.tobytes() + labels.tobytes()).digest()[:DIGEST_BYTES] for tokens, labels in read]
    return np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(-1, DIGEST_BYTES)


def references(
    config: JobConfig,
    ranks: Ranks,
    model: ParallelModel,
    feed: Feed,
    step: int,
    progress: Progress,
) -> References | None:
    """Those of the run, which is at `step`; None for an objective without. Every rank calls it. JobError where a run
    that goes on has lost them.
    """
    if not isinstance(feed.objective, Preference) or "reference" not in feed.objective.targets:
        return None
    path = Path(config.job.dump_folder, FILE)
    asked_of = _name_of(config.dpo.reference)
    if step:
        try:
            require_file(path)
            with safe_open(path, "numpy") as file:
                before = (file.metadata() or {}).get(MODEL, asked_of)
                kept = References(file.get_tensor("digests"), file.get_tensor("values"))
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise JobError(
                f"{path}: what the run's reference said of its pairs cannot be read ({error}); bring the file back, or "
                "start anew in another job.dump_folder"
            ) from None
        _must_be_the_model_of_before(path, before, asked_of)
        return kept
    asked = model if config.dpo.reference is None else _other_model(config, config.dpo.reference, model)
    digests, values = _over_ranks(*_own(config, asked, feed, progress))
    if asked is not model:
        del asked
        gc.collect()  # what FSDP wraps knows itself, and training collects young objects only
    if ranks.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        save_file({"digests": digests, "values": values}, unfinished, {MODEL: asked_of})
        unfinished.rename(path)
    return References(digests, values)


def _name_of(path: str | None) -> str:
    """Of the model at a path, the same however it is spelt; empty for the run's own."""
    return "" if path is None else str(Path(path).absolute())


def _must_be_the_model_of_before(path: Path, before: str, today: str) -> None:
    """JobError where a run that goes on names another model than the one that it has asked, once and for all."""
    if before != today:
        kept = show(before) if before else "unset"
        raise JobError(
            f"dpo.reference: given {show(today or None)}; allowed: {kept}, as when {path} was made of the run's pairs; "
            "bring it back (it is not opened again), or start anew in another job.dump_folder"
        )


def _other_model(config: JobConfig, path: str, model: ParallelModel) -> ParallelModel:
    """The weights at a path, spread as those of the run are. JobError where they are of another model."""
    _, place = find_weights(Path(path))
    built = build.model(build.as_reference(config), model.mesh, model.dims, model.device, drawn=False)
    with opened(place, config.model.name, build.model_args(config, place)) as weights:
        for part in built.parts:
            fill(part, weights, build.model_args(config).tied_embeddings)
    logger.info("the reference of the pairs is %s", place)
    return built


@torch.no_grad()
def _own(config: JobConfig, model: ParallelModel, feed: Feed, progress: Progress) -> tuple[np.ndarray, np.ndarray]:
    """Of this rank's share of all pairs, NaN where another stage of a pipeline has the values."""
    digests, values = [], []
    objectives = [part.loss for part in model.parts]
    model.train(False)
    for batch in _batches(config, feed):
        for objective in objectives:
            objective.asked = []
        model.loss_sum(feed.to_device(batch | {"reference": torch.zeros(len(batch["tokens"]))}))
        found = [logs.float().flatten().cpu().numpy() for objective in objectives for logs in objective.asked]
        values.append(np.concatenate(found) if found else np.full(len(batch["tokens"]), np.nan, dtype=np.float32))
        digests.append(digests_of(batch))
        progress.enter("load")
    for objective in objectives:
        objective.asked = None
    model.train()
    return np.concatenate(digests), np.concatenate(values)


def _batches(config: JobConfig, feed: Feed) -> Iterator[Batch]:
    for loader in pass_loaders(config, build.tokenizer(config), feed.dp_rank, feed.dims):
        yield from loader
        loader.close()


def _over_ranks(digests: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those of all ranks, which have as many each, without rows that are there twice."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        own = torch.from_numpy(digests.copy()), torch.from_numpy(values)
        everyone = [[torch.empty_like(each) for _ in range(dist.get_world_size())] for each in own]
        for gathered, each in zip(everyone, own, strict=True):
            dist.all_gather(gathered, each)
        digests, values = (torch.cat(gathered).numpy() for gathered in everyone)
    known = ~np.isnan(values)
    digests, first = np.unique(digests[known], axis=0, return_index=True)
    return digests, values[known][first]
