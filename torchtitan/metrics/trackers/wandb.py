"""The tracker for Weights & Biases."""

import os
from collections.abc import Mapping
from pathlib import Path

from torchtitan.core.files import read_file
from torchtitan.metrics.trackers.interface import TrackedRun, Tracker


class WeightsAndBiases(Tracker):
    """One W&B run per job, also over restarts: the job's folder stores its id.

    Project, entity and mode are wandb's own settings (WANDB_PROJECT and others)."""

    name, package = "Weights & Biases", "wandb"
    entries = ("wandb",)

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            dir=str(run.folder),
            name=run.name,
            tags=run.tags or None,
            config=dict(run.job),
            id=run.saved_id(self.package),
            resume="allow",
        )
        run.save_id(self.package, self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()

    @classmethod
    def obstacle(cls) -> tuple[str, str] | None:
        missing = super().obstacle()
        if missing is None and not _can_log_in():
            allowed = "only with a key of Weights & Biases, because a run cannot answer its prompt"
            return allowed, "run wandb login once, set WANDB_API_KEY, or log to this machine with WANDB_MODE=offline"
        return missing


def _can_log_in() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE", "online") != "online":
        return True
    try:
        netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
        return b"wandb" in read_file(netrc, 2**20)
    except (OSError, RuntimeError, ValueError):  # missing, or the user has no home folder
        return False
