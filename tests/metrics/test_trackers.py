"""Tests of each tracker, and that a tracker that raises, blocks or cannot be reached costs only its own records.

MLflow and Aim run where they are installed (extras mlflow and aim). Elsewhere, and in addition, fakes with their
documented interface record the calls.
"""

import importlib.util
import json
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from tests.support import jobs
from tests.support.judged import anywhere, lines  # noqa: F401
from tests.support.logged_runs import build
from tests.support.pool import run_ranks
from torchtitan.metrics.logger import histogram
from torchtitan.metrics.trackers import interface
from torchtitan.metrics.trackers.aim import Aim
from torchtitan.metrics.trackers.interface import TrackedRun, TrackerThread
from torchtitan.metrics.trackers.mlflow import MLflow, allowed_name
from torchtitan.metrics.trackers.tensorboard import TensorBoard
from torchtitan.metrics.trackers.wandb import WeightsAndBiases

QUICK = (0.001,)


class Service:
    """A tracker that fails `failures` times, and with `blocks` waits until `free` is set."""

    def __init__(self, failures: int = 0, blocks: bool = False):
        self.failures, self.logged, self.closed = failures, [], False
        self.free = threading.Event()
        self.busy = threading.Event()
        if not blocks:
            self.free.set()

    def log(self, values, step):
        self.busy.set()
        assert self.free.wait(30)
        if self.failures:
            self.failures -= 1
            raise OSError(5, "planted")
        self.logged.append(step)

    def close(self):
        self.closed = True


def test_a_tracker_that_works_gets_every_record_in_order():
    service = Service()
    tracker = TrackerThread("it", lambda: service)
    for step in range(50):
        tracker.log({}, step)
    tracker.close()
    assert service.logged == list(range(50)) and service.closed and tracker.dropped == 0


def test_a_tracker_that_raises_is_retried_and_loses_nothing(caplog):
    service = Service(failures=3)
    tracker = TrackerThread("it", lambda: service, pauses=QUICK)
    for step in range(5):
        tracker.log({}, step)
    tracker._waiting.put(None)
    tracker._thread.join(30)
    assert service.logged == list(range(5)) and service.closed
    assert "it fails (OSError: [Errno 5] planted): the run continues" in caplog.text
    assert "it works again after 3 tries" in caplog.text
    assert caplog.text.count("planted") == 1


def test_a_tracker_that_cannot_be_opened_is_retried():
    tries, service = [], Service()

    def open_it():
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionError("refused")
        return service

    tracker = TrackerThread("it", open_it, pauses=QUICK)
    tracker.log({}, 1)
    tracker._waiting.put(None)
    tracker._thread.join(30)
    assert service.logged == [1] and len(tries) == 4


def test_a_tracker_that_always_fails_reports_its_missing_records(caplog):
    tracker = TrackerThread("it", lambda: Service(failures=10**9), pauses=(60.0,))
    for step in range(3):
        tracker.log({}, step)
    tracker.close()
    assert not tracker._thread.is_alive()
    assert "it lacks 3 records; metrics.jsonl has them all" in caplog.text


def test_a_tracker_that_blocks_delays_neither_the_run_nor_its_end(caplog, monkeypatch):
    monkeypatch.setattr(interface, "LONGEST_QUEUE", 4)
    service = Service(blocks=True)
    tracker = TrackerThread("it", lambda: service, close_seconds=0.01)
    tracker.log({}, 0)
    assert service.busy.wait(30)
    for step in range(1, 10):
        tracker.log({}, step)  # returns at once
    assert tracker.dropped == 5
    tracker.close()
    assert "does not keep up" in caplog.text and "is abandoned" in caplog.text
    service.free.set()
    tracker._thread.join(30)
    assert service.logged == [0, 1, 2, 3, 4]


def test_control_without_patient_tracker_an_error_ends_the_run():
    with pytest.raises(OSError, match="planted"):
        Service(failures=1).log({}, 1)


def test_a_failing_tensorboard_changes_no_loss(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts")
    plain, digest = run_ranks(1, jobs.train, jobs.arguments(tmp_path / "plain", texts, training__steps=3))[0]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tb").write_text("a file where its folder has to be")
    options = dict(training__steps=3, metrics__enable_tensorboard=True)
    rows, same = run_ranks(1, jobs.train, jobs.arguments(tmp_path / "run", texts, **options))[0]
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain]
    assert same == digest


# Each of them


JOB = {"training": {"steps": 2, "shuffle": True, "sources": [{"weight": 1.0}]}, "optimizer": {"lr": 0.5}}


def run_description(folder: Path, resume_step: int | None = None, job: dict | None = None) -> TrackedRun:
    return TrackedRun(folder, folder / "tb", resume_step, "a job", job or {})


def test_tensorboard_shows_a_resumed_run_as_one(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps in ((None, (1, 2, 3)), (1, (2,))):
        board = TensorBoard(run_description(tmp_path, resume_step))
        for step in steps:
            board.log({"lr": step * 10.0 + (resume_step or 0)}, step)
        board.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("lr")] == [(1, 10.0), (2, 21.0)]


def test_tensorboard_shows_a_repeated_step_once(tmp_path):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator  # as TensorBoard uses

    boards = []

    def board() -> TensorBoard:
        boards.append(TensorBoard(run_description(tmp_path, resume_step=1, job=JOB)))
        return boards[-1]

    metrics = build(tmp_path, trackers=[TrackerThread("it", board)])
    for step in (2, 3, 4):
        metrics.record_validation(step, 10.0 * step)
    metrics.go_back(1, 0)
    for step in (2, 3):
        metrics.record_validation(step, 10.0 * step + 1)
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    shown = [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors("validation_metrics/loss")]
    assert shown == [(2, 21.0), (3, 31.0)]
    assert len(boards) == 1 and len(events.Tensors("job/text_summary")) == 1


def test_tensorboard_holds_the_job(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    job = {"training": {"steps": 2, "shuffle": True, "sources": [{"weight": 1.0}]}, "optimizer": {"lr": 0.5}}
    TensorBoard(run_description(tmp_path, job=job)).close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    (text,) = events.Tensors("job/text_summary")
    assert json.loads(text.tensor_proto.string_val[0].decode().strip("`\n")) == job
    plugin = events.PluginTagToContent("hparams")
    start = HParamsPluginData.FromString(plugin["_hparams_/session_start_info"]).session_start_info
    values = {name: value.ListFields()[0][1] for name, value in start.hparams.items()}
    assert values == {"training.steps": 2, "training.shuffle": True, "optimizer.lr": 0.5}
    assert [path.name for path in (tmp_path / "tb").iterdir() if path.is_dir()] == []  # one run, not two


def test_wandb_continues_its_run(tmp_path, monkeypatch):
    calls = []

    class TrackedRun:
        def __init__(self, **options):
            calls.append(options)
            self.id = options["id"] or f"run{len(calls)}"

        def log(self, values, step):
            calls.append((values, step))

        def finish(self):
            calls.append("finish")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=TrackedRun))
    job = {"job": {"tags": ["warm", "9m"]}, "training": {"steps": 2}}
    for resume_step, expected_id in ((None, None), (5, "run1"), (None, None)):
        calls_before = len(calls)
        tracker = WeightsAndBiases(run_description(tmp_path / "run", resume_step, job))
        tracker.log({"lr": 1.0}, 3)
        tracker.close()
        options = dict(dir=str(tmp_path / "run"), name="a job", tags=["warm", "9m"], config=job)
        options |= dict(id=expected_id, resume="allow")
        assert calls[calls_before:] == [options, ({"lr": 1.0}, 3), "finish"]


def test_wandb_keeps_the_first_value_of_a_repeated_step(tmp_path, monkeypatch):
    logged = {}

    class TrackedRun:
        id = "run1"

        def __init__(self, **options):
            pass

        def log(self, values, step):
            if step > max(logged, default=0):  # as in wandb: steps only grow, and late records are ignored
                logged[step] = values

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=TrackedRun))
    tracker = WeightsAndBiases(run_description(tmp_path))
    for step, loss in ((1, 4.0), (2, 3.0), (2, 3.5), (3, 2.0)):
        tracker.log({"loss": loss}, step)
    assert logged == {1: {"loss": 4.0}, 2: {"loss": 3.0}, 3: {"loss": 2.0}}


def test_a_user_without_a_home_is_asked_to_log_in_to_wandb(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert "run wandb login once" in str(WeightsAndBiases.obstacle())


class Recorder:
    """A fake package that records all calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, args, options))
            return types.SimpleNamespace(experiment_id="7", info=types.SimpleNamespace(run_id="run1"), hash="run1")

        return call


def test_mlflow_continues_its_run(tmp_path, monkeypatch):
    client = Recorder()
    entities = types.SimpleNamespace(Param=lambda *it: it, Metric=lambda key, value, time, step: (key, value, step))
    tracking = types.SimpleNamespace(MlflowClient=lambda: client)
    for name, module in (("mlflow", tracking), ("mlflow.entities", entities), ("mlflow.tracking", tracking)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    first = MLflow(run_description(tmp_path, job=JOB | {"job": {"tags": ["warm"]}}))
    first.log({"throughput(tps)": 2.0, "mfu(%)": 1.0, "loss_metrics/global_avg_loss": 3.0}, 4)
    first.close()
    parameters = [("training.steps", "2"), ("training.shuffle", "True"), ("optimizer.lr", "0.5")]
    metrics = [("throughput_tps", 2.0, 4), ("mfu_percent", 1.0, 4), ("loss_metrics/global_avg_loss", 3.0, 4)]
    assert client.calls == [
        ("get_experiment_by_name", ("mine",), {}),
        ("create_run", ("7",), {"run_name": "a job", "tags": {"warm": ""}}),
        ("log_batch", ("run1",), {"params": parameters}),
        ("log_batch", ("run1",), {"metrics": metrics}),
        ("set_terminated", ("run1",), {}),
    ]
    client.calls.clear()
    MLflow(run_description(tmp_path, resume_step=4, job=JOB)).close()
    assert client.calls == [("update_run", ("run1",), {"status": "RUNNING"}), ("set_terminated", ("run1",), {})]


def test_metric_names_are_converted_for_mlflow():
    names = ["time_metrics/data_loading(%)", "memory/max_active(GiB)", "lr", "time_metrics/end_to_end(s)"]
    expected = ["time_metrics/data_loading_percent", "memory/max_active_GiB", "lr", "time_metrics/end_to_end_s"]
    assert [allowed_name(name) for name in names] == expected


def test_aim_continues_its_run(tmp_path, monkeypatch):
    runs = []

    class FakeRun(dict):
        def __init__(self, number, **options):
            self.hash, self.options, self.tracked = number or f"hash{len(runs)}", options, []
            runs.append(self)

        def track(self, values, step):
            self.tracked.append((values, step))

        def close(self):
            self.tracked.append("closed")

    monkeypatch.setitem(sys.modules, "aim", types.SimpleNamespace(Run=FakeRun))
    monkeypatch.delenv("AIM_REPO", raising=False)
    for resume_step in (None, 3, None):
        tracker = Aim(run_description(tmp_path, resume_step, JOB))
        tracker.log({"lr": 1.0}, 4)
        tracker.close()
    assert [run.hash for run in runs] == ["hash0", "hash0", "hash2"]
    assert runs[0] == {"job": JOB} and runs[0].tracked == [({"lr": 1.0}, 4), "closed"]
    assert runs[0].options["repo"] == str(tmp_path) and runs[0].options["experiment"] == "a job"
    monkeypatch.setenv("AIM_REPO", "aim://host:1")
    Aim(run_description(tmp_path))
    assert runs[-1].options["repo"] == "aim://host:1"


@pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed: pip install '.[mlflow]'"
)
def test_the_installed_mlflow(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for resume_step, step in ((None, 1), (1, 2)):
        tracker = MLflow(run_description(tmp_path, resume_step, JOB))
        tracker.log({"throughput(tps)": float(step)}, step)
        tracker.close()
    run = MlflowClient().get_run((tmp_path / "mlflow_run_id").read_text())
    assert run.data.params["optimizer.lr"] == "0.5" and run.info.status == "FINISHED"
    history = MlflowClient().get_metric_history(run.info.run_id, "throughput_tps")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 2.0)]


@pytest.mark.skipif(not importlib.util.find_spec("aim"), reason="needs pip install '.[aim]'")
def test_the_installed_aim(tmp_path):
    import aim

    for resume_step, step in ((None, 1), (1, 2)):
        tracker = Aim(run_description(tmp_path, resume_step, JOB))
        tracker.log({"throughput(tps)": float(step)}, step)
        tracker.close()
    run = aim.Run((tmp_path / "aim_run_id").read_text(), repo=str(tmp_path), system_tracking_interval=None)
    assert run["job"] == JOB
    (metric,) = [metric for metric in run.metrics() if metric.name == "throughput(tps)"]
    assert metric.values.sparse_list()[1] == [1.0, 2.0]
    run.close()


# Faults that check reports


def test_trackers_that_cannot_start_are_refused(monkeypatch):
    find = importlib.util.find_spec
    absent = ("mlflow", "aim", "wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name in absent else find(name, *args))
    faults = lines("--metrics.trackers=mlflow,aim,tensorbord", "--metrics.enable_wandb")
    assert [fault.partition(";")[0] for fault in faults] == [
        'metrics.trackers[0]: given "mlflow"',
        'metrics.trackers[1]: given "aim"',
        'metrics.trackers[2]: given "tensorbord"',
        "metrics.enable_wandb: given true",
    ]
    assert "pip install 'torchtitan-toml[mlflow]', or leave it out" in faults[0]
    assert faults[2].endswith('did you mean "tensorboard"?')


def test_mlflow_without_a_tracking_uri_is_refused(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: name == "mlflow" or find(name, *args))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (fault,) = lines("--metrics.trackers=mlflow")
    assert "allowed: only with MLFLOW_TRACKING_URI in the environment" in fault
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    assert lines("--metrics.trackers=mlflow") == []
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "TRUE")
    (fault,) = lines("--metrics.trackers=mlflow")
    assert "allowed: nothing with DISABLE_MLFLOW_INTEGRATION in the environment; unset it, or leave mlflow out" in fault


def test_flags_and_names_select_the_same_trackers():
    from torchtitan.config.job import trackers_of
    from torchtitan.config.manager import load

    config = load(["--metrics.enable_tensorboard", "--metrics.trackers=tensorboard,aim"])
    assert list(trackers_of(config.metrics).values()) == ["aim", "tensorboard"]


# Histograms


def test_a_histogram_covers_all_finite_values():
    values = torch.tensor([[-1.0, 0.0, 0.25], [0.5, 0.75, 1.0]])
    summary = histogram(values)
    assert (summary.minimum, summary.maximum, summary.number, sum(summary.counts)) == (-1.0, 1.0, 6, 6)
    assert summary.sum == pytest.approx(1.5) and summary.sum_of_squares == pytest.approx(1 + 0.0625 + 0.25 + 0.5625 + 1)
    assert summary.limits[-1] == 1.0 and summary.counts[0] == summary.counts[-1] == 1
    assert sum(histogram(torch.zeros(5)).counts) == 5
    finite_only = histogram(torch.tensor([1.0, torch.nan, torch.inf, 2.0]))
    assert (finite_only.minimum, finite_only.maximum, finite_only.number, sum(finite_only.counts)) == (1.0, 2.0, 2, 2)
    assert histogram(torch.tensor([torch.nan])).number == 0


def read_histograms(folder: Path) -> dict[str, list]:
    """Read all histograms of a run from its TensorBoard events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"), size_guidance={"histograms": 0}).Reload()
    histograms = {}
    for tag in events.Tags()["histograms"]:
        (event,) = events.Histograms(tag)
        value = event.histogram_value
        histograms[tag] = [event.step, value.num, value.sum, value.sum_squares, value.min, value.max]
    return histograms


@pytest.mark.parametrize("plan", [{}, {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}])
def test_histograms_of_two_ranks_equal_those_of_one(plan, tmp_path, one_rank_histograms):
    ranks = 2  # FSDP without another degree
    options = dict(training__steps=2, metrics__enable_tensorboard=True, metrics__histogram_freq=2)
    options |= {f"parallelism__{name}": degree for name, degree in plan.items()}
    options |= {} if plan else {"training__local_batch_size": 4}
    run_ranks(ranks, jobs.train, jobs.arguments(tmp_path, jobs.write_texts(tmp_path / "texts"), **options))
    histograms = read_histograms(tmp_path)
    assert histograms.keys() == one_rank_histograms.keys() and "gradients/layers.3.attention.wq.weight" in histograms
    for tag, expected in one_rank_histograms.items():
        assert histograms[tag] == pytest.approx(expected, rel=1e-3, abs=1e-4), tag  # sums of a step in another order


@pytest.fixture(scope="module")
def one_rank_histograms(tmp_path_factory) -> dict[str, list]:
    folder = tmp_path_factory.mktemp("one")
    options = dict(training__steps=2, metrics__enable_tensorboard=True, metrics__histogram_freq=2)
    run_ranks(1, jobs.train, jobs.arguments(folder, jobs.write_texts(folder / "texts"), **options))
    return read_histograms(folder)
