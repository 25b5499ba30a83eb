"""The tracker for Aim."""

import os
from collections.abc import Mapping

from torchtitan.metrics.trackers.interface import TrackedRun, Tracker


class Aim(Tracker):
    """One Aim run per job, also over restarts: the job's folder stores its hash.

    The repository is the job's folder, or AIM_REPO (a folder, or a server's aim://HOST:PORT) for runs of several jobs.
    """

    name, package = "Aim", "aim"
    entries = (".aim",)

    def __init__(self, run: TrackedRun) -> None:
        import aim

        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = aim.Run(
            run.saved_id(self.package),
            repo=os.environ.get("AIM_REPO") or str(run.folder),
            experiment=run.name,
            system_tracking_interval=None,  # would start a separate process
            log_system_params=False,  # would include environment variables
            capture_terminal_logs=False,
        )
        run.save_id(self.package, self._run.hash)
        for tag in run.tags if run.resume_step is None else ():
            self._run.add_tag(tag)
        self._run["job"] = dict(run.job)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.track(dict(values), step=step)

    def close(self) -> None:
        self._run.close()
