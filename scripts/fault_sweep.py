"""Kill ranks at many places and see that the job ends by itself, with the same bits, and leaves nothing behind.

    python scripts/fault_sweep.py [--kills 54] [--seed 0] [--only FSDP] [--async]

For each plan a small job runs undisturbed, then others in which, start after start, a rank kills itself (SIGKILL) at a
place in the code: which rank, where, before or after it and the how-manieth time are drawn from the seed. The launcher
restarts the job each time. Compared: the files of the last checkpoint, byte by byte; the steps that were done again,
against checkpoint.interval (--async: twice that, as a save in the background may last until the next one, which waits
for it); processes and temporary files that are left. Exit code 1 if anything differs.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_timing import ROOT

from torchtitan import launch
from torchtitan.checkpoint.layout import read_manifest
from torchtitan.launcher.company import First
from torchtitan.launcher.lock import start_of
from torchtitan.launcher.stops import SignalQueue
from torchtitan.metrics.json_lines import read_records

STEPS, INTERVAL, PER_JOB = 40, 4, 9
PLACES = {  # module, name: what every rank goes through, and what only the one that publishes does
    "restore": ("torchtitan.origin", "Origin.restore"),
    "fetch": ("torchtitan.trainer", "Trainer.fetch"),
    "forward and backward": ("torchtitan.parallelisms.parallel_model", "ParallelModel.forward_backward"),
    "clipping": ("torchtitan.parallelisms.parallel_model", "ParallelModel.clip_gradients"),
    "after the update": ("torchtitan.parallelisms.parallel_model", "ParallelModel.after_step"),
    "log": ("torchtitan.trainer", "Trainer.log"),
    "save": ("torchtitan.trainer", "Trainer.maybe_save"),
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


def draw(seed: random.Random) -> dict:
    place = seed.choice(list(PLACES))
    rank = 0 if place == "publish" else seed.randrange(2)
    seldom = place in ("restore", "write", "commit", "publish")
    return {"place": place, "rank": rank, "after": seed.random() < 0.5, "hit": 1 if seldom else seed.randint(1, 7)}


def rank_main(kills: list[dict], argv: list[str]) -> None:
    """A rank's program: the trainer's, with a fault at this start's place."""
    import importlib

    from torchtitan import train
    from torchtitan.leaving import exit_with
    from torchtitan.ranks import read_ranks

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
    exit_with(lambda: train.quietly(train.main, argv))


def run_job(folder: Path, options: dict, kills: list[dict]) -> int:
    """All ranks of a job under the launcher, in a process of its own; its exit code."""
    words = [f"--{name}={value}" for name, value in (JOB | options | {"job.dump_folder": folder}).items()]
    command = [sys.executable, __file__, "--launch", json.dumps(kills), *words]
    folder.mkdir(parents=True)
    with (folder / "log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder.parent / "tmp")}
        return subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment).returncode


def launch_main(kills: str, argv: list[str]) -> int:
    config = launch.load_job(argv, 2)
    program = (sys.executable, __file__, "--rank", kills)
    return launch.run(config, argv, 2, SignalQueue(), First(), program)


def last_state(folder: Path) -> str:
    """Of all tensors, and of the state beside them but for its versions and times."""
    step = folder / "checkpoint" / f"step-{STEPS:08d}"
    files = read_manifest(step).files
    digest = hashlib.sha256()
    for name in sorted(name for name in files if name.endswith(".distcp")):
        digest.update(name.encode() + files[name].sha256.encode())
    return digest.hexdigest()


def left_behind(folder: Path, before: set[int], temporary: set[Path]) -> list[str]:
    """Processes that were not there before and know the folder; temporary files but for those that any run leaves
    (torch's cache of compiled code); locks and unfinished checkpoints."""
    found = [path.name for path in set((folder.parent / "tmp").iterdir()) - temporary]
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) not in before and start_of(int(path.name)) is not None:
            try:
                if str(folder) in (path / "cmdline").read_text():
                    found.append(f"process {path.name}")
            except OSError:
                continue
    return found + [path.name for path in folder.glob("run.lock*")] + [p.name for p in folder.glob("checkpoint/.tmp*")]


def sweep(name: str, options: dict, kills: int, seed: random.Random, place: Path) -> bool:
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
        left = left_behind(folder, before, temporary)
        log = (folder / "log").read_text()
        done = log.count("restart ")
        same = code == 0 and last_state(folder) == expected
        most = INTERVAL * (2 if "checkpoint.async_mode" in options else 1)
        fine = same and lost <= most and not left and done == len(plan)
        good &= fine
        seconds = time.monotonic() - started
        print(
            f"{name}, job {job}: {done} of {len(plan)} kills, exit code {code}, "
            f"{'the same bits' if same else 'OTHER BITS'}, at most {lost} steps again, left behind: "
            f"{', '.join(left) or 'nothing'}; {seconds:.0f} s{'' if fine else '  <-- ' + json.dumps(plan)}",
            flush=True,
        )
        if not fine:
            print(log[-3000:])
    return good


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank_main(json.loads(sys.argv[2]), sys.argv[3:])
    if sys.argv[1:2] == ["--launch"]:
        return launch_main(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=54, help="in all plans together (default: 54)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(PLANS), help="plans (default: all)")
    parser.add_argument("--async", dest="background", action="store_true", help="save in the background")
    options = parser.parse_args()
    more = {"checkpoint.async_mode": "async"} if options.background else {}
    seed, good = random.Random(options.seed), True
    with tempfile.TemporaryDirectory(prefix="fault-sweep-") as place:
        for name in options.only:
            share = -(-options.kills // len(options.only))
            good &= sweep(name, PLANS[name] | more, share, seed, Path(place, name.replace(" ", "-")))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
