"""The trace of a predicted step: its tracks have the simulated actions, and end when the step does."""

import collections
import json

import pytest

from torchtitan import cli
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.core.hardware import load_hardware
from torchtitan.job import ResolvedJob
from torchtitan.planner import trace
from torchtitan.planner.plan import Plan, Workload
from torchtitan.planner.search import PipelineTimer
from torchtitan.planner.time.measured_runs import usual_calibration
from torchtitan.planner.time.step_time import StepTimer

H100 = load_hardware("h100-80")
PIPELINE = {"pp": 4, "tp": 2, "microbatches": 8}


def timer() -> PipelineTimer:
    job = ResolvedJob(manager.load(["--job.config_file=llama3_8b", "--model.overrides={n_layers = 8}"]), 8, "cuda")
    return PipelineTimer(StepTimer(Workload.of(job, 16), H100, usual_calibration(H100)))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(shards=8, passes=2, recompute="full"),
        Plan(**PIPELINE, microbatch=2, schedule="1F1B"),
        Plan(**PIPELINE, passes=2, schedule="ZBVZeroBubble", stages_per_rank=2, recompute="none"),
    ],
    ids=str,
)
def test_a_trace_is_as_long_as_the_step(plan, tmp_path):
    times = timer()
    trace.write_trace(tmp_path / "new" / "step.json", times, plan)
    events = json.loads((tmp_path / "new" / "step.json").read_text())["traceEvents"]
    spans = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)
    ranks = {track for track in spans if track[0] == trace.RANKS}
    assert len(ranks) == plan.pp
    step = times.step_time(plan)
    end = max(event["ts"] + event["dur"] for track in ranks for event in spans[track]) / 1e6
    assert end == pytest.approx(step.seconds, rel=1e-3)
    for track in ranks:
        names = [event["name"] for event in spans[track]]
        assert (
            names[0].startswith("forward") and "optimizer" in names and len(set(names)) * plan.passes >= len(names) - 9
        )
        ends = [0.0, *(event["ts"] + event["dur"] for event in spans[track])]
        assert all(event["ts"] >= before - 1 for before, event in zip(ends, spans[track], strict=False))
    titles = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    messages = times.timer.messages_of_step(plan, 0)
    for track in spans.keys() - ranks:
        seconds = sum(event["dur"] for event in spans[track]) / 1e6
        assert seconds == pytest.approx(messages[titles[track]].seconds)
    assert len(spans) == plan.pp + len(messages)


def test_a_step_of_too_many_actions_is_refused(tmp_path):
    with pytest.raises(JobError, match="a step of 393,216 actions; allowed: 100,000; give a smaller batch"):
        trace.write_trace(tmp_path / "step.json", timer(), Plan(shards=1, passes=2**14))


@pytest.mark.parametrize("command", [["plan", "debug_model", "--gpus=2"], ["rehearse", "debug_model"]])
@pytest.mark.parametrize(("name", "reason"), [("step.txt", "allowed: names with .json; rename it"), ("", "a folder")])
def test_names_of_traces_are_checked_first(command, name, reason, tmp_path, capsys):
    assert cli.main([*command, f"--trace={tmp_path / name}"]) == 2
    assert reason in capsys.readouterr().err


def test_a_job_without_a_predicted_step_has_no_trace(tmp_path, capsys):
    adapter = ["--adapter.kind=dora", "--adapter.rank=4"]
    assert cli.main(["rehearse", "debug_model", *adapter, f"--trace={tmp_path / 'step.json'}"]) == 2
    assert "--trace: the planner's formulas do not describe a step of this job" in capsys.readouterr().err


def test_the_best_plan_is_traced(tmp_path, capsys):
    path = tmp_path / "step.json"
    assert cli.main(["plan", "debug_model", "--gpus=2", "--quick", "--top=1", f"--trace={path}"]) == 0
    assert f"trace    {path}" in capsys.readouterr().out and json.loads(path.read_text())["traceEvents"]
