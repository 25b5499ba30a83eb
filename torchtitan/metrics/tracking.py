"""TensorBoard and Weights & Biases. Both get the tags that torchtitan's users have on their dashboards.

What a bare tag means is torchtitan's: throughput(tps) is per device, and tflops and mfu(%) count attention in full,
masked or not. mfu_causal(%) and mfu_full(%) cannot be confused.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torchtitan.errors import JobError


class TrackingError(JobError):
    """A tracker that was asked for is not there."""


class Tracker(Protocol):
    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in a folder. Events of an older run after the step that this one resumes at are not shown. The job is
    there as text, and its options as what runs are told apart by (hparams).
    """

    def __init__(self, folder: Path, resume_step: int | None, job: Mapping[str, Any] | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(str(folder), purge_step=(resume_step or 0) + 1, max_queue=1000)
        if job:
            step = (resume_step or 0) + 1
            self._writer.add_text("job", f"```\n{json.dumps(job, indent=1)}\n```", step)
            # not add_hparams, which would make a run of its own beside this one
            for summary in hparams(dict(_scalars(job)), {"loss_metrics/global_avg_loss": 0.0}):
                self._writer.file_writer.add_summary(summary, step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


def _scalars(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """Dotted name and value of what is no list."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            yield prefix + key, value


class WeightsAndBiases:
    """One W&B run for a job, also over restarts: its id is kept in the folder. Project, entity and mode are wandb's own
    settings (WANDB_PROJECT and others)."""

    def __init__(self, folder: Path, resume_step: int | None, name: str, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise TrackingError(
                "metrics.enable_wandb is set, but wandb is not installed; "
                "pip install 'torchtitan-toml[wandb]', or leave it out"
            ) from None
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / "wandb_run_id"
        run_id = id_file.read_text().strip() if resume_step is not None and id_file.exists() else None
        tags = config.get("job", {}).get("tags") or None
        self._run = wandb.init(dir=str(folder), name=name, tags=tags, config=config, id=run_id, resume="allow")
        id_file.write_text(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
