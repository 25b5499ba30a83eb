"""Launch the ranks of a job: check the job once, start and end its ranks together, restart them after a crash.

`python -m torchtitan.launch NUM_RANKS|auto [arguments of torchtitan train]`, or `torchtitan train --ranks NUM_RANKS`. A
job on several machines has a launcher on each. Unlike torchrun, the launcher of a single machine listens on no socket.
It imports no torch and keeps the ranks' exit codes, such as 2 for a refused job and 130 for a stop by Ctrl-C.
"""

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError, print_help_if_requested
from torchtitan.config.sections.run import Job
from torchtitan.core.errors import JobError, wrap_lines
from torchtitan.core.hub import Access, set_access, take_commits
from torchtitan.core.machine_errors import MachineError
from torchtitan.launcher import slurm
from torchtitan.launcher.hangs import HangLimits
from torchtitan.launcher.messages import Start
from torchtitan.launcher.monitor import RankMonitor
from torchtitan.launcher.multi_node import LATE_SECONDS, Coordinator, Worker
from torchtitan.launcher.nodes import Nodes, use_head_interface
from torchtitan.launcher.processes import Processes, SignalQueue
from torchtitan.launcher.restarts import follow_coordinator, supervise
from torchtitan.launcher.run_folder import (
    HANGS_FOLDER,
    SECRET_FILE,
    empty_folder,
    export_advice,
    hold_lock,
    newest_step,
    this_process,
)
from torchtitan.metrics.run_end import RunEnd, describe_last_end, record_end
from torchtitan.process.children import python_command
from torchtitan.process.exit import CRASHED, REFUSED, exit_with
from torchtitan.process.ranks import (
    Restart,
    count_ranks,
    likely_device,
    logging_ranks,
    parse_number,
    read_nodes,
    require_interfaces,
    set_default,
    slurm_job,
    started_as_rank,
)
from torchtitan.process.run_log import print_message
from torchtitan.rules.loading import load_valid

AUTO = "auto"
"""As many ranks as this machine has GPUs, or 2 without any."""
OPTION, VARIABLE = "--ranks", "NGPU"
"""What gives `torchtitan train` the number of ranks."""
OTHER_NAMES = ("--rank", "--nproc_per_node", "--nproc-per-node", "--num_processes", "--num_gpus")
"""Options that may be meant: of torchrun, Accelerate and DeepSpeed."""


def main(argv: list[str]) -> int:
    print_help_if_requested(argv)
    try:
        return launch(ranks_of(*argv[:1]), argv[1:])
    except JobError as error:
        print(error, file=sys.stderr)
        return REFUSED


def ranks_of(text: str | None = None, name: str = f"the number of ranks ({VARIABLE})") -> int | None:
    """Return the number of ranks that a text says; None for AUTO. Raises JobError."""
    if text is None or text != AUTO and not parse_number(text):
        value = "not given" if text is None else f"given {text!r}"
        example = "NGPU=2 ./run_llama_train.sh, torchtitan train job.toml --ranks 2"
        raise JobError(f"{name}: {value}; allowed: 1 or more, or auto; e.g. {example}")
    return None if text == AUTO else int(text)


def split_ranks(argv: list[str]) -> tuple[int | None, list[str]]:
    """Split the arguments of `torchtitan train` into the number of ranks, None for AUTO, and those of the job.

    The number is that of the option, else of the variable, else 1. Raises JobError.
    """
    job: list[str] = []
    text: str | None = os.environ.get(VARIABLE, "1")
    name = VARIABLE
    remaining = iter(argv)
    for argument in remaining:
        option, sign, value = argument.partition("=")
        if option == OPTION:
            text, name = value if sign else next(remaining, None), OPTION
        elif option in OTHER_NAMES:
            adapter = "; the rank of an adapter is --adapter.rank" if option == "--rank" else ""
            raise JobError(f"{option}: no option of torchtitan train; did you mean {OPTION}?{adapter}")
        else:
            job.append(argument)
    return ranks_of(text, name), job


NO_JOB = """\
usage: torchtitan train JOB.toml [--section.key value ...]

  torchtitan train debug_model     a first run, in a minute; its results go to ./outputs/debug
  torchtitan init my_job.toml      writes a job to change, then: torchtitan train my_job.toml
  torchtitan train --help          the options of a job"""


PROGRAM = python_command("torchtitan.train")
"""Of a rank."""


def launch(num_ranks: int | None, arguments: list[str]) -> int:
    """Run the job on `num_ranks` ranks of this machine (None: one per GPU) and return the exit code."""
    if not arguments:  # the default job is only a base: ten thousand steps, no checkpoints
        print(NO_JOB, file=sys.stderr)
        return REFUSED
    set_access(Access.DOWNLOAD)
    queue = SignalQueue()
    try:
        if slurm.outside_of_step():
            ranks = AUTO if num_ranks is None else str(num_ranks)
            return slurm.start_on_all(python_command("torchtitan.launch", ranks, *arguments), queue)
        in_step = slurm.in_step()
        if num_ranks is None:
            num_ranks = 1 if in_step and slurm.tasks_per_machine() != 1 else count_ranks()
        nodes = slurm.nodes_of_step(num_ranks) if in_step else Nodes(*read_nodes())
        if not nodes.index:
            logging_ranks(num_ranks)
        if num_ranks > 1:
            set_default("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
        # the job is checked here, before any rank exists: once and within a second
        run_machine = run_as_worker if nodes.index else run_as_coordinator
        if nodes.count == 1:
            require_interfaces()
        return run_machine(nodes, num_ranks, arguments, queue)
    except (JobError, MachineError) as error:
        if str(error):
            print(wrap_lines(error), file=sys.stderr)
        return REFUSED if isinstance(error, JobError) else CRASHED
    finally:
        queue.close()


def run_as_coordinator(nodes: Nodes, num_ranks: int, arguments: list[str], queue: SignalQueue) -> int:
    """Run the job from the first or only machine: check it, lock the run folder, and restart all ranks after crashes
    and hangs."""
    coordinator, code = Coordinator(nodes, num_ranks), CRASHED  # the code that an unexpected exception sends
    end = RunEnd(CRASHED, reason="the launcher failed")
    try:
        config = load_job(arguments, nodes.count * num_ranks, notices=True)
        if config is None:
            code = REFUSED
            return code
        for number in queue.wait(0):
            code = 128 + number
            return code
        if nodes.count > 1:
            use_head_interface(nodes)
        folder = Path(config.job.dump_folder)
        with hold_lock(folder, this_process(*slurm_job())) as was_left:
            for message in (empty_folder(config, slurm_job()[1]), describe_last_end(folder, was_left)):
                if message:
                    print_message(message)
            try:
                stop_signal = coordinator.wait_for_workers(
                    queue, config.comm.init_timeout_seconds, folder / SECRET_FILE
                )
                stopped = RunEnd(128 + (stop_signal or 0))
                end = stopped if stop_signal else LocalRanks(config, arguments, num_ranks, queue).run(coordinator)
            except JobError as error:
                print(wrap_lines(error), file=sys.stderr)
                end = RunEnd(REFUSED, reason=str(error))
            except MachineError as error:
                print(wrap_lines(error), file=sys.stderr)
                end = RunEnd(CRASHED, reason=str(error))
            finally:
                code = end.code
                coordinator.end_run(code)  # before the lock ends, as the secret is deleted here
                if problem := record_end(folder, end):
                    print_message(problem, sys.stderr)
        return code
    except JobError as error:
        print(wrap_lines(error), file=sys.stderr)
        code = REFUSED
        return code
    finally:
        coordinator.end_run(code, Path(_folder_of(arguments)) / SECRET_FILE if nodes.count > 1 else None)


@dataclass(frozen=True)
class LocalRanks:
    """The ranks of a job on this machine, to be started and started again."""

    config: JobConfig
    arguments: list[str]
    number: int
    queue: SignalQueue
    program: Sequence[str] | None = None
    """The command of a rank; None for PROGRAM."""

    def run(self, coordinator: Coordinator) -> RunEnd:
        """Run the job from the first or only machine."""

        def start(restart: Restart | None) -> RankMonitor:
            nodes, listener = coordinator.order_start(restart)
            monitor = self.start(coordinator, restart, nodes, listener)
            if listener is not None:
                listener.close()  # the first rank has inherited it
            return monitor

        newest = partial(newest_step, Path(self.config.job.dump_folder) / self.config.checkpoint.folder)
        return supervise(start, self.queue, lambda: self.restarts, newest, coordinator, self.config.job.rejoin_seconds)

    def follow(self, worker: Worker, nodes: Nodes) -> int:
        """Run the job as the launcher of the first machine orders."""

        def start(order: Start) -> RankMonitor:
            agree_on_commits(order.commits, self.arguments, nodes.count * self.number)
            return self.start(worker, order.restart, replace(nodes, port=order.port), None)

        rejoin_seconds = self.config.job.rejoin_seconds if self.restarts else 0
        return follow_coordinator(start, self.queue, worker, rejoin_seconds)

    @property
    def restarts(self) -> int:
        """Restarts of the ranks without a new checkpoint in between, at most: 0 in a run that saves none."""
        options = self.config.checkpoint
        return self.config.job.max_restarts if options.enable and not options.load_only else 0

    def start(
        self, peers: Coordinator | Worker, restart: Restart | None, nodes: Nodes, listener: socket.socket | None
    ) -> RankMonitor:
        """Start the ranks and return their monitor."""
        options, command = self.config.comm, [*(self.program or PROGRAM), *self.arguments]
        limits = HangLimits(options.init_timeout_seconds, options.train_timeout_seconds)
        can_fork = self.program is None and likely_device() == "cpu"
        ranks = Processes(command, self.number, restart, nodes, listener, can_fork)
        folder = Path(self.config.job.dump_folder)
        advice = export_advice(folder, self.config.checkpoint)
        return RankMonitor(ranks, self.queue, limits, folder / HANGS_FOLDER, peers, advice)


def run_as_worker(nodes: Nodes, num_ranks: int, arguments: list[str], queue: SignalQueue) -> int:
    """Run the job on another machine than the first, and report the faults that this machine finds to the first."""
    use_head_interface(nodes)
    config, faults = load_and_check(arguments, nodes.count * num_ranks)
    folder = _folder_of(arguments) if config is None else config.job.dump_folder
    worker = Worker(nodes, num_ranks, Path(folder) / SECRET_FILE)
    if config is None:
        try:
            worker.join(queue, LATE_SECONDS, faults)
        except JobError:
            print(faults, file=sys.stderr)
        return REFUSED
    stop_signal = worker.join(queue, config.comm.init_timeout_seconds)
    return 128 + stop_signal if stop_signal else LocalRanks(config, arguments, num_ranks, queue).follow(worker, nodes)


def agree_on_commits(commits: dict[str, str], arguments: list[str], world_size: int) -> None:
    """Take the first machine's commits of the job's sources on the hub, and download those that differ here, as where a
    branch has moved on in between. If they are not to be had, the ranks refuse the job for the reason printed here."""
    if take_commits(commits):
        config, faults = load_and_check(arguments, world_size)
        if config is None:
            print(faults, file=sys.stderr)


def _folder_of(arguments: list[str]) -> str:
    """Return job.dump_folder of a refused job, as far as it can be read. The option itself may be at fault."""
    folder: object = Job().dump_folder
    with suppress(ConfigError):
        for layer in manager.read_layers(arguments)[1]:
            folder = layer.values.get("job.dump_folder", folder)
    return os.path.expanduser(str(folder))


def load_job(argv: list[str], world_size: int, explain: bool = True, notices: bool = False) -> JobConfig | None:
    """Return the checked job, or None after its faults are printed to stderr, one line each.

    `notices`: also print how the schedule of a trial run was shortened.
    """
    config, message = load_and_check(argv, world_size)
    if message and (notices if config else explain):
        print(message, file=sys.stderr)
    return config


def load_and_check(argv: list[str], world_size: int) -> tuple[JobConfig | None, str]:
    """Return the checked job and a notice or "", or None and its faults, one line each."""
    if any(argument.partition("=")[0] == OPTION for argument in argv):
        number = f"WORLD_SIZE in the environment, as torchrun sets it, says {world_size}"
        number = number if started_as_rank() else f"torchtitan.launch was given {world_size}"
        return None, f"{OPTION}: allowed where torchtitan train starts the ranks; {number}; leave one of the two out"
    try:
        facts = load_valid(argv, world_size, likely_device())
        return facts.config, wrap_lines(facts.notice)
    except ConfigError as error:
        faults = error.faults
    total = f"{len(faults)} fault{'s' if len(faults) > 1 else ''} in the job; nothing was started"
    return None, "\n".join([*map(wrap_lines, faults), total])


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
