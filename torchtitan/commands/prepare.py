"""`torchtitan prepare`: tokenize a dataset once, into memory-mapped shards that training reads at full speed.

    torchtitan prepare --dataset text --dataset_path stories/ --tokenizer_path tokenizer.model --output shards/
    torchtitan prepare job.toml       # what a job tokenizes before it starts: prepare_job.py

Documents keep the order in which they are stored; training shuffles. Everything is written beside the output and
renamed at the end, so a folder of that name is complete. `--verify shards/` reads a folder again and compares the
checksums.
"""

import argparse
import os
import re
from os.path import expanduser
from pathlib import Path

from torchtitan.commands.prepare_job import of_a_job, prepare_job
from torchtitan.datasets import DATASETS, open_source
from torchtitan.datasets.preparing import prepare
from torchtitan.datasets.reading import Reading
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.tokens import TokenShards

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
            open_source(options.dataset, options.dataset_path, Reading(options.text_field)),
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
