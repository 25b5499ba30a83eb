"""In an allocation of SLURM: how a launcher comes onto every machine, and how each finds out which one it is.

Outside of a step (in a batch script, in salloc's shell) the launcher starts one with `srun`, a task a machine, and
waits for it. In a step the environment tells the rest. Tasks of which several share a machine are taken for one rank
each, as `srun --ntasks-per-node=8` means it. Whoever sets NNODES wants none of this.
"""

import os
import re
import signal
import subprocess
from datetime import datetime
from shutil import which

from torchtitan.core.errors import JobError
from torchtitan.launcher.nodes import Nodes
from torchtitan.launcher.signals import Requests, SignalQueue
from torchtitan.process.exit import STOPPED
from torchtitan.process.ranks import likely_device, number, set_default

_SPECIAL_STEPS = 0xFFFFFFF0
"""Numbers from here on are of steps that no srun has made: the batch script's, that of salloc's shell."""
_SHAPE_OF_TASKS = (
    *("NTASKS", "NPROCS", "NTASKS_PER_NODE", "NTASKS_PER_CORE", "NTASKS_PER_SOCKET", "NTASKS_PER_GPU"),
    *("TASKS_PER_NODE", "CPUS_PER_TASK", "CPUS_PER_GPU", "GPUS_PER_TASK", "TRES_PER_TASK", "DISTRIBUTION"),
)
"""What srun would read of the allocation's request and take for a request for its step."""
FIRST_PORT, PORTS = 20000, 10000
"""Below those that Linux hands out by itself, so that one per job and step is free as a rule."""
ASK_SECONDS = 30
LOOK_SECONDS = 0.5


def in_step() -> bool:
    """Whether srun has started this process, and nobody has said by hand which machine it is."""
    step = os.environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _SPECIAL_STEPS and "NNODES" not in os.environ


def outside_of_step() -> bool:
    """Whether this is an allocation's, and no step of it has begun."""
    return "SLURM_JOB_ID" in os.environ and "NNODES" not in os.environ and not in_step()


# Outside of a step


def start_on_all(command: list[str], queue: SignalQueue) -> int:
    """Run the command once on every machine of the allocation; the exit code, which they agree on."""
    if which("srun") is None:
        raise JobError(
            f"SLURM_JOB_ID: given {os.environ['SLURM_JOB_ID']}, an allocation of SLURM, and there is no srun here to "
            "start a launcher on its machines; allowed: srun on PATH, NNODES=1 for this machine alone, or NNODES, "
            "NODE_RANK and HEAD_ADDR on each"
        )
    _find_end_of_allocation()
    given = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    shape = [f"--nodes={given}", f"--ntasks={given}", "--ntasks-per-node=1", f"--cpus-per-task={_cpus()}"]
    # the launchers see themselves that all end; one that saves must not be ended for another's exit code
    shape += ["--kill-on-bad-exit=0", "--wait=0", "--mpi=none"]
    unwanted = {f"SLURM_{name}" for name in _SHAPE_OF_TASKS}
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    # a session of its own: from Ctrl-C srun would cancel the step instead of letting it save
    srun = subprocess.Popen(
        ["srun", *shape, *command], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    requests = Requests()
    while srun.poll() is None:
        for signaled in queue.wait(LOOK_SECONDS):
            if requests.add(signaled):
                # which srun passes on to the launchers; TERM would end the step at once
                srun.send_signal(signal.SIGUSR1 if requests.count <= 3 else signal.SIGTERM)
    code = srun.returncode if srun.returncode >= 0 else 128 - srun.returncode
    return 128 + requests.first if code in STOPPED and requests.first else code


def _cpus() -> int:
    """Of every machine, as srun gives a task one alone unless it is told: the fewest of "96(x3),48"."""
    return min(map(int, re.findall(r"(?:^|,)(\d+)", os.environ.get("SLURM_JOB_CPUS_PER_NODE", "1"))), default=1)


def _find_end_of_allocation() -> None:
    """Newer SLURMs say it by themselves, others (22.05 does not) are asked."""
    if "SLURM_JOB_END_TIME" in os.environ:
        return
    command = ["squeue", "--noheader", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%e"]
    try:
        asked = subprocess.run(
            command,
            env=os.environ | {"SLURM_TIME_FORMAT": "standard"},
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
        )
        set_default("SLURM_JOB_END_TIME", str(int(datetime.fromisoformat(asked.stdout.strip()).timestamp())))
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return  # without a limit, or nobody answers: the run then stops when SLURM says so


# In a step


def tasks_per_machine() -> int:
    """Of this step; 0 if not all machines have as many."""
    told = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return int(told[0]) if len(set(told)) == 1 else 0


def nodes_of_step(num_ranks: int) -> Nodes:
    """Which machine this is, or which rank, where a task is one. Raises `JobError` for tasks that are neither."""
    tasks, task, local = number("SLURM_STEP_NUM_TASKS", 1), number("SLURM_PROCID", 0), number("SLURM_LOCALID", 0)
    machines, each = number("SLURM_STEP_NUM_NODES", 1), tasks_per_machine()
    if tasks > machines:
        if not each or num_ranks > 1:
            if task:
                raise JobError("")  # the first task says it for all
            raise JobError(
                f"srun: {tasks} tasks on {machines} machine{'s' if machines > 1 else ''}, with NGPU = {num_ranks}; "
                "allowed: a task a machine (--ntasks-per-node=1), which starts NGPU ranks, or a task a GPU, which is a "
                "rank (leave NGPU out)"
            )
        _take_one_device(local)
    if tasks == 1:
        return Nodes()
    port = FIRST_PORT + (number("SLURM_JOB_ID", 0) * 8 + number("SLURM_STEP_ID", 0)) % PORTS
    return Nodes(tasks, task, _head(), number("HEAD_PORT", port))


def _take_one_device(local: int) -> None:
    """Of GPUs that several tasks of a machine see all of them, each takes its own."""
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
    """The address of the step's first machine; names of nodes need not be known to the network."""
    if os.environ.get("HEAD_ADDR"):
        return os.environ["HEAD_ADDR"]
    first = _ask("scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", "")).split()[0]
    found = re.search(r"\bNodeAddr=(\S+)", _ask("scontrol", "--oneliner", "show", "node", first))
    return found[1] if found else first


def _ask(*command: str) -> str:
    why = "no answer"
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS)
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout
        why = asked.stderr.strip() or why
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    raise JobError(
        f"HEAD_ADDR: not given, and SLURM does not tell it ({' '.join(command)}: {why}); allowed: the address of the "
        "step's first machine; e.g. HEAD_ADDR=10.0.0.1"
    )
