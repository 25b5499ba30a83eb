"""Tests of progress bars: only on a terminal, on the first rank, and for long operations."""

import contextlib
import io
import sys
import time
from collections.abc import Callable

import pytest
import torch

from tests.support.hf_parity import build
from tests.support.tiny_decoders import LLAMA
from torchtitan import cli
from torchtitan.core import progress_bar as bars
from torchtitan.core.progress_bar import progress_bar, waiting
from torchtitan.models.llama.model import Llama
from torchtitan.models.spec import MODELS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Callable[[Callable[[], object]], str]:
    """Return a function that calls another one with stderr a terminal and no delay, and returns the screen's text."""
    monkeypatch.setattr(bars, "DELAY_SECONDS", 0)
    monkeypatch.delenv("RANK", raising=False)

    def output_of(function: Callable[[], object]) -> str:
        screen = Terminal()
        with contextlib.redirect_stderr(screen):
            function()
        return screen.getvalue()

    return output_of


def show_both_bars(awaited: str | None = None) -> None:
    """Show a progress bar and a waiting bar, for a moment or until the drawing thread has shown `awaited`."""
    with progress_bar("reading", 100) as progress:
        progress.update(100)
    with waiting("first step"):
        until = time.monotonic() + (0.05 if awaited is None else 60)
        while time.monotonic() < until and (awaited is None or awaited not in sys.stderr.getvalue()):
            time.sleep(0.01)


def test_bars_on_a_terminal(terminal):
    output = terminal(lambda: show_both_bars("first step"))
    assert "reading: " in output and "first step 00:00" in output
    assert output.endswith("\r")  # finished bars are erased


def test_no_bar_before_three_seconds(terminal, monkeypatch):
    monkeypatch.setattr(bars, "DELAY_SECONDS", 3)
    assert terminal(show_both_bars) == ""


def test_no_bar_on_other_ranks(terminal, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert terminal(show_both_bars) == ""


def test_no_bar_into_a_file(monkeypatch, capsys):
    monkeypatch.setattr(bars, "DELAY_SECONDS", 0)
    show_both_bars()
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_long_operations_show_a_bar(terminal, tmp_path):
    """Cover loading, exporting, converting, verifying and preparing."""
    args = LLAMA["llama3.2"]
    model, hf = build(Llama, args), MODELS["llama3.2"].hf

    def command(*options: object) -> str:
        return terminal(lambda: cli.main(list(map(str, options))) and pytest.fail("it should work"))

    state = model.state_dict()
    assert "writing the weights" in terminal(lambda: hf.save_hf(tmp_path / "hf", state, args, dtype=torch.float32))
    assert "loading hf" in terminal(lambda: hf.load_hf(tmp_path / "hf", model, args))
    options = ["--model.tokenizer_path=bytes"]
    assert "writing ours" in command("convert", tmp_path / "hf", tmp_path / "ours", *options)
    output = command("convert", tmp_path / "ours", tmp_path / "a.safetensors", *options)
    assert "checking ours" in output and "loading ours" in output and "writing a.safetensors" in output
    (tmp_path / "text.txt").write_text("some text")
    data = ["--dataset_path", tmp_path / "text.txt", "--tokenizer_path=bytes", "--workers=1"]
    assert "tokenizing" in command("prepare", *data, "--output", tmp_path / "shards")
    assert "checking shards" in command("prepare", "--verify", tmp_path / "shards")
