"""Cause faults in small jobs and see that each ends by itself, with the same bits, and leaves nothing behind.

    python scripts/fault_sweep.py all      every part; a case that --results has passed is not repeated
    python scripts/fault_sweep.py save     one part: save, export, retention, guards, desync, clock, trackers, disk,
                                           memory, machines (fault_parts.py), kills
    python scripts/fault_sweep.py table    the table of docs/reliability.md, from --results
    python scripts/fault_sweep.py [--kills 54] [--seed 0] [--only FSDP] [--async]    kills at drawn places

Random kills: for each plan a small job runs undisturbed. Then, in further jobs, a rank kills itself (SIGKILL) in each
start; the seed determines the rank, the function, the call, and whether before or after it. The launcher restarts the
job each time. Compared are the files of the last checkpoint, byte by byte; the number of repeated steps, with
checkpoint.interval (--async: twice that, as a background save may last until the next one, which waits for it); and
processes and temporary files left behind. Exit code 1 if anything differs.

The other parts compare the outcome after named faults: the tensors of the last checkpoint with a job without faults,
the exit code, the number of restarts, and leftovers.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from bench_timing import ROOT
from fault_parts import PARTS, Case, arm_starts, remove_cgroups

from torchtitan import launch
from torchtitan.checkpoint.layout import CheckpointError, check_complete, read_manifest
from torchtitan.launcher.multi_node import Coordinator
from torchtitan.launcher.processes import SignalQueue
from torchtitan.launcher.run_folder import start_time
from torchtitan.metrics.json_lines import read_records

STEPS, INTERVAL, PER_JOB = 40, 4, 9
PLACES = {  # (module, name): functions that every rank calls, and one that only the publishing rank calls
    "restore": ("torchtitan.training.restore", "Restorer.restore"),
    "fetch": ("torchtitan.training.trainer", "Trainer.fetch"),
    "forward and backward": ("torchtitan.parallelisms.parallel_model", "ParallelModel.forward_backward"),
    "clipping": ("torchtitan.parallelisms.parallel_model", "ParallelModel.clip_gradients"),
    "after the update": ("torchtitan.parallelisms.parallel_model", "ParallelModel.after_step"),
    "log": ("torchtitan.training.step", "TrainingStep.log"),
    "save": ("torchtitan.training.trainer", "Trainer.maybe_save"),
    "write": ("torchtitan.checkpoint.saving", "_write"),
    "commit": ("torchtitan.checkpoint.saving", "_commit"),
    "publish": ("torchtitan.checkpoint.folders", "publish"),
}
EXPERTS = "{dim=32, n_layers=4, n_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, "
EXPERTS += "ffn_dim=48, expert_dim=16, vocab_size=260, bias_rate=0.001}"
PLANS = {
    "FSDP 2": {},
    "PP 2": {"parallelism.pipeline_parallel_degree": 2},
    "EP 2": {"model.name": "deepseek", "model.overrides": EXPERTS, "parallelism.expert_parallel_degree": 2},
}
JOB = {
    "model.overrides": "{dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16}",
    "model.tokenizer_path": "bytes",
    "training.global_batch_size": 8,
    "training.local_batch_size": 4,
    "training.seq_len": 64,
    "training.steps": STEPS,
    "activation_checkpoint.mode": "none",
    "metrics.log_freq": 1,
    "metrics.plot": "false",
    "checkpoint.enable": "true",
    "checkpoint.interval": INTERVAL,
    "checkpoint.keep_latest_k": 2,
    "job.max_restarts": PER_JOB,
}
SHORT = {"training.steps": 12, "checkpoint.interval": 3, "job.max_restarts": 40}
"""Options of all parts except the random kills."""
WITHOUT_EFFECT = {
    *(
        "guard.spike",
        "guard.spike_window",
        "guard.spike_sigmas",
        "guard.non_finite",
        "guard.shard_checksums",
        "guard.replica_check_interval",
    ),
    *("comm.train_timeout_seconds", "metrics.enable_tensorboard", "checkpoint.async_mode"),
    "checkpoint.last_save_model_only",
}
"""Options that leave a job without faults unchanged."""


def draw(seed: random.Random) -> dict:
    """Draw a kill: function, rank, before or after it, and at which call."""
    place = seed.choice(list(PLACES))
    rank = 0 if place == "publish" else seed.randrange(2)
    seldom = place in ("restore", "write", "commit", "publish")
    return {"place": place, "rank": rank, "after": seed.random() < 0.5, "hit": 1 if seldom else seed.randint(1, 7)}


def run_rank(kills: list[dict], argv: list[str]) -> None:
    """Run the trainer as a rank, with the kill of this start planted."""
    import importlib

    from torchtitan import cli, train
    from torchtitan.process.exit import exit_with
    from torchtitan.process.ranks import read_ranks

    ranks = read_ranks()
    number = ranks.launcher.restart.number if ranks.launcher.restart else 0
    kill = kills[number] if number < len(kills) else None
    if kill and kill["rank"] == ranks.rank:
        module, name = PLACES[kill["place"]]
        owner = importlib.import_module(module)
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        original, hits = getattr(owner, last), [0]

        def fatal(*args, **kwargs):
            hits[0] += 1
            if hits[0] < kill["hit"]:
                return original(*args, **kwargs)
            if kill["after"]:
                original(*args, **kwargs)
            os.kill(os.getpid(), 9)

        setattr(owner, last, fatal)
    exit_with(lambda: cli.guarded(lambda: train.main(argv)))


def run_job(folder: Path, options: dict, kills: list[dict]) -> int:
    """Run a job under the launcher in a separate process; return its exit code."""
    arguments = [f"--{name}={value}" for name, value in (JOB | options | {"job.dump_folder": folder}).items()]
    command = [sys.executable, __file__, "--launch", json.dumps(kills), *arguments]
    folder.mkdir(parents=True)
    with (folder / "log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder.parent / "tmp")}
        return subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment).returncode


def launch_main(kills: str, argv: list[str]) -> int:
    """Run the launcher with ranks that kill themselves as `kills` says."""
    config = launch.load_job(argv, 2)
    program = (sys.executable, __file__, "--rank", kills)
    return launch.LocalRanks(config, argv, 2, SignalQueue(), program).run(Coordinator()).code


def last_state(folder: Path, steps: int = STEPS) -> str:
    """Return the digest of all tensor files of a step."""
    step = folder / "checkpoint" / f"step-{steps:08d}"
    files = read_manifest(step).files
    digest = hashlib.sha256()
    for name in sorted(name for name in files if name.endswith(".distcp")):
        digest.update(name.encode() + files[name].sha256.encode())
    return digest.hexdigest()


def find_leftovers(folder: Path, before: set[int], temporary: set[Path]) -> list[str]:
    """List leftovers: new processes with the folder in their command line, new temporary files except torch's cache of
    compiled code, locks, and unfinished checkpoints.
    """
    leftovers = [path.name for path in set((folder.parent / "tmp").iterdir()) - temporary]
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) not in before and start_time(int(path.name)) is not None:
            try:
                if str(folder) in (path / "cmdline").read_text():
                    leftovers.append(f"process {path.name}")
            except OSError:
                continue
    return (
        leftovers + [path.name for path in folder.glob("run.lock*")] + [p.name for p in folder.glob("checkpoint/.tmp*")]
    )


def sweep(name: str, options: dict, kills: int, seed: random.Random, place: Path) -> bool:
    """Run the jobs of one plan with random kills, and compare each with an undisturbed job."""
    (place / "tmp").mkdir(parents=True)
    assert run_job(place / "straight", options, []) == 0, (place / "straight" / "log").read_text()
    expected, good = last_state(place / "straight"), True
    temporary = set((place / "tmp").iterdir())
    for job in range(-(-kills // PER_JOB)):
        plan = [draw(seed) for _ in range(min(PER_JOB, kills - job * PER_JOB))]
        folder, started = place / f"job-{job}", time.monotonic()
        before = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()}
        code = run_job(folder, options, plan)
        events = [row for row in read_records(folder / "metrics.jsonl") if row.get("event") == "restart"]
        lost = max((row["steps_lost"] for row in events), default=0)
        leftovers = find_leftovers(folder, before, temporary)
        log = (folder / "log").read_text()
        done = log.count("restart ")
        same = code == 0 and last_state(folder) == expected
        most = INTERVAL * (2 if "checkpoint.async_mode" in options else 1)
        fine = same and lost <= most and not leftovers and done == len(plan)
        good &= fine
        seconds = time.monotonic() - started
        print(
            f"{name}, job {job}: {done} of {len(plan)} kills, exit code {code}, "
            f"{'the same bits' if same else 'OTHER BITS'}, at most {lost} steps again, left behind: "
            f"{', '.join(leftovers) or 'nothing'}; {seconds:.0f} s{'' if fine else '  <-- ' + json.dumps(plan)}",
            flush=True,
        )
        if not fine:
            print(log[-3000:])
    return good


def run_case(case: Case, folder: Path) -> list[int]:
    """Run a case on machines that are forks of this process; return the launchers' exit codes."""
    settings = JOB | SHORT | case.options | {"job.dump_folder": folder}
    arguments = [
        f"--{name}={str(value).lower() if value in (True, False) else value}" for name, value in settings.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launchers = []
    for machine in range(case.machines):
        if (pid := os.fork()) == 0:
            run_launcher(case, machine, port, folder, arguments)
        launchers.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in launchers]


def run_launcher(case: Case, machine: int, port: int, folder: Path, arguments: list[str]) -> NoReturn:
    """Run the launcher of one machine in this fork, with the case's faults planted; never returns."""
    from tests.support.forked_job import fork_ranks
    from torchtitan.launcher import restarts
    from torchtitan.process.exit import exit_with

    log = os.open(folder / f"log-{machine}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    restarts.FIRST_PAUSE_SECONDS, restarts.LONGEST_PAUSE_SECONDS = 0.05, 0.2
    if case.machines > 1:
        os.environ |= {"NNODES": str(case.machines), "NODE_RANK": str(machine)}
        os.environ |= {"HEAD_ADDR": "127.0.0.1", "HEAD_PORT": str(port)}
    arm_starts(case.faults, folder)
    fork_ranks()
    exit_with(lambda: launch.main([str(2 // case.machines), *arguments]))


def judge(case: Case, folder: Path, codes: list[int], expected: str) -> dict:
    """Return the row of a case: its outcome, compared with the expected one.

    `codes` are the exit codes of every machine's launcher, then the ones of the second start, if there was one.
    """
    log = (folder / "log-0").read_text(errors="replace")
    steps = int({**JOB, **SHORT, **case.options}["training.steps"])
    try:
        same = last_state(folder, steps) == expected
        if case.options.get("checkpoint.last_save_model_only"):
            check_complete(folder / "model")
    except (OSError, CheckpointError) as error:
        same = False
        log += f"not whole: {error}"
    restarts = log.count("restart ")
    leftovers = [path.name for path in [*folder.glob("run.lock*"), *folder.glob("checkpoint/.tmp*")]]
    ended = set(codes[: case.machines]) == {case.exit_code} and set(codes[case.machines :]) <= {0}
    good = same and ended and restarts == case.expected_restarts and not leftovers and case.log in log
    return {
        "case": case.name,
        "faults": sum(map(len, case.faults)),
        "codes": codes,
        "same": same,
        "restarts": restarts,
        "left": leftovers,
        "good": good,
        "log": "" if good else log[-3000:],
    }


def run_part(name: str, results: Path, place: Path) -> bool:
    """Run the cases of a part that have not passed yet, and add a row for each to the results."""
    import torchtitan.training.trainer  # noqa: F401  # before the launchers are forked

    passed = {(row["part"], row["case"]) for row in rows_of(results) if row["good"]}
    straight: dict[str, str] = {}
    good = True
    for number, case in enumerate(PARTS[name]()):
        if (name, case.name) in passed:
            continue
        options = {key: value for key, value in case.options.items() if key not in WITHOUT_EFFECT}
        key = json.dumps([options, case.machines], sort_keys=True)
        if key not in straight:
            folder = place / f"{name}-straight-{number}"
            plain = replace(case, faults=[], options=options)
            codes = run_case(plain, folder)
            assert set(codes) == {0}, (folder / "log-0").read_text()
            straight[key] = last_state(folder, int({**JOB, **SHORT, **options}["training.steps"]))
        began = time.monotonic()
        folder = place / f"{name}-{number}"
        codes = run_case(case, folder)
        if case.exit_code:
            codes += run_case(replace(case, faults=[]), folder)
        row = {"part": name} | judge(case, folder, codes, straight[key])
        row["seconds"] = round(time.monotonic() - began)
        remove_cgroups()
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        printed = {key: value for key, value in row.items() if key != "log"}
        print(json.dumps(printed) + ("" if row["good"] else f"  <--\n{row['log']}"), flush=True)
        good &= row["good"]
    return good


def rows_of(results: Path) -> list[dict]:
    """Read the newest row of every case."""
    lines = results.read_text().splitlines() if results.exists() else []
    rows = [json.loads(line) for line in lines]
    return list({(row["part"], row["case"]): row for row in rows}.values())


def table(rows: list[dict]) -> str:
    """Format the results as a Markdown table."""
    lines = ["| part | case | faults | restarts | ended with | bits |", "|---|---|---|---|---|---|"]
    for row in rows:
        codes = ", ".join(map(str, row["codes"]))
        bits = "the same" if row["same"] else "**other**"
        lines.append(f"| {row['part']} | {row['case']} | {row['faults']} | {row['restarts']} | {codes} | {bits} |")
    return "\n".join(lines)


def main() -> int:
    sys.path.insert(0, str(ROOT))  # for tests.support
    if sys.argv[1:2] == ["--rank"]:
        run_rank(json.loads(sys.argv[2]), sys.argv[3:])
    if sys.argv[1:2] == ["--launch"]:
        return launch_main(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="kills", choices=["kills", *PARTS, "all", "table"])
    parser.add_argument("--results", type=Path, default=Path("fault_sweep.jsonl"), help="a row for each case")
    parser.add_argument("--folder", type=Path, help="keep the jobs here")
    parser.add_argument("--kills", type=int, default=54, help="in all plans together (default: 54)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(PLANS), help="plans (default: all)")
    parser.add_argument("--async", dest="background", action="store_true", help="save in the background")
    options = parser.parse_args()
    if options.part == "table":
        print(table(rows_of(options.results)))
        return 0
    more = {"checkpoint.async_mode": "async"} if options.background else {}
    seed, good = random.Random(options.seed), True
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    # no context manager, as the launchers are forks of this process and would delete the folder when they exit
    place = Path(tempfile.mkdtemp(prefix="fault-sweep-", dir=options.folder))
    for name in PARTS if options.part == "all" else [options.part]:
        if name in PARTS:
            good &= run_part(name, options.results, place)
    for name in options.only if options.part in ("kills", "all") else []:
        share = -(-options.kills // len(options.only))
        good &= sweep(name, PLANS[name] | more, share, seed, place / name.replace(" ", "-"))
    if good and options.folder is None:
        shutil.rmtree(place)
    else:
        print(f"the jobs are in {place}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
