"""The tracker for MLflow."""

import os
import re
import time
from collections.abc import Mapping

from torchtitan.metrics.trackers.interface import TrackedRun, Tracker

EXPERIMENT = "torchtitan"
MOST_AT_ONCE = 100
"""Maximum number of parameters that MLflow accepts in one call."""
LONGEST = 500
"""Maximum number of characters of a parameter's value that every MLflow store accepts."""


class MLflow(Tracker):
    """One MLflow run per job, also over restarts: the job's folder stores its id.

    MLflow's own MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME select its destination. Its parameters are the options
    of the first start, because MLflow cannot change them.
    """

    name, package = "MLflow", "mlflow"

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client, id_ = MlflowClient(), run.saved_id(self.package)
        if id_ is not None:
            self._client.update_run(id_, status="RUNNING")
            self._id = id_
            return
        experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        existing = self._client.get_experiment_by_name(experiment_name)
        experiment = self._client.create_experiment(experiment_name) if existing is None else existing.experiment_id
        self._id = self._client.create_run(experiment, run_name=run.name, tags=dict.fromkeys(run.tags, "")).info.run_id
        run.save_id(self.package, self._id)
        parameters = [Param(key, str(value)[:LONGEST]) for key, value in run.options().items()]
        for start in range(0, len(parameters), MOST_AT_ONCE):
            self._client.log_batch(self._id, params=parameters[start : start + MOST_AT_ONCE])

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 10**6
        metrics = [Metric(allowed_name(tag), value, now, step) for tag, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)

    @classmethod
    def obstacle(cls) -> tuple[str, str] | None:
        missing = super().obstacle()
        if os.environ.get(OFF, "").lower() in ("true", "1"):
            return f"nothing with {OFF} in the environment", "unset it, or leave mlflow out"
        if missing is None and not os.environ.get("MLFLOW_TRACKING_URI"):
            allowed = "only with MLFLOW_TRACKING_URI in the environment, the place of MLflow's runs"
            return allowed, "export MLFLOW_TRACKING_URI=http://HOST:5000, the address of an `mlflow server`"
        return missing


OFF = "DISABLE_MLFLOW_INTEGRATION"
"""Environment variable that disables MLflow in programs that integrate it."""


def allowed_name(tag: str) -> str:
    """Replace characters that MLflow forbids: throughput(tps) -> throughput_tps, mfu(%) -> mfu_percent."""
    return re.sub(r"[^\w\-./: ]+", "_", tag.replace("%", "percent")).rstrip("_")
