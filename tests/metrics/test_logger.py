"""Metrics: rates over the time and steps of a window, MFU only for known peaks, no device waits between logged
steps, and a metrics.jsonl that survives crashes and resumes."""

import json
import logging
import math
import re
import time
import types

import pytest
import torch

from tests.support.logged_runs import Clock, build, png_size, write_run
from torchtitan.metrics import console, device, plot
from torchtitan.metrics.curves import smoothed
from torchtitan.metrics.json_lines import JsonLinesWriter, read_records
from torchtitan.metrics.logger import MetricsLogger, tags_of


class Recorder:
    """A tracker that records its calls."""

    def __init__(self):
        self.logged, self.closed = {}, False

    def log(self, values, step):
        self.logged.setdefault(step, {}).update(values)

    def close(self):
        self.closed = True


def train(metrics: MetricsLogger, clock: Clock, first: int, last: int, seconds: float = 0.5) -> None:
    for step in range(first, last + 1):
        clock.now += seconds
        loss, norm = torch.tensor(8.0 - step / 10), torch.tensor(float(step))
        metrics.record(step, loss=loss, grad_norm=norm, lr=step / 1000, tokens=100, data_seconds=0.1)


def test_rates_are_those_of_the_window(tmp_path):
    clock = Clock()
    metrics = build(tmp_path, clock)
    clock.now += 50  # time before the first step is not part of the first window
    metrics.start()
    train(metrics, clock, 1, 10)
    metrics.close()
    records = read_records(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 4, 8, 10]  # first, every fourth, last
    required = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "data_seconds"}
    for record in records:
        assert required | {"memory_gib", "perplexity"} == set(record) - {"marked"} and "mfu" not in record
        assert record["tokens"] == record["step"] * 100
        assert record["tokens_per_second"] == pytest.approx(200)
        assert record["step_seconds"] == pytest.approx(0.5)  # divided by the steps of the window, not by log_freq
        assert record["data_seconds"] == pytest.approx(0.1)
        assert record["lr"] == record["step"] / 1000
        assert record["grad_norm"] == record["step"]
        assert 0.01 < record["memory_gib"] < 100 and record["perplexity"] == pytest.approx(math.exp(record["loss"]))
    assert [r["loss"] for r in records] == [torch.tensor(8 - s / 10).item() for s in (1, 4, 8, 10)]


def test_marked_windows_are_left_out_of_averages(tmp_path, caplog):
    clock = Clock()
    metrics = build(tmp_path, clock, log_freq=1)
    with caplog.at_level(logging.INFO, logger="torchtitan.metrics"):
        train(metrics, clock, 1, 1, seconds=30)  # compiles
        train(metrics, clock, 2, 4)
        metrics.record_validation(4, 7.7)
        metrics.mark("checkpoint")
        clock.now += 20
        train(metrics, clock, 5, 10)
    metrics.close()
    records = [r for r in read_records(tmp_path / "metrics.jsonl") if "loss" in r]
    marks = {r["step"]: r["marked"] for r in records if "marked" in r}
    assert marks == {1: ["first"], 5: ["validation", "checkpoint"]}
    assert records[4]["step_seconds"] == pytest.approx(20.5)  # including the marked step
    assert "validation loss 7.7000" in metrics.summary({}) and "200 tokens/s" in metrics.summary({})
    lines = caplog.messages
    assert "-    left" in lines[0] and "(first)" in lines[0]  # no estimate yet
    assert "0:04 left" in lines[1]
    assert lines[4] == "step  4/10  validation loss 7.7000"
    assert "(validation, checkpoint)" in lines[5] and "0:02 left" in lines[5]
    assert "left" not in lines[-1]


def test_nothing_is_read_between_logged_steps(tmp_path):
    class Untouchable:
        def __float__(self):
            raise AssertionError("read")

    metrics = build(tmp_path)
    for step in (2, 3, 5):
        assert not metrics.due(step)
        metrics.record(step, loss=Untouchable(), grad_norm=Untouchable(), lr=1, tokens=1, data_seconds=0)
    with pytest.raises(AssertionError, match="read"):
        metrics.record(8, loss=Untouchable(), grad_norm=None, lr=1, tokens=1, data_seconds=0)


def test_a_resume_drops_rows_of_repeated_steps(tmp_path):
    clock = Clock()
    metrics = build(tmp_path, clock)
    train(metrics, clock, 1, 8)
    metrics.record_validation(8, 6.5)
    metrics.close()
    path = tmp_path / "metrics.jsonl"
    until_4 = path.read_text().splitlines(keepends=True)[:2]
    with path.open("a") as file:
        file.write('{"step": 9, "lo')  # killed while writing

    metrics = build(tmp_path, clock, resume_step=4, tokens_seen=400)
    assert path.read_text() == "".join(until_4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.redone.jsonl"]
    train(metrics, clock, 5, 10)
    metrics.close()
    records = read_records(path)
    assert [r["step"] for r in records] == [1, 4, 8, 10]
    assert [r["tokens"] for r in records] == [100, 400, 800, 1000]
    assert records[2]["marked"] == ["first"]
    assert metrics.summary({}).startswith("step 10/10, loss 7.0000 (step 8: 7.2000), 200 tokens/s, 600 tokens in 0:03")


def test_crash_while_rewriting_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 9}\n')

    def crash(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        JsonLinesWriter(path, 1)
    assert path.read_text() == '{"step": 1}\n{"step": 9}\n'


def test_links_are_replaced_and_not_followed(tmp_path, monkeypatch):
    (tmp_path / "another's").write_text("theirs")
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 9}\n')
    for name in ("metrics.redone.jsonl", "metrics.jsonl.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "another's")
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(descriptor))
    JsonLinesWriter(path, 1).close()
    assert (tmp_path / "another's").read_text() == "theirs"
    assert path.read_text() == '{"step": 1}\n' and len(synced) == 2
    assert (tmp_path / "metrics.redone.jsonl").read_text() == '{"step": 9}\n'


@pytest.mark.parametrize("resume_step", [None, 0])
def test_a_new_run_keeps_the_old_file(tmp_path, resume_step):
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    build(tmp_path, resume_step=resume_step).close()
    assert (tmp_path / "metrics.previous.jsonl").read_text() == '{"step": 7}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_malformed_rows_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\n[1]\n{"loss": 1}\n\n{"step": "2"}\n{"step": 3}\n{"step": true}\n{"st')
    assert read_records(path) == [{"step": 1}, {"step": 3}]


def test_json_has_no_nan(tmp_path):
    clock = Clock()
    metrics = build(tmp_path, clock)
    clock.now += 1
    metrics.record(4, loss=torch.tensor(float("nan")), grad_norm=None, lr=1.0, tokens=1, data_seconds=0, extra={"x": 2})
    metrics.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert record["loss"] is None and record["grad_norm"] is None and record["x"] == 2.0


def test_every_row_is_written_at_once(tmp_path):
    clock = Clock()
    metrics = build(tmp_path, clock)
    train(metrics, clock, 1, 4)
    assert len(read_records(tmp_path / "metrics.jsonl")) == 2
    metrics.close()


def test_other_ranks_do_not_write(tmp_path):
    clock = Clock()
    metrics = build(tmp_path, clock, writes=False)
    train(metrics, clock, 1, 10)
    metrics.record_validation(10, 1.0)
    metrics.close()
    assert list(tmp_path.iterdir()) == []


# MFU and memory


@pytest.mark.parametrize(
    "name, tera",
    {
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA A100-PCIE-40GB": 312,
        "NVIDIA A10": 125,
        "NVIDIA L40S": 362,
        "NVIDIA H20": 148,
        "NVIDIA H800": 989,
        "NVIDIA H100": 989,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H100 NVL": 835,
        "NVIDIA H200": 989,
        "NVIDIA H200 NVL": 835,
        "NVIDIA B200": 2250,
        "NVIDIA GB200": 2500,
        "AMD Instinct MI300X": 1307,
        "AMD Instinct MI325X": 1307,
        "AMD Instinct MI355X": 2517,
    }.items(),
)
def test_peak_flops_of_known_gpus(name, tera):
    peak = device.peak_of(name, torch.bfloat16)
    assert peak.flops == tera * 1e12
    assert name in peak.reason and f"{tera:,} TFLOP/s" in peak.reason
    assert device.peak_of(name, torch.float32).flops is None


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A10G", "NVIDIA GeForce RTX 4090 D", "NVIDIA GH200 480GB", "Tesla T4", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"],
)
def test_unknown_peaks_are_not_guessed(name):
    peak = device.peak_of(name, torch.bfloat16)
    assert peak.flops is None and name in peak.reason


def fake_cuda(monkeypatch) -> list[str]:
    calls = []
    stats = {
        "active_bytes.all.peak": 2**30,
        "reserved_bytes.all.peak": 3 * 2**30,
        "num_alloc_retries": 1,
        "num_ooms": 0,
    }
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: calls.append("reset"))
    properties = types.SimpleNamespace(total_memory=12 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return calls


def test_gpu_figures(tmp_path, monkeypatch, caplog):
    """Llama 3.1 8B at 5,762 tokens/s on each of two devices has an MFU of 33.7 % (full attention counted)."""
    calls = fake_cuda(monkeypatch)
    clock, tracker = Clock(), Recorder()
    metrics = build(tmp_path, clock, device=torch.device("cuda", 0), trackers=[tracker])
    clock.now += 1
    with caplog.at_level(logging.INFO, logger="torchtitan.metrics"):
        metrics.record(1, loss=torch.tensor(2.0), grad_norm=None, lr=0.1, tokens=2 * 5762, data_seconds=0.25)
    metrics.close()
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert record["mfu_full"] == pytest.approx(5762 * 57.91e9 / 989e12)
    assert record["mfu_full"] == pytest.approx(0.337, abs=5e-4)
    assert record["mfu"] == pytest.approx(0.337 * 51.47 / 57.91, abs=5e-4)
    assert record["memory_gib"] == 3.0 and record["memory_active_gib"] == 1.0 and calls == ["reset"]
    assert "mfu 30.0%" in caplog.messages[0] and "  3.00 GiB" in caplog.messages[0]
    tags = tracker.logged[1]
    assert tags["mfu(%)"] == tags["mfu_full(%)"] == pytest.approx(33.7, abs=0.05)
    assert tags["mfu_causal(%)"] == pytest.approx(30.0, abs=0.05)
    assert tags["throughput(tps)"] == pytest.approx(5762)  # per device, as in PyTorch's torchtitan
    assert tags["tflops"] == pytest.approx(5762 * 57.91e9 / 1e12)
    assert tags["memory/max_active(GiB)"] == 1.0 and tags["memory/max_reserved(%)"] == 25.0
    assert tags["memory/num_alloc_retries"] == 1 and tags["memory/num_ooms"] == 0
    assert metrics.header() == (
        "8.03 G parameters, 51.47 GFLOP per token (attention causal; 57.91 GFLOP counting it in full), "
        "MFU against 989 TFLOP/s, dense bfloat16 of NVIDIA H200"
    )


def test_header_without_a_peak(tmp_path):
    header = build(tmp_path, num_parameters=7_200_000).header()
    assert header.startswith("7.2 M parameters, ") and header.endswith("no MFU: no peak is known for a cpu device")


def test_the_header_of_a_bidirectional_model_has_one_count(tmp_path):
    header = build(tmp_path, flops_per_token_full=5e9, flops_per_token_causal=5e9).header()
    assert "FLOP per token, no MFU" in header and "causal" not in header


# Console


def record_of(step: int, **changes):
    base = dict(step=step, loss=5.31241, grad_norm=1.2345, lr=7.2e-4, tokens_per_second=5110.4, memory_gib=0.887)
    return base | changes


def test_console_line():
    line = console.training_line(record_of(7), 40, 35.2)
    assert line == "step  7/40  loss   5.3124  grad   1.234  lr 7.20e-04      5,110 tok/s    0.89 GiB     0:35 left"
    other = console.training_line(record_of(12, loss=10.1, grad_norm=None, tokens_per_second=1_234_567.0), 40, 4000)
    assert len(other) == len(line) and "grad       -" in other and "1h 06m left" in other
    assert "lr" not in console.training_line(record_of(7), 40, 1.0, log_lr=False)
    of_pairs = console.training_line(record_of(7, reward_accuracy=0.8125), 40, 35.2)
    assert of_pairs == line.replace("  lr", "  reward accuracy 0.812  lr")


def test_colour_changes_no_text():
    plain, painted = (console.training_line(record_of(7, mfu=0.4), 40, 35.2, color=c) for c in (False, True))
    assert "\033" not in plain and re.sub(r"\033\[\d+m", "", painted) == plain != painted
    assert "\033[1m" in console.validation_line(1, 10, 2.0, color=True)


def test_format_of_durations():
    texts = [console.duration(s) for s in (0.4, 7, 59.6, 754, 18180, float("inf"))]
    assert texts == ["0:00", "0:07", "1:00", "12:34", "5h 03m", "-"]


def test_the_summary_names_the_written_files(tmp_path):
    clock = Clock()
    metrics = build(tmp_path, clock, total_steps=1)
    train(metrics, clock, 1, 1)
    lines = metrics.summary({"metrics": metrics.path, "picture": "x.png"}).splitlines()
    assert lines[1:] == [f"  metrics  {tmp_path}/metrics.jsonl", "  picture  x.png"]
    assert (
        build(tmp_path, resume_step=10).summary({})
        == "nothing was left to train; raise training.steps, training.epochs or training.tokens to continue, or start "
        "from scratch in another job.dump_folder"
    )


# Trackers (each one is tested in test_trackers.py)


def test_trackers_see_every_logged_step(tmp_path):
    clock, tracker = Clock(), Recorder()
    metrics = build(tmp_path, clock, trackers=[tracker])
    train(metrics, clock, 1, 8)
    metrics.record_validation(8, 6.5)
    metrics.close()
    assert list(tracker.logged) == [1, 4, 8] and tracker.closed
    assert tracker.logged[8]["validation_metrics/loss"] == 6.5
    tags = "loss_metrics/global_avg_loss|throughput(tps)|tflops|time_metrics/end_to_end(s)|time_metrics/data_loading(s)"
    tags += "|time_metrics/data_loading(%)|grad_norm|lr|n_tokens_seen|memory/max_resident(GiB)"
    assert set(tracker.logged[4]) == set(tags.split("|"))
    assert tracker.logged[4]["time_metrics/data_loading(%)"] == pytest.approx(20)
    assert tracker.logged[4]["n_tokens_seen"] == 400


def test_additional_losses_have_tags():
    record = dict(step=1, loss=2.0, grad_norm=None, lr=1.0, tokens=1, tokens_per_second=1.0, step_seconds=1.0)
    tags = tags_of(record | {"data_seconds": 0.0, "max_loss": 3.0, "mtp_loss": 4.0}, 1, 1.0)
    assert tags["loss_metrics/global_max_loss"] == 3.0 and "grad_norm" not in tags
    assert tags["loss_metrics/global_avg_mtp_loss"] == 4.0


# The plot


# by category: a ResourceWarning may come from what an earlier test left for the collector of garbage
@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
@pytest.mark.parametrize(
    "losses, changes",
    [
        ([7.0, 6.0, float("nan"), 5.0, 4.5], {}),
        ([7.0], {"marked": ["first"], "lr": 0.0}),
        ([float("nan")], {}),
    ],
    ids=["gap", "one step", "nothing finite"],
)
def test_a_plot_of_any_run_is_written(tmp_path, losses, changes):
    write_run(tmp_path / "metrics.jsonl", losses, **changes)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "validation_loss": 5.5}\n{"step": 5, "validation_loss": null}\n{"st')
    assert plot.draw_training_curve(tmp_path / "metrics.jsonl", tmp_path / "training.png", "a run")
    assert png_size(tmp_path / "training.png") == (1500, 1080)


def test_the_plot_shows_loss_rate_and_speed(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plot, "save_picture", lambda figure, path: figures.append(figure))
    write_run(tmp_path / "metrics.jsonl", [7.0, 6.0, 5.0])
    plot.draw_training_curve(tmp_path / "metrics.jsonl", tmp_path / "training.png", "a run")
    loss, rate, speed = figures[0].axes
    assert loss.get_title(loc="left") == "a run"
    assert list(loss.lines[0].get_ydata()) == [7.0, 6.0, 5.0] and list(loss.lines[0].get_xdata()) == [1, 2, 3]
    assert list(rate.lines[0].get_ydata()) == [1e-3 / step for step in (1, 2, 3)]
    texts = [text.get_text() for axes in figures[0].axes for text in axes.texts]
    assert {"6.000", "3.3e-04", "tokens per second, median 5,000"} <= set(texts)


def test_without_rows_there_is_no_plot(tmp_path):
    write_run(tmp_path / "metrics.jsonl", [])
    assert not plot.draw_training_curve(tmp_path / "metrics.jsonl", tmp_path / "training.png", "a run")
    assert not (tmp_path / "training.png").exists()


def test_smoothing_is_centred_except_at_the_end():
    line = [float(i) for i in range(90)]
    assert smoothed(line)[:-3] == pytest.approx(line[:-3])  # a straight line is unchanged
    assert smoothed(line)[-3:] == pytest.approx([86.0] * 3)  # the mean of the last window
    assert smoothed([5.0] * 59 + [9.0])[-1] == pytest.approx(5.8)
    assert smoothed([2.0, 1.0]) == [2.0, 1.0] and smoothed([3.0, 2.0, 1.0])[-1] == 2.0
    noisy = [1.0 if i % 2 else -1.0 for i in range(300)]
    assert max(map(abs, smoothed(noisy)[20:-20])) < 0.1
    spiked = [1e300, 1e-9, math.inf, *[0.3] * 100, math.nan]
    assert smoothed(spiked)[50:-1] == [0.3] * 53  # neither a spike nor its running sum reaches other windows


def test_smoothing_takes_time_in_proportion_to_the_points():
    start = time.process_time()
    smoothed([1.0] * 60_000)
    assert time.process_time() - start < 3
