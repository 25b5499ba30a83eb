"""Published runs: scripts/compare_published.py replays them, and the planner's factors and page follow from them."""

import collections
import importlib.util
import json
import statistics

import pytest

from tests.support.jobs import ROOT
from torchtitan.config import manager
from torchtitan.core.hardware import load_hardware
from torchtitan.job import ResolvedJob
from torchtitan.models.flops import flops_per_token
from torchtitan.planner.time import measured_runs

H100 = load_hardware("h100-80")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_published", ROOT / "scripts" / "compare_published.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def published(script):
    return script.fixtures()


@pytest.fixture(scope="module")
def refitted(script, published):
    """The factors without each source, and of all."""
    return script.refitted(published)


@pytest.fixture(scope="module")
def without(script, published, refitted):
    """The error of each run by the factors without its source."""
    return script.errors_without_source(published, refitted)


def test_published_step_times_are_predicted(published):
    errors = [run.error for run in published]
    assert statistics.median(map(abs, errors)) <= 0.04 and abs(statistics.median(errors)) <= 0.02
    assert statistics.fmean(run.is_inside for run in published) >= 0.95
    assert measured_runs.PUBLISHED_SPREAD == 0.25


def test_no_source_is_predicted_too_fast_or_too_slow(script, published):
    groups = [indices for key, indices in script.grouped(published).items() if len(indices) >= 8]
    assert len(groups) >= 4
    assert all(abs(statistics.median(published[index].error for index in indices)) <= 0.05 for indices in groups)


def test_errors_do_not_depend_on_the_length_of_samples(published):
    """From 512 to 32,768 tokens: with them attention's share of a step grows."""
    by_length = collections.defaultdict(list)
    for run in published:
        by_length[run.hardware.chip, run.workload.seq_len].append(run.error)
    medians = {key: statistics.median(by_length[key]) for key in by_length if len(by_length[key]) >= 3}
    assert {length for chip, length in medians if chip == "a100"} >= {512, 2048, 8192, 32768}
    assert max(map(abs, medians.values())) <= 0.04


@pytest.mark.parametrize(("model", "loss"), [("30b", -0.038), ("7b", -0.091), ("1b", -0.097)])
def test_more_gpus_are_slower_as_published(published, model, loss):
    """From 128 to 512 GPUs. `loss`: the published median over batches and lengths."""
    few, many = (
        next(run.step for run in published if run.name.startswith(f"MPT-{model} s2048 {gpus}xh100"))
        for gpus in (128, 512)
    )
    assert many.tokens_per_second / few.tokens_per_second - 1 == pytest.approx(loss, abs=0.03)


def test_sources_are_predicted_without_their_own_runs(script, published, without):
    """The goals of the planner: by factors that were fitted without a run's source."""
    assert statistics.median(map(abs, without)) <= 0.09
    assert statistics.fmean(run.has_inside(error) for run, error in zip(published, without, strict=True)) >= 0.9
    groups = [[without[index] for index in indices] for indices in script.grouped(published).values()]
    assert all(abs(statistics.median(errors)) <= 0.08 for errors in groups if len(errors) >= 8)


def test_the_factors_are_the_fit_of_the_published_runs(published, refitted):
    fit = refitted[""]
    assert fit == pytest.approx(measured_runs.PUBLISHED, rel=0.02) and len(fit) * 8 < len(published)
    assert collections.Counter(run.hardware.chip for run in published) == measured_runs.PUBLISHED_ROWS


def test_the_page_has_the_table_of_the_script(script, published, without):
    text = (ROOT / "docs" / "planning.md").read_text()
    assert all(line in text for line in script.page(published, without))


def test_software_differs_in_attention_alone():
    faster, slower = (measured_runs.usual_calibration(H100, name).factors for name in ("cudnn", "2023"))
    assert {name for name in faster if faster[name] != slower[name]} == {"attention"}
    assert slower["attention"] > 2 * faster["attention"]
    a100 = load_hardware("a100-80")
    assert measured_runs.usual_calibration(a100, "flash2").factors == measured_runs.usual_calibration(a100).factors
    a100_40 = load_hardware("a100-40")
    assert measured_runs.usual_calibration(a100_40) == measured_runs.usual_calibration(a100)


ROW = dict(name="a row", source="a table", gpu="h100-80", model="llama3", flavor="8B", seq_len=8192, dtype="bfloat16")


def test_rows_of_a_file_are_replayed(script, tmp_path, capsys, monkeypatch):
    rows = [
        {**ROW, "plan": {"shards": 8, "recompute": "full"}, "tokens_per_second": 9000, "reshard": "always"},
        {**ROW, "plan": {"shards": 8}, "variants": [{"recompute": "full"}, {"recompute": "none"}], "tflops_full": 400},
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    monkeypatch.setattr("sys.argv", ["compare_published.py", str(path), "--json"])
    script.main()
    first, second = json.loads(capsys.readouterr().out)
    assert list(first) == ["name", "source", "gpu", "published", "predicted", "low", "high"]
    assert first["low"] < first["predicted"] < first["high"] and first["published"] == 9000
    assert second["predicted"] > 1.2 * first["predicted"]  # the fastest variant
    job = ResolvedJob(manager.load(["--job.config_file", "llama3_8b"]), 1, "cuda")
    assert second["published"] == pytest.approx(400e12 / flops_per_token(job.model.args, 8192).full)
    monkeypatch.setattr("sys.argv", ["compare_published.py", str(path)])
    script.main()
    text = capsys.readouterr().out
    assert "a row: products" in text and "a table, h100-80, bfloat16" in text and "2 " in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("source", "title"),
    [
        ("A", "torchtitan, December 2024"),
        ("llm-foundry 8c8dd48f7 README.md", "llm-foundry, 2023"),
        ("AMD MI300X blog", "AMD MI300X blog"),
        ("BLOOM", "BLOOM"),
        ("Facebook OPT", "Facebook OPT"),
    ],
)
def test_a_source_of_a_letter_is_no_prefix(script, source, title):
    run = script.PublishedRun(
        {**ROW, "source": source, "plan": {"shards": 8, "recompute": "full"}, "tokens_per_second": 9000}
    )
    assert run.title == title and (run.software == "cudnn") == (source == title)
