"""Generation with a growing cache.

Earlier segments are looked up in the cache, and the current segment has a key-value cache. When it is full, it is
stored and the next one begins.
"""

import torch

from torchtitan.models.decoder import Decoder
from torchtitan.models.kv_cache import CachedDecoder


class SegmentReader(CachedDecoder):
    """Calls a decoder that has a memory with growing sequences, in segments of `seq_len` tokens."""

    def __init__(self, model: Decoder, seq_len: int):
        assert model.memory is not None
        super().__init__(model)
        self.memory, self.seq_len = model.memory, seq_len
        self.memory.decodes = True

    def clear(self) -> None:
        self.memory.clear()
        self._begin()

    def read(self, ids: torch.Tensor, num_cached: int) -> torch.Tensor:
        while num_cached < ids.shape[1]:
            offset = num_cached % self.seq_len
            piece = ids[:, num_cached : num_cached - offset + self.seq_len]
            positions = torch.arange(offset, offset + piece.shape[1], device=ids.device)[None]
            logits = self.model(piece, positions=positions)
            num_cached += piece.shape[1]
            if num_cached % self.seq_len == 0:
                self.memory.commit()
                self._begin()
        return logits

    def _begin(self) -> None:
        self.memory.tail = {}
        super().clear()
