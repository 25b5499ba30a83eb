"""What the model that a run began from says of its pairs: one pass over the data before the first step, kept with the
run.

An answer's log-probability under the reference never changes, so no second model is kept, whatever is trained, and it
costs a third of an epoch once. Values are found by the content of a row, so that neither order nor plan matters to
them, and a resume reads them back.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load_file, save_file

from torchtitan import build
from torchtitan.build_data import pass_loaders
from torchtitan.config.job import JobConfig
from torchtitan.datasets.sources import DataError
from torchtitan.errors import JobError
from torchtitan.feed import Batch, Feed
from torchtitan.loss import IGNORE_INDEX
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.preferences import Preference
from torchtitan.progress import Progress
from torchtitan.ranks import Ranks

FILE = "reference.safetensors"
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
    """[B, DIGEST_BYTES] uint8, of what each row reads and learns."""
    rows = zip(batch["tokens"].cpu().numpy(), batch["labels"].cpu().numpy(), strict=True)
    hashes = [hashlib.sha256(tokens.tobytes() + labels.tobytes()).digest()[:DIGEST_BYTES] for tokens, labels in rows]
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
    if step:
        try:
            kept = load_file(path)
            return References(kept["digests"], kept["values"])
        except (OSError, KeyError, ValueError) as error:
            raise JobError(
                f"{path}: what the run's reference said of its pairs cannot be read ({error}); bring the file back, or "
                "start anew in another job.dump_folder"
            ) from None
    digests, values = _over_ranks(*_own(config, model, feed, progress), feed.device)
    if ranks.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        save_file({"digests": digests, "values": values}, unfinished)
        unfinished.rename(path)
    return References(digests, values)


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


def _over_ranks(digests: np.ndarray, values: np.ndarray, device: torch.device) -> tuple[np.ndarray, np.ndarray]:
    """Those of all ranks, which have as many each, without rows that are there twice."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        own = torch.from_numpy(digests.copy()).to(device), torch.from_numpy(values).to(device)
        everyone = [[torch.empty_like(each) for _ in range(dist.get_world_size())] for each in own]
        for gathered, each in zip(everyone, own, strict=True):
            dist.all_gather(gathered, each)
        digests, values = (torch.cat(gathered).cpu().numpy() for gathered in everyone)
    known = ~np.isnan(values)
    digests, first = np.unique(digests[known], axis=0, return_index=True)
    return digests, values[known][first]
