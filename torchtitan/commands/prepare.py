"""`torchtitan prepare job.toml`: what a job tokenizes before it starts, ahead of it and without its ranks.

The run then begins on what is there. Shown is what became of the records of each source, how long they are, and how
many samples and steps they make.

`torchtitan prepare`: tokenize a dataset once, into memory-mapped shards that training reads at full speed.

    torchtitan prepare --dataset text --dataset_path stories/ --tokenizer_path tokenizer.model --output shards/
    torchtitan prepare job.toml       # what a job tokenizes before it starts: prepare.py

Documents keep the order in which they are stored; training shuffles. Everything is written beside the output and
renamed at the end, so a folder of that name is complete. `--verify shards/` reads a folder again and compares the
checksums.
"""

import argparse
import os
import re
from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path
from typing import Any

from torchtitan.build import parts
from torchtitan.build.data import cache_of, data_sources, filled, tokenized_before, with_steps
from torchtitan.commands.check import fewest_ranks
from torchtitan.config import manager
from torchtitan.config.batch_shape import Section, sample_count
from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError
from torchtitan.core.errors import JobError
from torchtitan.core.presets import jobs
from torchtitan.datasets import DATASETS, open_source
from torchtitan.datasets.preparing import advice, prepare
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.token_shards import TokenShards
from torchtitan.losses.tasks import task_of
from torchtitan.rules import check

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
    if "training" in sections and not task_of(config).streams_documents:
        sources = [each.source for each in data_sources(config, "training")]
        made = filled(config, [source for source in sources if isinstance(source, TokenShards)])
        steps = with_steps(config, parts.dims(config, ranks)).training.steps
        batch = parts.global_batch_size(config, parts.dims(config, ranks))
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


JOB = "With a job instead (prepare job.toml --section.key value): tokenize what it tokenizes before it starts."


def main(argv: list[str]) -> int:
    if of_a_job(argv):
        return prepare_job(argv)
    options = parse(argv)
    if options.verify:
        TokenShards(Path(options.verify)).verify()
        print(f"{options.verify}: every checksum is right")
        return 0
    try:
        header = prepare(
            open_source(options.dataset, options.dataset_path, RecordReader(options.text_field)),
            options.tokenizer_path,
            Path(options.output),
            workers=options.workers,
            stop=options.on_bad_data == "stop",
        )
    except DataError as error:
        raise DataError(_of_this_command(str(error))) from None
    skipped = f", {header['skipped']} records left out" if header["skipped"] else ""
    trained = header.get("trained_tokens")
    share = "" if trained is None else f", {trained / header['tokens']:.1%} of them trained"
    print(
        f"{options.output}: {header['documents']:,} documents, {header['tokens']:,} tokens ({header['dtype']}) in "
        f'{len(header["shards"])} shard(s){share}{skipped}\ntrain on them with training.dataset = "tokens" and '
        f'training.dataset_path = "{options.output}"'
    )
    return 0


def _of_this_command(message: str) -> str:
    """A message about a job's data, with the options of this command instead of the job's."""
    return re.sub(
        r'(?:training|model)\.(\w+)(?: = "([^"]*)")?', lambda m: f"--{m[1]}" + f" {m[2]}" * bool(m[2]), message
    )


def parse(argv: list[str]) -> argparse.Namespace:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="torchtitan prepare", description="Tokenize a dataset once.", epilog=JOB)
    parser.add_argument("--dataset", default="text", choices=[name for name in DATASETS if name != "tokens"])
    parser.add_argument("--dataset_path", type=expanduser, help="file, folder or glob; a name for dataset huggingface")
    parser.add_argument("--text_field", default="text", help="the field with text, ids or segments (default: text)")
    parser.add_argument("--tokenizer_path", type=expanduser, help="a tokenizer's file or folder, or the word bytes")
    parser.add_argument("--output", type=expanduser, help="the folder to make")
    parser.add_argument("--workers", type=int, default=cpus, help=f"processes that tokenize (default: {cpus})")
    parser.add_argument("--on_bad_data", default="stop", choices=["stop", "skip"], help="unreadable records")
    parser.add_argument(
        "--verify", type=expanduser, metavar="FOLDER", help="check a folder made before, and do nothing else"
    )
    options = parser.parse_args(argv)
    if not options.verify and not (options.tokenizer_path and options.output):
        parser.error("--tokenizer_path and --output are needed")
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: must be at least 1")
    return options
