"""Rules on Neurocache. Imported by torchtitan.rules."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from torchtitan.adapters import LOW_RANK_OPTIONS
from torchtitan.adapters.targets import Misfit, linear_adapter_options
from torchtitan.config.options import Fault, show
from torchtitan.config.sections.model import Adapter
from torchtitan.core.errors import JobError
from torchtitan.plugins.neurocache import authors_format
from torchtitan.plugins.neurocache.options import NeurocacheOptions
from torchtitan.plugins.neurocache.sizes import KEY, cache_misfits, layers_of, split_layers_message
from torchtitan.rules.facts import Facts, Rule

KIND = "neurocache"
FAMILIES = ("llama2", "llama3", "llama3.1", "llama3.2", "mistral", "opt")
BESIDE = ("none", "lora", "dora", "qlora", "lora_int8")


def cache_fits_the_model(facts: Facts) -> Iterator[Fault]:
    if facts.config.adapter.kind != KIND:
        return
    options, args = facts.config.adapter.neurocache, facts.model.args
    if facts.config.model.name not in FAMILIES:
        yield facts.fault(
            "adapter.kind",
            f"another one for {facts.config.model.name}",
            f"write lora, or choose one of {', '.join(FAMILIES)}",
        )
        return
    longest = max(facts.data.lengths.values())
    misfits = list(cache_misfits(options, args.n_layers, args.dim, longest))
    for size in filter(None, options.eval_cache_sizes if not misfits else ()):
        if size < 0:
            misfits.append(Misfit(KEY + "eval_cache_sizes", "sizes from 0 on", f"drop {size}"))
            continue
        for misfit in cache_misfits(replace(options, cache_size=size), args.n_layers, args.dim, longest):
            misfits.append(misfit._replace(key=KEY + "eval_cache_sizes"))
    yield from (facts.fault(*misfit) for misfit in misfits)
    if options.compat_head_layout and facts.layout.tp > 1:
        remedy = "each rank has only some heads, and this layout mixes values of all heads: use another parallelism"
        yield facts.fault(KEY + "compat_head_layout", "false with tensor parallel", remedy)
    if misfits or facts.layout.pp == 1:
        return
    layers, first = layers_of(options, args.n_layers), 0
    try:
        stages = facts.layers_by_stage
    except (JobError, AssertionError):  # another rule reports it
        return
    for count in stages:
        if first <= layers.first < first + count <= layers.last:
            yield facts.fault(
                KEY + "attention_layers", "layers of one stage", split_layers_message(layers), show(layers.attending)
            )
        first += count


def released_cache_is_the_jobs(facts: Facts) -> Iterator[Fault]:
    options, key = facts.config.adapter, "adapter.initial_path"
    if options.kind != KIND or options.initial_path is None:
        return
    n_layers = facts.model.args.n_layers
    try:
        released = authors_format.read(Path(options.initial_path))
        mismatches = list(authors_format.differences(released, options.neurocache, n_layers))
    except JobError as error:
        yield facts.fault(key, f"a folder with {authors_format.CONFIG}", str(error))
        return
    yield from (
        facts.fault(key, "an adapter of the job's kind", f"its {authors_format.CONFIG} has {mismatch}")
        for mismatch in mismatches
    )


def cache_reads_documents(facts: Facts) -> Iterator[Fault]:
    config = facts.config
    if config.adapter.kind != KIND:
        return
    if config.task.kind != "documents":
        yield facts.fault(
            "task.kind",
            '"documents" with adapter.kind = "neurocache"',
            "each row must continue its document from batch to batch",
        )
    if config.adapter.neurocache.scope == "global" and facts.layout.pp > 1:
        remedy = "microbatches of a pipeline would retrieve entries of other microbatches, depending on the schedule"
        yield facts.fault(KEY + "scope", '"lane" with a pipeline', remedy)
    if config.adapter.neurocache.track_hits and facts.layout.pp > 1:
        yield facts.fault(KEY + "track_hits", "false with a pipeline", "only the first pipeline stage has the tokens")
    for key in ("checkpoint.last_save_model_only", "checkpoint.last_save_in_hf", "adapter.last_save_in_peft"):
        section, name = key.split(".")
        if getattr(getattr(config, section), name):
            yield facts.fault(
                key, 'false with adapter.kind = "neurocache"', "an export of the model alone cannot hold the cache"
            )


def cache_is_shared(facts: Facts) -> Iterator[Fault]:
    options = facts.config.adapter.neurocache
    if facts.config.adapter.kind != KIND or options.cache_shard == "none":
        return
    if facts.layout.tp == 1:
        remedy = "leave it out, or set parallelism.tensor_parallel_degree"
        yield facts.fault(KEY + "cache_shard", '"none" without tensor parallel', remedy)
    elif remainder := options.cache_size % facts.layout.tp:
        below = options.cache_size - remainder
        remedy = f"write {below} or {below + facts.layout.tp}"
        yield facts.fault(KEY + "cache_size", f'a multiple of {facts.layout.tp} ranks with cache_shard = "tp"', remedy)
    elif any(size % facts.layout.tp for size in options.eval_cache_sizes):
        allowed = f'multiples of {facts.layout.tp} ranks with cache_shard = "tp"'
        yield facts.fault(KEY + "eval_cache_sizes", allowed, "all ranks keep the same number of entries")
    if options.resume_warmup == "saved":
        remedy = "each rank has a different part of the caches: write replay"
        yield facts.fault(KEY + "resume_warmup", 'not "saved" with cache_shard = "tp"', remedy)


def cache_options_have_a_cache(facts: Facts) -> Iterator[Fault]:
    """Report options of Neurocache, or of the adapter combined with it, that have no effect."""
    adapter_options, default = facts.config.adapter, Adapter()
    if adapter_options.kind == "none":
        return
    if adapter_options.kind != KIND:
        for field in fields(NeurocacheOptions):
            if getattr(adapter_options.neurocache, field.name) != getattr(default.neurocache, field.name):
                remedy = 'write kind = "neurocache", or leave it out'
                yield facts.fault(KEY + field.name, f'nothing with adapter.kind = "{adapter_options.kind}"', remedy)
        return
    adapter_kind = adapter_options.neurocache.beside
    if adapter_kind not in BESIDE:
        yield facts.fault(KEY + "beside", f"one of {', '.join(BESIDE)}", "")
    if linear_adapter_options(adapter_options) is None:
        for name in LOW_RANK_OPTIONS:
            if getattr(adapter_options, name) != getattr(default, name):
                remedy = 'write adapter.neurocache.beside = "lora", or leave it out'
                yield facts.fault(f"adapter.{name}", 'nothing with adapter.neurocache.beside = "none"', remedy)


RULES: tuple[Rule, ...] = (
    cache_fits_the_model,
    cache_is_shared,
    cache_reads_documents,
    released_cache_is_the_jobs,
)
WITHOUT_EFFECT: tuple[Rule, ...] = (cache_options_have_a_cache,)
OF_THE_MODEL: tuple[Rule, ...] = (cache_fits_the_model,)
