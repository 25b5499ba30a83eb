"""Start a launcher on every machine of a SLURM allocation, and derive each machine's index.

Outside of a step (in a batch script or salloc's shell) the launcher runs one task per machine with `srun` and waits for
it. Inside a step it reads SLURM's environment variables. If several tasks share a machine, each is one rank, as with
`srun --ntasks-per-node=8`. Setting NNODES disables all of this.
"""

import os
import re
import shlex
import signal
import subprocess
from datetime import datetime
from shutil import which

from torchtitan.core.errors import JobError
from torchtitan.launcher.nodes import Nodes
from torchtitan.launcher.processes import SignalQueue, StopRequests
from torchtitan.process.children import tied_command
from torchtitan.process.exit import STOPPED
from torchtitan.process.ranks import env_number, likely_device, parse_number, set_default

_SPECIAL_STEPS = 0xFFFFFFF0
"""Lowest step number that SLURM reserves for steps that srun did not create: the batch script and salloc's shell."""
_SHAPE_OF_TASKS = (
    *("NTASKS", "NPROCS", "NTASKS_PER_NODE", "NTASKS_PER_CORE", "NTASKS_PER_SOCKET", "NTASKS_PER_GPU"),
    *("TASKS_PER_NODE", "CPUS_PER_TASK", "CPUS_PER_GPU", "GPUS_PER_TASK", "TRES_PER_TASK", "DISTRIBUTION"),
)
"""Variables from the allocation's request that srun would apply to its step."""
FIRST_PORT, PORTS = 20000, 10000
"""Range of ports below those that Linux assigns by itself, so that the one of a job and step is usually free."""
ASK_SECONDS = 30
_REMEDY = "let srun set it, or set NNODES, NODE_RANK and HEAD_ADDR on each machine"
POLL_SECONDS = 0.5


def in_step() -> bool:
    """Return True if srun has started this process and NNODES is not set."""
    step = parse_number(os.environ.get("SLURM_STEP_ID", ""))
    return step is not None and step < _SPECIAL_STEPS and "NNODES" not in os.environ


def outside_of_step() -> bool:
    """Return True if this process is in an allocation but not in a step, and NNODES is not set."""
    return "SLURM_JOB_ID" in os.environ and "NNODES" not in os.environ and not in_step()


# Outside of a step


def start_on_all(command: list[str], queue: SignalQueue) -> int:
    """Run the command once on every machine of the allocation and return the exit code that they agree on."""
    if which("srun") is None:
        raise JobError(
            f"SLURM_JOB_ID: given {os.environ['SLURM_JOB_ID']}, an allocation of SLURM, and there is no srun here to "
            "start a launcher on its machines; allowed: srun on PATH, NNODES=1 for this machine alone, or NNODES, "
            "NODE_RANK and HEAD_ADDR on each"
        )
    _find_end_of_allocation()
    num_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    options = [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", f"--cpus-per-task={_cpus()}"]
    # launchers end together by themselves; one that is saving must not be killed for another's exit code
    options += ["--kill-on-bad-exit=0", "--wait=0", "--mpi=none", *shlex.split(os.environ.get("SRUN_FLAGS", ""))]
    dropped_names = {f"SLURM_{name}" for name in _SHAPE_OF_TASKS}
    environment = {name: value for name, value in os.environ.items() if name not in dropped_names}
    # in its own session: on Ctrl-C srun would cancel the step instead of letting it save
    srun = subprocess.Popen(
        tied_command(["srun", *options, *command]), env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    requests = StopRequests()
    while srun.poll() is None:
        for signaled in queue.wait(POLL_SECONDS):
            if requests.add(signaled):
                # srun passes USR1 on to the launchers; TERM would end the step at once
                srun.send_signal(signal.SIGUSR1 if requests.count <= 3 else signal.SIGTERM)
    code = srun.returncode if srun.returncode >= 0 else 128 - srun.returncode
    return 128 + requests.first if code in STOPPED and requests.first else code


def _cpus() -> int:
    """Return the CPUs per task, which srun would otherwise limit to one: the smallest count in "96(x3),48"."""
    counts = re.findall(r"(?:^|,)(\d{1,9})", os.environ.get("SLURM_JOB_CPUS_PER_NODE", "1"))
    return max(1, min(map(int, counts), default=1))


def _find_end_of_allocation() -> None:
    """Set SLURM_JOB_END_TIME. Newer versions of SLURM set it themselves, others (22.05) are asked."""
    if "SLURM_JOB_END_TIME" in os.environ:
        return
    command = ["squeue", "--noheader", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%e"]
    try:
        result = subprocess.run(
            command,
            env=os.environ | {"SLURM_TIME_FORMAT": "standard"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_SECONDS,
        )
        set_default("SLURM_JOB_END_TIME", str(int(datetime.fromisoformat(result.stdout.strip()).timestamp())))
    except (OSError, subprocess.TimeoutExpired, ValueError, OverflowError):
        return  # no time limit, or SLURM does not answer: the run then stops on SLURM's signal


# In a step


def tasks_per_machine() -> int:
    """Return the number of tasks per machine in this step; 0 if machines differ."""
    counts = re.findall(r"(\d{1,9})(?:\(x\d+\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return int(counts[0]) if len(set(counts)) == 1 else 0


def nodes_of_step(num_ranks: int) -> Nodes:
    """Return which machine this is, or which rank if each task is a rank. Raises `JobError` for other layouts."""
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES")
    tasks, task, local, machines = (
        env_number(name, default, _REMEDY) for name, default in zip(names, (1, 0, 0, 1), strict=True)
    )
    per_machine = tasks_per_machine()
    if tasks > machines:
        if not per_machine or num_ranks > 1:
            if task:
                raise JobError("")  # only the first task prints the message
            raise JobError(
                f"srun: {tasks} tasks on {machines} machine{'s' if machines > 1 else ''}, with NGPU = {num_ranks}; "
                "allowed: a task a machine (--ntasks-per-node=1), which starts NGPU ranks, or a task a GPU, which is a "
                "rank (leave NGPU out)"
            )
        _take_one_device(local)
    if tasks == 1:
        return Nodes()
    job, step = (env_number(name, 0, _REMEDY) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = FIRST_PORT + (job * 8 + step) % PORTS
    return Nodes(tasks, task, _head(), env_number("HEAD_PORT", port, "leave it out for one that the job's ID gives"))


def _take_one_device(local: int) -> None:
    """Select one GPU per task where several tasks of a machine see all of its GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and likely_device() == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local)
    devices = (visible or "").split(",")
    if len(devices) > 1:
        if local >= len(devices):
            raise JobError(
                f"srun: {local + 1} or more tasks on a machine and {len(devices)} GPUs (CUDA_VISIBLE_DEVICES = "
                f"{visible}); allowed: a task a GPU"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[local]


def _head() -> str:
    """Return the address of the step's first machine; node names may not be resolvable in the network."""
    if os.environ.get("HEAD_ADDR"):
        return os.environ["HEAD_ADDR"]
    first = _ask("scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", "")).split()[0]
    match = re.search(r"\bNodeAddr=(\S+)", _ask("scontrol", "--oneliner", "show", "node", first))
    return match[1] if match else first


def _ask(*command: str) -> str:
    text = "no answer"
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS)
        if result.returncode == 0 and result.stdout.strip():
            return result.stdout
        text = result.stderr.strip() or text
    except (OSError, subprocess.TimeoutExpired) as error:
        text = str(error)
    raise JobError(
        f"HEAD_ADDR: not given, and SLURM does not tell it ({' '.join(command)}: {text}); allowed: the address of the "
        "step's first machine; e.g. HEAD_ADDR=10.0.0.1"
    )
