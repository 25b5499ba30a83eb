"""Tests of `torchtitan plot`: the loss of a run in the terminal, as an image, and as a self-contained page."""

import re

import pytest

from tests.support.logged_runs import png_size, write_run
from torchtitan import cli
from torchtitan.commands import report


def test_a_drawing_of_two_points():
    drawing = report.text_plot([(1, 3.0), (2, 2.0)], [(2, 2.5)], report.LABEL + 20)
    lines = drawing.splitlines()
    assert len(lines) == report.ROWS + 2
    assert lines[0] == "  3.000 |o" and lines[report.ROWS - 1] == "  2.000 |" + " " * 19 + "o"
    assert lines[-2] == " " * report.LABEL + f"1{'2':>19}"
    assert lines[-1].endswith(". loss of a logged step   o smoothed, 1 of them at a time   v validation")
    (at,) = [number for number, line in enumerate(lines[:-1]) if "v" in line]
    assert at == 8 and lines[at] == "  2.467 |" + " " * 19 + "v"


def test_a_falling_line_and_a_single_value():
    lines = report.text_plot([(step, 40.0 - step) for step in range(1, 41)], [], report.LABEL + 40).splitlines()
    places = [line.find("o") for line in lines[: report.ROWS] if "o" in line]
    assert places == sorted(places) and len(places) > report.ROWS - 3
    assert "smoothed, 5 of them at a time" in lines[-1] and "validation" not in lines[-1]
    lines = report.text_plot([(7, 2.0)], [], 30).splitlines()
    assert [number for number, line in enumerate(lines[:-1]) if "o" in line] == [report.ROWS // 2]


def test_the_command_draws_finite_values_and_a_self_contained_page(tmp_path, capsys):
    run = tmp_path / "<run>"
    run.mkdir()
    write_run(run / "metrics.jsonl", [3.0, float("nan"), 2.0])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "validation_loss": 2.5}\n{"step": 4, "lo')
    assert cli.main(["plot", str(run), "--to", str(tmp_path / "a.html")]) == 0
    out = capsys.readouterr().out
    assert "3.000 |" in out and "v validation" in out and out.endswith(f"drawn into {tmp_path}/a.html\n")
    page = (tmp_path / "a.html").read_text()
    assert page.startswith("<!doctype html>") and page.count("<svg") == 1 and page.endswith("</svg>\n</html>\n")
    assert "&lt;run&gt;</title>" in page and "<run>" not in page
    assert not re.search(r"<script|<link|<img|src=|href=\"(?!#)", page)  # nothing is fetched
    assert cli.main(["plot", str(run / "metrics.jsonl"), "--to", str(tmp_path / "a.png")]) == 0
    assert png_size(tmp_path / "a.png") == (1500, 1080) and (tmp_path / "a.png").stat().st_size < 40_000


def test_a_report_in_the_terminal_is_a_plot_of_each_run(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name / "metrics.jsonl", [3.0, 2.0])
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert cli.main(["plot", runs[0]]) == 0
    plotted = capsys.readouterr().out
    assert cli.main(["report", *runs, "--terminal"]) == 0
    assert capsys.readouterr().out == 2 * plotted
    assert cli.main(["report", runs[0], "--terminal", "--to", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").exists() and not (tmp_path / "b.svg").exists()
    assert cli.main(["report", *runs, "--terminal", "--to", str(tmp_path / "b.svg")]) == 2
    assert "--to: allowed with --terminal for one run only" in capsys.readouterr().err


def test_rows_of_another_program_are_drawn_where_finite(tmp_path, capsys):
    """Plot rows of another program, in a folder named like a formula of matplotlib."""
    run = tmp_path / "$x_{$"
    run.mkdir()
    rows = '{"step": 1, "loss": 3}\n{"step": 2, "loss": NaN, "lr": 1e999}\n{"step": 3, "loss": 123456.7, "lr": "low"}\n'
    (run / "metrics.jsonl").write_text(rows + '{"step": 3, "validation_loss": Infinity}\n')
    assert cli.main(["plot", str(run), "--to", str(tmp_path / "a.png")]) == 0
    out = capsys.readouterr().out
    assert png_size(tmp_path / "a.png") == (1500, 1080) and " v validation" not in out
    drawing = out.splitlines()[: report.ROWS]
    assert drawing[0].startswith("1.2e+05 |") and {line.index("|") for line in drawing} == {report.LABEL - 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "none: cannot be read (No such file or directory); give the dump_folder of a run that has logged"),
        (
            ["."],
            "metrics.jsonl: no logged step with a loss; give the dump_folder of a run, or try again after its "
            "first step",
        ),
        (["run", "--to=a.gif"], "--to: given 'a.gif'; allowed: names with .html or .svg or .png; rename it"),
        (["run", "--to=none/a.html"], "none/a.html: cannot be written (No such file or directory); give another name"),
    ],
    ids=lambda case: "-".join(case) if isinstance(case, list) else "",
)
def test_bad_arguments_are_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run" / "metrics.jsonl", [3.0, 2.0])
    assert cli.main(["plot", *arguments]) == 2
    assert message in capsys.readouterr().err
