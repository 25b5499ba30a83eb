"""Neurocache as a kind of adapter. Needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.adapters import ALL_LOW_RANK_OPTIONS, AdapterSpec
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.plugins.neurocache.sizes import cache_misfits


@dataclass(frozen=True, kw_only=True)
class CacheSpec(AdapterSpec):
    def linear_kind(self, options: Options) -> str:
        return options.neurocache.beside

    def state_of_all_rows(self, options: Options) -> str:
        shared = 'the rows of each of its ranks share a cache (adapter.neurocache.scope = "global")'
        return shared if options.neurocache.scope == "global" else ""

    def check_evaluation(self, options: Options, args: Any, sizes: Sequence[int] | None, seq_len: int) -> None:
        """Refuse a cache that cannot hold a segment, or that the job's lookup cannot read."""
        for size in filter(None, sizes or [options.neurocache.cache_size]):
            candidate = replace(options.neurocache, cache_size=size)
            if misfits := list(cache_misfits(candidate, args.n_layers, args.dim, seq_len)):
                subject = f"--cache-sizes: given {size}" if sizes else f"segments of {seq_len} tokens"
                raise JobError(f"{subject}: {'; '.join(map(str, misfits))}")


SPEC = CacheSpec(
    make="torchtitan.plugins.neurocache.adapter:Neurocache",
    options=ALL_LOW_RANK_OPTIONS,
    stateful=True,
    peft_folder=False,
)
