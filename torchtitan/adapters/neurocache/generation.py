"""Writing with a cache that grows: what was read and written before the segment under way is looked up, and keys and
values are kept within the segment. When it is full, it is stored, and the next one begins.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchtitan.models.decoder import Decoder
from torchtitan.models.kv_cache import Remembering

ENDLESS = 2**31
"""Tokens of a context: it need not end."""


class ReadingOn(Remembering):
    """A decoder with a memory called with growing sequences; segments are of `seq_len` tokens."""

    def __init__(self, model: Decoder, seq_len: int):
        assert model.memory is not None
        super().__init__(model)
        self.memory, self.seq_len = model.memory, seq_len
        self.memory.decodes = True

    def forget(self) -> None:
        self.memory.forget()
        self._begin()

    def read(self, ids: torch.Tensor, known: int) -> torch.Tensor:
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
        super().forget()


def reader_of(model: Decoder, seq_len: int) -> tuple[Remembering, int]:
    """What keeps what a model has read, and how many tokens it reads at most."""
    if getattr(model, "memory", None) is None:
        return Remembering(model), seq_len
    return ReadingOn(model, seq_len), ENDLESS


@contextmanager
def reading(model: Decoder, seq_len: int) -> Iterator[tuple[Remembering, int]]:
    """The same, and behind it the model takes whole batches again."""
    kernel = model.kernel
    try:
        yield reader_of(model, seq_len)
    finally:
        model.set_attention_kernel(kernel)
        if model.memory is not None:
            model.memory.decodes = False
            model.memory.forget()
