"""The tracker for TensorBoard."""

import json
from collections.abc import Mapping

from torchtitan.metrics.trackers.interface import Histogram, TrackedRun, Tracker


class TensorBoard(Tracker):
    """Event files in a folder, with the job as text and its options as hparams.

    TensorBoard hides the events after a step at which the run resumes or to which it returns.
    """

    name, package, runs_on_all_ranks = "TensorBoard", "tensorboard", True

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # the import takes a second

        self._run, step = run, (run.resume_step or 0) + 1
        self._writer = SummaryWriter(str(run.events), purge_step=step, max_queue=1000)
        self._tell_job(step)

    def _tell_job(self, step: int) -> None:
        from torch.utils.tensorboard.summary import hparams

        if self._run.job:
            self._writer.add_text("job", f"```\n{json.dumps(self._run.job, indent=1)}\n```", step)
            # not add_hparams, which would create a separate run next to this one
            for summary in hparams(self._run.options(), {"loss_metrics/global_avg_loss": 0.0}):
                self._writer.file_writer.add_summary(summary, step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def histograms(self, histograms: Mapping[str, Histogram], step: int) -> None:
        for tag, histogram in histograms.items():
            self._writer.add_histogram_raw(
                tag,
                min=histogram.minimum,
                max=histogram.maximum,
                num=histogram.number,
                sum=histogram.sum,
                sum_squares=histogram.sum_of_squares,
                bucket_limits=list(histogram.limits),
                bucket_counts=list(histogram.counts),
                global_step=step,
            )

    def go_back(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # hides events from this step on, as purge_step does at the beginning of a file
        started = SessionLog(status=SessionLog.START)
        self._writer.file_writer.add_event(Event(session_log=started), step + 1)
        self._tell_job(step + 1)  # once more, because the event above hides it if the run began at this step

    def close(self) -> None:
        self._writer.close()
