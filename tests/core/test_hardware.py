"""Files that describe hardware: the known ones, and those of users."""

import re
from pathlib import Path

import pytest
import tomli_w

from tests.support.jobs import ROOT
from torchtitan.core.errors import JobError
from torchtitan.core.hardware import FOLDER, Curve, Link, find_hardware, known_hardware, load_hardware

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


ROW = {"kind": "all_gather", "ranks": 8, "latency": 1e-6, "bandwidth": 1e11, "smallest": 1000, "largest": 10**9}


def collectives(**changes):
    """Return the text of a table with one row, before that of the peaks. Without the values that are None."""
    row = {name: value for name, value in {**ROW, **changes}.items() if value is not None}
    return tomli_w.dumps({"collectives": {"version": 1, "rows": [row]}}) + "[peak]"


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
        (r"\[peak\]", "[collectives]\nversion = 2\nrows = []\n[peak]", "collectives.version: input should be 1"),
        (r"\[peak\]", collectives(kind="gather"), "collectives.rows.0.kind: input should be 'all_gather', "),
        (r"\[peak\]", collectives(latency=0), "collectives.rows.0.latency: input should be greater than 0"),
        (r"\[peak\]", collectives(bandwidth=None), "collectives.rows.0.bandwidth: field required"),
        (r"\[peak\]", collectives(machines=3), "rows.0: value error, given 8 ranks on 3 machines, 1000 to 1e+09 bytes"),
        (r"\[peak\]", collectives(largest=10), "allowed: equally many ranks on each machine, and smallest <= largest"),
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


def test_speeds_scale_links_and_the_collectives_that_were_measured_there(tmp_path):
    rows = [ROW, {**ROW, "machines": 2, "ranks": 16}]
    text = (FOLDER / "h200.toml").read_text() + tomli_w.dumps({"collectives": {"version": 1, "rows": rows}})
    path = tmp_path / "ours.toml"
    path.write_text(text)
    hardware, plain = load_hardware(str(path)), load_hardware("h200")
    assert plain.collectives is None and plain.with_speeds() == plain
    changed = hardware.with_speeds(inside=2, between=0.5, latency=3)
    for before, after, factor in (
        (hardware.machine_link, changed.machine_link, 2),
        (hardware.network_link, changed.network_link, 0.5),
        (hardware.collectives.rows[0], changed.collectives.rows[0], 2),
        (hardware.collectives.rows[1], changed.collectives.rows[1], 0.5),
    ):
        assert (after.bandwidth, after.latency) == (factor * before.bandwidth, 3 * before.latency)
