"""What is validated on: the first samples of a data set, the same ones whatever the plan and the size of a batch."""

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from torchtitan.datasets.loader import Batch, Loader


class HeldOut:
    """The batches of a data-parallel rank. Whatever its last one has beyond the first `samples` of all ranks is left
    out by `first`: (batch, how many rows count) -> batch.
    """

    def __init__(self, loader: Loader, samples: int, first: Callable[[Batch, int], Batch]):
        self.loader, self.share, self.first = loader, loader.share, first
        self.samples = -(-samples // self.share.together) * self.share.together
        together = self.share.batch_size * self.share.ranks
        self.batches = -(-self.samples // together)  # on every rank, as they communicate in each

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(islice(self.loader, self.batches)):
            rows = int((self.share.samples(np.array([index])) < self.samples).sum())
            yield batch if rows == self.share.batch_size else self.first(batch, rows)

    def close(self) -> None:
        self.loader.close()
