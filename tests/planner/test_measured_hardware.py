"""Files of hardware: known ones are complete and tell devices apart, and faults in a user's file are reported."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from tests.support.jobs import ROOT
from torchtitan.commands import bench
from torchtitan.core.errors import JobError
from torchtitan.core.hardware import FOLDER, Curve, Link, find_hardware, known_hardware, load_hardware
from torchtitan.planner.time import measured_hardware
from torchtitan.planner.time.measured_hardware import Sizes, fit, write_hardware

NAMES = {
    "NVIDIA H100 80GB HBM3": "h100-80",
    "NVIDIA H100": "h100-96-500w",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA H20": "h20",
    "NVIDIA H800": "h800",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA A10": "a10",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI325X": "mi325x",
    "AMD Instinct MI355X": "mi355x",
}
"""Names of devices that torch reports."""


@pytest.mark.parametrize("device_name", NAMES)
def test_one_file_describes_a_device(device_name):
    matching = [name for name in known_hardware() if load_hardware(name).matches(device_name)]
    assert matching == [NAMES[device_name]] and find_hardware(device_name).name == NAMES[device_name]


@pytest.mark.parametrize("name", known_hardware())
def test_figures_of_known_hardware_are_plausible(name):
    """Types with fewer bits are not slower, links are slower than memory, and each file cites its source."""
    hardware = load_hardware(name)
    peak = hardware.peak
    known_peaks = [flops for flops in (peak.float32, peak.tf32, peak.bfloat16, peak.float8) if flops]
    assert peak.float16 == peak.bfloat16
    assert hardware.network_link.bandwidth <= hardware.machine_link.bandwidth < hardware.memory_bandwidth
    assert hardware.price is None
    if hardware.device_names:  # CPUs may be slower with fewer bits
        assert known_peaks == sorted(known_peaks)
        assert re.match("# https://", (FOLDER / f"{name}.toml").read_text())


def test_the_page_lists_all_hardware():
    page = " ".join((ROOT / "docs/jobs.md").read_text().split())
    names = [name for name in known_hardware() if load_hardware(name).device_names]
    assert f"{', '.join(names[:-1])} and {names[-1]}: peaks" in page


def test_shares_saturate_and_links_reach_a_share():
    curve = Curve(most=0.8, half=(256, 256, 256))
    assert curve.share(256, 256, 256) == pytest.approx(0.1) and curve.share(1e12, 1e12, 1e12) == pytest.approx(0.8)
    assert Link(bandwidth=100e9, latency=1e-5, reached=0.5).reached_bandwidth == 50e9


@pytest.mark.parametrize(
    ("line", "replacement", "message"),
    [
        (r"memory_gib = .*\n", "", "memory_gib: field required"),
        ("memory_gib", "memory_gb", "memory_gb: unexpected keyword argument"),
        ("memory_gib = .*", "memory_gib = -80", "memory_gib: input should be greater than 0"),
        ("reached = .*", "reached = 1.5", "machine_link.reached: input should be less than or equal to 1"),
        ("title = .*", "title = 7", "title: input should be a valid string"),
        ("device_names = .*", "device_names = ['(']", "is not TOML of hardware (missing ), unterminated subpattern"),
        (r"\[peak\]", "[peak", "is not TOML of hardware (Expected ']'"),
        (r"\[peak\]", "[products]\nmost = 0.5\nhalf = [1]\n[peak]", "products.half has 3 values"),
    ],
)
def test_faults_in_a_file_are_reported(line, replacement, message, tmp_path):
    text, count = re.subn(line, replacement, (FOLDER / "h200.toml").read_text())
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(JobError) as error:
        load_hardware(str(path))
    assert count and message in str(error.value) and str(error.value).endswith("h100-80.toml shows the format")


def test_a_file_of_the_user_is_loaded(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text("price = 2.5\n" + (FOLDER / "h200.toml").read_text())
    hardware = load_hardware(str(path))
    assert (hardware.name, hardware.price, hardware.memory_gib) == ("ours", 2.5, 139.8)
    with pytest.raises(JobError, match="none.toml cannot be read"):
        load_hardware(str(Path(tmp_path, "none.toml")))


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
    assert hardware.matches(name) and not hardware.matches(name + "2")


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
