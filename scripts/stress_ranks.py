"""Run many short jobs under debugging allocators and count the processes that crash below Python.

    python scripts/stress_ranks.py FOLDER [--runs 1000] [--minutes 60] [--seed 0]

Each run trains a tiny model for a few steps on two gloo ranks. Plan, optimizer, background saves and the way the run
ends are drawn from the seed. Half of the runs use ranks that live on from run to run, as the tests do; the others are
jobs under the launcher that finish, are stopped by SIGTERM, or lose a rank to SIGKILL. The processes run with
PYTHONMALLOC=debug, MALLOC_CHECK_=3 and MALLOC_PERTURB_ (glibc's checking allocator, preloaded), so that a write past
the end of a block, a double free or a use after free aborts near its cause.

A crash is any signal that this script did not send itself. The run's folder is kept with its log, the stacks that
faulthandler wrote and, where cores are written to the working directory and gdb is installed, the C stacks of all
threads. FOLDER/runs.jsonl has a row for each run; started again, the script adds to it. The last line bounds the crash
rate: with no crash in n runs it is below 3/n with 95 % confidence (rule of three). Exit code 1 if anything crashed.
"""

import argparse
import ctypes.util
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
CHECKING_ALLOCATOR = "libc_malloc_debug.so.0"
DEBUG = {"PYTHONMALLOC": "debug", "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165", "OMP_NUM_THREADS": "1"}
PLANS = {
    "FSDP": {},
    "DDP": {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 1},
    "TP": {"parallelism.tensor_parallel_degree": 2},
    "PP": {"parallelism.pipeline_parallel_degree": 2},
}
OPTIMIZERS = ("AdamW", "Lion", "Muon", "AdamW8bit")
ENDS = {"pool": {0}, "finish": {0}, "stop": {0, 128 + signal.SIGTERM}, "kill": {0, 128 + signal.SIGKILL, 1}}
"""How a run ends, and the exit codes that are expected then: 0 where it was over before, and 1 after a kill where the
launcher saw the end of the other rank first."""
CRASH = re.compile(r"Fatal Python error|was ended by SIG(?!KILL)\w+|RankCrashed|malloc_check|\(core dumped\)")


def draw(seed: random.Random) -> dict:
    """Draw the settings of a run."""
    end = seed.choice(["pool", "pool", "pool", "finish", "stop", "kill"])
    return {
        "plan": seed.choice(list(PLANS)),
        "optimizer": seed.choice(OPTIMIZERS),
        "async": seed.choice(["disabled", "async"]),
        "validation": seed.random() < 0.5,
        "end": end,
        "step": seed.randint(1, 4),
        "rank": seed.randrange(2),
    }


def arguments(run: dict, folder: Path, texts: Path) -> list[str]:
    """Return the job's command line."""
    from tests.support import jobs

    options = PLANS[run["plan"]] | {
        "optimizer.name": run["optimizer"],
        "optimizer.lr": 1e-3,
        "model.overrides": jobs.SHALLOW if run["plan"] != "PP" else jobs.SHALLOW.replace("n_layers=1", "n_layers=2"),
        "training.local_batch_size": 4,
        "training.steps": 5,
        "checkpoint.enable": True,
        "checkpoint.interval": 2,
        "checkpoint.async_mode": run["async"],
        "checkpoint.keep_latest_k": 2,
        "job.max_restarts": 0,
    }
    if run["validation"]:
        options |= {"validation.enable": True, "validation.freq": 3, "validation.steps": 1}
        options |= {"validation.dataset": "text", "validation.dataset_path": texts}
    return jobs.arguments(folder, texts, **{name.replace(".", "__"): value for name, value in options.items()})


def run_in_pool(run: dict, folder: Path, argv: list[str]) -> int:
    """Train on ranks that outlive the run; return its exit code."""
    from tests.support import jobs, pool

    try:
        pool.run_ranks(2, jobs.train, argv, limit=300)
    except pool.RankFailed as error:
        (folder / "log").write_text(f"{type(error).__name__}: {error}")
        return 1
    return 0


def run_under_launcher(run: dict, folder: Path, argv: list[str]) -> int:
    """Train under a launcher with new ranks, end it as drawn, and return its exit code."""
    pid = os.fork()
    if pid == 0:
        _be_launcher(run, folder, argv)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _be_launcher(run: dict, folder: Path, argv: list[str]) -> NoReturn:
    """Become the launcher of a job, with output to the run's log."""
    from tests.support.forked_job import fork_ranks
    from torchtitan import launch
    from torchtitan.process.exit import exit_with
    from torchtitan.process.ranks import read_ranks
    from torchtitan.training.trainer import Trainer

    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    launcher, step = os.getpid(), Trainer.step

    def end_at_step(self, batch):
        if self.current_step + 1 == run["step"] and read_ranks().rank == run["rank"]:
            if run["end"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if run["end"] == "stop":
                os.kill(launcher, signal.SIGTERM)
        step(self, batch)

    Trainer.step = end_at_step
    fork_ranks()
    exit_with(lambda: launch.main(["2", *argv]))


def stacks_of_cores(folder: Path) -> list[str]:
    """Move core files from the working directory to the run's folder, add their C stacks, and return their names."""
    cores = sorted(Path.cwd().glob("core*"))
    for core in cores:
        target = folder / core.name
        shutil.move(core, target)
        command = ["gdb", "-batch", "-ex", "thread apply all bt", sys.executable, str(target)]
        if shutil.which("gdb"):
            text = subprocess.run(command, capture_output=True, text=True).stdout
            (folder / f"{core.name}.stacks.txt").write_text(text)
    return [core.name for core in cores]


def one_run(number: int, run: dict, folder: Path, texts: Path) -> dict:
    """Execute a run and return its row: the drawn settings, the exit code, and the crashes."""
    folder.mkdir(parents=True)
    argv = arguments(run, folder / "job", texts)
    started = time.monotonic()
    function = run_in_pool if run["end"] == "pool" else run_under_launcher
    code = function(run, folder, argv)
    log = (folder / "log").read_text(errors="replace") if (folder / "log").exists() else ""
    signs = sorted(set(CRASH.findall(log)) and {match[0] for match in CRASH.finditer(log)})
    row = {"run": number, **run, "code": code, "seconds": round(time.monotonic() - started, 2)}
    row["crash"] = signs + stacks_of_cores(folder)
    row["unexpected"] = not row["crash"] and code not in ENDS[run["end"]]
    if not row["crash"] and not row["unexpected"]:
        shutil.rmtree(folder)
    return row


def conclusion(rows: list[dict]) -> str:
    """Return the last line: numbers of runs and crashes, and the bound on the crash rate."""
    crashes, strange = sum(bool(row["crash"]) for row in rows), sum(row["unexpected"] for row in rows)
    bound = f"below 3/{len(rows)} = {100 * 3 / len(rows):.2f} % of runs (95 %)" if not crashes else "not bounded"
    launched = sum(row["end"] != "pool" for row in rows)
    return (
        f"{len(rows)} runs of 2 ranks ({launched} under the launcher), {crashes} crashed below Python, {strange} ended "
        f"in another way than asked: crash rate {bound}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=1000, help="in total, with the runs of earlier starts")
    parser.add_argument("--minutes", type=float, default=60, help="no run begins after that")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if os.environ.get("PYTHONMALLOC") != "debug":
        environment = os.environ | DEBUG
        if ctypes.util.find_library("c_malloc_debug") or sys.platform == "linux":
            environment["LD_PRELOAD"] = CHECKING_ALLOCATOR
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cores").mkdir(exist_ok=True)
    os.chdir(folder / "cores")
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))

    import torchtitan.training.trainer  # noqa: F401  # the launched ranks are forks of this process
    from tests.support import jobs

    texts, rows_file = jobs.write_texts(folder / "texts"), folder / "runs.jsonl"
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
    seed, until = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    drawn = [draw(seed) for _ in range(options.runs)]
    while len(rows) < options.runs and time.monotonic() < until:
        number = len(rows)
        rows.append(one_run(number, drawn[number], folder / f"run-{number}", texts))
        with rows_file.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        if rows[-1]["crash"] or rows[-1]["unexpected"]:
            print(f"run {number}: {json.dumps(rows[-1])}", flush=True)
    print(conclusion(rows))
    return int(any(row["crash"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
