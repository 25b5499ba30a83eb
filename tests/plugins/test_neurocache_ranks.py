"""Cache lookups return the same entries on all ranks as on one device, also where ranks hold parts of the cache."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.plans.combinations import COMPOSED, Combination
from tests.support.pool import run_ranks
from tests.support.table_rows import run_row
from torchtitan.core.errors import JobError
from torchtitan.parallelisms.tensor_parallel import RegionBorder
from torchtitan.plugins.neurocache import memory
from torchtitan.plugins.neurocache.cache import (
    CacheSegment,
    CacheShard,
    CacheStore,
    entry_places,
    nearest,
    with_neighbours,
)
from torchtitan.plugins.neurocache.memory import gather_places
from torchtitan.plugins.neurocache.options import NeurocacheOptions as Cache
from torchtitan.plugins.neurocache.sizes import cache_bytes

CACHE = dict(adapter="neurocache", accumulation=4, precision="float64")


def ages_of_hits(row: Combination) -> list[list[int]]:
    """Run a row of the table; for each lookup, list the ages of the entries found, -1 for none."""
    ages, nearest = [], memory.nearest

    def watched(*args, **options):
        hits = nearest(*args, **options)
        ages.append(hits.ages.where(hits.exists, -1).flatten().tolist())
        return hits

    memory.nearest = watched
    try:
        run_row(row)
    finally:
        memory.nearest = nearest
    return ages


@pytest.mark.parametrize("adapter", ["neurocache", "neurocache, shared"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_hits_under_tensor_parallel_equal_one_device(adapter, sequence_parallel):
    (one_device,) = run_ranks(1, ages_of_hits, Combination(**CACHE))
    assert len(one_device) == 4 and max(one_device[0]) == -1 and min(one_device[-1]) >= 0
    split = Combination(**COMPOSED["TP 2"], **CACHE | {"adapter": adapter}, sequence_parallel=sequence_parallel)
    assert run_ranks(2, ages_of_hits, split) == [one_device, one_device]


def read_store(size: int, similarity: str, ranks: int) -> tuple[list, list, int]:
    """Store and look up six segments in a store shared by ranks: (ages, entries read, bytes of this rank).

    States are small integers, so that many scores are equal.
    """
    generator = torch.Generator().manual_seed(0)
    border = RegionBorder(init_device_mesh("cpu", (ranks,)), sequence=False) if ranks > 1 else None
    share, layer, device = CacheShard(border), 3, torch.device("cpu")
    store = CacheStore(2, size, [layer], {"key": 4}, torch.float32, device, share=share)
    ages, rows = [], []
    for segment in range(6):
        states = torch.randint(-1, 2, (2, 7, 4), generator=generator).float()
        reach = -(-max(store.reach, 1) // share.ranks) * share.ranks
        keys = store.entries[layer, "key"][:, : reach // share.ranks]
        lookup_options = dict(similarity=similarity, share=share)
        hits = with_neighbours(nearest(states, keys, store.counts, 5, **lookup_options), 2, reach, store.counts)
        places = entry_places(hits, reach, store.counts)
        read = share.combine(gather_places(keys, places // share.ranks), places)
        ages.append(hits.ages.where(hits.exists, -1).tolist())
        rows.append(read.where(hits.exists[..., None], 0).tolist())
        filled = torch.tensor([7, 1 + segment])
        begins = torch.tensor([False, segment == 3])
        counts = store.counts.masked_fill(begins, 0)
        store.commit(CacheSegment(slice(0, 2), counts, filled, {(layer, "key"): states}, {}))
    return ages, rows, store.bytes


@pytest.mark.parametrize("similarity", ["l2", "dot"])
@pytest.mark.parametrize("size", [8, 12, 24])
def test_a_store_shared_by_ranks_equals_an_unshared_one(size, similarity):
    """The latest of entries with equal scores wins, whichever rank holds it, in a partly filled and a wrapped store."""
    *one_rank, _ = read_store(size, similarity, 1)
    assert len({age for segment in one_rank[0] for lane in segment for token in lane for age in token}) > 5
    options = Cache(cache_size=size, cache_shard="tp", cache_dtype="float32", compression=8)
    for *two_ranks, own_bytes in run_ranks(2, read_store, size, similarity, 2):
        assert two_ranks == one_rank and own_bytes == cache_bytes(options, 32, 4, 2, training=False, tp=2)


def test_a_cache_size_that_ranks_do_not_divide_is_refused():
    """Jobs are checked before they start; `torchtitan generate --ranks` may have another number of ranks."""
    share = CacheShard(SimpleNamespace(rank=0, size=3))
    with pytest.raises(JobError, match='cache_size: given 16; allowed: a multiple of 3 ranks; write 15, or .* "none"'):
        CacheStore(1, 16, [0], {"key": 1}, torch.float32, torch.device("cpu"), share=share)
