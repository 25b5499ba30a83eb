"""Small real jobs for tests: a model of a few thousand parameters, bytes as tokens, generated texts."""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.forked_job import Program
from torchtitan.assembly.data import JobDatasets
from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.core.random_draws import clean_name
from torchtitan.job import ResolvedJob
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
Process = subprocess.Popen | Program
LAUNCH = """
import sys
from torchtitan import launch
from torchtitan.process.exit import exit_with
exit_with(lambda: launch.main(sys.argv[1:]))
"""
SHALLOW = "{dim=32, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16}"
"""Sizes for what many steps show and layers do not: ranks that share two cores wait long for each collective."""


def write_texts(folder: Path, documents: int = 120) -> Path:
    """Write documents of uneven length, the same in every call."""
    generator = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "texts.jsonl", "w") as file:
        for _ in range(documents):
            text = " ".join(
                generator.choice(("alpha", "beta", "gamma", "delta")) for _ in range(generator.randrange(3, 60))
            )
            file.write(json.dumps({"text": text}) + "\n")
    return folder / "texts.jsonl"


def arguments(folder: Path, texts: Path, **options: object) -> list[str]:
    """Return the command line of a tiny job that writes into `folder`; option names have __ in place of the dot."""
    settings = {
        "job.dump_folder": folder,
        "model.name": "llama3",
        "model.overrides": "{dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16}",
        "model.tokenizer_path": "bytes",
        "training.dataset": "text",
        "training.dataset_path": texts,
        "training.local_batch_size": 8,
        "training.global_batch_size": 8,
        "training.seq_len": 32,
        "training.steps": 20,
        "training.mixed_precision_param": "float32",
        "activation_checkpoint.mode": "none",
        "optimizer.lr": 1e-2,
        "metrics.log_freq": 1,
        "metrics.plot": "false",
    }
    settings |= {name.replace("__", "."): value for name, value in options.items()}
    if {"training.epochs", "training.tokens"} & settings.keys() and "training__steps" not in options:
        del settings["training.steps"]
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()]


def train(argv: list[str]) -> tuple[list[dict], str]:
    """Run a job on this rank of an existing process group; return the logged steps and the final state's sha256."""
    torch._dynamo.reset()
    config = manager.load(argv)
    trainer = Trainer(config, read_ranks())
    trainer.train()
    trainer.metrics.close()
    if dist.is_initialized():
        dist.barrier()  # the first rank writes the rows that all ranks read
    return logged_steps(Path(config.job.dump_folder)), state_hash(trainer)


def with_end(config: JobConfig, ranks: int = 1, samples_read: int = 0, step: int = 0) -> JobConfig:
    """Return the job with the number of steps that its data last, from a position in them."""
    job = ResolvedJob(config, ranks)
    return job.ending_at(JobDatasets(job).last_step(samples_read, step)).config


def state_hash(trainer: Trainer) -> str:
    """Return the sha256 of the names and full tensors of all parameters and moments; no plan changes it."""
    digest = hashlib.sha256()
    for name, parameter in sorted(trainer.model.named_parameters(), key=lambda item: clean_name(item[0])):
        state = next((o.state[parameter] for o in trainer.optimizers if parameter in o.state), {})
        for key, value in [("", parameter.detach()), *sorted(state.items())]:
            content = tensor_bytes(value) if torch.is_tensor(value) else repr(value).encode()
            digest.update(f"{clean_name(name)}.{key}".encode() + content)
    return digest.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, gathered if it is a DTensor. numpy has no bfloat16."""
    return full(tensor).contiguous().flatten().view(torch.uint8).numpy().tobytes()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a DTensor to a full tensor, and return other tensors unchanged. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def logged_steps(folder: Path) -> list[dict]:
    """Return the rows of logged steps, without an incomplete last line that the job is still writing."""
    text = (folder / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [row for row in rows if "loss" in row]


def start(argv: list[str], ranks: int = 1, **environment: str) -> Program:
    """Start a job under the launcher. It and its ranks are forks of a process that has imported torch."""
    return Program(LAUNCH, str(ranks), *argv, folder=ROOT, environment=environment)


def start_new(argv: list[str], ranks: int = 1, **environment: str) -> subprocess.Popen:
    """Start the job in new processes, as a user does. Each set of ranks imports torch, in five seconds of CPU time."""
    return subprocess.Popen(
        [sys.executable, "-m", "torchtitan.launch", str(ranks), *argv],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(argv: list[str], ranks: int = 1, **environment: str) -> tuple[int, str, str]:
    """Run a job under the launcher to its end; return exit code, output and errors."""
    return finish(start(argv, ranks, **environment))


def finish(process: Process, seconds: float = 600) -> tuple[int, str, str]:
    """Wait for a job; return exit code, output and errors."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # this ends its ranks too
        raise
    return process.returncode, out, err


def wait_for_step(folder: Path, step: int, process, seconds: float = 600) -> None:
    """Wait until the job has logged `step`; fail if it ends before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended = process.poll() is not None  # checked first, so that rows logged before the end are seen
        if (folder / "metrics.jsonl").exists() and len(logged_steps(folder)) >= step:
            return
        if ended:
            break
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"step {step} was not reached: {process.communicate()}")


def children(pid: int) -> list[int]:
    """Return the process ids of all descendants; none if the process has ended."""
    pids = direct_children(pid)
    return pids + [grandchild for child in pids for grandchild in children(child)]


def direct_children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def ended(pid: int) -> bool:
    """True if a process has ended, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return True


def started_ranks(process: Process, count: int) -> list[int]:
    """Wait until a job has `count` ranks, after the end of the process that they are forked from, and return their
    process ids."""
    while len(pids := [pid for pid in direct_children(process.pid) if not ended(pid)]) != count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return pids
