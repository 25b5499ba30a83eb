"""Runs of any length are read into a bounded memory, with their extremes, and short ones in full."""

import json
import math
import random
import tracemalloc
from types import SimpleNamespace

import pytest

from tests.support.pool import run_alone
from torchtitan.commands import report, sweep
from torchtitan.metrics import curves
from torchtitan.metrics.curves import EXTREME, MOST_GROUPS, Thinner, read_thinned, smoothed, smoothed_losses
from torchtitan.metrics.json_lines import JsonLinesWriter, iterate_records, read_records


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def long_run(count, generator):
    for step in range(1, count + 1):
        yield {"step": step, "loss": 2 + math.exp(-step / count) + generator.random(), "lr": 1 / step}
        if step % 1000 == 0:
            yield {"step": step, "validation_loss": generator.random()}
        if step % 2000 == 0:
            yield {"step": step, "event": "goodput", "saved": True, "train_seconds": float(step)}


@pytest.mark.parametrize("count", [1, 7, MOST_GROUPS])
def test_a_short_run_is_read_in_full(count, tmp_path):
    path = write(tmp_path / "metrics.jsonl", long_run(count, random.Random(0)))
    assert read_thinned(path, ("loss", "lr")) == read_records(path)


@pytest.mark.parametrize("seed", range(4))
def test_extremes_and_ends_of_a_long_run_are_retained(seed, tmp_path):
    generator = random.Random(seed)
    rows = list(long_run(30_000, generator))
    steps = [row for row in rows if "loss" in row]
    spikes = generator.sample(range(1, len(steps) - 1), 5)
    for number, value in zip(spikes, (90.0, 80.0, -3.0, None, 70.0), strict=True):
        steps[number]["loss"] = value
    path = write(tmp_path / "metrics.jsonl", rows)
    records = read_thinned(path, ("loss", "lr"))
    retained = [record for record in records if "loss" in record]
    assert {steps[0]["step"], steps[-1]["step"], *(steps[number]["step"] for number in spikes)} <= {
        row["step"] for row in retained
    }
    assert len(retained) < 8 * MOST_GROUPS and [row["step"] for row in records] == sorted(
        row["step"] for row in records
    )
    assert [r for r in records if "loss" not in r] == [r for r in rows if "loss" not in r]
    plain = {row["step"]: row for row in steps}
    assert all(plain[row["step"]].items() <= row.items() for row in retained)
    # smoothing: as of the means of all rows, not of the extremes alone
    exact = dict(zip(plain, smoothed([row["loss"] if row["loss"] else math.nan for row in steps]), strict=True))
    for row, value in list(zip(retained, smoothed_losses(retained), strict=True))[3000:]:
        assert value == pytest.approx(exact[row["step"]], abs=0.06)  # a spike enters the window some steps earlier
    # averages: of evenly spaced rows
    typical = [row["step"] for row in retained if EXTREME not in row]
    gaps = {later - row for row, later in zip(typical, typical[1:], strict=False)}
    assert len(gaps) == 1


def peak(count):
    """Return the most bytes that are allocated at once while a curve gets `count` rows."""
    tracemalloc.start()
    thinner = Thinner(("loss",), most=64)
    for number in range(count):
        thinner.add(number, {"step": number, "loss": float(number % 97)})
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return size


def test_memory_does_not_grow_with_the_run():
    """It is measured in processes of their own, as threads of other tests may allocate too."""
    assert run_alone(peak, 40_000) < 2 * run_alone(peak, 4_000)


def test_hours_and_lost_losses_of_a_report_are_of_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(curves.Thinner.__init__, "__defaults__", (64,))
    rows = [{"step": step, "loss": 1.0, "step_seconds": 3.6, "tokens": step} for step in range(1, 5001)]
    for step in (1234, 1235, 4000):
        rows[step - 1]["loss"] = None
    write(tmp_path / "metrics.jsonl", rows)
    run = report.read(tmp_path, 0)
    assert len(run.rows) < 1000 and run.rows[-1]["hours"] == pytest.approx(5.0)
    assert [event["step"] for event in run.events] == [1234, 4000]


def test_a_sweep_names_the_step_at_which_the_loss_of_a_long_run_was_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(Thinner.__init__, "__defaults__", (16,))
    rows = [{"step": step, "loss": 2.0 if step < 303 else None, "tokens_per_second": 9.0} for step in range(1, 401)]
    write(tmp_path / "metrics.jsonl", rows)
    assert sweep.figures(SimpleNamespace(folder=tmp_path)) == {"steps": 400, "lost": 303, "tokens/s": 9.0}


def test_a_resume_of_a_long_run_moves_later_records_without_holding_them(tmp_path):
    path = write(tmp_path / "metrics.jsonl", ({"step": step, "loss": 1.0} for step in range(1, 20_001)))
    tracemalloc.start()
    JsonLinesWriter(path, 15_000).close()
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size < 2**20
    assert [row["step"] for row in iterate_records(path)] == list(range(1, 15_001))
    redone = tmp_path / "metrics.redone.jsonl"
    assert [row["step"] for row in iterate_records(redone)] == list(range(15_001, 20_001))
    JsonLinesWriter(path, 15_000).close()
    assert len(read_records(redone)) == 5000 and len(read_records(path)) == 15_000
