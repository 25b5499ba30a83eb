"""Trace windows and memory snapshots cover the configured steps, and cost nothing when disabled."""

import json

import pytest
import torch

from torchtitan.core.errors import JobError
from torchtitan.metrics.device import Profiler
from torchtitan.torch_internals import memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def build(folder, **options) -> Profiler:
    defaults = dict(traces=folder / "traces", snapshots=None, freq=4, active=1, warmup=1, device=CPU, rank=3)
    return Profiler(**(defaults | options))


def run(profiler: Profiler, steps: int) -> None:
    with profiler:
        for _ in range(steps):
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()


def files(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def read_trace(path) -> tuple[list[str], int]:
    """Return the profiler steps and the number of matrix products in a trace."""
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    return sorted({name for name in names if name.startswith("ProfilerStep")}), names.count("aten::mm")


def test_a_trace_window_ends_every_freq_steps(tmp_path):
    run(build(tmp_path, active=2), 9)
    assert files(tmp_path) == ["traces/step_4/rank3_trace.json", "traces/step_8/rank3_trace.json"]
    assert read_trace(tmp_path / "traces/step_8/rank3_trace.json") == (["ProfilerStep#6", "ProfilerStep#7"], 2)


def test_names_continue_after_a_resume(tmp_path):
    run(build(tmp_path, start_step=100), 5)
    assert files(tmp_path) == ["traces/step_104/rank3_trace.json"]


def test_a_run_may_end_inside_a_window(tmp_path):
    run(build(tmp_path, active=3, warmup=0), 3)
    assert files(tmp_path) == ["traces/step_3/rank3_trace.json"]
    assert read_trace(tmp_path / "traces/step_3/rank3_trace.json")[1] == 2


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_windows_without_a_pause(tmp_path):
    run(build(tmp_path, active=4, warmup=0), 8)
    assert files(tmp_path) == ["traces/step_4/rank3_trace.json", "traces/step_8/rank3_trace.json"]
    assert read_trace(tmp_path / "traces/step_8/rank3_trace.json")[1] == 4


def test_disabled_profiling_does_nothing(tmp_path):
    run(build(tmp_path, traces=None, freq=1, active=5), 3)
    assert files(tmp_path) == []


def test_refused_profiling_options(tmp_path):
    with pytest.raises(JobError, match="profile_freq: given 4; allowed: at least profiler_warmup 3 .* 2 = 5"):
        build(tmp_path, active=2, warmup=3)
    with pytest.raises(JobError, match="enable_memory_snapshot: given true; allowed: false without a GPU"):
        build(tmp_path, snapshots=tmp_path)


def test_memory_snapshots(tmp_path, monkeypatch):
    history = []
    monkeypatch.setattr(memory, "record_memory_history", lambda **options: history.append(options))
    monkeypatch.setattr(memory, "dump_snapshot", lambda path: open(path, "w").close())
    options = dict(traces=None, snapshots=tmp_path / "memory", device=CUDA, freq=2, start_step=10)
    run(build(tmp_path, **options), 5)
    names = [f"memory/step_{step}/rank3_memory.pickle" for step in (12, 14)]
    assert files(tmp_path) == names
    assert history == [{"max_entries": 100_000}, {"enabled": None}]

    for error in (ValueError, torch.OutOfMemoryError):
        with pytest.raises(error), build(tmp_path, **options | {"start_step": 20}) as profiler:
            profiler.step()
            raise error
    assert files(tmp_path) == [*names, "memory/step_21_out_of_memory/rank3_memory.pickle"]
