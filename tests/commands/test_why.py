"""Tests of the planner's model in `torchtitan why`: parts of a step by axis, and the plan that it proposes."""

import json
import re
from dataclasses import asdict, replace

import pytest

from tests.support.checkpoint_folders import make_step
from torchtitan import cli
from torchtitan.config import manager
from torchtitan.core.hardware import FOLDER, load_hardware
from torchtitan.launcher.run_folder import RecordedPlan, record_start, this_process
from torchtitan.metrics.run_end import cause_of
from torchtitan.planner.search import Result, Search
from torchtitan.planner.time.measured_runs import UNEXPLAINED, MeasuredRun, ModelledStep

H100 = "NVIDIA H100 80GB HBM3"
DATA_SECONDS = 0.01
TENSOR_PARALLEL = ["llama3_8b", "--parallelism.tensor_parallel_degree=4", "--training.local_batch_size=1"]
CUSTOM = "parallelism.pipeline_parallel_{}: the formulas are of named schedules and usual stages"
MISFIT = "its job, recorded plan and metrics do not fit each other; give the folder as the run has left it"
PIPELINE = ["llama3_8b", "--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2"]


def write_run(folder, job, ranks, device=H100, factor=1.0, hardware=None):
    """Write a run of 16 samples a step on one machine, whose steps take `factor` times what the model predicts."""
    config = manager.load([*job, "--training.global_batch_size=16"])
    record_start(folder, manager.to_toml(config), 0, RecordedPlan({"tp": 1}, 16, ranks, ranks, device))
    tokens = 16 * config.training.seq_len

    def write(seconds):
        rates = {"step_seconds": seconds, "data_seconds": DATA_SECONDS, "tokens_per_second": tokens / seconds}
        rows = ({"step": step, "loss": 1.0, **rates} for step in range(1, 20))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(1.0)
    step = ModelledStep.of(MeasuredRun(folder), hardware)
    write(DATA_SECONDS + factor * step.time.seconds)
    return ModelledStep.of(MeasuredRun(folder), hardware)


def output_of(capsys, *arguments, code=0):
    assert cli.main([str(argument) for argument in arguments]) == code
    output = capsys.readouterr()
    return output.out if code == 0 else output.err


@pytest.mark.parametrize(
    ("job", "part", "title"),
    [(TENSOR_PARALLEL, "tp", "tensor parallel, exposed"), (PIPELINE, "bubble", "pipeline bubble")],
    ids=["tensor parallel", "pipeline"],
)
def test_parts_and_savings_are_those_of_the_planner(job, part, title, tmp_path, capsys):
    """A step is 1.1 times what `torchtitan plan` predicts for the job, so that 0.1 of it is not explained."""
    step = write_run(tmp_path, job, 8, factor=1.1)
    command = ["plan", tmp_path / "config.toml", "--gpus=8", "--gpu=h100-80", "--quick", "--json", "--top=1"]
    answer = json.loads(output_of(capsys, *command))
    own, best = answer["job"], answer["plans"][0]
    shares, measured = step.shares(), DATA_SECONDS + 1.1 * own["step_seconds"]
    assert step.run.seconds == pytest.approx(measured) and sum(shares.values()) == pytest.approx(1)
    assert shares[UNEXPLAINED] == pytest.approx(0.1 * own["step_seconds"] / measured)
    assert shares["waiting for data"] == pytest.approx(DATA_SECONDS / measured)
    assert shares[title] == pytest.approx(own["parts"][part] / measured) and shares[title] > 0.05
    assert shares["recompute"] == pytest.approx(own["parts"]["recompute"] / measured)
    saved = [own["step_seconds"] - best[name] for name in ("step_seconds", "step_seconds_high", "step_seconds_low")]
    lines = output_of(capsys, "why", tmp_path).splitlines()
    (change,) = [line for line in lines if line.startswith("change first: ")]
    percent, least, most = (f"{100 * seconds / measured:.0f}" for seconds in saved)
    assert f"on these 8 ranks, which saves {percent} % of a step by the model ({least} to {most} %): " in change
    assert "the steps are bound by computation" in lines and float(percent) > 5


@pytest.mark.parametrize(
    ("options", "title"),
    [
        (["--parallelism.tensor_parallel_degree=2"], "tensor parallel, exposed"),
        ([], "FSDP and replicas, exposed"),
        (["--parallelism.data_parallel_replicate_degree=2"], "FSDP and replicas, exposed"),
        (["--parallelism.context_parallel_degree=2", "--training.seq_len=65536"], "context parallel, exposed"),
        (["--model.name=qwen3_moe", "--model.flavor=debugmodel", "--parallelism.expert_parallel_degree=2"], "expert"),
    ],
    ids=["tp", "fsdp", "replicas", "cp", "ep"],
)
def test_slow_links_bound_the_axis_that_uses_them(options, title, tmp_path, capsys):
    path = tmp_path / "slow.toml"
    text = (FOLDER / "cpu.toml").read_text()
    path.write_text(re.sub("^bandwidth = .*", "bandwidth = 1e3", text, flags=re.MULTILINE))
    job = ["debug_model", "--training.local_batch_size=8", *options]
    step = write_run(tmp_path / "run", job, 2, "cpu", hardware=load_hardware(str(path)))
    assert next(iter(step.shares())).startswith(title)
    out = output_of(capsys, "why", tmp_path / "run", "--gpu", path)
    assert f"the steps are bound by {title}" in out and "unknown: whether the CPU" not in out


@pytest.mark.parametrize(
    ("factor", "line"),
    [
        (2.0, f"the steps are bound by {UNEXPLAINED}: they take longer than its interval, and it cannot know why"),
        (0.5, "what bounds the steps is not known: they take less time than the model's interval, so it is wrong here"),
    ],
)
def test_steps_outside_the_interval_of_the_model(factor, line, tmp_path, capsys, monkeypatch):
    """The model cannot know then, and proposes no plan."""
    write_run(tmp_path, TENSOR_PARALLEL, 8, factor=factor)
    monkeypatch.setattr(ModelledStep, "fastest", lambda step: pytest.fail("plans are searched"))
    lines = output_of(capsys, "why", tmp_path).splitlines()
    assert line in lines and not any("legal plan" in other for other in lines)
    changes = [other for other in lines if other.startswith("change first: ")]
    assert changes == [
        "change first: to see what takes the unexplained time, set profiling.enable_profiling for some steps"
    ] * (factor > 1)


def test_each_remedy_is_printed_once(tmp_path, capsys):
    """A profile shows both what slow steps take and what the model does not explain."""
    write_run(tmp_path, TENSOR_PARALLEL, 8, factor=2.0)
    path = tmp_path / "metrics.jsonl"
    *rows, last = path.read_text().splitlines()
    slow = json.loads(last) | {"step_seconds": 5 * json.loads(last)["step_seconds"]}
    path.write_text("\n".join([*rows, json.dumps(slow), ""]))
    out = output_of(capsys, "why", tmp_path)
    assert "change first: to see what takes the unexplained time, set profiling" in out
    assert "then: look for other programs on the machine\n" in out and out.count("set profiling.") == 1
    record = json.loads(output_of(capsys, "why", tmp_path, "--json"))  # its keys are documented in docs/jobs.md
    assert {*record} == {"run", "exit_code", "seconds", "training_share", "causes", "lines"}
    assert record["lines"] == out.splitlines() and record["exit_code"] == 0
    assert all({*cause} == {"name", "share", "gain", "remedy"} for cause in record["causes"]) and record["causes"]


def test_the_fastest_plan_is_no_change(tmp_path, capsys, monkeypatch):
    step = write_run(tmp_path, TENSOR_PARALLEL, 8)
    for best in (None, replace(step.fastest(), time=step.time)):
        monkeypatch.setattr(ModelledStep, "fastest", lambda step, best=best: best)
        assert "change first" not in output_of(capsys, "why", tmp_path)


def test_the_fastest_plan_is_searched_within_the_memory_limit_of_the_job(tmp_path, monkeypatch):
    step, limits = write_run(tmp_path, [*TENSOR_PARALLEL, "--memory.limit=24GiB"], 8), []
    monkeypatch.setattr(Search, "find", lambda search, gpus, top, within: limits.append(within) or Result())
    assert step.fastest() is None and limits[0].memory == pytest.approx(24 * 2**30)


@pytest.mark.parametrize(
    ("job", "device", "reason"),
    [
        (TENSOR_PARALLEL, "Mystery 9000", "no figures of Mystery 9000; give --gpu NAME, or a file of"),
        (["debug_model", "--adapter.kind=dora"], "cpu", "adapter.kind = 'dora': the formulas are of lora, qlora"),
        (["debug_model", "--model.flavor=mine"], "cpu", "model.name = 'llama3' with model.flavor = 'mine': not known"),
        (TENSOR_PARALLEL, None, "the run has not recorded its device; give --gpu NAME"),
        ([*PIPELINE, "--parallelism.pipeline_parallel_schedule_csv=a.csv"], H100, CUSTOM.format("schedule_csv")),
        (
            [*PIPELINE, "--parallelism.pipeline_parallel_layers_per_stage=40"],
            H100,
            MISFIT,
        ),
        (["llama3_8b", "--parallelism.tensor_parallel_degree=16"], H100, MISFIT),
    ],
)
def test_what_the_model_cannot_know_is_said(job, device, reason, tmp_path, capsys):
    write_run(tmp_path, TENSOR_PARALLEL, 8)
    record_start(
        tmp_path,
        manager.to_toml(manager.load([*job, "--parallelism.data_parallel_shard_degree=2"])),
        0,
        None if device is None else RecordedPlan({"tp": 1}, 16, 8, 8, device),
    )
    out = output_of(capsys, "why", tmp_path)
    assert f"\nunknown: the parts of a step by the planner's model: {reason}" in out
    assert "the steps are bound by" not in out
    if job is TENSOR_PARALLEL:
        assert "on NVIDIA H200" in output_of(capsys, "why", tmp_path, "--gpu=h200")


def test_ranks_on_more_machines_take_longer(tmp_path):
    """A step is predicted on as many ranks of a machine as are recorded, for why and for plan --from."""
    usual = write_run(tmp_path / "one", TENSOR_PARALLEL, 8)
    write_run(tmp_path / "eight", TENSOR_PARALLEL, 8)
    (file,) = (tmp_path / "eight/starts").glob("*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"ranks_per_machine": 1}))
    run = MeasuredRun(tmp_path / "eight")
    factors = usual.calibration.factors
    seconds = run.predicted(usual.hardware, factors)
    assert seconds > 1.5 * usual.run.predicted(usual.hardware, factors)
    assert seconds == ModelledStep.of(run, None).time.seconds


def test_hardware_that_is_not_known_is_a_line(tmp_path, capsys):
    write_run(tmp_path, TENSOR_PARALLEL, 8)
    assert "--gpu: given 'h99'; allowed: a10, " in output_of(capsys, "why", tmp_path, "--gpu=h99", code=2)


def write_account(folder, **seconds):
    """Write a run with a logged step and this account of its time."""
    account = {f"{cause}_seconds": spent for cause, spent in seconds.items()}
    row = {"step": 1, "loss": 1.0, "step_seconds": 1.0, "data_seconds": 0.0}
    records = [row, {"step": 20, "event": "goodput", **account}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(
    ("saved", "bound"), [(6, "the steps themselves; next comes saving, 6 % of"), (40, "saving; at")]
)
def test_a_small_cause_is_not_what_bounds_a_run(tmp_path, capsys, saved, bound):
    write_account(tmp_path, train=100.0 - saved, save=float(saved))
    out = output_of(capsys, "why", tmp_path)
    assert f"bound by {bound}" in out and "change first: " in out


@pytest.mark.parametrize(
    ("code", "reason", "remedy"),
    [
        (4, "`torchtitan replay RUN --step 8` shows it", "torchtitan replay RUN --step 8"),
        (6, "hang: rank 1 is behind", "in the newest folder of RUN/hangs"),
        (137, "rank 1 was ended by SIGKILL", "memory was used up"),
        (139, "rank 1 was ended by SIGSEGV", "the stack that the rank has printed"),
        (143, "", None),
        (2**70, "of an odd file", None),
        ("8", "of an odd file", None),
        (4, "the loss is 9, above 5 for 3 steps", None),
        (7, "a reason", "make room"),
        (8, "a reason", "torchtitan estimate"),
        (0, "a reason", None),
    ],
)
def test_the_answer_begins_with_the_end_and_what_to_do_about_it(tmp_path, capsys, code, reason, remedy):
    write_account(tmp_path, train=60.0, save=40.0)
    end = {"step": 7, "event": "end", "cause": "a cause", "reason": reason, "exit_code": code}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(end) + "\n")
    first, second, *_ = output_of(capsys, "why", tmp_path).splitlines()
    assert re.search(rf"a cause after step 7 \(exit code {code}\)", first) and reason in first
    if remedy:
        assert second.startswith("first of all: ") and remedy in second.replace(str(tmp_path), "RUN")
    else:
        assert "recorded" in second


def add_end(folder, step, code, reason=""):
    end = {"step": step, "event": "end", "cause": cause_of(code), "reason": reason, "exit_code": code}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(end) + "\n")


@pytest.mark.parametrize(
    ("saved", "line"),
    [
        (None, "another start begins with step 1: there is no checkpoint"),
        (12, "another start goes on from the checkpoint of step 12; 7 steps are made again"),
        (19, "another start goes on from the checkpoint of step 19"),
    ],
)
def test_where_another_start_goes_on(tmp_path, capsys, saved, line):
    write_run(tmp_path, [*TENSOR_PARALLEL, "--checkpoint.enable"], 8)
    if saved:
        make_step(tmp_path / "checkpoint", saved)
    add_end(tmp_path, 19, 137, "rank 3 was ended by SIGKILL")
    first, second, third, *_ = output_of(capsys, "why", tmp_path).splitlines()
    assert "killed by SIGKILL after step 19" in first and "rank 3" in first and "dmesg" in second and third == line


def test_a_run_that_was_killed_with_its_launcher_is_told_by_its_lock(tmp_path, capsys):
    write_run(tmp_path, [*TENSOR_PARALLEL, "--checkpoint.enable=false"], 8)
    owner = replace(this_process(), started=1)
    (tmp_path / "run.lock.1").write_text(json.dumps(asdict(owner)))
    first, second, third, *_ = output_of(capsys, "why", tmp_path).splitlines()
    assert "left no end after step 19: it was killed together with its launcher" in first and "recorded" in third
    assert second == "another start begins with step 1: there is no checkpoint (checkpoint.enable)"
    (tmp_path / "run.lock.1").write_text(json.dumps(asdict(this_process())))
    first, second, *_ = output_of(capsys, "why", tmp_path).splitlines()
    assert "still at work" in first and "recorded" in second


def test_the_end_of_a_run_without_a_step_is_an_answer(tmp_path, capsys):
    """Of memory that was used up in the first step, the end is all that there is."""
    add_end(tmp_path, 0, 8, "can't allocate memory")
    first, second, last = output_of(capsys, "why", tmp_path).splitlines()
    assert "out of memory after step 0 (exit code 8)" in first and "torchtitan estimate" in second
    assert last == "unknown: what bounds its speed, as it has logged no step"
    record = json.loads(output_of(capsys, "why", tmp_path, "--json"))
    assert record["lines"] == [first, second, last] and record["causes"] == [] and record["seconds"] == 0


def test_a_save_in_every_step_is_not_called_no_step(tmp_path, capsys):
    write_run(tmp_path, TENSOR_PARALLEL, 8)
    path = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) | {"marked": ["save"]} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = output_of(capsys, "why", tmp_path)
    assert "each logged step has a save" in out and "no step has been logged" not in out
