"""Monitor the ranks of a user's script: what differs from the ranks of a job, which the launcher has checked itself.

A script may never build an engine. Then it reports no progress: it is not watched for hangs, and the launcher only
passes on signals and exit codes. An engine announces its job (`ScriptJob`), by which the launcher then watches and
restarts the ranks as those of any job.
"""

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from torchtitan.config.job import JobConfig
from torchtitan.core.bounded import Count, Seconds
from torchtitan.launcher.hangs import HangLimits
from torchtitan.launcher.monitor import RankMonitor
from torchtitan.launcher.processes import Processes, RankExit, SignalQueue
from torchtitan.launcher.run_folder import HANGS_FOLDER, export_advice, newest_step
from torchtitan.process.exit import STOPPED
from torchtitan.process.heartbeat import Activity
from torchtitan.process.ranks import Ranks

STOP_SECONDS = 30
"""Longest wait after a stop request for a rank without an engine, of which nothing else is known."""
BETWEEN_CALLS = ("start", "script", "end")
"""Phases in which a script may end by itself."""


@dataclass(frozen=True)
class ScriptJob:
    """The job of an engine, as far as the launcher of its script needs it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")
    folder: str
    """job.dump_folder, as an absolute path."""
    checkpoints: str
    """Folder of the checkpoints, or "" if none are saved."""
    newest_step: int
    """The newest checkpoint in it before the engine starts; -1 without one."""
    max_restarts: Count
    start_seconds: Seconds
    train_seconds: Seconds
    advice: str
    """What to do after a failed export."""


def announce(config: JobConfig, ranks: Ranks) -> None:
    """Tell the launcher of a script the job of its engine, before that saves or reports progress. To be called on every
    rank; the first one does so. The launcher of a job, or none, needs nothing.

    A failure has no consequence but that the script is restarted and watched as one without an engine.
    """
    if ranks.launcher is None or not ranks.launcher.job or not ranks.is_main:
        return
    folder, options = Path(config.job.dump_folder).absolute(), config.checkpoint
    saves = options.enable and not options.load_only
    job = ScriptJob(
        str(folder),
        str(folder / options.folder) if saves else "",
        newest_step(folder / options.folder) if saves else -1,
        config.job.max_restarts if saves else 0,
        float(config.comm.init_timeout_seconds),
        float(config.comm.train_timeout_seconds),
        export_advice(folder, options),
    )
    with suppress(OSError):
        Path(ranks.launcher.job).write_text(json.dumps(asdict(job)))


class ScriptMonitor(RankMonitor):
    """Monitors one start of a script's ranks on this machine. `job`: the one that an earlier start has announced."""

    stopping = "stopping the script"

    def __init__(self, processes: Processes, queue: SignalQueue, job: ScriptJob | None = None) -> None:
        super().__init__(processes, queue, HangLimits(0, 0), Path())
        self.job = job
        self.is_announced = False
        """True once a rank of this start has announced the job of its engine."""

    def is_complete(self, rank_exit: RankExit) -> bool:
        """Return True if a rank has ended by itself, and not in a call of its engine, in which others wait for it."""
        is_stop = rank_exit.exit_code in STOPPED and (self.requests.count > 0 or rank_exit.end is not None)
        return (rank_exit.code == 0 or is_stop) and rank_exit.activity.phase in BETWEEN_CALLS

    def stop_signal(self, number: int) -> int:
        return number  # a script may handle each in its own way

    def exit_seconds(self) -> float:
        return math.inf  # it may do more after its engine

    def stop_seconds(self, activity: Activity) -> float:
        return super().stop_seconds(activity) if activity.since else STOP_SECONDS

    def is_explained(self, rank_exit: RankExit) -> bool:
        """Return True for an exit code of ours; a script may end with the same for other reasons."""
        return rank_exit.end is not None and super().is_explained(rank_exit)

    def on_poll(self) -> None:
        """Read the job that the first rank has announced."""
        if self.is_announced:
            return
        with suppress(ValidationError):  # also of an empty text
            self.job = job = TypeAdapter(ScriptJob).validate_json(self.processes.rank_files[0].job.read())
            self.is_announced = True
            self.watchdog.limits = HangLimits(job.start_seconds, job.train_seconds)
            self.folder, self.remedy = Path(job.folder, HANGS_FOLDER), job.advice

    def check_for_hang(self) -> None:
        if self.is_announced:
            super().check_for_hang()
