"""`torchtitan rehearse JOB --world-size 8`: the whole step of a job on a fake CUDA, at its real size, without a GPU.

Some ranks run a step on tensors without values (torchtitan/planner/fake_cuda). Their messages are compared: ranks of a
group that issue different collectives would wait for each other forever.
"""

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.commands.command_lines import USUAL_GPU, parse_command
from torchtitan.commands.schedule import check_file
from torchtitan.config.sections.run import Guard, Metrics
from torchtitan.core.errors import JobError, format_bytes
from torchtitan.core.hardware import load_hardware
from torchtitan.core.progress_bar import progress_bar, waiting
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.planner.answer import predicted_step, step_line
from torchtitan.planner.fake_cuda import FakeCuda, build
from torchtitan.planner.search import is_judged
from torchtitan.planner.trace import check_ending, write_trace
from torchtitan.rules.loading import load_valid, without_resume

NO_JOB = """\
torchtitan rehearse: no job is given; give a file, a name of `torchtitan list jobs`, or options of a job, as in
  torchtitan rehearse llama3_8b --world-size 8"""
EXPECTED = {
    "parallelisms/expert_parallel.py": "sizes of the exchange between experts",
    "parallelisms/pipeline/overlap/exchange.py": "sizes of the exchange between experts",
}
"""File -> purpose of its host waits, which options of the job require."""
QUESTION, PREPARATION = "torchtitan.planner.fake_cuda.rehearse:rehearse", ""
"""The function that each rank runs, and one to call before it, for tests."""
FINE, WRONG = 0, 1
"""Exit codes."""
Rank = dict[str, Any]
"""The record of a rank, from torchtitan/planner/fake_cuda/rehearse.py."""


def main(argv: list[str]) -> int:
    options, job_args = parse_command("rehearse", argv)
    if not job_args:
        raise JobError(NO_JOB)
    check_file("trace", options.trace)
    check_ending(options.trace)
    facts = load_valid(job_args, options.world_size, "cuda", is_judged, without_resume)
    predicted = predicted_step(facts.job, load_hardware(USUAL_GPU))
    if options.trace and predicted is None:
        raise JobError("--trace: the planner's formulas do not describe a step of this job; leave it out")
    config, world_size = facts.config, facts.job.world_size
    dims, files = facts.job.layout.dims, config.job.config_file
    ranks = sorted(set(options.ranks or usual_ranks(dims)))
    if ranks[-1] >= world_size:
        raise JobError(f"--ranks: given {ranks[-1]}; allowed: 0 to {world_size - 1}")
    records = rehearse_ranks(options, job_args, ranks, world_size)
    faults_of_step, notes = verdict(records)
    if options.json:
        print(json.dumps(as_json(files, world_size, records, faults_of_step), indent=1))
    else:
        left_out = not_rehearsed(config.metrics, config.guard, records)
        step = step_line(predicted)
        print("\n".join([*header(files, dims, records, left_out), *step, *tables(records), *faults_of_step, *notes]))
    if options.trace and predicted is not None:
        timer, plan, _ = predicted
        try:
            write_trace(options.trace, timer, plan)
        except OSError as error:
            raise JobError(f"--trace: {options.trace}: cannot be written ({error.strerror}); name another") from None
    return WRONG if faults_of_step else FINE


def usual_ranks(dims: ParallelDims) -> list[int]:
    """Return rank 0, its neighbor along each axis, and the first ranks of the stages at both ends of a pipeline."""
    ranks, stride = {0}, 1
    for degree in (dims.tp, dims.cp, dims.dp_shard, dims.dp_replicate):  # the axes of the mesh, the innermost first
        ranks |= {stride} if degree > 1 else set()
        stride *= degree
    return sorted(ranks | {stage % dims.pp * stride for stage in (0, 1, -2, -1)})


def rehearse_ranks(
    options: argparse.Namespace, job_args: list[str], ranks: list[int], world_size: int
) -> dict[int, Rank]:
    """Rehearse the ranks in processes of their own. Raises JobError for a job that cannot be rehearsed."""
    records: dict[int, Rank] = {}
    with tempfile.TemporaryDirectory() as folder:
        with waiting("the fake CUDA is compiled"):
            card = FakeCuda(build(Path(folder)))
        try:
            questions = [(QUESTION, PREPARATION, (job_args, rank, world_size, options.all_layers)) for rank in ranks]
            with progress_bar("ranks are rehearsed", len(ranks), "rank") as bar:
                for number, ok, record in card.ask_all(questions):
                    records[ranks[number]] = require_record(ranks[number], ok, record)
                    bar.update()
        except BaseException:
            card.process.kill()
            raise
        finally:
            card.close()
    return dict(sorted(records.items()))


def require_record(rank: int, ok: bool, record: Any) -> Rank:
    """Return the record of a rank, and show the traceback of its failure on request. Raises JobError without one."""
    if not ok:
        *lines, reason = str(record).strip().splitlines()
        text = f"rehearse: rank {rank} gave no answer: {reason}"
        if "no answer within" in reason:
            text += "; without --all-layers, or with fewer --ranks, it takes less"
        raise JobError("\n".join([*(lines if shows_tracebacks() else []), text]))
    if "refusal" in record:
        raise JobError(
            f"rehearse: this job cannot be rehearsed, as its step needs values, which no tensor has here: "
            f"{record['refusal']}; `torchtitan estimate` predicts its memory"
        )
    if "traceback" in record and shows_tracebacks():
        print(record["traceback"])
    return record


def shows_tracebacks() -> bool:
    return os.environ.get("TORCHTITAN_TRACEBACK") == "1"


# Faults


def verdict(records: dict[int, Rank]) -> tuple[list[str], list[str]]:
    """Return lines about the faults of the step, and lines about its correct parts."""
    failures = [f"rank {rank}: the step fails at {r['failure']}" for rank, r in records.items() if "failure" in r]
    complete = {rank: record for rank, record in records.items() if "failure" not in record}
    differences, compared = disagreements(complete)
    faults, notes = failures + differences, []
    if not differences and compared:
        notes.append(f"collectives agree across {len(compared)} ranks: {', '.join(map(str, sorted(compared)))}")
    elif not differences:
        notes.append("collectives are not compared, as no two of these ranks are in one group")
    waits = [(rank, *wait) for rank, record in complete.items() for wait in record["waits"]]
    for rank, kind, line, number, reason in waits:
        purpose = reason or EXPECTED.get(line.partition(":")[0])
        text = f"rank {rank}: the host waits {number} times a step for the device, at {line or 'a line of torch'}"
        (notes if purpose else faults).append(f"{text} ({purpose or kind})")
    if not waits and complete:
        notes.append("no host wait in a step")
    return faults, notes


def disagreements(records: dict[int, Rank]) -> tuple[list[str], set[int]]:
    """Return a line for each group whose rehearsed ranks issue different messages, and the ranks that were compared."""
    groups: dict[Any, dict[int, list[Any]]] = defaultdict(dict)  # group or pair of ranks -> rank -> messages
    for rank, record in records.items():
        for group, message, line in issued(rank, record):
            groups[group].setdefault(rank, []).append((message, line))
    lines, compared = [], set()
    for group, of_rank in groups.items():
        members = sorted(set(group[1]) & records.keys())
        compared |= set(members) if len(members) > 1 else set()
        for rank in members[1:]:
            first, second = (of_rank.get(member, []) for member in (members[0], rank))
            if difference := first_difference(members[0], first, rank, second):
                lines.append(f"{difference}, in {group[0]} of {ranks_text(group[1])}: a real run would hang")
                break
    return lines, compared


def issued(rank: int, record: Rank) -> Iterator[tuple[tuple[str, tuple[int, ...]], list[Any], str]]:
    """Yield a rank's messages in order: the group or pair, the values that both ends must share, and the line."""
    for number in record["order"]:
        group, kind, dtype, elements, peer, line = record["messages"][number]
        if peer is None:
            # the parts of an all-to-all may have any size on each rank
            yield ("the group", tuple(group)), [kind, dtype, "" if kind == "all_to_all" else elements], line
        else:
            sender, receiver = (rank, peer) if kind == "send" else (peer, rank)
            yield ("the pair", tuple(sorted((rank, peer)))), [f"{sender} to {receiver}", dtype, elements], line


def first_difference(first: int, messages: list[Any], second: int, other_messages: list[Any]) -> str:
    """Describe the first message in which two ranks differ; an empty string if there is none."""
    for number in range(max(len(messages), len(other_messages))):
        ends = [log[number] if number < len(log) else None for log in (messages, other_messages)]
        if ends[0] is None or ends[1] is None or ends[0][0] != ends[1][0]:
            texts = [f"rank {rank} {message_text(end)}" for rank, end in zip((first, second), ends, strict=True)]
            return f"message {number + 1} differs: {' but '.join(texts)}"
    return ""


def message_text(end: Any) -> str:
    if end is None:
        return "issues none"
    (kind, dtype, elements), line = end
    return " ".join(filter(None, [f"issues {kind} of", f"{elements:,}" if elements else "", dtype])) + (
        f" at {line}" if line else ""
    )


def ranks_text(ranks: tuple[int, ...]) -> str:
    return "ranks " + (", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}")


# Output


def header(files: list[str], dims: ParallelDims, records: dict[int, Rank], left_out: list[str]) -> list[str]:
    name = " + ".join(files) or "the default job"
    degrees = " ".join(f"{axis}={size}" for axis, size in dims.all_degrees.items() if size > 1) or "no parallelism"
    lines = [
        f"{name} on {dims.world_size} rank{'s' * (dims.world_size > 1)}, {degrees}, as on an H100 with 80 GB",
        f"rehearsed: {'rank' if len(records) == 1 else 'ranks'} {', '.join(map(str, records))}; nothing is compiled",
        f"not rehearsed: {', '.join(left_out)}",
    ]
    layers = next((record["layers"] for record in records.values() if "layers" in record), [0, 0])
    if layers[0] < layers[1]:
        lines.append(
            f"with {layers[0]} of {layers[1]} layers in all stages together, as all would take long (--all-layers): "
            "kernels, messages and memory are of fewer layers; `torchtitan estimate` predicts the memory of all"
        )
    return lines


def not_rehearsed(metrics: Metrics, guard: Guard, records: dict[int, Rank]) -> list[str]:
    """Return what a step of the job has besides the rehearsed parts."""
    names = ["agreement on the data and time limit, which come before the step"]
    names += ["histograms"] if metrics.histogram_freq else []
    names += ["comparison of replicas"] if guard.replica_check_interval else []
    names += ["a microbatch on another rank"] if guard.replay_every else []
    reasons = {record["not_rehearsed"] for record in records.values() if record.get("not_rehearsed")}
    return [*names, *(f"a logged step, which needs values ({reason})" for reason in sorted(reasons))]


def tables(records: dict[int, Rank]) -> list[str]:
    """Format the tables of all ranks; ranks with equal tables share one."""
    ranks: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, record in records.items():
        if "failure" not in record:
            ranks[tuple(table(record))].append(rank)
    lines = []
    for rows, equal in ranks.items():
        lines += ["", f"rank{'s' * (len(equal) > 1)} {', '.join(map(str, equal))}", *rows]
    return [*lines, ""]


def table(record: Rank) -> list[str]:
    """Format the memory, kernels, messages and types of a rank."""
    peak, largest = sum(record["memory"].values()), list(record["memory"].items())[:4]
    lines = [
        f"  memory     {format_bytes(peak)} of tensors at most, in {record['moment']}",
        "             " + ", ".join(f"{kind} {format_bytes(size)}" for kind, size in largest),
    ]
    for title, costs in record["costs"].items():
        a_weight = f", {costs['bytes'] / record['trained']:,.0f} bytes a trained weight" if record["trained"] else ""
        title = f"{title}: {costs['kernels']:,} kernels move {format_bytes(costs['bytes'])}"
        lines.append(f"  kernels    {title}{a_weight}")
    lines += [f"  sends      {line}" for line in sent_lines(record)]
    lines += [f"  types      {title}: {types_text(sizes)}" for title, sizes in record["types"].items()]
    waits = sum(number for _, _, number, _ in record["waits"])
    return [*lines, f"  waits      {waits} of the host for the device"]


def sent_lines(record: Rank) -> list[str]:
    """Format the messages by axis of the mesh and kind."""
    amounts: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for axis, kind, unit, amount in record["sent"]:
        amounts[axis, kind][unit] = amount
    return [
        f"{axis:12}{kind:15}{units['calls']:8,} calls{format_bytes(units['bytes']):>12}"
        for (axis, kind), units in amounts.items()
    ]


def types_text(sizes: dict[str, int]) -> str:
    total = sum(sizes.values()) or 1
    shown = {name: size for name, size in sorted(sizes.items(), key=lambda item: -item[1]) if size >= total / 1000}
    return ", ".join(f"{name} {size / total:.1%}" for name, size in shown.items())


def as_json(files: list[str], world_size: int, records: dict[int, Rank], faults: list[str]) -> dict[str, Any]:
    shown = ("layers", "moment", "memory", "costs", "trained", "sent", "types", "waits", "failure")
    return {
        "job": files,
        "world_size": world_size,
        "ranks": {rank: {key: record[key] for key in shown if key in record} for rank, record in records.items()},
        "faults": faults,
    }
