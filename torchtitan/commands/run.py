"""`torchtitan run script.py`: run a Python script on several ranks of this machine, with the launcher of jobs.

    torchtitan run script.py --ranks 4 --my-option 3
    torchtitan run --ranks 4 --max-restarts 2 script.py --my-option 3

What follows the script belongs to it, except for --ranks right after it, unless that is given before it too. The script
runs on every rank, as `python script.py` runs it (script_rank.py); torchrun and plain Python run the same script.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from torchtitan.commands.command_lines import parse_command
from torchtitan.core.errors import JobError
from torchtitan.launcher.processes import Processes, SignalQueue
from torchtitan.launcher.restarts import supervise
from torchtitan.launcher.run_folder import newest_step
from torchtitan.launcher.script import ScriptMonitor
from torchtitan.process.children import python_command
from torchtitan.process.ranks import Restart, env_number, require_interfaces, set_default, use_loopback

PROGRAM = python_command("torchtitan.commands.script_rank")
"""Of a rank."""
RANKS, HELP = "--ranks", ("-h", "--help")


def main(argv: list[str]) -> int:
    before, script = split_arguments(argv)
    options, _ = parse_command("run", [*before, *script[:1]])
    refuse(options.script)
    if options.ranks > 1:
        set_default("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.ranks)))
    require_interfaces()
    use_loopback()
    queue = SignalQueue()
    try:
        ranks = ScriptRanks([*PROGRAM, *script], options.ranks, options.max_restarts, queue)
        return supervise(ranks.start, queue, ranks.restarts, ranks.newest).code
    finally:
        queue.close()


def split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the options of the command, and the script with its arguments. Each option takes a value."""
    place = 0
    while argv[place : place + 1] and argv[place].startswith("-"):
        place += 1 if "=" in argv[place] or argv[place] in HELP else 2
    before, script, after = argv[:place], argv[place : place + 1], argv[place + 1 :]
    num_ours = 0
    if after and _name(after[0]) == RANKS and RANKS not in map(_name, before):
        num_ours = 1 if "=" in after[0] else 2
    return [*before, *after[:num_ours]], [*script, *after[num_ours:]]


def _name(option: str) -> str:
    return option.partition("=")[0]


def refuse(script: Path) -> None:
    """Raise JobError for what is no script, and for several machines."""
    if not script.is_file():
        problem = "a folder" if script.is_dir() else "no such file"
        raise JobError(f"torchtitan run: {script}: {problem}; allowed: a Python file")
    names = ("NNODES", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_NUM_NODES")
    name = next((name for name in names if name in os.environ), "")
    if name and env_number(name, 1, "leave it out for one machine") > 1:
        raise JobError(
            f"torchtitan run: {name}: given {os.environ[name]}; allowed: one machine; start the script by torchrun on "
            "each of several machines, or set NNODES=1 to run it on this one alone"
        )


def rendezvous() -> dict[str, str]:
    """Return an address for `torch.distributed.init_process_group()` of a script: on loopback, with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


@dataclass
class ScriptRanks:
    """The ranks of a script, to be started and started again."""

    command: list[str]
    number: int
    max_restarts: int | None
    """None for those of the job that an engine announces, and none without an engine."""
    queue: SignalQueue
    monitor: ScriptMonitor | None = None
    """Of the newest start."""
    first_step: int | None = None
    """The newest checkpoint when a rank first announced its job."""

    def start(self, restart: Restart | None) -> ScriptMonitor:
        processes = Processes(self.command, self.number, restart, script_variables=rendezvous())
        self.monitor = ScriptMonitor(processes, self.queue, self.monitor.job if self.monitor else None)
        return self.monitor

    def restarts(self) -> int:
        """Return the most restarts without a new checkpoint in between."""
        if self.max_restarts is not None:
            return self.max_restarts
        job = self.monitor.job if self.monitor else None
        return job.max_restarts if job else 0

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint, None if this run has not saved any."""
        job = self.monitor.job if self.monitor else None
        if job is None or not job.checkpoints:
            return None
        if self.first_step is None:
            self.first_step = job.newest_step
        step = newest_step(Path(job.checkpoints))
        return None if step == self.first_step else step
