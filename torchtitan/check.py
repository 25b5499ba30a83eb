"""`torchtitan check`: judge jobs without starting them, and translate old ones. Needs no torch, so it is quick."""

import sys
from collections.abc import Iterable
from typing import Any

import tomli_w

from torchtitan.config import JobConfig
from torchtitan.config_manager import Layer, assemble, layer_of, load, nest, read_layers, to_toml
from torchtitan.options import ConfigError, Fault, help_text, options, show
from torchtitan.ranks import likely_device
from torchtitan.renames import Upgrade, upgrade
from torchtitan.rules import RULES, UNSUPPORTED, Device, Facts, check, with_faults_of_the_rest

__all__ = ["RULES", "UNSUPPORTED", "check", "main"]

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
    return product


def summary(facts: Facts) -> str:
    """What a job without faults would do, in a few lines."""
    config, training = facts.config, facts.config.training
    samples = training.global_batch_size if training.global_batch_size > 0 else facts.samples
    tokens = samples * training.seq_len
    passes = samples // facts.samples
    accumulation = f"in {passes} forward passes" if passes > 1 else "in one forward pass"
    replicas = config.parallelism.data_parallel_replicate_degree
    plan = [f"{facts.shard} shards (FSDP)"] * (facts.shard > 1) + [f"{replicas} replicas"] * (replicas > 1)
    parameters = facts.args.num_parameters
    # parameters, gradients and the two moments of Adam, all of training.dtype
    state = parameters * 4 * {"float32": 4, "bfloat16": 2}[training.dtype] / facts.shard
    ranks = f"{facts.world_size} rank{'s' if facts.world_size > 1 else ''} ({facts.device})"
    return "\n".join(
        [
            f"  model     {config.model.name} {config.model.flavor}, {parameters:,} parameters",
            f"  ranks     {ranks}: {' x '.join(plan) or 'no data parallelism'}",
            f"  state     {state / 2**30:.2f} GiB a rank (parameters, gradients, two moments in {training.dtype})",
            f"  data      {training.dataset}, {samples} samples of {training.seq_len} tokens a step, {accumulation}",
            f"  tokens    {tokens:,} a step, {tokens * training.steps:,} in {training.steps:,} steps",
            "  schedule  " + facts.schedule.describe(config.optimizer.lr).removeprefix("learning rate: "),
        ]
    )


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
    assemble(translated.values, [])
    print(_as_file(name, result, translated))
    return 0


def _merged(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


def _as_file(name: str, result: Upgrade, translated: Layer) -> str:
    head = [f"Translated from {name}, read as a job for torchtitan of {result.dialect}.", *result.notes]
    ordered = {key: translated.values[key] for key in options() if key in translated.values}
    return "".join(f"# {line}\n" for line in head) + "\n" + tomli_w.dumps(nest(ordered))
