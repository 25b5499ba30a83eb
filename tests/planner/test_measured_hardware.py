"""Files of hardware: known ones are complete and tell devices apart, and faults in a user's file are reported."""

import dataclasses
import math

import pytest
import torch

from torchtitan.commands import bench
from torchtitan.core.errors import JobError
from torchtitan.core.hardware import Curve, load_hardware
from torchtitan.planner.time import measured_hardware
from torchtitan.planner.time.measured_hardware import Sizes, fit, fit_collective, write_hardware

TINY = Sizes(products=(8, 16, 32), keys=(8, 32), copied=(2**10, 2**16), sent=(2**8, 2**16), seconds=0.001)


def test_this_machine_is_measured(tmp_path):
    hardware = write_hardware(tmp_path / "ours.toml", ranks=2, sizes=TINY)
    assert hardware == load_hardware(str(tmp_path / "ours.toml")) and hardware.devices_per_machine == 2
    assert hardware.machine_link.evidence == "measured between 2 ranks" and hardware.products.evidence.startswith(
        "fitted"
    )
    assert 0 < hardware.peak.float32 < math.inf and 0 < hardware.machine_link.bandwidth < math.inf
    kinds = ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]
    rows = hardware.collectives.rows
    assert [row.kind for row in rows] == kinds and {(row.ranks, row.machines) for row in rows} == {(2, 1)}
    assert {(row.smallest, row.largest) for row in rows} == {(2**9, 2**17)}
    with pytest.raises(JobError, match="ours.toml: exists already; give another name"):
        write_hardware(tmp_path / "ours.toml", ranks=1, sizes=TINY)
    with pytest.raises(JobError, match="allowed: a name with .toml"):
        write_hardware(tmp_path / "ours", ranks=1, sizes=TINY)


def test_a_gpu_that_no_file_describes_is_recognized_by_its_own(tmp_path, monkeypatch):
    name, measure = "NVIDIA Unlisted 9 (A+)", measured_hardware._measure
    monkeypatch.setattr(measured_hardware, "device_type", lambda: "cuda")
    monkeypatch.setattr(measured_hardware, "_memory", lambda kind: 2**34)
    monkeypatch.setattr(
        measured_hardware, "_measure", lambda ranks, sizes, _: measure(ranks, sizes, torch.device("cpu"))
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    hardware = write_hardware(tmp_path / "ours.toml", ranks=1, sizes=TINY)
    assert hardware.matches(name) and not hardware.matches(name + "2") and hardware.chip == ""
    name = "NVIDIA H100 80GB HBM3"
    assert measured_hardware.measure_hardware(1, TINY)["chip"] == "h100"


def test_a_curve_is_recovered_from_its_samples():
    curve = Curve(most=0.75, half=(64, 128, 32))
    shapes = [(m, n, k) for m in (32, 256, 4096) for n in (64, 512, 2048) for k in (16, 128, 1024)]
    samples = [(shape, 5e12 * curve.share(*shape)) for shape in shapes]
    fitted = fit(samples, 5e12, 3)
    assert fitted["half"] == [64, 128, 32] and fitted["most"] == pytest.approx(0.75, abs=1e-4)


@pytest.mark.parametrize(("kind", "passes"), [("all_gather", 1), ("all_reduce", 2)])
def test_latency_and_bandwidth_are_recovered_from_times(kind, passes):
    """Four ranks: three hops with a rank's part, and in an all-reduce three back."""
    samples = [(size, passes * 3 * (2e-5 + size / 4e9)) for size in (2**12, 2**18, 2**24)]
    assert fit_collective(kind, 4, samples) == pytest.approx({"latency": 2e-5, "bandwidth": 4e9}, rel=1e-3)


@pytest.mark.parametrize("seconds", [(3e-3, 2e-3), (1e-9, 2.0)])
def test_times_of_a_busy_machine_have_figures_above_0(seconds):
    fitted = fit_collective("all_gather", 2, list(zip((2**8, 2**16), seconds, strict=True)))
    assert all(0 < value < math.inf for value in fitted.values())


def test_ranks_call_a_collective_equally_often(monkeypatch):
    """The clock of this rank says 2,000 calls in the time, and rank 0 says 7."""
    calls = []
    monkeypatch.setattr(measured_hardware, "timed", lambda run, device: run() or 0.001 / 2)
    monkeypatch.setattr(measured_hardware.dist, "barrier", lambda: None)
    monkeypatch.setattr(measured_hardware.dist, "broadcast", lambda count, rank: count.fill_(7) if rank == 0 else None)
    sizes = dataclasses.replace(TINY, seconds=1.0)
    measured_hardware._steady_seconds(lambda: calls.append(1), torch.device("cpu"), sizes)
    assert len(calls) == 2 + 7


def test_bench_measures_hardware_or_a_job():
    with pytest.raises(JobError, match="--hardware: allowed without a job, --sweep and --plot"):
        bench.main(["debug_model", "--hardware=ours.toml"])


def test_short_operations_are_measured_in_a_row(monkeypatch):
    """Starting a kernel would count for one that is measured alone on a GPU."""
    calls = []

    def timed(run, device, in_a_row=1):
        calls.append(in_a_row)
        return 0.25

    monkeypatch.setattr(measured_hardware, "timed", timed)
    sizes = dataclasses.replace(TINY, seconds=2.0, min_seconds=1.0)
    assert measured_hardware.seconds_of(lambda: None, torch.device("cpu"), sizes) == 0.25
    assert calls == [1, 4, 4], "one call to see how long it takes, and four in a row until two seconds are over"
