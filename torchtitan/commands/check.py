"""`torchtitan check`: validate jobs without starting them, and translate old ones.

The check is quick because it needs no torch. For a job without faults, `torchtitan estimate` then predicts its memory.
"""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchtitan.adapters import NONE
from torchtitan.adapters.targets import QUANTIZED_MULTIPLES, linear_adapter_options
from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.end_tokens import end_token_line
from torchtitan.commands.upgrade import translate
from torchtitan.config.batch_shape import notice, rows_per_sample, sample_count
from torchtitan.config.job import JobConfig, describe_sources, job_schema
from torchtitan.config.manager import to_toml
from torchtitan.config.options import ConfigError, Fault, help_text
from torchtitan.config.upgrade import ERAS
from torchtitan.core.cadence import NO_LIMIT, cadence_of, describe_end
from torchtitan.core.errors import JobError, format_bytes, wrap_lines
from torchtitan.core.progress_bar import waiting
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.optimizers.spec import SHARED, StateSize
from torchtitan.process.children import python_command
from torchtitan.process.machine import describe_limit, limit_in_bytes
from torchtitan.rules import RULES, Facts, check
from torchtitan.rules.loading import fewest_ranks, load_valid
from torchtitan.rules.optimization import trained_matrices
from torchtitan.rules.pipeline import layers_by_stage

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
    files = [*options.config, *options.job]
    job_options = job_args[2 * len(files) :]
    if options.upgrade:
        if len(files) > 1:
            raise JobError("--upgrade takes one job")
        return _upgrade(job_args, options)
    jobs = [["--job.config_file", file, *job_options] for file in files] or [job_options]
    verdicts = [_judged(job, options) for job in jobs]  # all jobs are judged before the first simulation
    if not options.json:
        for verdict in verdicts:
            _refuse(verdict.faults) if verdict.faults else None
    for job, verdict in zip(jobs, verdicts, strict=True):
        if verdict.facts is not None:
            _look_further(job, verdict.facts, verdict, options)
    code = 0 if all(verdict.ok for verdict in verdicts) else REFUSED
    if options.json:
        records = [verdict.record() for verdict in verdicts]
        print(json.dumps({"ok": code == 0, "exit_code": code, "jobs": records}, indent=1))
    return code


@dataclass
class Verdict:
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
        ranks = None if self.facts is None else self.facts.world_size
        memory = self.memory.strip() or None
        return {"job": self.job, "ok": self.ok, "faults": faults, "warnings": self.warnings} | {
            "ranks": ranks,
            "memory": memory,
        }


def _judged(argv: list[str], options: argparse.Namespace) -> Verdict:
    """Judge one job."""
    try:
        facts = load_valid(argv, options.world_size, options.device)
    except ConfigError as error:
        return Verdict(" + ".join(argv[1::2][: argv.count("--job.config_file")]), None, error.faults, [])
    ends = end_token_line(facts)
    warnings = [facts.notice] if facts.notice else []
    warnings += [ends] if ends.startswith("0 ") else []
    return Verdict(" + ".join(facts.config.job.config_file) or "the default job", facts, [], warnings)


def _look_further(argv: list[str], facts: Facts, verdict: Verdict, options: argparse.Namespace) -> None:
    """Predict the memory of a job without faults, and print its summary. The prediction shows if the step fails."""
    config = facts.config
    if not _left_out(config, options):
        estimate_args = argv or [f"--model.name={config.model.name}"]  # estimate refuses to run without a job
        sizes = [f"--world-size={facts.world_size}", f"--device={facts.device}"]
        verdict.memory, verdict.failure = _memory([*estimate_args, *sizes])
    if options.json:
        return
    if verdict.failure:
        message = f"a step of it fails: {verdict.failure}; `torchtitan estimate` with the same words shows where"
        print(wrap_lines(f"{verdict.job}: {message}"), file=sys.stderr)
    lines = [f"{verdict.job}: {'not OK' if verdict.failure else 'OK'}", summary(facts)]
    lines += [wrap_lines(f"  ends      {line}") for line in [end_token_line(facts)] if line]
    lines += [wrap_lines(f"  trial     {facts.notice}")] * bool(facts.notice)
    if _left_out(config, options):
        lines.append("  memory    `torchtitan estimate` with the same words foretells the most that a rank has at once")
    lines += [to_toml(config)] * config.job.print_config + [verdict.memory] * bool(verdict.memory)
    print("\n".join(lines), flush=True)


def _left_out(config: JobConfig, options: argparse.Namespace) -> bool:
    """Return True if the memory is not predicted. Nothing follows a printed job, so that it can be read as a file."""
    return options.no_memory or config.job.print_config


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


def _refuse(faults: Iterable[Fault | Exception | str], number: int | None = None) -> int:
    lines = list(map(wrap_lines, faults))
    number = number or len(lines)
    print(*lines, f"{number} fault{'s' if number > 1 else ''}", sep="\n", file=sys.stderr)
    return REFUSED


def summary(facts: Facts) -> str:
    """Describe a job without faults in a few lines."""
    config, training = facts.config, facts.config.training
    samples = training.global_batch_size if training.global_batch_size > 0 else facts.samples
    tokens = samples * rows_per_sample(config) * training.seq_len
    passes = samples // facts.samples
    accumulation = f"in {passes} forward passes" if passes > 1 else "in one forward pass"
    most = "up to " * (facts.padding_multiple > 0)
    step = f"{sample_count(config, samples or 0)} of {most}{training.seq_len} tokens a step"
    data, active = describe_sources(config, "training"), getattr(facts.args, "num_active_parameters", None)
    parameters = f"{facts.args.num_parameters:,} parameters" + f", {active or 0:,} of them for a token" * bool(active)
    ranks = f"{facts.world_size} rank{'s' if facts.world_size > 1 else ''} ({facts.device})"
    return "\n".join(
        [
            f"  model     {config.model.name} {config.model.flavor}, {parameters}",
            f"  ranks     {ranks}: {_plan(facts)}",
            *_pipeline(facts),
            *_state(facts),
            f"  data      {data}, {step}, {accumulation}",
            *[f"  pairs     {pair_notice}" for pair_notice in [notice(config)] if pair_notice],
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
    frozen = f"{facts.frozen_dtype or dtype}{packed}"
    lines = [f"  types     frozen weights in {frozen}, trained ones and their state in {dtype}"]
    if facts.config.adapter.kind == NONE and not facts.config.training.unfrozen:
        state, state_label = _bytes_of_a_rank(facts)
        scope = "on average (parameters" if facts.pp > 1 else "(parameters"
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
    other_parameters = facts.args.num_parameters - sum(map(math.prod, matrices.values()))
    state_size = (
        spec.state_size(options, "", (other_parameters,))
        if facts.config.adapter.kind == NONE and other_parameters > 0
        else StateSize()
    )
    for matrix, shape in matrices.items():
        state_size = state_size.plus(spec.state_size(options, matrix, shape))
    share = local_parameters / facts.args.num_parameters
    state_bytes = (share * state_size.values + state_size.everywhere / facts.pp) * value + share * state_size.bytes
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
    if facts.schedule is None:
        return []
    return ["  schedule  " + facts.schedule.describe(facts.config.optimizer.lr).removeprefix("learning rate: ")]


def _cadence(facts: Facts) -> list[str]:
    if facts.steps is None:
        return []
    return ["  cadence   " + cadence_of(facts.config_with_end, facts.steps).describe(facts.config)]


def _parameters_of_a_rank(facts: Facts) -> float:
    """Return the average number of parameters per rank.

    Tensor-parallel ranks replicate the routed experts unless expert parallel splits them. They always replicate shared
    experts and routers.
    """
    args, shards = facts.args, facts.fsdp_shards * facts.pp
    layers = facts.expert_layers
    routed = layers * args.n_experts * args.expert_parameters if layers else 0
    shared = layers * args.moe_parameters - routed if layers else 0
    split = (args.num_parameters - routed - shared) / facts.tp
    return (split + shared + routed / (facts.tp if facts.ep > 1 else 1)) / shards


def _plan(facts: Facts) -> str:
    degrees = {
        f"{facts.shard} shards (FSDP)": facts.shard,
        f"{facts.replicas} replicas": facts.replicas,
        f"context parallel {facts.cp} ({facts.config.parallelism.context_parallel_rotate_method})": facts.cp,
        f"tensor parallel {facts.tp}{' with sequence parallel' * facts.sequence_parallel}": facts.tp,
        f"pipeline parallel {facts.pp}": facts.pp,
    }
    experts = f"; expert parallel {facts.ep} over these ranks" * (facts.ep > 1)
    return (" x ".join(label for label, degree in degrees.items() if degree > 1) or "nothing is parallel") + experts


def _pipeline(facts: Facts) -> list[str]:
    if facts.pp == 1:
        return []
    degrees, layers = facts.config.parallelism, layers_by_stage(facts)
    name = degrees.pipeline_parallel_schedule_csv or degrees.pipeline_parallel_schedule
    counts = ", ".join(map(str, layers)) if len(layers) <= 8 else f"{min(layers)} to {max(layers)}"
    size = degrees.pipeline_parallel_microbatch_size
    microbatches = f"{facts.microbatches} microbatch{'es' if facts.microbatches > 1 else ''}"
    samples = sample_count(facts.config, size)
    return [f"  pipeline  {name}, {len(layers)} stages of {counts} layers, {microbatches} of {samples}"]


def _upgrade(argv: list[str], options: argparse.Namespace) -> int:
    """Print a job in today's options. Returns 2 also for a translated job that cannot start without changes."""
    try:
        text, config = translate(argv, ERAS.get(options.era))
    except ConfigError as error:
        return _refuse(error.faults)
    print(text, flush=True)
    faults = check(config, options.world_size or fewest_ranks(config), options.device)
    return _refuse(["translated, but the job cannot start without changes:", *faults], len(faults)) if faults else 0
