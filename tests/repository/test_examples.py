"""Each page of examples/: its commands run as they are written, and the losses are the page's."""

import contextlib
import io
import os
import re
import shlex
import shutil

import pytest

from tests.support import jobs
from tests.support.pool import run_alone, run_script
from torchtitan import cli
from torchtitan.commands.command_lines import parse_command

EXAMPLES = jobs.ROOT / "examples"
SLOW = ("plan", "rehearse", "verify")
"""Commands that are only parsed: they take longer than a test may, and have tests of their own."""
FIRST, LAST = 0.05, {"book": (4.5, 6.5), "chat_lora": (4.3, 5.6), "preference": (0.0, 0.3)}
"""Relative tolerance of the first loss, and the limits of the last one: each Python has another book."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Return a folder with the examples and their data."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(EXAMPLES, folder / "examples")
    code, out, err = run_script(folder, folder / "examples/make_data.py")
    assert code == 0 and out.count(": 79 records") <= 3 and out.count(" records") == 3, err
    return folder


def commands(page):
    text = (EXAMPLES / f"{page}.md").read_text()
    lines = "".join(re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)).splitlines()
    return [line.removeprefix("NGPU=1 ").removeprefix("torchtitan ") for line in lines]


def train(folder, job):
    """Train the job of a page in this process; return its losses by step."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        steps, _ = jobs.train(["--job.config_file", job])
    return {step["step"]: step["loss"] for step in steps}


def run_page(folder, page):
    """Run the commands of a page; return the losses of its job, and what the others print."""
    losses, out = {}, io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)  # generate reconfigures it
    for line in commands(page):
        command, *arguments = shlex.split(line)
        if command == "train":
            losses = train(folder, *arguments)
        elif command in SLOW:
            parse_command(command, arguments)
        else:
            os.chdir(folder)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                assert cli.main([command, *arguments]) == 0, printed(out)
    return losses, printed(out)


def printed(out):
    return out.buffer.getvalue().decode()


def logged(page):
    """Return the losses of the log that a page expects, by step."""
    rows = re.findall(r"^step +(\d+)/\d+  loss +([\d.]+)", (EXAMPLES / f"{page}.md").read_text(), re.MULTILINE)
    return {int(step): float(loss) for step, loss in rows}


def agree(losses, page):
    expected, last = logged(page), losses[max(losses)]
    assert losses[1] == pytest.approx(expected[1], rel=FIRST)
    assert LAST[page][0] <= last <= LAST[page][1] and expected.keys() <= losses.keys()


@pytest.fixture(scope="module")
def book(workplace):
    return run_alone(run_page, workplace, "book")


def test_the_book_is_learned_and_continued(book):
    losses, out = book
    agree(losses, "book")
    assert losses[80] < losses[1] - 1 and "20 tokens" in out


def test_chat_records_become_a_served_folder(book, workplace):
    losses, out = run_alone(run_page, workplace, "chat_lora")
    agree(losses, "chat_lora")
    assert losses[40] < losses[1] and "serve it: vllm serve outputs/served" in out
    names = {path.name for path in (workplace / "outputs/served").iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= names


def test_pairs_are_ordered(book, workplace):
    losses, _ = run_alone(run_page, workplace, "preference")
    agree(losses, "preference")
    assert losses[1] == pytest.approx(0.6931, abs=1e-3)


def test_a_job_of_70b_is_checked(workplace):
    _, out = run_alone(run_page, workplace, "plan_70b")
    assert "no faults" in out or "OK" in out


def test_the_loss_and_the_callback_of_the_script(workplace):
    code, out, err = run_script(workplace, workplace / "examples/custom_loss.py")
    assert code == 0, err
    steps = {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  weighted loss ([\d.]+)", out)}
    assert steps[5] == pytest.approx(9.40, rel=FIRST) and min(steps.values()) < 7.0
    assert re.search(r"ended after step \d+ of 60: the loss is below 7", out + err)


@pytest.mark.parametrize("page", sorted(path.stem for path in EXAMPLES.glob("*.md")))
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#]+)", (EXAMPLES / f"{page}.md").read_text()):
        assert (EXAMPLES / target).exists(), target
        assert not target.endswith(".png") or (EXAMPLES / target).stat().st_size <= 60_000, f"{target}: too large"
