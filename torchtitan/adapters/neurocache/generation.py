"""Writing with a cache that grows: what was read and written before the segment under way is looked up, and keys and
values are kept within the segment. When it is full, it is stored, and the next one begins.
"""

from collections.abc import Iterator

import torch
from torch import nn

from torchtitan.models.cache import Remembering
from torchtitan.models.decoder import Decoder

ENDLESS = 2**31
"""Tokens of a context: it need not end."""


class ReadingOn:
    """A decoder with a memory called with growing sequences, as Remembering is; segments are of `seq_len` tokens."""

    def __init__(self, model: Decoder, seq_len: int):
        assert model.memory is not None
        self.model, self.memory, self.seq_len = model, model.memory, seq_len
        self.memory.decodes = True
        self.kernels = Remembering(model).kernels
        self.seen: torch.Tensor | None = None  # [1, T]

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [1, T] -> the logits of the last tokens, [1, those that were read together, V]."""
        known = 0 if self.seen is None else self.seen.shape[1]
        if not 0 < known < ids.shape[1] or not torch.equal(ids[:, :known], self.seen):
            known = 0
            self.memory.forget()
            self._begin()
        self.seen = ids
        while known < ids.shape[1]:
            place = known % self.seq_len
            piece = ids[:, known : known - place + self.seq_len]
            positions = torch.arange(place, place + piece.shape[1], device=ids.device)[None]
            logits = self.model(piece, positions=positions)
            known += piece.shape[1]
            if known % self.seq_len == 0:
                self.memory.commit()
                self._begin()
        return logits

    def _begin(self) -> None:
        self.memory.tail = {}
        for kernel in self.kernels:
            kernel.forget()


def reader_of(model: Decoder, seq_len: int) -> tuple[Remembering | ReadingOn, int]:
    """What keeps what a model has read, and how many tokens it reads at most."""
    if getattr(model, "memory", None) is None:
        return Remembering(model), seq_len
    return ReadingOn(model, seq_len), ENDLESS
