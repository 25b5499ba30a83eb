"""Tests of `torchtitan replay --under`: a step equals one device's, and a planted mistake is named."""

import dataclasses
import json
import re

import pytest
import torch

from tests.support import expert_jobs, jobs
from tests.support.planted import run_with
from torchtitan import cli
from torchtitan.config.job import JobConfig
from torchtitan.job import ResolvedJob
from torchtitan.process.gloo_ranks import run_on_ranks
from torchtitan.process.ranks import read_ranks
from torchtitan.training import plan_replay
from torchtitan.training.plan_replay import GradientDifference, RankStep, compare, difference_of
from torchtitan.training.step import TrainingStep

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
OPTIONS = {"checkpoint__enable": True, "checkpoint__interval": 2, "training__steps": 3, "training__local_batch_size": 4}
LLAMA = {"model__overrides": "{dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16}"}
SHAPES = {
    "llama": LLAMA,
    "tied": LLAMA | {"model__name": "llama3.2", "model__flavor": "debugmodel"},
    "opt": {
        "model__name": "opt",
        "model__overrides": "{dim=32, n_layers=2, n_heads=4, vocab_size=260, ffn_dim=64, max_seq_len=64}",
    },
    "experts": expert_jobs.JOB,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that trains three steps of a model on one rank, once, and returns the folder."""
    folders, texts = {}, jobs.write_texts(tmp_path_factory.mktemp("texts"))

    def train(shape):
        if shape not in folders:
            folders[shape] = tmp_path_factory.mktemp(shape) / "run"
            jobs.train(jobs.arguments(folders[shape], texts, **OPTIONS | SHAPES[shape]))
        return folders[shape]

    return train


@pytest.mark.parametrize(
    ("shape", "step", "plan", "arguments"),
    [
        ("llama", 3, "tp=2,pp=2", []),
        ("tied", 2, "pp=2,dp_shard=2", ["--parallelism.pipeline_parallel_schedule=GPipe"]),
        ("opt", 2, "cp=2", []),
        ("experts", 3, "dp_shard=2,ep=2", []),
    ],
)
def test_a_step_under_another_plan_is_equal(shape, step, plan, arguments, run, capsys):
    """Step 3 begins with a checkpoint, step 2 with the initial weights and a step that only one device makes."""
    assert cli.main(["replay", str(run(shape)), f"--step={step}", "--under", plan, *arguments]) == 0
    out = capsys.readouterr().out
    assert ("from the checkpoint of step 2\n" if step == 3 else "from the initial weights\n") in out
    assert out.endswith("\nequal\n") and len(re.findall("; the run's|; equal to the run's", out)) == 2
    modules, total = re.search(r"outputs +(\d+) of (\d+) modules", out).groups()
    assert modules == total and int(total) > 20
    gradients, total = re.search(r"gradients +(\d+) of (\d+) are the same", out).groups()
    assert gradients == total and int(total) > 15


@pytest.mark.parametrize(
    ("mutant", "shape", "plan", "finding"),
    [
        ("row-bias-on-every-rank", "opt", "tp=2", "forward: the output of layers.0.attention.wo:"),
        ("norm-gradients-not-summed-over-tp", "llama", "tp=2", "backward: the gradient of norm.weight,"),
        ("tied-gradients-not-summed", "tied", "pp=2", "backward: the gradient of tok_embeddings.weight,"),
        ("expert-gradients-doubled", "experts", "dp_shard=2,ep=2", "it is 2 times one device's"),
        ("clip-by-the-norm-of-a-stage", "llama", "pp=2", "grad_norm .* DIFFERS"),
        ("pipeline-gradients-not-normalised", "llama", "pp=2", "backward: the gradient of output.weight, .* times"),
    ],
)
def test_a_planted_mistake_is_named(mutant, shape, plan, finding, run, monkeypatch, capsys):
    monkeypatch.setattr(plan_replay, "run_on_ranks", run_with(mutant))
    assert cli.main(["replay", str(run(shape)), "--step=3", "--under", plan]) == 1
    out = capsys.readouterr().out
    assert re.search(finding, out), out


def lose_gradient(name, function, *args):
    """Return `function(*args)` on a rank whose steps lose the gradient of a parameter, if it is the second one."""
    forward_backward = TrainingStep.forward_backward

    def lossy(step, *arguments):
        loss = forward_backward(step, *arguments)
        dict(step.model.named_parameters())[name].grad = None
        return loss

    if read_ranks().rank == 1:
        TrainingStep.forward_backward = lossy
    return function(*args)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("norm.weight", "tp=2"),  # replicated, with a partial gradient
        ("layers.1.attention.wq.weight", "tp=2"),
        ("layers.0.ffn_norm.weight", "dp_shard=2"),
    ],
)
def test_a_gradient_that_one_rank_lacks_is_named_without_waiting(name, plan, run, monkeypatch, capsys):
    def with_a_loss(ranks, function, *args, **options):
        call = (function, *args) if ranks == 1 else (lose_gradient, name, function, *args)
        return run_on_ranks(ranks, *call, **options)

    monkeypatch.setattr(plan_replay, "run_on_ranks", with_a_loss)
    assert cli.main(["replay", str(run("llama")), "--step=3", "--under", plan, "--timeout=300"]) == 1
    out = capsys.readouterr().out
    assert f"only some ranks have a gradient of {name} (1 in all)" in out and "no rank has" not in out
    assert re.search(r"gradients +(\d+) of (\d+) are the same", out), out


def test_the_probe_of_the_run_does_not_disturb_the_comparison(tmp_path, capsys):
    """It makes further forwards of some microbatches."""
    options = OPTIONS | {"training__local_batch_size": 2, "guard__replay_every": 1, "model__overrides": jobs.SHALLOW}
    jobs.train(jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), **options))
    assert cli.main(["replay", str(tmp_path / "run"), "--step=3", "--under", "dp_shard=2"]) == 0
    assert "outputs    17 of 17 modules" in capsys.readouterr().out


def test_batches_that_a_plan_pads_to_other_lengths_are_equal(tmp_path, capsys):
    records = [{"instruction": "ab " * (number % 3), "output": "cde " * (number % 7 + 1)} for number in range(40)]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    options = {"training__local_batch_size": 2, "training__seq_len": 256, "model__overrides": jobs.SHALLOW}
    options |= {"task__kind": "sft", "training__format": "alpaca", "data__packing": "off"}
    jobs.train(jobs.arguments(tmp_path / "run", tmp_path / "records.jsonl", **OPTIONS | options))
    for plan in ("dp_shard=2", "tp=2"):  # which would leave out none of the tokens without a label
        assert cli.main(["replay", str(tmp_path / "run"), "--step=3", "--under", plan]) == 0
        assert "outputs    17 of 17 modules" in capsys.readouterr().out


def test_steps_of_which_no_module_was_compared_are_not_equal():
    step = RankStep(1.0, 1.0, {"norm": [0.0, 1.0, 1.0]}, {"w": GradientDifference(0.0, 1.0)})
    job = ResolvedJob(JobConfig())
    assert compare(None, job, step, [step]).equal
    result = compare(None, job, step, [dataclasses.replace(step, outputs={"other": step.outputs["norm"]})])
    assert (result.modules, result.compared, result.equal) == (1, 0, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--under", "tp=3"], "parallelism.tensor_parallel_degree: given 3, which does not divide n_heads 4"),
        (["--under", "dp=2"], "given 'dp=2'; allowed: degrees like tp=2,pp=2, each axis once: pp, dp_replicate,"),
        (["--under", "tp=2,tp=2"], "each axis once"),
        (["--under", "tp=x"], "given 'x'; allowed: a whole number from 1 to 64"),
        (["--under", "pp=2", "--parallelism.tensor_parallel_degree=2"], "allowed: as an axis of --under, one of pp"),
        (["--under", "pp=2", "--training.seq_lem=2"], "training.seq_len"),
        (["--training.seq_len=8"], "--training.seq_len=8: allowed: with --under"),
    ],
)
def test_an_illegal_plan_is_a_line(arguments, message, run, capsys):
    assert cli.main(["replay", str(run("llama")), "--step=3", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_the_difference_of_gradients():
    right = torch.tensor([1.0, -4.0, 2.0], dtype=torch.float64)
    assert difference_of(2 * right, right, 5.0).size == 1.0 and difference_of(2 * right, right, 5.0).ratio == 2.0
    assert difference_of(right + torch.tensor([0, 0, 1.0]), right, 5.0).ratio is None
    tiny = difference_of(torch.tensor([1e-9]).double(), torch.zeros(1).double(), 1.0)
    assert tiny.size == pytest.approx(1e-5), "held against the norm of all"
    nan = difference_of(right * torch.nan, right, 5.0)
    assert not nan.size <= 1.0
