"""Measure Neurocache by cache size: lookup and reading of a segment relative to full attention over the history, and
memory relative to the formula. Also compare attention with absorbed projections with the plain form.

One device, float32, one row and layer of the width of OPT-125M; both sides of a ratio take turns in one process.
`--quick` makes one repeat of one pair, of small sizes.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_timing import take_turns
from torchtitan.plugins.neurocache.attention import EntryAttention, Retrieved
from torchtitan.plugins.neurocache.cache import CacheStore, entry_places, nearest, with_neighbours
from torchtitan.plugins.neurocache.memory import gather_places
from torchtitan.plugins.neurocache.options import NeurocacheOptions
from torchtitan.plugins.neurocache.sizes import cache_bytes, widths

DIM, HEADS = 768, 12
SIZES = (1024, 4096, 16384, 65536, 131072)


def full_attention(q: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """Attend with q [1, H, S, E] to the full history [1, H, M, E], used as keys and values."""
    return F.scaled_dot_product_attention(q, history, history)


def read_cache(
    reading: EntryAttention, q: torch.Tensor, queries: torch.Tensor, store: CacheStore, size: int
) -> torch.Tensor:
    """Look up queries [1, S, C] in a full cache of `size` entries and read them with q [1, S, H, E]: [1, S, H, E]."""
    options, keys = NeurocacheOptions(), store.entries[0, "key"]
    counts = torch.tensor([size])
    hits = with_neighbours(nearest(queries, keys, counts, options.topk), options.window, size, counts)
    return reading(q, Retrieved(gather_places(keys, entry_places(hits, size, counts)), hits.exists))


@torch.no_grad()
def by_size(tokens: int, sizes: tuple[int, ...], pairs: int, repeats: int) -> None:
    """Print memory, speed and time relative to full attention for each cache size."""
    width = DIM // NeurocacheOptions().compression
    reading = EntryAttention(width, HEADS, DIM // HEADS, 2, scrambled=False)
    torch.nn.init.normal_(reading.wk), torch.nn.init.normal_(reading.wv)
    q, queries = torch.randn(1, tokens, HEADS, DIM // HEADS), torch.randn(1, tokens, width)
    for size in sizes:
        options = NeurocacheOptions(cache_size=size, cache_dtype="float32", retrieval_map={"0": 0})
        store = CacheStore(1, size, [0], widths(options, DIM, False), torch.float32, torch.device("cpu"))
        store.entries[0, "key"].normal_()
        history = torch.randn(1, HEADS, size, DIM // HEADS)
        turns = take_turns(
            partial(read_cache, reading, q, queries, store, size),
            partial(full_attention, q.transpose(1, 2), history),
            max(1, min(pairs, 4 * SIZES[2] // size)),  # large ones take seconds
            repeats,
        )
        seconds, predicted_bytes = turns.median(turns.wall, "A"), cache_bytes(options, DIM, 1, 1, training=False)
        ratio = sorted(turns.ratios(turns.wall))[repeats // 2]
        speed = f"{tokens / seconds:>10,.0f} tokens/s"
        memory = f"{store.bytes / 1e6:>8.1f} MB (by the formula {predicted_bytes / 1e6:.1f})"
        print(f"{size:>8,} entries  {memory}  {speed}  {ratio:.2f} of full attention's time")


@torch.no_grad()
def absorbed(tokens: int, pairs: int, repeats: int) -> None:
    """Print the time of attention with absorbed projections relative to the plain form."""
    reading = EntryAttention(DIM // 4, HEADS, DIM // HEADS, 2, scrambled=False)
    torch.nn.init.normal_(reading.wk), torch.nn.init.normal_(reading.wv)
    q, rows = torch.randn(1, tokens, HEADS, DIM // HEADS), [torch.randn(1, tokens, 32, DIM // 4) for _ in range(2)]
    exists = torch.ones(1, tokens, 1, 64, dtype=torch.bool)
    turns = take_turns(
        partial(reading.attend_absorbed, q, rows, exists),
        partial(reading.attend_expanded, q, rows, exists),
        pairs,
        repeats,
    )
    ratio = sorted(turns.ratios(turns.wall))[repeats // 2]
    print(f"brought to the entries / written out  {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="of a segment (default 256)")
    parser.add_argument("--quick", action="store_true", help="one repeat of one pair, small sizes")
    options = parser.parse_args()
    torch.manual_seed(0)
    pairs, repeats = (1, 1) if options.quick else (5, 5)
    tokens = 16 if options.quick else options.tokens
    by_size(tokens, SIZES[:1] if options.quick else SIZES, pairs, repeats)
    absorbed(tokens, pairs, repeats)


if __name__ == "__main__":
    main()
