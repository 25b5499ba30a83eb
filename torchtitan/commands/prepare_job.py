"""`torchtitan prepare job.toml`: what a job tokenizes before it starts, ahead of it and without its ranks.

The run then begins on what is there. Shown is what became of the records of each source, how long they are, and how
many samples and steps they make.
"""

from collections.abc import Sequence
from typing import Any

from torchtitan import build
from torchtitan.batch_shape import Section, sample_count
from torchtitan.build_data import cache_of, data_sources, filled, tokenized_before, with_steps
from torchtitan.commands.check import fewest_ranks
from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError
from torchtitan.datasets.learned import advice
from torchtitan.datasets.tokens import TokenShards
from torchtitan.errors import JobError
from torchtitan.rules import check
from torchtitan.shipped import jobs
from torchtitan.tasks import TASKS

COLUMNS = ("records", "whole", "cut", "left out", "50 %", "90 %", "99 %", "longest", "tokens", "trained")
"""Of the table; lengths are in tokens."""
WIDTH = 32
"""Signs of a source's name."""


def of_a_job(argv: Sequence[str]) -> bool:
    """Whether these are words of a job, and no options of the command's own."""
    first = argv[0].partition("=")[0] if argv else ""
    named = first in ("--config", "--config_file") or (first.startswith("--") and "." in first)
    return named or first.endswith(".toml") or first in jobs()


def prepare_job(argv: Sequence[str]) -> int:
    config = manager.load(list(argv))
    ranks = fewest_ranks(config)
    # what is tokenized here may be trained elsewhere, so that only what no device would run is a fault
    elsewhere = check(config, ranks, "cuda")
    if faults := [fault for fault in check(config, ranks, "cpu") if fault in elsewhere]:
        raise ConfigError(faults)
    print("\n".join(prepared(config, ranks)))
    return 0


def prepared(config: JobConfig, ranks: int) -> list[str]:
    """Tokenize what is not there; lines of what is. JobError for a job that tokenizes nothing before its start."""
    validation = config.validation.enable and config.validation.split is None
    asked: list[Section] = ["training", "validation"] if validation else ["training"]
    sections = [section for section in asked if tokenized_before(config, section)]
    if not sections:
        raise JobError(
            f"task.kind = {config.task.kind} without training.epochs reads its text as it trains, so that nothing is "
            "tokenized before; set training.epochs, or make shards with torchtitan prepare --output FOLDER"
        )
    lines = [f"{'':{WIDTH}} " + " ".join(f"{name:>9}" for name in COLUMNS)]
    advices = {}
    for section in sections:
        for weighted in data_sources(config, section):
            assert isinstance(weighted.source, TokenShards)
            header = weighted.source.header
            told_by = header.get("source", {}).get("name", weighted.source.name)
            name = f"{section}: {told_by[len(section) + 2 - WIDTH :]}"
            lines.append(f"{name:{WIDTH}} " + " ".join(f"{cell:>9}" for cell in row(header)))
            if told := advice(header["records"], config.training.seq_len) if "records" in header else "":
                advices[name] = told
    lines += [f"{name}: {told}" for name, told in advices.items()]
    if "training" in sections and not TASKS[config.task.kind].in_lanes:
        sources = [each.source for each in data_sources(config, "training")]
        made = filled(config, [source for source in sources if isinstance(source, TokenShards)])
        steps = with_steps(config, build.dims(config, ranks)).training.steps
        batch = build.global_batch_size(config, build.dims(config, ranks))
        of_ranks = f"on {ranks} rank{'s' if ranks > 1 else ''}"
        lines.append(f"samples {made}; {steps:,} steps of {sample_count(config, batch)}, {of_ranks}")
    return [*lines, f"kept in {cache_of(config)}"]


def row(header: dict[str, Any]) -> list[str]:
    """Of a source, in COLUMNS; without records, of what is read end to end, its documents alone."""
    trained = f"{header.get('trained_tokens', header['tokens']) / header['tokens']:.1%}"
    tokens = f"{header['tokens']:,}"
    if "records" not in header:
        return [f"{header['documents']:,}", *[""] * 7, tokens, trained]
    fates, lengths = header["records"]["fates"], header["records"]["lengths"]
    cut = fates.get("truncated", 0) + fates.get("split", 0)
    left_out = fates.get("dropped", 0) + fates.get("empty", 0)
    counts = [sum(fates.values()), fates["whole"], cut, left_out, *lengths.values()]
    return [*(f"{count:,}" for count in counts), tokens, trained]
