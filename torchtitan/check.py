"""`torchtitan check`: judge jobs without starting them, and translate old ones. Needs no torch, so it is quick."""

import math
import sys
from collections.abc import Iterable
from typing import Any

import tomli_w

from torchtitan.config import JobConfig
from torchtitan.config_manager import Values, assemble, layer_of, load, nest, read_layers, to_toml
from torchtitan.options import ConfigError, Fault, help_text, options, show
from torchtitan.ranks import likely_device
from torchtitan.renames import Upgrade, upgrade
from torchtitan.rules import RULES, WITHOUT_EFFECT, Device, Facts, check, with_faults_of_the_rest
from torchtitan.rules.pipeline import layers_by_stage

__all__ = ["RULES", "check", "main"]

USAGE = """\
usage: torchtitan check job.toml [more.toml ...] [--world-size N] [--device cpu|cuda] [--section.key value ...]
       torchtitan check old.toml --upgrade > new.toml

Checks each job by itself, with the options after it, and says what it would do, or all that is wrong with it.
  --world-size N   ranks that it is to run on (default: as few as its degrees of parallelism need)
  --device D       what the ranks compute on (default: what this machine has)
  --upgrade        print the translation of a job written for torchtitan's TOML era
  --help-config    print all options with their types, defaults and help
Exit code: 0 if nothing is wrong, 2 otherwise."""

REFUSED = 2


def main(argv: list[str]) -> int:
    if {"--help", "-h"} & set(argv) or not argv:
        print(USAGE)
        return 0 if argv else REFUSED
    if "--help-config" in argv:
        print(help_text())
        return 0
    try:
        flags, rest = _own_flags(argv)
    except ValueError as error:
        return _refuse([error])
    number = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    jobs = [["--job.config_file", file] for file in rest[:number]] or [[]]
    if "--upgrade" in flags:
        return _refuse(["--upgrade takes one job"]) if len(jobs) > 1 else _upgrade([*jobs[0], *rest[number:]])
    return max([_check([*job, *rest[number:]], flags) for job in jobs])


def _own_flags(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The flags of this command, and the words that are left. ValueError names a flag's wrong value."""
    flags: dict[str, Any] = {}
    rest, words = [], iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--upgrade" and not equals:
            flags[name] = True
        elif name in ("--world-size", "--device"):
            flags[name] = value if equals else next(words, "")
        else:
            rest.append(word)
    if not flags.get("--world-size", "1").isdecimal() or int(flags.get("--world-size", 1)) < 1:
        raise ValueError(f"--world-size: given {show(flags['--world-size'])}; allowed: a whole number >= 1")
    if flags.get("--device", "cpu") not in ("cpu", "cuda"):
        raise ValueError(f'--device: given {show(flags["--device"])}; allowed: "cpu" or "cuda"')
    return flags, rest


def _check(argv: list[str], flags: dict[str, Any]) -> int:
    device: Device = flags.get("--device") or likely_device()
    try:
        config = load(argv)
    except ConfigError as error:
        ranks = flags.get("--world-size") or (fewest_ranks(error.rest) if error.rest else 1)
        return _refuse(with_faults_of_the_rest(error, int(ranks), device))
    facts = Facts(config, int(flags.get("--world-size", fewest_ranks(config))), device)
    faults = check(config, facts.world_size, device)
    if faults:
        return _refuse(faults)
    print(f"{' + '.join(config.job.config_file) or 'the default job'}: OK\n{summary(facts)}")
    if config.job.print_config:
        print(to_toml(config))
    return 0


def _refuse(faults: Iterable[Fault | Exception | str]) -> int:
    lines = list(map(str, faults))
    print(*lines, f"{len(lines)} fault{'s' if len(lines) > 1 else ''}", sep="\n", file=sys.stderr)
    return REFUSED


def fewest_ranks(config: JobConfig) -> int:
    """The ranks that a job's degrees need at least."""
    facts = Facts(config, 1, "cpu")
    product = max(1, config.parallelism.data_parallel_shard_degree)
    for degree in facts.other_degrees.values():
        product *= degree
    if config.parallelism.data_parallel_shard_degree == -1:  # as many shards as expert parallel needs beside cp and tp
        product *= facts.ep // math.gcd(facts.ep, facts.cp * facts.tp)
    return product


def summary(facts: Facts) -> str:
    """What a job without faults would do, in a few lines."""
    config, training = facts.config, facts.config.training
    samples = training.global_batch_size if training.global_batch_size > 0 else facts.samples
    tokens = samples * training.seq_len
    passes = samples // facts.samples
    accumulation = f"in {passes} forward passes" if passes > 1 else "in one forward pass"
    parameters = facts.args.num_parameters
    # parameters, gradients and the two moments of Adam, all of training.dtype; pipeline ranks have unlike shares
    state = _parameters_of_a_rank(facts) * 4 * {"float32": 4, "bfloat16": 2}[training.dtype]
    each = "on average (parameters" if facts.pp > 1 else "(parameters"
    ranks = f"{facts.world_size} rank{'s' if facts.world_size > 1 else ''} ({facts.device})"
    return "\n".join(
        [
            f"  model     {config.model.name} {config.model.flavor}, {parameters:,} parameters",
            f"  ranks     {ranks}: {_plan(facts)}",
            *_pipeline(facts),
            f"  state     {state / 2**30:.2f} GiB a rank {each}, gradients, two moments in {training.dtype})",
            f"  data      {training.dataset}, {samples} samples of {training.seq_len} tokens a step, {accumulation}",
            f"  tokens    {tokens:,} a step, {tokens * training.steps:,} in {training.steps:,} steps",
            "  schedule  " + facts.schedule.describe(config.optimizer.lr).removeprefix("learning rate: "),
        ]
    )


def _parameters_of_a_rank(facts: Facts) -> float:
    """Experts are whole on tensor-parallel ranks unless expert parallel splits them; shared ones and routers always."""
    args, shards = facts.args, facts.fsdp_shards * facts.pp
    layers = facts.expert_layers
    routed = layers * args.n_experts * args.expert_parameters if layers else 0
    beside = layers * args.moe_parameters - routed if layers else 0
    split = (args.num_parameters - routed - beside) / facts.tp
    return (split + beside + routed / (facts.tp if facts.ep > 1 else 1)) / shards


def _plan(facts: Facts) -> str:
    degrees = {
        f"{facts.shard} shards (FSDP)": facts.shard,
        f"{facts.replicas} replicas": facts.replicas,
        f"context parallel {facts.cp} ({facts.config.parallelism.context_parallel_rotate_method})": facts.cp,
        f"tensor parallel {facts.tp}{' with sequence parallel' * facts.sequence_parallel}": facts.tp,
        f"pipeline parallel {facts.pp}": facts.pp,
    }
    experts = f"; expert parallel {facts.ep} over these ranks" * (facts.ep > 1)
    return (" x ".join(words for words, degree in degrees.items() if degree > 1) or "nothing is parallel") + experts


def _pipeline(facts: Facts) -> list[str]:
    if facts.pp == 1:
        return []
    degrees, layers = facts.config.parallelism, layers_by_stage(facts)
    name = degrees.pipeline_parallel_schedule_csv or degrees.pipeline_parallel_schedule
    counts = ", ".join(map(str, layers)) if len(layers) <= 8 else f"{min(layers)} to {max(layers)}"
    size = degrees.pipeline_parallel_microbatch_size
    microbatches = f"{facts.microbatches} microbatch{'es' if facts.microbatches > 1 else ''}"
    samples = f"{size} sample{'s' if size > 1 else ''}"
    return [f"  pipeline  {name}, {len(layers)} stages of {counts} layers, {microbatches} of {samples}"]


def _upgrade(argv: list[str]) -> int:
    """Print the job in today's options, with the old defaults that differ from today's."""
    files, layers = read_layers(argv)
    faults = [fault for layer in layers for fault in layer.faults]
    if faults:
        return _refuse(faults)
    name = " + ".join(files) or "the job"
    result = upgrade(_merged(layer.old for layer in layers), _merged(layer.values for layer in layers))
    faults = [Fault(name, key, show(value), "", f"has no translation: {why}") for key, value, why in result.stuck]
    translated = layer_of(name, result.values.items())
    faults += translated.all_faults()
    if faults:
        return _refuse(faults)
    values = _with_effect(translated.values, result)
    print(_as_file(name, result, values))
    return 0


def _with_effect(values: Values, result: Upgrade) -> Values:
    """Leave out what does nothing where another option is as it is, and would be a fault here."""
    while faults := [fault for fault in _faults_without_effect(values) if fault.key in values]:
        result.notes += [f"left out, changed nothing: {fault.key} (allowed: {fault.allowed})" for fault in faults]
        values = {key: value for key, value in values.items() if key not in {fault.key for fault in faults}}
    return values


def _faults_without_effect(values: Values) -> list[Fault]:
    facts = Facts(assemble(values, []), 1, "cpu")
    return [fault for rule in WITHOUT_EFFECT for fault in rule(facts)]


def _merged(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


def _as_file(name: str, result: Upgrade, values: Values) -> str:
    head = [f"Translated from {name}, read as a job for torchtitan of {result.dialect}.", *result.notes]
    ordered = {key: values[key] for key in options() if key in values}
    return "".join(f"# {line}\n" for line in head) + "\n" + tomli_w.dumps(nest(ordered))
