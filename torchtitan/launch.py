"""Start the ranks of one machine: checked once, found by nobody outside, ended together, started again after a crash.

`python -m torchtitan.launch NUM_RANKS [arguments of torchtitan train]`; `torchtitan train` is the same with one rank.
Unlike torchrun it listens on nothing, imports no torch and keeps the ranks' exit codes: a refused job (2) or a stop by
Ctrl-C (130) has already said what there is to say.
"""

import os
import sys
from pathlib import Path

from torchtitan.checkpoint import newest_complete
from torchtitan.checkpoint.layout import step_of
from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError
from torchtitan.errors import JobError
from torchtitan.launcher.hangs import Limits
from torchtitan.launcher.lock import held, this_process
from torchtitan.launcher.nodes import Nodes, listen, stay_on_the_way_to
from torchtitan.launcher.processes import Processes
from torchtitan.launcher.restarts import supervise
from torchtitan.launcher.stops import SignalQueue
from torchtitan.launcher.watching import Watch
from torchtitan.leaving import REFUSED, exit_with
from torchtitan.ranks import Restart, likely_device, read_nodes, set_default, slurm_job
from torchtitan.rules import check, with_faults_of_the_rest


def main(argv: list[str]) -> int:
    if not argv or not argv[0].isdigit() or int(argv[0]) < 1:
        given = f"given {argv[0]!r}" if argv else "not given"
        told = f"the number of ranks (NGPU): {given}; allowed: 1 or more; e.g. NGPU=2 ./run_llama_train.sh"
        print(told, file=sys.stderr)
        return REFUSED
    return launch(int(argv[0]), argv[1:])


NO_JOB = """\
usage: torchtitan train JOB.toml [--section.key value ...]

  torchtitan train debug_model     a first run, in a minute; its results go to ./outputs/debug
  torchtitan init my_job.toml      writes a job to change, then: torchtitan train my_job.toml
  torchtitan train --help          every option, its type, default and meaning"""


def launch(num_ranks: int, arguments: list[str]) -> int:
    """Run the job on that many ranks of this machine; the exit code."""
    if not arguments:  # the default job is one to build on: ten thousand steps, nothing saved
        print(NO_JOB, file=sys.stderr)
        return REFUSED
    queue = SignalQueue()
    try:
        nodes = Nodes(*read_nodes())
        # here, before any rank exists: in a second and once, not from every rank
        config = load_job(arguments, nodes.count * num_ranks)
        if config is None:
            return REFUSED
        if num_ranks > 1:
            set_default("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
        for number in queue.wait(0):
            return 128 + number
        command = [sys.executable, "-m", "torchtitan.train", *arguments]
        if nodes.index:  # the first machine holds the folder for all
            return run(config, command, num_ranks, queue, nodes)
        with held(Path(config.job.dump_folder), this_process(*slurm_job())):
            return run(config, command, num_ranks, queue, nodes)
    except JobError as error:
        print(error, file=sys.stderr)
        return REFUSED
    finally:
        queue.close()


def run(config: JobConfig, command: list[str], num_ranks: int, queue: SignalQueue, nodes: Nodes | None = None) -> int:
    """All ranks of a checked job on this machine, started again after crashes and hangs if there is something to go on
    from. Of several machines none starts again alone: that is for who has started all of them."""
    folder, options = Path(config.job.dump_folder), config.checkpoint
    limits = Limits(config.comm.init_timeout_seconds, config.comm.train_timeout_seconds)

    def start(restart: Restart | None) -> Watch:
        return Watch(Processes(command, num_ranks, restart), queue, limits, folder / "hangs")

    def newest() -> int:
        path, _ = newest_complete(folder / options.folder)
        return step_of(path.name) if path is not None else -1

    if nodes is not None and nodes.count > 1:
        stay_on_the_way_to(nodes)
        listener = listen(nodes) if nodes.index == 0 else None
        world = Processes(command, num_ranks, nodes=nodes, listener=listener)
        if listener is not None:
            listener.close()  # it is the first rank's now
        return Watch(world, queue, limits, folder / "hangs").until_the_end()
    saves = options.enable and not options.load_only
    return supervise(start, queue, config.job.max_restarts if saves else 0, newest)


def load_job(argv: list[str], world_size: int, explain: bool = True) -> JobConfig | None:
    """The checked job, or None after its faults have been printed to stderr, one line each."""
    try:
        config = manager.load(argv)
        faults = check(config, world_size, likely_device(), manager.said_by(argv))
    except ConfigError as error:
        faults = with_faults_of_the_rest(error, world_size, likely_device(), manager.said_by(argv))
    if not faults:
        return config
    if explain:
        print("\n".join(map(str, faults)), file=sys.stderr)
        print(f"{len(faults)} fault{'s' if len(faults) > 1 else ''} in the job; nothing was started", file=sys.stderr)
    return None


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
