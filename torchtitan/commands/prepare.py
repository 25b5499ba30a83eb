"""`torchtitan prepare`: tokenize a dataset once, into memory-mapped shards that training reads at full speed.

    torchtitan prepare --dataset text --dataset_path stories/ --tokenizer_path tokenizer.model --output shards/
    torchtitan prepare job.toml

With a job, fill its token cache before the run and without its ranks, so that the run starts training at once. The
output lists for each source how many records were kept, cut or dropped and their lengths, then the number of samples
and steps.

Documents keep their stored order; training shuffles. Shards are written to a temporary folder next to the output and
renamed at the end, so a folder of that name is complete. `--verify shards/` reads a folder and compares the checksums.
"""

import re
from pathlib import Path
from typing import Any

from torchtitan.assembly.data import JobDatasets, unread_lines
from torchtitan.commands.command_lines import parse_command
from torchtitan.core.errors import JobError
from torchtitan.datasets import open_source
from torchtitan.datasets.preparing import LEFT_OUT, advice, prepare
from torchtitan.datasets.record_account import describe_unread
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.token_shards import TokenShards
from torchtitan.job import ResolvedJob
from torchtitan.job.layout import Section
from torchtitan.process.distributed import device_type
from torchtitan.rules.loading import load_valid

COLUMNS = ("records", "whole", "cut", "left out", "50 %", "90 %", "99 %", "longest", "tokens", "trained")
"""Of the table; lengths are in tokens."""
WIDTH = 32
"""Signs of a source's name."""


def prepare_job(job_args: list[str]) -> int:
    # training may run on another machine, so only faults on every kind of device count
    facts = load_valid(job_args, None, None)
    print("\n".join(prepared(facts.job.on_ranks(facts.job.world_size, device_type()))))
    return 0


def prepared(job: ResolvedJob) -> list[str]:
    """Tokenize the sources that are not cached, and return a summary of all, as lines.

    Raises JobError for a job that tokenizes nothing before its start.
    """
    config, ranks, datasets = job.config, job.world_size, JobDatasets(job)
    validation = config.validation.enable and config.validation.split is None
    candidates: list[Section] = ["training", "validation"] if validation else ["training"]
    sections = [section for section in candidates if job.data.is_tokenized_first(section)]
    if not sections:
        raise JobError(
            f"task.kind = {config.task.kind} without training.epochs reads its text as it trains, so that nothing is "
            "tokenized before; set training.epochs, or make shards with torchtitan prepare --output FOLDER"
        )
    lines = [f"{'':{WIDTH}} " + " ".join(f"{name:>9}" for name in COLUMNS)]
    advices, unread, tokenizer = {}, [], job.tokenizer()
    for section in sections:
        for weighted in datasets.open_sources(section):
            assert isinstance(weighted.source, TokenShards)
            header = weighted.source.header
            source_name = header.get("source", {}).get("name", weighted.source.name)
            name = f"{section}: {source_name[len(section) + 2 - WIDTH :]}"
            lines.append(f"{name:{WIDTH}} " + " ".join(f"{cell:>9}" for cell in row(header)))
            unread += unread_lines([weighted.source], tokenizer)
            options = config.training.seq_len, config.data.max_tokens is not None, job.model.spec.labels != "ends"
            if hint := advice(header["records"], *options) if "records" in header else "":
                advices[name] = hint
            if "note" in header:
                lines.append(f"{name}: {header['note']}")
    lines += [*(f"{name}: {hint}" for name, hint in advices.items()), *unread]
    if "training" in sections and not job.model.spec.streams_documents:
        samples = datasets.describe_samples(datasets.open_shards("training"))
        steps = job.ending_at(datasets.last_step()).schedule.steps
        of_ranks = f"on {ranks} rank{'s' if ranks > 1 else ''}"
        lines.append(f"samples {samples}; {steps:,} steps of {job.layout.sample_count(job.layout.samples)}, {of_ranks}")
    return [*lines, f"kept in {job.data.cache}"]


def row(header: dict[str, Any]) -> list[str]:
    """Format the header of a source's shards, one cell per column of COLUMNS.

    A source of streamed documents has no records: these columns are empty, except for the number of documents.
    """
    trained = f"{header.get('trained_tokens', header['tokens']) / max(1, header['tokens']):.1%}"
    tokens = f"{header['tokens']:,}"
    if "records" not in header:
        return [f"{header['documents']:,}", *[""] * 7, tokens, trained]
    fates, lengths = header["records"]["fates"], header["records"]["lengths"]
    cut = fates.get("truncated", 0) + fates.get("split", 0)
    left_out = sum(fates.get(outcome, 0) for outcome in LEFT_OUT)
    counts = [sum(fates.values()), fates["whole"], cut, left_out, *lengths.values()]
    return [*(f"{count:,}" for count in counts), tokens, trained]


def main(argv: list[str]) -> int:
    options, job_args = parse_command("prepare", argv)
    if job_args:
        for name in ("dataset_path", "tokenizer_path", "output", "verify"):
            if getattr(options, name):
                raise JobError(f"--{name.replace('_', '-')}: not allowed with a job, which sets it itself")
        return prepare_job(job_args)
    if options.verify:
        TokenShards(Path(options.verify)).verify()
        print(f"{options.verify}: all checksums match")
        return 0
    if not options.tokenizer_path or not options.output:
        raise JobError("torchtitan prepare: give a job, or --tokenizer-path and --output")
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
    if line := describe_unread(options.dataset_path or options.dataset, header["unread"]):
        print(line)
    skipped = f", {header['skipped']} records left out" if header["skipped"] else ""
    trained = header.get("trained_tokens")
    share = "" if trained is None else f", {trained / header['tokens']:.1%} of them trained"
    if "note" in header:
        print(header["note"])
    print(
        f"{options.output}: {header['documents']:,} documents, {header['tokens']:,} tokens ({header['dtype']}) in "
        f'{len(header["shards"])} shard(s){share}{skipped}\ntrain on them with training.dataset = "tokens" and '
        f'training.dataset_path = "{options.output}"'
    )
    return 0


def _of_this_command(message: str) -> str:
    """Replace the job's options in a message about data by the options of this command."""
    return re.sub(
        r'(?:training|model)\.(\w+)(?: = "([^"]*)")?',
        lambda m: f"--{m[1].replace('_', '-')}" + f" {m[2]}" * bool(m[2]),
        message,
    )
