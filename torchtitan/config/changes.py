"""What a resume may change of the job that its checkpoint was made by: each option has a class. Needs no torch.

REFUSED: after it the curve is another run's, so it is named in checkpoint.allow_config_change or brought back. TOLD:
how the run is computed, how long it is, and what the position in the data judges by itself. QUIET: how the run is
watched and kept.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.config.batch_shape import rows_per_sample
from torchtitan.config.job import JobConfig, as_dict
from torchtitan.config.options import options, show

Kind = Literal["refused", "told", "quiet"]

KINDS: dict[str, Kind] = {
    "job": "quiet",
    "profiling": "quiet",
    "metrics": "quiet",
    "checkpoint": "quiet",
    "comm": "quiet",
    "memory": "quiet",
    "guard": "told",
    "early_stop": "told",
    "model": "refused",
    "model.flavor": "told",  # what it stands for is compared size by size
    "model.hf_folder": "told",  # so are the sizes in it, and a checkpoint's job has it as found from any folder
    "model.tokenizer_path": "told",  # its content is part of the position in the data
    "model.attention_backend": "told",
    "task": "refused",
    "adapter": "refused",
    "adapter.neurocache.resume_warmup": "told",
    "adapter.neurocache.score_block_bytes": "told",
    "optimizer": "refused",
    "optimizer.implementation": "told",
    "lr_scheduler": "refused",
    "lr_scheduler.total_steps": "told",
    "lr_scheduler.t_max": "told",
    "lr_scheduler.t_max_unit": "told",
    "data": "told",  # what of it decides the samples is part of the position in the data
    "dpo": "refused",
    "dpo.reference": "told",  # what it has said of the pairs is kept with the run, which knows whom it has asked
    "training": "refused",
    "training.dataset": "told",
    "training.dataset_path": "told",
    "training.text_field": "told",
    "training.format": "told",
    "training.fields": "told",
    "training.template": "told",
    "training.sources": "told",
    "training.mixing": "told",
    "training.shuffle": "told",
    "training.seq_len": "told",
    "training.on_bad_data": "told",
    "training.local_batch_size": "told",  # of global_batch_size the samples of a step are compared, however given
    "training.steps": "told",
    "training.epochs": "told",
    "training.tokens": "told",
    "training.loss_chunks": "told",
    "training.enable_cpu_offload": "told",
    "training.gc_freq": "quiet",
    "training.gc_debug": "quiet",
    "training.dataloader": "quiet",
    "parallelism": "told",
    "activation_checkpoint": "told",
    "compile": "told",
    "validation": "told",
    "debug": "told",
}
"""Of sections, and of the options in them that are of another class."""

TRAINED = ("training.unfrozen", "adapter.train_fully", "adapter.train_dense_rest")
"""Which parameters an optimizer has a state of: a checkpoint has none for what was frozen in its run."""
DEFAULTS = {"adapter.save": "whole"}
"""Values of options in jobs from before they had them, where that is not today's default."""
SIZES, SAMPLES = "model.overrides", "training.global_batch_size"
ROWS_PER_SAMPLE = "rows_per_sample"
"""A key of `kept_job`; checkpoints without it have batch sizes that counted each answer of a pair."""
BATCH_SIZES = (
    *("training.local_batch_size", SAMPLES, "validation.local_batch_size", "validation.samples"),
    "parallelism.pipeline_parallel_microbatch_size",
)


@dataclass(frozen=True)
class Change:
    """One difference between a checkpoint's job and today's, both values in words."""

    key: str
    before: str
    now: str
    note: str = ""
    """Further advice for whoever has to bring the option back."""

    @property
    def kind(self) -> Kind:
        return kind_of(self.key)

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"


def kind_of(key: str) -> Kind:
    """Of the longest name in KINDS that it lies under; what is in none is refused, which loses nothing."""
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((KINDS[name] for name in names if name in KINDS), "refused")


def refusable() -> list[str]:
    """The options that a resume refuses to change unless they are named."""
    return [key for key in options() if kind_of(key) == "refused"]


def kept_job(config: JobConfig, sizes: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """The part of a job that a checkpoint saves, JSON-able: its options, every size of its model, the samples of a
    step, and how many rows a sample has.
    """
    parts = {"job": as_dict(config), "sizes": dict(sizes), "samples": samples}
    return parts | {ROWS_PER_SAMPLE: rows_per_sample(config)}


def changes(kept: Mapping[str, Any], now: Mapping[str, Any], model_only: bool = False) -> list[Change]:
    """From one `kept_job` to another, without the quiet ones; of the model's sizes alone if no more than its weights
    are taken. Empty for checkpoints from before jobs were kept.
    """
    if not isinstance(kept.get("job"), dict):
        return []
    kept, note = _counted_in_samples(kept, now[ROWS_PER_SAMPLE])
    found = list(_changed_sizes(kept, now))
    return (
        found
        if model_only
        else found + [change for change in _changed_options(kept, now, note) if change.kind != "quiet"]
    )


def refused(found: list[Change], allowed: list[str]) -> list[Change]:
    """Those of the changes that are neither harmless nor allowed by name."""
    return [change for change in found if change.kind == "refused" and change.key not in allowed]


def remedy(change: Change) -> str:
    anew = ', beside checkpoint.exclude_from_loading = ["optimizer"]' if change.key in TRAINED else ""
    return (
        f'{change.note}bring it back, or allow the change by checkpoint.allow_config_change = ["{change.key}"]{anew}, '
        "or start anew in another job.dump_folder"
    )


def _changed_sizes(kept: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    before = kept.get("sizes", {})
    for name in before.keys() & now["sizes"].keys():  # a size that came with a later version has no other value yet
        if before[name] != now["sizes"][name]:
            yield Change(SIZES, f"{name} = {show(before[name])}", f"{name} = {show(now['sizes'][name])}")


def _counted_in_samples(kept: Mapping[str, Any], per_sample: int) -> tuple[Mapping[str, Any], str]:
    """Convert the batch sizes of a checkpoint's job from rows of pairs to pairs, if they counted rows; with advice for
    whoever has to change the job.
    """
    if ROWS_PER_SAMPLE in kept or per_sample == 1:
        return kept, ""
    job = {name: dict(section) if isinstance(section, dict) else section for name, section in kept["job"].items()}
    sizes = {}
    for key in BATCH_SIZES:
        section, name = key.split(".")
        size = job[section].get(name) if isinstance(job.get(section), dict) else None
        if isinstance(size, int) and size > 0:
            sizes[key] = job[section][name] = -(-size // per_sample)
    samples = kept.get("samples")
    kept = {**kept, "job": job, "samples": samples // per_sample if isinstance(samples, int) else samples}
    advice = " and ".join(f"{key} = {sizes[key]}" for key in BATCH_SIZES[:2] if key in sizes)
    return kept, f"the checkpoint's job counted answers, and batch sizes count pairs now: write {advice}; else "


def _changed_options(kept: Mapping[str, Any], now: Mapping[str, Any], note: str) -> Iterator[Change]:
    for key, option in options().items():
        if key == SIZES:
            continue
        default = DEFAULTS.get(key, option.default)
        before, today = _value(kept["job"], key, default), _value(now["job"], key, default)
        if key == SAMPLES:
            before, today = kept.get("samples"), now["samples"]
        if before != today:
            yield Change(key, show(before), show(today), note * (key == SAMPLES))


def _value(job: Mapping[str, Any], key: str, default: Any) -> Any:
    """Of an option in nested tables; what is not set is not there, and neither is what came with a later version."""
    value: Any = job
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value
