"""The event of how a run ended: written once, whatever the file holds, and read back."""

import json
import os
import random
import re
from dataclasses import replace

import pytest

from torchtitan.commands import report, why
from torchtitan.core.errors import JobError
from torchtitan.launcher.run_folder import describe_run_end, hold_lock, this_process
from torchtitan.metrics import run_end
from torchtitan.metrics.json_lines import JsonLinesWriter, read_records
from torchtitan.metrics.run_end import RunEnd, cause_of, describe_end, describe_last_end, end_of, read_end, record_end
from torchtitan.process import exit as exit_codes

STEP = {"step": 7, "loss": 2.0, "step_seconds": 1.0, "data_seconds": 0.5}


def write(folder, *records, tail=""):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return folder


def test_every_exit_code_has_a_cause():
    codes = {code for name, code in vars(exit_codes).items() if name.isupper() and type(code) is int and 0 < code < 128}
    assert codes <= run_end.CAUSES.keys()
    causes = [cause_of(code) for code in (0, 143, 130, 137, 139, 77)]
    assert causes == ["finished", "stopped", "stopped", "killed", "killed", "crashed"]


@pytest.mark.parametrize("tail", ["", '{"step": 8, "loss": 1.', "\n\n"])
def test_an_end_is_a_line_of_its_own_after_whatever_was_written(tmp_path, tail):
    write(tmp_path, STEP, tail=tail)
    assert record_end(tmp_path, RunEnd(137, reason="rank 1 was ended by SIGKILL")) == ""
    first, last = read_records(tmp_path / "metrics.jsonl")
    time = last.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", time) and first == STEP
    assert last == {
        "step": 7,
        "event": "end",
        "cause": "killed",
        "reason": "rank 1 was ended by SIGKILL",
        "exit_code": 137,
    }
    shown = f"{time[:10]} {time[11:16]} UTC"
    text = f"killed by SIGKILL after step 7 (exit code 137), {shown}: rank 1 was ended by SIGKILL"
    assert (
        describe_end(last | {"time": time})
        == text
        == describe_run_end(tmp_path, read_records(tmp_path / "metrics.jsonl"))
    )
    assert describe_last_end(tmp_path, left_lock=False) == f"the last run in this folder: {text}"


def test_an_end_is_found_after_any_bytes(tmp_path, is_full_run):
    generator, path = random.Random(0), tmp_path / "metrics.jsonl"
    lines = [json.dumps(STEP).encode(), b"[" * 2000, b'{"step": "7"}', b"null", b"\xff\xfe", b'{"step": 1e400}', b"\r"]
    for _ in range(2000 if is_full_run else 100):
        pieces = [generator.choice([*lines, generator.randbytes(20)]) for _ in range(generator.randrange(6))]
        path.write_bytes(generator.choice([b"\n", b"", b"\r\n"]).join(pieces))
        before = [record for record in read_records(path) if record.get("event") == "end"]
        assert record_end(tmp_path, RunEnd(6)) == ""
        last = end_of(read_records(path))
        assert not before and last is not None and last["exit_code"] == 6
        assert describe_last_end(tmp_path, left_lock=False).startswith("the last run in this folder: hung after step ")


def test_an_end_that_cannot_be_written_says_so_and_raises_nothing(tmp_path):
    assert "could not be written" in record_end(tmp_path / "missing", RunEnd(0))
    (tmp_path / "metrics.jsonl").mkdir()
    assert "not a regular file but a folder" in record_end(tmp_path, RunEnd(0))
    assert describe_last_end(tmp_path, left_lock=False) == ""


def test_a_pipe_in_its_place_does_not_hold_up_an_end(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert "not a regular file but a pipe" in record_end(tmp_path, RunEnd(0))
    assert describe_last_end(tmp_path, left_lock=False) == ""


def test_a_full_disk_has_no_consequence(tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan.metrics.run_end._tail", lambda path: [])  # a device is not read
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    assert "No space left on device" in record_end(tmp_path, RunEnd(0))


def test_rows_after_an_end_belong_to_the_next_start(tmp_path):
    write(tmp_path, STEP)
    record_end(tmp_path, RunEnd(143, step=7))
    JsonLinesWriter(tmp_path / "metrics.jsonl", resume_step=7).write({"step": 8, "loss": 1.0})
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [7, 7, 8] and end_of(records) is None
    assert end_of(records[:2]) is not None
    record_end(tmp_path, RunEnd(1, step=9))  # the steps up to 9 are made again
    JsonLinesWriter(tmp_path / "metrics.jsonl", resume_step=7)
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [7, 7]


@pytest.mark.parametrize(
    "content",
    [b'{"epoch": 1, "loss": 2.0}\n', b"step,loss\n", b'{"step": 0, "event": "end"}\n{"step": 0, "eve', b"\xff\n"],
)
def test_a_new_run_appends_to_no_file_of_another_program_or_cut_off_line(content, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    lines = JsonLinesWriter(tmp_path / "metrics.jsonl", None)
    lines.write(STEP)
    lines.close()
    assert read_records(tmp_path / "metrics.jsonl") == [STEP]
    assert (tmp_path / "metrics.previous.jsonl").read_bytes() == content


def test_starts_that_failed_at_once_leave_no_earlier_file_behind(tmp_path):
    for _ in range(2):
        record_end(tmp_path, RunEnd(2, reason="no data"))
    JsonLinesWriter(tmp_path / "metrics.jsonl", None).write(STEP)
    assert [record.get("event") for record in read_records(tmp_path / "metrics.jsonl")] == ["end", "end", None]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    JsonLinesWriter(tmp_path / "metrics.jsonl", None)
    assert (tmp_path / "metrics.previous.jsonl").exists()


@pytest.mark.parametrize("text", ["", "null", "[1]", '{"other": 1}', "{", '{"code": 1, "cause": "", "wrong": 2}'])
def test_what_a_rank_has_not_passed_on_whole_is_ignored(text):
    assert read_end(text) is None


def test_control_characters_and_odd_values_of_an_event_are_harmless():
    assert describe_end({"step": 1, "cause": "\x1b[2J", "exit_code": None, "time": 5, "reason": "a\nb"}) == (
        " [2J after step 1 (exit code None): a b"
    )
    assert describe_end({"step": 1, "cause": "stopped", "exit_code": 10**6, "time": None}) == (
        "stopped after step 1 (exit code 1000000)"
    )


def test_why_and_plot_say_how_the_run_ended(tmp_path, capsys):
    run = write(tmp_path / "run", STEP, {"step": 7, "event": "goodput", "train_seconds": 9.0, "data_seconds": 1.0})
    why.main([str(run)])
    before = capsys.readouterr().out
    record_end(run, RunEnd(143, step=7))
    why.main([str(run)])
    first, *account = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{run}: stopped by SIGTERM after step 7 (exit code 143), ")
    assert account == before.splitlines()  # runs of earlier versions are read as before
    report.plot([str(run)])
    assert "\n     end stopped by SIGTERM after step 7" in capsys.readouterr().out
    assert report.draw_training_curve(run / "metrics.jsonl", tmp_path / "a.svg", "title")
    assert "stopped after step 7" in (tmp_path / "a.svg").read_text()


def test_the_page_of_a_run_has_its_ends(tmp_path):
    run = write(tmp_path / "run", STEP)
    record_end(run, RunEnd(143, step=7))
    record_end(run, RunEnd(0, run_end.EARLY_STOP, "<no gain>", step=7))
    data = report.read(run, 0)
    assert data.end.startswith("early stop after step 7 (exit code 0), ") and data.end.endswith(": <no gain>")
    assert [report.describe(event).partition(" after")[0] for event in data.events] == [
        "stopped by SIGTERM",
        "early stop",
    ]
    assert "&lt;no gain&gt;" in report.results(data)[-1]


def test_a_lock_tells_a_run_at_work_from_one_that_was_killed(tmp_path):
    records = read_records(write(tmp_path, STEP) / "metrics.jsonl")
    assert describe_run_end(tmp_path, records) == ""  # of an earlier version
    with hold_lock(tmp_path, this_process()):
        assert describe_run_end(tmp_path, records) == "still at work"
    with hold_lock(tmp_path, replace(this_process(), started=1)):
        assert describe_run_end(tmp_path, records).startswith("left no end")


def test_a_run_that_never_logged_a_step_says_why(tmp_path):
    record_end(write(tmp_path / "run"), RunEnd(2, reason="no such file"))
    with pytest.raises(JobError, match="no logged step with a loss, and it ended: no such file; give"):
        report.plot([str(tmp_path / "run")])
