"""Read growing sequences for generation, through a key-value cache or as the memory of the model reads them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan.models.decoder import Decoder
from torchtitan.models.kv_cache import CachedDecoder


def context_of(model: Decoder, seq_len: int) -> int:
    """Return the maximum number of tokens of a sequence that a model reads, in segments if it has a memory."""
    memory = getattr(model, "memory", None)
    return seq_len if memory is None else memory.context


def reader_for(model: Decoder, seq_len: int) -> tuple[CachedDecoder, int]:
    """Return the incremental reader of a model, and the maximum number of tokens that it reads."""
    memory = getattr(model, "memory", None)
    reader = CachedDecoder(model) if memory is None else memory.reader(model, seq_len)
    return reader, context_of(model, seq_len)


@contextmanager
def incremental_reader(model: Decoder, seq_len: int) -> Iterator[tuple[CachedDecoder, int]]:
    """Yield `reader_for`, and afterwards prepare the model for full batches again."""
    kernels = list(model.kernels)
    try:
        yield reader_for(model, seq_len)
    finally:
        model.set_attention_kernels(kernels)
        if model.memory is not None:
            model.memory.end_reading()
