"""Bars are shown on a terminal, by the first rank, and only for what takes long."""

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
    """Calls a function where stderr is a terminal, bars without delay; what is seen there."""
    monkeypatch.setattr(bars, "DELAY_SECONDS", 0)
    monkeypatch.delenv("RANK", raising=False)

    def seen(call: Callable[[], object]) -> str:
        screen = Terminal()
        with contextlib.redirect_stderr(screen):
            call()
        return screen.getvalue()

    return seen


def use_both(awaited: str | None = None) -> None:
    """For a moment, or until the screen shows what is awaited of the thread that draws there."""
    with progress_bar("reading", 100) as progress:
        progress.update(100)
    with waiting("first step"):
        until = time.monotonic() + (0.05 if awaited is None else 60)
        while time.monotonic() < until and (awaited is None or awaited not in sys.stderr.getvalue()):
            time.sleep(0.01)


def test_on_a_terminal(terminal):
    said = terminal(lambda: use_both("first step"))
    assert "reading: " in said and "first step 00:00" in said
    assert said.endswith("\r")  # they go when they are done


def test_not_before_three_seconds(terminal, monkeypatch):
    monkeypatch.setattr(bars, "DELAY_SECONDS", 3)
    assert terminal(use_both) == ""


def test_not_of_another_rank(terminal, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert terminal(use_both) == ""


def test_not_into_a_file(monkeypatch, capsys):
    monkeypatch.setattr(bars, "DELAY_SECONDS", 0)
    use_both()
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_takes_long_has_one(terminal, tmp_path):
    """Loading, exporting, converting, verifying and preparing."""
    args = LLAMA["llama3.2"]
    model, hf = build(Llama, args), MODELS["llama3.2"].hf

    def command(*words: object) -> str:
        return terminal(lambda: cli.main(list(map(str, words))) and pytest.fail("it should work"))

    state = model.state_dict()
    assert "writing the weights" in terminal(lambda: hf.save_hf(tmp_path / "hf", state, args, dtype=torch.float32))
    assert "loading hf" in terminal(lambda: hf.load_hf(tmp_path / "hf", model, args))
    words = ["--model.tokenizer_path=bytes"]
    assert "writing ours" in command("convert", tmp_path / "hf", tmp_path / "ours", *words)
    said = command("convert", tmp_path / "ours", tmp_path / "a.safetensors", *words)
    assert "checking ours" in said and "loading ours" in said and "writing a.safetensors" in said
    (tmp_path / "text.txt").write_text("some text")
    data = ["--dataset_path", tmp_path / "text.txt", "--tokenizer_path=bytes", "--workers=1"]
    assert "tokenizing" in command("prepare", *data, "--output", tmp_path / "shards")
    assert "checking shards" in command("prepare", "--verify", tmp_path / "shards")
