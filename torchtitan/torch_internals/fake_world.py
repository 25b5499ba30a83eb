"""A process group that sends nothing, for rehearsals. The import registers torch's backend "fake"."""

from torch.distributed.tensor import debug
from torch.testing._internal.distributed import fake_pg

FakeStore = fake_pg.FakeStore
"""torch 2.13: the store of a world with one real rank, in which a rehearsal runs."""
clear_sharding_prop_cache = debug._clear_sharding_prop_cache
"""torch 2.13: forgets meshes of an earlier rehearsal in the same process. Importing this takes a second."""
