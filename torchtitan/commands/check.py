"""`torchtitan check`: validate jobs without starting them, and translate old ones.

The check is quick because it needs no torch. For a job without faults, `torchtitan estimate` then predicts its memory.
The line on records that teach the model to stop is shared with `torchtitan preview`.
"""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from torchtitan.adapters import NONE
from torchtitan.adapters.targets import QUANTIZED_MULTIPLES, linear_adapter_options
from torchtitan.commands.command_lines import parse_command
from torchtitan.config.job import job_schema
from torchtitan.config.manager import to_toml
from torchtitan.config.options import ConfigError, Fault, help_text
from torchtitan.core.cadence import NO_LIMIT, describe_end
from torchtitan.core.errors import JobError, format_bytes, wrap_lines
from torchtitan.core.hub import Access, set_access
from torchtitan.core.machine_errors import MachineError
from torchtitan.core.plugins import COMMAND_OPTIONS, loaded_plugin
from torchtitan.core.progress_bar import waiting
from torchtitan.datasets import open_source
from torchtitan.datasets.sources import Document, Pair
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.optimizers.spec import SHARED, StateSize
from torchtitan.process.children import python_command
from torchtitan.process.machine import describe_limit, limit_in_bytes
from torchtitan.rules import RULES, Facts, check
from torchtitan.rules.loading import load_valid
from torchtitan.rules.optimization import trained_matrices

ENCODING = "torchtitan.datasets.encoding"
"""Imported by name on demand, as it needs numpy."""
MOST_RECORDS, MOST_SECONDS = 100, 1.0
"""Limits on the records that are looked at, and on the time that this takes."""


def end_token_line(facts: Facts) -> str:
    """Return a line on the first records of the training data; empty if these are not at hand or have no end.

    Only local files of records that are learned as a whole are looked at.
    """
    if not facts.model.spec.whole_records or facts.model.spec.labels != "next":
        return ""
    try:
        looked_at, trained = _count(facts)
    except (JobError, MachineError, OSError):  # training reports it, with the record's location
        return ""
    if not looked_at:
        return ""
    line = f"{trained} of the first {looked_at} records train an end token"
    if trained:
        return line
    return f"{line}: the model will not learn to stop; see data.train_on_eos and the template's end token"


def _count(facts: Facts) -> tuple[int, int]:
    """Return the number of records looked at, and how many of them train an end token."""
    config, end = facts.config, time.monotonic() + MOST_SECONDS
    tokenizer = facts.job.tokenizer()
    scope = "last_turn" if facts.layout.rows_per_sample > 1 else config.data.train_on
    encode, train_on = resolve_name(f"{ENCODING}:encode"), resolve_name(f"{ENCODING}:TrainOn")
    train_on = train_on(scope, config.data.train_on_eos)
    looked_at = trained = 0
    for name, source_config in facts.data.all_sources.items():
        path = source_config.dataset_path
        if not name.startswith("training") or source_config.dataset != "text" or not path or not Path(path).exists():
            continue
        reader, fields = facts.data.reader(source_config), facts.model.labelled_fields
        source = open_source(source_config.dataset, path, reader, fields, source_config.slice)
        for document in islice(source.documents(), MOST_RECORDS - looked_at):
            if isinstance(document, Document):
                looked_at, trained = looked_at + 1, trained + _trains_end(tokenizer, document, encode, train_on)
            if time.monotonic() > end:
                return looked_at, trained
    return looked_at, trained


def _trains_end(tokenizer: Tokenizer, document: Document, encode: Callable[..., Any], train_on: Any) -> bool:
    if isinstance(document.content, Pair):
        return all(_trains_end(tokenizer, answer, encode, train_on) for answer in document.content)
    ids, loss_mask = encode(tokenizer, document, train_on)
    ends = {tokenizer.eos_id, *tokenizer.special_tokens.values()}
    return any(int(number) in ends for number in ids[loss_mask])


__all__ = ["RULES", "check", "main"]

REFUSED = 2
STEP_FAILED = 3
"""Exit code of `torchtitan estimate` if the step that it rehearses fails."""


def main(argv: list[str]) -> int:
    if not argv:
        raise JobError("torchtitan check: no job is given; give a job's TOML file, or torchtitan check --help")
    options, job_args = parse_command("check", argv)
    if options.help_config:
        print(help_text())
        return 0
    if options.schema:
        print(job_schema())
        return 0
    if options.era and not options.upgrade:
        raise JobError("--from: allowed with --upgrade only")
    set_access(Access.DESCRIBE)
    files = [*options.config, *options.job]
    job_options = job_args[2 * len(files) :]
    if options.upgrade:
        if len(files) > 1:
            raise JobError("--upgrade takes one job")
        return loaded_plugin(COMMAND_OPTIONS, "--upgrade").print_translation(job_args, options)
    jobs = [["--job.config_file", file, *job_options] for file in files] or [job_options]
    verdicts = [_judged(job, options) for job in jobs]  # all jobs are judged before the first simulation
    if not options.json:
        for verdict in verdicts:
            refuse(verdict.faults) if verdict.faults else None
    for job, verdict in zip(jobs, verdicts, strict=True):
        if verdict.facts is not None:
            _look_further(job, verdict.facts, verdict, options)
    code = 0 if all(verdict.ok for verdict in verdicts) else REFUSED
    if options.json:
        records = [verdict.record() for verdict in verdicts]
        print(json.dumps({"ok": code == 0, "exit_code": code, "jobs": records}, indent=1))
    return code


@dataclass
class JobVerdict:
    """The result for one job. `memory`: lines of the estimate. `failure`: why its step fails, if it does."""

    job: str
    facts: Facts | None
    faults: list[Fault]
    warnings: list[str]
    memory: str = ""
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.faults and not self.failure

    def record(self) -> dict[str, Any]:
        """Return the verdict for JSON, see docs/jobs.md."""
        keys = {"file": "file", "key": "option", "value": "given", "allowed": "allowed", "remedy": "remedy"}
        faults = [{name: getattr(fault, key) for key, name in keys.items()} for fault in self.faults]
        if self.failure:
            faults.append(dict.fromkeys(keys.values(), "") | {"file": self.job, "given": self.failure})
        ranks = None if self.facts is None else self.facts.job.world_size
        memory = self.memory.strip() or None
        return {"job": self.job, "ok": self.ok, "faults": faults, "warnings": self.warnings} | {
            "ranks": ranks,
            "memory": memory,
        }


def _judged(argv: list[str], options: argparse.Namespace) -> JobVerdict:
    """Judge one job."""
    try:
        facts = load_valid(argv, options.world_size, options.device)
    except ConfigError as error:
        return JobVerdict(" + ".join(argv[1::2][: argv.count("--job.config_file")]), None, error.faults, [])
    ends = end_token_line(facts)
    warnings = [facts.notice] if facts.notice else []
    warnings += [ends] if ends.startswith("0 ") else []
    return JobVerdict(" + ".join(facts.config.job.config_file) or "the default job", facts, [], warnings)


def _look_further(argv: list[str], facts: Facts, verdict: JobVerdict, options: argparse.Namespace) -> None:
    """Print the summary of a job without faults, then predict its memory, which shows if its step fails."""
    config = facts.config
    # nothing follows a printed job, so that it can be read as a file
    has_memory = not (options.no_memory or config.job.print_config)
    if not options.json:
        lines = [f"{verdict.job}: {'no faults' if has_memory else 'OK'}", summary(facts)]
        lines += [wrap_lines(f"  ends      {line}") for line in [end_token_line(facts)] if line]
        lines += [wrap_lines(f"  trial     {facts.notice}")] * bool(facts.notice)
        if not has_memory:
            more = "`torchtitan estimate` with the same words foretells the most that a rank has at once"
            lines.append(f"  memory    {more}")
        print("\n".join(lines + [to_toml(config)] * config.job.print_config), flush=True)
    if not has_memory:
        return
    estimate_args = argv or [f"--model.name={config.model.name}"]  # estimate refuses to run without a job
    sizes = [f"--world-size={facts.job.world_size}", f"--device={facts.job.device_type}"]
    verdict.memory, verdict.failure = _memory([*estimate_args, *sizes])
    if options.json:
        return
    if verdict.failure:
        message = f"a step of it fails: {verdict.failure}; `torchtitan estimate` with the same words shows where"
        print(wrap_lines(f"{verdict.job}: {message}"), file=sys.stderr)
    result = f"{verdict.job}: {'not OK' if verdict.failure else 'OK'}"
    print("\n".join([verdict.memory] * bool(verdict.memory) + [result]), flush=True)


def _memory(estimate_args: list[str]) -> tuple[str, str]:
    """Return the output of `torchtitan estimate`, or the reason why there is none; and why the step fails, if it does.

    It needs torch and runs in a separate process, so that a torch that does not load, or too little memory, cannot end
    the check.
    """
    if importlib.util.find_spec("torch") is None:
        return "  memory    not foretold: torch is not installed", ""
    with waiting("a step is rehearsed for its memory"):
        command = python_command("torchtitan", "estimate", *estimate_args, "--no-remedies", tied=True)
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if result.stdout:
        return result.stdout.rstrip("\n"), ""
    if result.returncode < 0:
        return f"  memory    not foretold: `torchtitan estimate` was ended by signal {-result.returncode}", ""
    error_lines = [line.strip() for line in result.stderr.splitlines()]
    # the last line of a traceback has the message
    reason = " ".join(error_lines if result.returncode == REFUSED else error_lines[-1:])
    if result.returncode == STEP_FAILED:
        return "", reason
    return wrap_lines(f"  memory    not foretold: {reason or f'exit code {result.returncode}'}"), ""


def refuse(faults: Iterable[Fault | Exception | str], number: int | None = None) -> int:
    """Print faults, and their number (default: one for each line). Returns the exit code."""
    lines = list(map(wrap_lines, faults))
    number = number or len(lines)
    print(*lines, f"{number} fault{'s' if number > 1 else ''}", sep="\n", file=sys.stderr)
    return REFUSED


def summary(facts: Facts) -> str:
    """Describe a job without faults in a few lines."""
    config, layout, data, args = facts.config, facts.layout, facts.data, facts.model.args
    seq_len, tokens = config.training.seq_len, layout.rows * config.training.seq_len
    passes = layout.samples // layout.samples_per_pass
    accumulation = f"in {passes} forward passes" if passes > 1 else "in one forward pass"
    most = "up to " * (data.padding_multiple > 0)
    step = f"{layout.sample_count(layout.samples)} of {most}{seq_len} tokens a step"
    active = getattr(args, "num_active_parameters", None)
    parameters = f"{args.num_parameters:,} parameters" + f", {active or 0:,} of them for a token" * bool(active)
    ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''} ({facts.job.device_type})"
    return "\n".join(
        [
            f"  model     {config.model.name} {config.model.flavor}, {parameters}",
            f"  ranks     {ranks}: {_plan(facts)}",
            *_pipeline(facts),
            *_state(facts),
            f"  data      {data.describe_sources('training')}, {step}, {accumulation}",
            *[f"  pairs     {pair_notice}" for pair_notice in [layout.notice()] if pair_notice],
            f"  tokens    {most}{tokens:,} a step, {_length(facts, tokens)}",
            *_schedule(facts),
            *_cadence(facts),
        ]
    )


def _state(facts: Facts) -> list[str]:
    """Format the size of the training state per rank and its share of the memory limit.

    With an adapter or training.unfrozen the size is left out: weights are frozen and may be quantized, so that it
    depends on the model itself. Their types are given instead.
    """
    limit, state, dtype = facts.config.memory.limit, None, facts.config.training.dtype
    adapter = linear_adapter_options(facts.config.adapter)
    packed = " where they are not quantized" * (adapter is not None and adapter.kind in QUANTIZED_MULTIPLES)
    frozen = f"{facts.saving.frozen_dtype or dtype}{packed}"
    lines = [f"  types     frozen weights in {frozen}, trained ones and their state in {dtype}"]
    if facts.config.adapter.kind == NONE and not facts.config.training.unfrozen:
        state, state_label = _bytes_of_a_rank(facts)
        scope = "on average (parameters" if facts.layout.pp > 1 else "(parameters"
        lines = [f"  state     {format_bytes(state)} a rank {scope}, gradients, {state_label} in {dtype})"]
    if limit is not None:
        amount = limit_in_bytes(limit)
        state_share = ""
        if amount is not None and state is not None:
            state_share = f", {state / amount:.0%} of it for the state" + " alone: too much" * (state > amount)
        lines.append(f"  memory    at most {describe_limit(limit)} of a GPU for each rank{state_share}")
    return lines


def _bytes_of_a_rank(facts: Facts) -> tuple[float, str]:
    """Return the bytes of parameters, gradients and optimizer state per rank, and a description of the last.

    The bytes are an average, as pipeline ranks have different shares.
    """
    name, local_parameters = facts.config.optimizer.name, _parameters_of_a_rank(facts)
    value = {"float32": 4, "bfloat16": 2}[facts.config.training.dtype]
    spec = OPTIMIZERS[name]
    shared = {key: getattr(facts.config.optimizer, key) for key in SHARED}
    options = spec.arguments(shared, facts.config.optimizer.options)
    moments = spec.state(options)
    if moments is not None:
        moment_names = {0: "no moments", 1: "one moment", 2: "two moments"}
        return local_parameters * (2 + moments) * value, moment_names.get(moments, f"{moments} moments")
    if spec.state_size is None:
        return local_parameters * 2 * value, f"without what {name} keeps"
    matrices = trained_matrices(facts)
    # norms, biases, experts
    other_parameters = facts.model.args.num_parameters - sum(map(math.prod, matrices.values()))
    state_size = (
        spec.state_size(options, "", (other_parameters,))
        if facts.config.adapter.kind == NONE and other_parameters > 0
        else StateSize()
    )
    for matrix, shape in matrices.items():
        state_size = state_size.plus(spec.state_size(options, matrix, shape))
    share = local_parameters / facts.model.args.num_parameters
    state_bytes = (
        share * state_size.values + state_size.everywhere / facts.layout.pp
    ) * value + share * state_size.bytes
    return local_parameters * 2 * value + state_bytes, f"what {name} keeps"


def _length(facts: Facts, tokens: int) -> str:
    epochs = facts.config.training.epochs
    passes = "" if epochs is None else f", {epochs} epoch{'s' if epochs > 1 else ''}"
    limit = facts.config.training.steps
    if facts.steps is None:
        most = "" if limit == NO_LIMIT else f", at most {limit:,} steps"
        return f"counted when the data have been tokenized, at the start{passes}{most}"
    end = describe_end(facts.config.training, facts.last_step_of_data)
    return f"{tokens * facts.steps:,} in {facts.steps:,} steps{passes if limit == NO_LIMIT else end}"


def _schedule(facts: Facts) -> list[str]:
    if facts.learning_rate is None:
        return []
    return ["  schedule  " + facts.learning_rate.describe(facts.config.optimizer.lr).removeprefix("learning rate: ")]


def _cadence(facts: Facts) -> list[str]:
    if facts.steps is None:
        return []
    return ["  cadence   " + facts.job_with_end.schedule.cadence.describe(facts.config)]


def _parameters_of_a_rank(facts: Facts) -> float:
    """Return the average number of parameters per rank.

    Tensor-parallel ranks replicate the routed experts unless expert parallel splits them. They always replicate shared
    experts and routers.
    """
    args, layout = facts.model.args, facts.layout
    layers = getattr(args, "expert_layers", 0)
    routed = layers * args.n_experts * args.expert_parameters if layers else 0
    shared = layers * args.moe_parameters - routed if layers else 0
    split = (args.num_parameters - routed - shared) / layout.tp
    return (split + shared + routed / (layout.tp if layout.ep > 1 else 1)) / (layout.fsdp_shards * layout.pp)


def _plan(facts: Facts) -> str:
    layout, method = facts.layout, facts.config.parallelism.context_parallel_rotate_method
    degrees = {
        f"{layout.shards} shards (FSDP)": layout.shards,
        f"{layout.replicas} replicas": layout.replicas,
        f"context parallel {layout.cp} ({method})": layout.cp,
        f"tensor parallel {layout.tp}{' with sequence parallel' * layout.sequence_parallel}": layout.tp,
        f"pipeline parallel {layout.pp}": layout.pp,
    }
    experts = f"; expert parallel {layout.ep} over these ranks" * (layout.ep > 1)
    return (" x ".join(label for label, degree in degrees.items() if degree > 1) or "nothing is parallel") + experts


def _pipeline(facts: Facts) -> list[str]:
    layout = facts.layout
    if layout.pp == 1:
        return []
    degrees, layers = facts.config.parallelism, facts.layers_by_stage
    name = degrees.pipeline_parallel_schedule_csv or degrees.pipeline_parallel_schedule
    counts = ", ".join(map(str, layers)) if len(layers) <= 8 else f"{min(layers)} to {max(layers)}"
    microbatches = f"{layout.microbatches} microbatch{'es' if layout.microbatches > 1 else ''}"
    samples = layout.sample_count(degrees.pipeline_parallel_microbatch_size)
    return [f"  pipeline  {name}, {len(layers)} stages of {counts} layers, {microbatches} of {samples}"]
