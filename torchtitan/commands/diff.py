"""`torchtitan diff A B`: find the options, the first step and the tensors that differ between two runs.

    torchtitan diff outputs/a outputs/b                     two runs: jobs, logged steps, checkpoints of the same step
    torchtitan diff outputs/a/checkpoint/step-00000010 outputs/b/checkpoint/step-00000010
    torchtitan diff outputs/a Llama-3.2-1B --tolerance 1e-3 newest checkpoint of a run and a folder of Hugging Face

Two runs are compared in what both have: each step that both logged, without timings and memory, and each checkpoint of
the same step, oldest first, up to the first that differs. Otherwise the weights of both are compared, by their stored
names, or, in different formats, by this project's. Options that only affect where and how a run is logged and saved are
left out, and those of the plan are no difference. One tensor of each side is in memory at a time.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtitan.assembly import parts
from torchtitan.checkpoint import layout
from torchtitan.checkpoint.base_weights import Kind, find_weights
from torchtitan.checkpoint.stored_tensors import StoredTensors, TensorDifference, compare_tensors, open_tensors
from torchtitan.checkpoint.weight_sources import Weights, open_weights
from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.generate import JOB, find_job
from torchtitan.config import manager
from torchtitan.config.changes import ROWS_PER_SAMPLE, changes, is_of_plan, kept_job
from torchtitan.config.job import JobConfig
from torchtitan.config.options import show
from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError
from torchtitan.core.progress_bar import progress_bar
from torchtitan.launcher.run_folder import is_run_folder, newest_start, plan_of_start
from torchtitan.metrics.json_lines import METRICS, Record, read_records
from torchtitan.models.hf.config import find_config

DIFFERENT = 1
"""Exit code."""
MOST_LINES = 20
"""Options or tensors in the text."""
MEASURED = {"tokens_per_second", "step_seconds", "data_seconds", "memory_gib", "memory_active_gib", "mfu", "mfu_full"}
MEASURED |= {"slowest_rank", "slowest_ratio"}
"""Fields of a record that differ between equal runs."""
NOT_VALUES = MEASURED | {"step", "marked", "perplexity"}
"""Perplexity is a function of the loss."""
EXPLAINED = {"lr", "tokens"}
"""Fields that follow from the options, so that other options explain their differences."""
OF_A_RANK = {"max_loss"}
"""Fields that depend on the samples of a rank, so that other plans explain their differences."""
SHARDS = "parallelism.data_parallel_shard_degree"


class OptionDifference(NamedTuple):
    key: str
    a: str
    b: str
    plan: bool
    """True for an option that does not change the results."""

    def __str__(self) -> str:
        return f"{self.key} {self.a} -> {self.b}"


@dataclass
class Comparison:
    """The differences of two sides. `steps` and `weights` describe the extent of a comparison; "": not made."""

    all_options: list[OptionDifference] | None = None
    """None if they are not recorded on both sides."""
    tolerance: float = 0.0
    steps: str = ""
    first_step: int | None = None
    values: dict[str, list[Any]] = field(default_factory=dict)
    """Name -> both values, at `first_step`."""
    weights: str = ""
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)

    @property
    def options(self) -> list[str]:
        """The options that differ and change the results, with both values."""
        return [str(option) for option in self.all_options or () if not option.plan]

    @property
    def plan(self) -> list[str]:
        """The options of the plan that differ, with both values."""
        return [str(option) for option in self.all_options or () if option.plan]

    @property
    def equal(self) -> bool:
        return not (self.options or self.values or self.only_a or self.only_b or self.tensors)

    def lines(self) -> Iterator[str]:
        if self.all_options is not None:
            yield from _section("options", "", self.options)
        if self.plan:
            yield from _section("plan", "does not change the results", self.plan)
        if self.steps:
            pairs = [
                f"step {self.first_step}: {name} {_show_logged(pair[0])} -> {_show_logged(pair[1])}"
                for name, pair in self.values.items()
            ]
            outcome = f"step {self.first_step} is the first that differs" if pairs else ""
            yield from _section("steps", self.steps, pairs, outcome)
        if self.weights:
            absent = [f"only in A: {name}" for name in self.only_a] + [f"only in B: {name}" for name in self.only_b]
            yield from _section("tensors", self.weights, [*absent, *map(str, self.tensors)])
        yield "A and B are equal in all of this" if self.equal else "A and B differ"
        if self.plan and not (self.equal or self.options or self.tolerance):
            yield "results under different plans are equal up to rounding; --tolerance 1e-5 allows for that"


def _show_logged(value: Any) -> str:
    return "not finite" if value is None else show(value)  # JSON lacks NaN and infinity


def _section(title: str, extent: str, differences: list[str], outcome: str = "") -> Iterator[str]:
    """Yield a heading and a line for each difference. `outcome`: in place of their number."""
    count = f"{len(differences)} differ{'s' * (len(differences) == 1)}" if differences else ""
    shown = outcome or count or ("not compared" if extent.startswith("no ") else "equal")
    yield f"{title:9}" + ", ".join(filter(None, [extent, shown]))
    yield from (f"  {difference}" for difference in differences[:MOST_LINES])
    if len(differences) > MOST_LINES:
        yield f"  and {len(differences) - MOST_LINES} more; --json lists all"


def main(argv: list[str]) -> int:
    options, _ = parse_command("diff", argv)
    a, b = Path(options.a), Path(options.b)
    if is_run(a) and is_run(b):
        result = compare_runs(a, b, options.tolerance)
    else:
        result = Comparison(tolerance=options.tolerance)
        compare_weights(result, find_weights(a), find_weights(b))
    print(as_json(result) if options.json else "\n".join(result.lines()))
    return 0 if result.equal else DIFFERENT


def as_json(result: Comparison) -> str:
    """Return all differences as one JSON object, with null for infinity, which JSON lacks."""
    record = asdict(result)
    options = record.pop("all_options")
    if options is not None:
        options = [option._asdict() for option in options]
    text = json.dumps({"equal": result.equal, "options": options} | record)
    return json.dumps(json.loads(text, parse_constant=lambda constant: None))


def is_run(folder: Path) -> bool:
    return is_run_folder(folder) or (folder / METRICS).is_file()


def compare_runs(a: Path, b: Path, tolerance: float) -> Comparison:
    """Compare the jobs, the logged steps and the checkpoints of two runs. JobError if they share none of these."""
    result = Comparison(tolerance=tolerance)
    jobs = [job_of_run(folder) for folder in (a, b)]
    checkpoints = [
        complete_checkpoints(folder / ("checkpoint" if job is None else job.checkpoint.folder))
        for folder, job in zip((a, b), jobs, strict=True)
    ]
    records = [
        job_as_used(folder, job, paths)
        for folder, job, paths in zip((a, b), jobs, checkpoints, strict=True)
        if job is not None
    ]
    if len(records) == 2:
        result.all_options = option_differences(*records)
    compare_steps(result, values_by_step(a), values_by_step(b))
    shared = sorted(checkpoints[0].keys() & checkpoints[1].keys())
    for step in shared:
        compare_weights(result, ("native", checkpoints[0][step]), ("native", checkpoints[1][step]))
        result.weights = f"up to step {step}, {shared.index(step) + 1} of {len(shared)} common checkpoints compared"
        if result.tensors or result.only_a or result.only_b:
            break
    result.weights = result.weights or "no checkpoint of the same step"
    if not result.steps and not shared:
        raise JobError(f"{a} and {b}: no logged step and no checkpoint that both have; let both train a step first")
    result.steps = result.steps or "no step that both logged"
    return result


def job_of_run(folder: Path) -> JobConfig | None:
    """Return the job that a run has recorded; None if it has not. Raises ConfigError if that cannot be read."""
    return manager.load(["--job.config_file", str(folder / JOB)]) if (folder / JOB).exists() else None


def job_as_used(folder: Path, job: JobConfig, checkpoints: dict[int, Path]) -> dict[str, Any]:
    """Return the record of a run's job (`kept_job`) with what its number of ranks has decided.

    Samples of a step and shards are of the last start, or of the newest checkpoint in runs of earlier versions; without
    these they stay as the job has them.
    """
    trainer = layout.read_state(checkpoints[max(checkpoints)])["trainer"] if checkpoints else {}
    if plan := plan_of_start(newest_start(folder)):
        trainer |= {"samples": plan.samples, "degrees": plan.degrees}
    samples = trainer.get("samples")
    record = kept_job(job, {}, samples if isinstance(samples, int) else job.training.global_batch_size)
    return with_shards(record, trainer.get("degrees"))


def with_shards(record: dict[str, Any], degrees: Any) -> dict[str, Any]:
    """Return the record of a job with the shards that were used, if the job left them open and they are known."""
    section, option = SHARDS.split(".")
    job = record.get("job")
    if not isinstance(job, dict) or not isinstance(degrees, dict) or not isinstance(degrees.get("dp_shard"), int):
        return record
    options = job.get(section, {})
    if not isinstance(options, dict) or options.get(option, -1) != -1:
        return record
    return record | {"job": job | {section: options | {option: degrees["dp_shard"]}}}


def complete_checkpoints(root: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a folder by their steps."""
    paths = layout.complete_steps(root)[0]
    return {step: path for path in paths if (step := layout.step_of(path.name)) is not None}


def option_differences(a: dict[str, Any], b: dict[str, Any]) -> list[OptionDifference] | None:
    """Return the options and model sizes in two records of jobs (`kept_job`) that differ, without quiet ones."""
    if not all(isinstance(record.get("job"), dict) and ROWS_PER_SAMPLE in record for record in (a, b)):
        return None
    return [OptionDifference(change.key, change.before, change.now, is_of_plan(change.key)) for change in changes(a, b)]


def values_by_step(folder: Path) -> dict[int, Record]:
    """Return the logged values of a run by step; {} if it has logged none."""
    try:
        records = read_records(folder / METRICS)
    except FileNotFoundError:
        return {}
    except (OSError, FileError) as error:
        reason = error.reason if isinstance(error, FileError) else f"cannot be read ({error.strerror})"
        raise JobError(f"{folder / METRICS}: {reason}; give the dump_folder of a run") from None
    steps: dict[int, Record] = {}
    for record in records:
        if "event" not in record:
            steps.setdefault(record["step"], {}).update(record)
    return steps


def compare_steps(result: Comparison, a: dict[int, Record], b: dict[int, Record]) -> None:
    """Find the first step that both logged with other values. A tolerance is relative to the larger of two numbers."""
    shared = sorted(a.keys() & b.keys())
    if not shared:
        return
    result.steps = f"{len(shared)} that both logged (A up to {max(a)}, B up to {max(b)})"
    left_out = NOT_VALUES | (EXPLAINED if result.options else set()) | (OF_A_RANK if result.plan else set())
    for step in shared:
        names = [name for name in a[step] if name in b[step] and name not in left_out]
        pairs = {name: [a[step][name], b[step][name]] for name in names}
        result.values = {name: pair for name, pair in pairs.items() if not within(pair[0], pair[1], result.tolerance)}
        if result.values:
            result.first_step = step
            if result.values.get("max_loss") == result.values.get("loss"):  # the step had one batch
                result.values.pop("max_loss", None)
            return


def within(a: Any, b: Any, tolerance: float) -> bool:
    if tolerance and isinstance(a, int | float) and isinstance(b, int | float):
        return abs(a - b) <= tolerance * max(abs(a), abs(b))
    return a == b


# Weights

Location = tuple[Kind, Path]


def compare_weights(result: Comparison, a: Location, b: Location) -> None:
    """Compare the tensors at two locations of weights, and the options next to them."""
    if a[0] == b[0]:
        if result.all_options is None:
            result.all_options = option_differences_next_to(a, b)
        opened = opened_by_stored_names(a, b)
    else:
        opened = opened_by_our_names(a, b)
    result.weights = f"of {a[1].name} and {b[1].name}"
    with opened as (tensors_a, tensors_b):
        names_a, names_b = dict.fromkeys(tensors_a.names), dict.fromkeys(tensors_b.names)  # in order
        result.only_a = [name for name in names_a if name not in names_b]
        result.only_b = [name for name in names_b if name not in names_a]
        shared = [name for name in names_a if name in names_b]
        with progress_bar("comparing", len(shared), unit=" tensors") as progress:
            for name in shared:
                difference = compare_tensors(name, tensors_a.read(name), tensors_b.read(name), result.tolerance)
                result.tensors += [] if difference is None else [difference]
                progress.update()


def option_differences_next_to(a: Location, b: Location) -> list[OptionDifference] | None:
    """Return the differences of two checkpoints' jobs, or of the config.json of two folders."""
    if a[0] == "native":
        records = [layout.read_state(folder)["trainer"] for _, folder in (a, b)]
        return option_differences(*(with_shards(record, record.get("degrees")) for record in records))
    config_a, config_b = (find_config(folder) for _, folder in (a, b))
    if config_a is None or config_b is None:
        return None
    names = [name for name in {**config_a, **config_b} if config_a.get(name) != config_b.get(name)]
    return [OptionDifference(name, show(config_a.get(name)), show(config_b.get(name)), False) for name in names]


@contextmanager
def opened_by_stored_names(a: Location, b: Location) -> Iterator[tuple[StoredTensors, StoredTensors]]:
    with open_tensors(*a) as tensors_a, open_tensors(*b) as tensors_b:
        yield tensors_a, tensors_b


class NamedWeights(StoredTensors):
    """Weights of any format by this project's names."""

    def __init__(self, weights: Weights, names: Iterable[str]):
        self.weights, self.names = weights, list(names)

    def read(self, name: str) -> torch.Tensor:
        return self.weights.full_tensor(name)


@contextmanager
def opened_by_our_names(a: Location, b: Location) -> Iterator[tuple[StoredTensors, StoredTensors]]:
    """Open weights of different formats. The sizes are from the job or the config.json next to one of them."""
    source = next((path for kind, path in (a, b) if kind == "native"), a[1] if a[0] == "hf" else b[1])
    model = find_job(source, [], with_tokenizer=False).model
    options, args = model.model, model.args
    shapes = parts.model_spec(model).hf.shapes(args)
    names = [name for name in shapes if name != "output.weight" or not args.tied_embeddings]
    with ExitStack() as stack:
        weights = [
            stack.enter_context(
                open_weights(path, options.name, model.args_for_weights(path), options.ignore_config_keys)
            )
            for _, path in (a, b)
        ]
        tensors_a, tensors_b = (NamedWeights(opened, names) for opened in weights)
        yield tensors_a, tensors_b
