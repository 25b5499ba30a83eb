"""How much a cache is of use, counted while a run trains (`track_hits`).

Of each entry the token is kept that stood there and the one that came behind it. A token has a hit where one of the
entries that it found was followed by what is now to be told; an entry is the same where its token is the one that found
it. Nothing is waited for until somebody asks for the sums.

Letters of the shapes: B lanes, S tokens, k entries that a token found.
"""

from typing import NamedTuple

import torch

UNKNOWN = -1
"""Behind an entry, where nothing is to be told; no token's number."""


class Followed(NamedTuple):
    """Of tokens, by place in their segment."""

    counted: torch.Tensor  # bool [B, S], whether something is to be told and something was found
    hit: torch.Tensor  # bool [B, S]
    same: torch.Tensor  # bool [B, S, k]
    there: torch.Tensor  # bool [B, S, k]


def pairs(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Tokens and labels [B, S], which are negative where nothing is to be told -> what is kept of them, int32
    [B, S, 2].
    """
    return torch.stack((tokens, labels.clamp(min=UNKNOWN)), dim=-1).int()


def followed(own: torch.Tensor, found: torch.Tensor, there: torch.Tensor) -> Followed:
    """`own` pairs [B, S, 2] and those of what each token found, [B, S, k, 2], of which [B, S, k] are there."""
    tokens, labels = own[..., None, 0], own[..., None, 1]
    hit = (there & (found[..., 1] == labels)).any(-1)
    return Followed((labels[..., 0] != UNKNOWN) & there.any(-1), hit, there & (found[..., 0] == tokens), there)


class Hits:
    """Of one memory, sums since they were last taken."""

    names = ("cache_hits", "cache_same_token", "cache_filled")

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None  # float64 [3, 2]: of each name what is counted, and of how many

    def note(self, reader: int, found: Followed) -> None:
        """What the tokens of a microbatch found before the layer `reader`."""
        counted = found.counted
        self._add(0, (counted & found.hit).sum(), counted.sum())
        self._add(1, (found.same & counted[..., None]).sum(), (found.there & counted[..., None]).sum())

    def note_filled(self, counts: torch.Tensor, size: int) -> None:
        """Entries [B] that were stored of each lane's document, in a cache of that size."""
        self._add(2, counts.clamp(max=size).sum(), torch.full((), size * len(counts)))

    def _add(self, row: int, part: torch.Tensor, whole: torch.Tensor) -> None:
        if self.sums is None:
            self.sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=part.device)
        self.sums[row] += torch.stack((part, whole.to(part.device)))

    def take(self) -> torch.Tensor:
        """[3, 2], where the model computes"""
        taken, self.sums = self.sums, None
        return torch.zeros(len(self.names), 2, dtype=torch.float64) if taken is None else taken
