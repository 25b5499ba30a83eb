"""Cache hit statistics, counted during training (`track_hits`).

The cache stores each entry's token and the token after it. A token has a hit if one of its retrieved entries was
followed by the token's label. An entry is the same if its token equals the one that retrieved it. The sums stay on the
device until they are requested, so counting does not synchronize.

Shapes: B lanes, S tokens, k entries retrieved by a token.
"""

from typing import NamedTuple

import torch

UNKNOWN = -1
"""Label of an entry without a loss; no token has this id."""


class Followed(NamedTuple):
    """Comparison of tokens with their retrieved entries, by position in the segment."""

    counted: torch.Tensor  # bool [B, S], True if the token has a label and an entry
    hit: torch.Tensor  # bool [B, S]
    same: torch.Tensor  # bool [B, S, k]
    there: torch.Tensor  # bool [B, S, k]


def pairs(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Pack tokens and labels [B, S] to int32 [B, S, 2]. Labels are negative where there is no loss."""
    return torch.stack((tokens, labels.clamp(min=UNKNOWN)), dim=-1).int()


def followed(token_pairs: torch.Tensor, entry_pairs: torch.Tensor, there: torch.Tensor) -> Followed:
    """Compare pairs [B, S, 2] with those of each token's entries [B, S, k, 2], which exist where `there` [B, S, k]."""
    tokens, labels = token_pairs[..., None, 0], token_pairs[..., None, 1]
    hit = (there & (entry_pairs[..., 1] == labels)).any(-1)
    return Followed((labels[..., 0] != UNKNOWN) & there.any(-1), hit, there & (entry_pairs[..., 0] == tokens), there)


class Hits:
    """The statistics of one memory, summed since they were last taken."""

    names = ("cache_hits", "cache_same_token", "cache_filled")

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None  # float64 [3, 2]: for each name the count and its total

    def note(self, reader: int, comparison: Followed) -> None:
        """Count the entries that a microbatch's tokens retrieved before the layer `reader`."""
        counted = comparison.counted
        self._add(0, (counted & comparison.hit).sum(), counted.sum())
        self._add(1, (comparison.same & counted[..., None]).sum(), (comparison.there & counted[..., None]).sum())

    def note_filled(self, counts: torch.Tensor, size: int) -> None:
        """Count the entries [B] stored of each lane's document, in a cache of that size."""
        self._add(2, counts.clamp(max=size).sum(), torch.full((), size * len(counts)))

    def _add(self, row: int, count: torch.Tensor, total: torch.Tensor) -> None:
        if self.sums is None:
            self.sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=count.device)
        self.sums[row] += torch.stack((count, total.to(count.device)))

    def take(self) -> torch.Tensor:
        """Return the sums [3, 2], on the model's device, and reset them."""
        taken, self.sums = self.sums, None
        return torch.zeros(len(self.names), 2, dtype=torch.float64) if taken is None else taken
