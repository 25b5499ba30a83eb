"""Files of hardware: known ones are complete and tell devices apart, and faults in a user's file are reported."""

import dataclasses
import math

import pytest
import torch

from torchtitan.commands import bench
from torchtitan.core.errors import JobError
from torchtitan.core.hardware import Curve, load_hardware
from torchtitan.planner.time import measured_hardware
from torchtitan.planner.time.measured_hardware import Sizes, fit, write_hardware

TINY = Sizes(products=(8, 16, 32), keys=(8, 32), copied=(2**10, 2**16), sent=(2**8, 2**16), seconds=0.001)


def test_this_machine_is_measured(tmp_path):
    hardware = write_hardware(tmp_path / "ours.toml", ranks=2, sizes=TINY)
    assert hardware == load_hardware(str(tmp_path / "ours.toml")) and hardware.devices_per_machine == 2
    assert hardware.machine_link.evidence == "measured between 2 ranks" and hardware.products.evidence.startswith(
        "fitted"
    )
    assert 0 < hardware.peak.float32 < math.inf and 0 < hardware.machine_link.bandwidth < math.inf
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
