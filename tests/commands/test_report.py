"""Tests of `torchtitan report` and `torchtitan why`: runs with restarts, on several ranks, and with cut-off records."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.report_pages import figure_in, write_run
from torchtitan import cli
from torchtitan.commands import report, why


def test_a_page_of_two_runs(tmp_path, capsys):
    first, restarted = write_run(tmp_path / "first", rows=19), write_run(tmp_path / "a & b")
    (first / "generated.jsonl").write_text('{"step": 2, "number": 0, "prompt": "<b>alpha", "generated": "x"}\n')
    for folder, lr in ((first, 0.01), (restarted, 0.02)):
        (folder / "config.toml").write_text(f'extends = "debug_model"\n[optimizer]\nlr = {lr}\n')
    with (first / "metrics.jsonl").open("a") as file:  # the line of step 41 is cut off
        for step, ranks in ((18, "rank 1 (node, GPU 0) by 1.20"), (19, "")):
            row = {"step": step, "event": "straggler", "ranks": ranks, "number": len(ranks[:1])}
            file.write(f"\n{json.dumps(row)}")
    target = tmp_path / "page.html"
    assert cli.main(["report", str(first), str(restarted), "--to", str(target)]) == 0
    assert capsys.readouterr().out == f"2 runs drawn into {target}\n"
    page = target.read_text()
    own_text = page[: page.index("<script")] + page[page.rindex("</script>") :]
    assert not re.search(r"<link|<img|src=|href=", own_text) and "src=" not in re.findall("<script[^>]*>", page)
    assert "<td>optimizer.lr</td><td>0.01</td><td>0.02</td>" in page and "a &amp; b</title>" in page
    assert "&lt;b&gt;alpha" in own_text and "<b>alpha" not in page
    traces = figure_in(page)
    names = [trace["name"] for trace in traces]
    assert names.count(str(first)) > 6 and f"{restarted}, validation".replace("&", "&amp;") in names
    events = [trace for trace in traces if "text" in trace]
    assert "saved; 60.0 % of all time spent training" in events[1]["text"]
    assert any("rank 1 crashed, rank 1" in text and "<" not in text for text in events[1]["text"])
    assert events[0]["text"][:2] == ["slow: rank 1 (node, GPU 0) by 1.20 times", "no slow rank any more"]
    assert events[1]["x"] == [20, 20, 40] and events[1]["y"][0] == events[1]["y"][2] != events[1]["y"][1]
    assert '"namelength":-1' in page and '"ticktext":["save \\u25cf","restart \\u2716"' in page


def test_many_rows_keep_their_extremes():
    rows = [{"step": i, "loss": 9.0 if i == 777 else -9.0 if i == 1234 else 1.0} for i in range(10_000)]
    thin = report.thinned(rows, "loss", 300)
    assert len(thin) <= 300 and {777, 1234} <= {row["step"] for row in thin}
    assert report.thinned(rows[:300], "loss", 300) == rows[:300]


def test_the_bold_curve_smooths_all_rows(tmp_path):
    """Of two losses in turn it shows the mean, also of more rows than are drawn; a spike is one point of its window."""
    folder = write_run(tmp_path / "run", rows=0)
    losses = [9.0 if step == 5000 else 1.0 if step % 10 else 2.0 for step in range(1, 8001)]
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = report.read(folder, 0)
    bold = [traits for _, (_, traits) in report.curves(run, 1) if traits["showlegend"]][0]
    assert len(bold["x"]) <= report.MOST_POINTS
    assert bold["y"][len(bold["y"]) // 4] == pytest.approx(1.1, abs=0.01) and max(bold["y"][1000:]) < 1.15


def test_what_is_not_finite_is_a_gap_and_a_mark(tmp_path):
    folder = write_run(tmp_path / "run", rows=9)
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()[:9]]
    for step in (4, 8, 9):
        rows[step - 1] |= {"loss": None, "grad_norm": None}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = report.read(folder, 0)
    traits = [traits for _, (_, traits) in report.curves(run, 1)]
    for curve in (traits[0], traits[1], traits[3]):  # loss, smoothed loss, gradient norm
        assert [step for step, y in zip(curve["x"], curve["y"], strict=True) if y is None] == [4, 8, 9]
    assert traits[-1]["text"] == ["loss not finite since step 4", "loss not finite since step 8"]
    assert report.results(run)[2] == "not finite since step 8"
    assert 777 in {
        row["step"] for row in report.thinned([{"step": i, "x": None if i == 777 else 0} for i in range(9999)], "x", 99)
    }


def test_hours_and_events_are_on_the_axis_of_the_steps(tmp_path):
    run = report.read(write_run(tmp_path / "run"), 0)
    assert run.rows[-1]["hours"] == pytest.approx(40 * 2 / 3600) and run.rows[3]["data_share"] == 25
    (restart,) = [e for e in report.with_axes(run.events, run.rows) if e["event"] == "restart"]
    assert (restart["step"], restart["tokens"], restart["hours"]) == (20, 2000, pytest.approx(20 * 2 / 3600))


def test_the_package_that_draws_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert cli.main(["report", str(write_run(tmp_path / "run")), "--to", str(tmp_path / "a.html")]) == 2
    assert "pip install 'torchtitan-toml[report]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "why"])
def test_what_is_no_run_is_a_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for content, message in (
        (None, "metrics.jsonl: cannot be read"),
        ("", "no logged step with a loss"),
        ('{"st', "no logged step with a loss"),
    ):
        Path("run").mkdir(exist_ok=True)
        if content is not None:
            Path("run/metrics.jsonl").write_text(content)
        assert cli.main([command, "run"]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["report", "run", "--to=a.pdf"]) == 2
    assert "--to: given 'a.pdf'; allowed: names with .html" in capsys.readouterr().err


def test_the_largest_cause_is_named_first(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert cli.main(["why", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}: 1:40 recorded, 60.0 % of it training"
    assert lines[1:5] == [
        "   25.0 %  waiting for data",
        "   10.0 %  saving",
        "    3.0 %  restarts",
        "    2.0 %  steps that were lost",
    ]
    assert lines[5] == "bound by waiting for data; at most 1.33 times as fast without it"
    assert lines[6].startswith("change first: more training.dataloader.num_workers, or tokenize once")
    assert lines[7] == 'then: checkpoint.async_mode = "async"'
    assert any(line.startswith("unknown: the options of the job") for line in lines)


def test_a_run_that_computes_and_a_run_that_was_killed(tmp_path, capsys):
    assert cli.main(["why", str(write_run(tmp_path / "run", train=99.0, data=1.0))]) == 0
    assert "bound by the steps themselves" in capsys.readouterr().out
    run = write_run(tmp_path / "killed", rows=12)
    assert cli.main(["why", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{run}: 0:24 recorded, 75.0 % of it training")
    assert "unknown: starts, saves and restarts: they are logged at every save" in "\n".join(lines)


def test_slow_windows_and_a_pipeline(tmp_path):
    rows = [{"step": i, "loss": 1.0, "step_seconds": 10.0 if i % 5 == 0 else 1.0} for i in range(1, 21)]
    (cause,) = why.Account({"train": 100.0}, rows, None).causes()
    assert "4 of 20 logged ones took over 1.5 times the median" in cause.name
    assert cause.gain == pytest.approx(4 * 9 / 56)
    job = tmp_path / "job.toml"
    job.write_text(
        'extends = "debug_model"\n[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "1F1B"\n'
        "pipeline_parallel_microbatch_size = 1\n[training]\nlocal_batch_size = 2\n"
    )
    (cause,) = why.Account({"train": 100.0}, [], why.job_of_file(job)).causes()
    # 2 ranks, 2 microbatches: (p - 1) / (m + p - 1) = 1/3 idle, and 1/5 with 4
    assert cause.share == pytest.approx(1 / 3) and cause.gain == pytest.approx(1 - (2 / 3) / (4 / 5))
    assert cause.remedy.startswith("4 microbatches in place of 2")


def test_waiting_for_data_is_no_slow_step():
    """A cause that has its own account does not count within training again."""
    rows = [
        {"step": i, "step_seconds": 1.0 + 9.0 * (i % 5 == 0), "data_seconds": 9.0 * (i % 5 == 0)} for i in range(20)
    ]
    account = why.Account({"train": 20.0, "data": 36.0}, rows, None)
    assert [cause.name for cause in account.causes()] == ["waiting for data"]


def test_a_short_run_is_not_bound_by_its_start(tmp_path, capsys):
    run = write_run(tmp_path / "run", train=50.0, compile=30.0, start=20.0)
    job = 'extends = "debug_model"\n[profiling]\nenable_profiling = true\nsave_traces_folder = "traces"\n'
    (run / "config.toml").write_text(job)
    assert cli.main(["why", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "too short to tell what bounds it: 50 % of it is spent once in each start"
    assert lines[4] == "a longer run has a smaller share of its first step"
    assert lines[5].startswith("a longer run has a smaller share of its start; `torchtitan prepare`")
    assert "within a step: see the traces in traces in the run's folder" in "\n".join(lines[6:])
    assert not any("change first" in line or "times as fast" in line or "compile.enable" in line for line in lines)
    (run / "config.toml").write_text(job + "[compile]\nenable = true\n")
    assert cli.main(["why", str(run)]) == 0
    assert "its first step; without compile.enable the first step is shorter" in capsys.readouterr().out


def test_a_remedy_is_given_once(tmp_path, capsys):
    assert cli.main(["why", str(write_run(tmp_path / "run", train=70.0, restart=20.0, redone=10.0))]) == 0
    assert capsys.readouterr().out.count("remove the reason of the restarts") == 1


def test_a_schedule_that_cannot_be_read_leaves_its_bubble_unknown(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    options = 'pipeline_parallel_degree = 2\npipeline_parallel_schedule_csv = "gone.csv"\n'
    (run / "config.toml").write_text(f'extends = "debug_model"\n[parallelism]\n{options}')
    assert cli.main(["why", str(run)]) == 0
    out = capsys.readouterr().out
    assert "bound by waiting for data" in out and "unknown: bubble of the pipeline: `torchtitan schedule " in out


def test_an_account_at_the_end_is_no_save():
    """Young and Daly for 2 saves of 50 s each in 2 hours with a failure: sqrt(2 * 7200 * 50) s."""
    events = [{"step": 5, "end_seconds": 0.0}, {"step": 9, "end_seconds": 0.0}, {"step": 9, "end_seconds": 2.0}]
    records = [event | {"event": "goodput"} for event in events] + [{"step": 5, "event": "restart"}]
    account = why.Account({"train": 7100.0, "save": 100.0}, records, None)
    assert "a checkpoint.interval of about 14:09, by the 1 failures" in account.save_remedy()
