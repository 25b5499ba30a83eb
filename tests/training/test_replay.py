"""Tests of `torchtitan replay`: a step made again equals the run's, and a planted NaN is located."""

import json
import math
import shutil

import pytest
import torch

from tests.support import jobs
from torchtitan import cli
from torchtitan.launcher.run_folder import job_of_step, record_start
from torchtitan.models.layers import SwiGLU
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.training.replay import RunJob, ranks_of_sample

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
OPTIONS = {"checkpoint__enable": True, "checkpoint__interval": 2, "training__steps": 5}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, texts):
    """Return the folder of a float32 run on one rank, two microbatches a step, saved at steps 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    options = OPTIONS | {"training__local_batch_size": 4, "debug__seed": 3}
    jobs.train(jobs.arguments(folder, texts, **options))
    return folder


def record_of(run, step):
    (record,) = [row for row in jobs.logged_steps(run) if row["step"] == step]
    return record


def replay(run, step):
    return RunJob.of_step(run, step).replay(step)


@pytest.mark.parametrize("step", [1, 4, 5])
def test_a_step_on_one_rank_has_the_same_bits(run, step, capsys):
    """Step 1 starts from initial weights, step 4 from step 2 with one step in between, step 5 from step 4."""
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    result, record = replay(run, step), record_of(run, step)
    assert (result.loss, result.grad_norm) == (record["loss"], record["grad_norm"])
    assert result.start.step == {1: 0, 4: 2, 5: 4}[step]
    total = math.sqrt(sum(norm**2 for norm in result.norms.values()))
    assert total == pytest.approx(result.grad_norm, rel=1e-5) and len(result.norms) == 39
    tokens = [sample.tokens for sample in result.samples]
    mean = sum(sample.loss * sample.tokens for sample in result.samples) / sum(tokens)
    assert len(tokens) == 8 and mean == pytest.approx(result.loss, rel=1e-6)
    assert list(result.blocks) == [f"layers.{i}" for i in range(4)] and not result.first_output
    assert all(-math.inf < block.low < block.high < math.inf for block in result.blocks.values())
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before


def test_the_command_prints_the_step(run, capsys):
    assert cli.main(["replay", str(run), "--step", "5", "--samples", "1", "--tokens", "40"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"step 5 of {run}, from the checkpoint of step 4\n")
    assert out.count("equal to the run's, bit for bit") == 2 and "8 samples, highest loss first" in out
    assert "--- document 0: tokens 0-" in out and "alpha" in out
    assert "gradient norms of 39 parameters" in out and "\n  layers.3 " in out and "not finite" not in out


@pytest.mark.parametrize(
    "plan",
    [
        {"parallelism__data_parallel_shard_degree": 1, "parallelism__tensor_parallel_degree": 2},
        {"parallelism__data_parallel_shard_degree": 1, "parallelism__pipeline_parallel_degree": 2},
    ],
    ids=["tp", "pp"],
)
def test_a_step_of_two_ranks_is_equal_up_to_rounding(plan, texts, tmp_path, capsys):
    options = OPTIONS | {"training__steps": 3, "training__local_batch_size": 2, "training__global_batch_size": 4} | plan
    code, _, err = jobs.run(jobs.arguments(tmp_path / "run", texts, **options), ranks=2)
    assert code == 0, err
    result, record = replay(tmp_path / "run", 3), record_of(tmp_path / "run", 3)
    assert result.loss == pytest.approx(record["loss"], rel=1e-5)
    assert result.grad_norm == pytest.approx(record["grad_norm"], rel=1e-4)
    assert cli.main(["replay", str(tmp_path / "run"), "--step=3", "--rank=1", "--samples=0"]) == 0
    assert "\n4 samples, highest loss first" in capsys.readouterr().out
    assert cli.main(["replay", str(tmp_path / "run"), "--step=3", "--rank=2"]) == 2
    assert "--rank: given 2; allowed: 0 to 1, the ranks of the run" in capsys.readouterr().err


def test_ranks_of_a_sample():
    dims = ParallelDims(world_size=24, pp=2, dp_replicate=2, dp_shard=3, tp=2)
    assert ranks_of_sample(0, dims) == [0, 1, 12, 13] and ranks_of_sample(4, dims) == [8, 9, 20, 21]
    assert ranks_of_sample(7, dims) == [2, 3, 14, 15]


def test_a_planted_nan_is_located_at_its_module(run, monkeypatch, capsys):
    forward, calls = SwiGLU.forward, []

    def broken(self, x, *arguments, **kwargs):
        calls.append(self)
        output = forward(self, x, *arguments, **kwargs)
        return output * torch.nan if len(calls) == 3 else output

    monkeypatch.setattr(SwiGLU, "forward", broken)
    assert cli.main(["replay", str(run), "--step", "5", "--samples", "1"]) == 0
    out = capsys.readouterr().out
    assert "\nfirst output that is not finite: layers.2.feed_forward; its inputs are finite\n" in out
    assert "not finite\n" in out.split("activations by block")[1]


def test_weights_and_gradients_that_are_not_finite(run, monkeypatch):
    class NanGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.nan

    forward, calls = SwiGLU.forward, []

    def broken(self, x, *arguments, **kwargs):
        calls.append(self)
        return forward(self, NanGradient.apply(x) if len(calls) == 2 else x, *arguments, **kwargs)

    monkeypatch.setattr(SwiGLU, "forward", broken)
    result = replay(run, 5)
    assert not result.first_output and math.isnan(result.grad_norm)
    assert result.first_gradient.startswith("layers.1.")
    assert not math.isfinite(result.norms["layers.1.attention.wq.weight"])
    assert math.isfinite(result.norms["layers.2.attention.wq.weight"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none", "--step=1"], "none: no config.toml in it; give the dump_folder of a run"),
        (["run", "--step=6"], "--step: given 6; allowed: 1 to 5, the steps of the job after its start"),
        (["run", f"--step={10**15}"], f"--step: given {10**15}; allowed: 1 to 5, the steps of the job after its start"),
        (["run", "--step=1", "--under=tp=2", "--rank=0"], "--rank: allowed: without --under"),
        (["run", "--step=1", "--under=tp=2", "--samples=3"], "--samples: allowed: without --under"),
        (["run", "--step=1", "--timeout=9"], "--timeout: allowed: with --under"),
        (["run", "--step=0"], "--step: given '0'; allowed: a whole number >= 1"),
        (["run"], "the following arguments are required: --step"),
    ],
    ids=["no-run", "too-late", "far-too-late", "rank-under", "samples-under", "time-alone", "zero", "no-step"],
)
def test_bad_arguments_are_a_line(arguments, message, run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    assert cli.main(["replay", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_run_without_checkpoints_starts_from_the_initial_weights(texts, tmp_path, capsys):
    options = {"training__steps": 2, "training__global_batch_size": -1}
    jobs.train(jobs.arguments(tmp_path / "run", texts, **options))
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    cut = json.loads(rows[1]) | {"loss": None}
    (tmp_path / "run/metrics.jsonl").write_text(f"{rows[0]}\n{json.dumps(cut)}\n" + '{"step": 3, "lo')
    assert cli.main(["replay", str(tmp_path / "run"), "--step=2", "--samples=0"]) == 0
    output = capsys.readouterr()
    assert "making steps 1 to 1 again" in output.err and "from the initial weights" in output.out
    assert "the run logged a value that is not finite" in output.out and "bit for bit" in output.out
    (tmp_path / "run/metrics.jsonl").unlink()
    assert cli.main(["replay", str(tmp_path / "run"), "--step=2", "--rank=0", "--samples=0"]) == 0
    assert "\n8 samples, highest loss first" in capsys.readouterr().out, "the start has recorded its plan"
    for path in (tmp_path / "run/starts").glob("*.json"):  # earlier versions did not
        path.unlink()
    assert cli.main(["replay", str(tmp_path / "run"), "--step=2"]) == 2
    assert "job and metrics.jsonl of the start that made the step has it" in capsys.readouterr().err


def test_records_of_varying_length_without_a_checkpoint(tmp_path, capsys):
    """Tokens do not tell the samples of a step then, but the start's plan does."""
    records = [{"prompt": f"{'a' * (i % 7)}?", "completion": "b" * (1 + i % 20)} for i in range(64)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = {"task__kind": "sft", "data__packing": "off", "data__pad_to": "batch"}
    options |= {"training__steps": 2, "training__global_batch_size": -1, "training__local_batch_size": 4}
    jobs.train(jobs.arguments(tmp_path / "run", tmp_path / "records.jsonl", **options))
    assert cli.main(["replay", str(tmp_path / "run"), "--step=2", "--samples=0"]) == 0
    out = capsys.readouterr().out
    assert out.count("equal to the run's, bit for bit") == 2 and "\n4 samples, highest loss first" in out


def test_a_run_that_steps_in_backward(texts, tmp_path, capsys):
    """Its gradients are freed at once, so the run logged no norm; the replay keeps them."""
    options = OPTIONS | {"optimizer__early_step_in_backward": True, "training__max_norm": 0}
    jobs.train(jobs.arguments(tmp_path / "run", texts, **options))
    for step in (1, 4, 5):
        assert cli.main(["replay", str(tmp_path / "run"), f"--step={step}", "--samples=0"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1].endswith("equal to the run's, bit for bit"), (step, lines[1])
        assert float(lines[2].split()[1]) > 0 and len(lines[2].split()) == 2


DOCUMENTS = {"task__kind": "documents", "adapter__kind": "neurocache", "training__steps": 4, "training__seq_len": 16}
DOCUMENTS |= {"training__local_batch_size": 2, "training__global_batch_size": 8}
DOCUMENTS |= {f"adapter__neurocache__{name}": value for name, value in {"cache_size": 64, "topk": 4}.items()}


def test_caches_of_several_ranks(texts, tmp_path, capsys):
    """Each of two ranks has caches of two rows. Compressed entries are of the weights of their time, so that the start
    cannot compute them again: without those of the checkpoint, the loss of step 4 differs by 7e-5."""
    run = tmp_path / "run"
    options = OPTIONS | DOCUMENTS | {"adapter__neurocache__resume_warmup": "saved"}
    code, _, err = jobs.run(jobs.arguments(run, texts, **options), ranks=2)
    assert code == 0, err
    for step, start in ((2, 0), (4, 2)):
        result, record = replay(run, step), record_of(run, step)
        assert result.start.step == start and [sample.number for sample in result.samples] == list(range(8))
        assert result.loss == pytest.approx(record["loss"], rel=2e-6)
        assert result.grad_norm == pytest.approx(record["grad_norm"], rel=2e-6)
        tokens = [sample.tokens for sample in result.samples]
        mean = sum(sample.loss * sample.tokens for sample in result.samples) / sum(tokens)
        assert mean == pytest.approx(result.loss, rel=2e-6), "each sample reads the cache of its row"
    assert cli.main(["replay", str(run), "--step=4", "--rank=1", "--samples=0"]) == 0
    out = capsys.readouterr().out
    assert "\n4 samples, highest loss first" in out and out.count("tokens with a loss  rank 1\n") == 4


@pytest.mark.parametrize(("first", "axis"), [(1, "data_parallel_shard"), (2, "tensor")])
def test_caches_of_another_plan_are_rebuilt_as_by_the_run(first, axis, texts, tmp_path):
    """The checkpoint is of one rank or of two by tensor parallel, the start from it has two data-parallel ranks or one.

    With the saved caches the loss of step 3 after tensor parallel differs by 1.25e-6.
    """
    run = tmp_path / "run"
    options = OPTIONS | DOCUMENTS | {"adapter__neurocache__resume_warmup": "saved"}
    tensor = {"parallelism__data_parallel_shard_degree": 1, "parallelism__tensor_parallel_degree": 2}
    for ranks, steps in ((first, 2), (3 - first, 4)):
        plan = tensor if axis == "tensor" and ranks == 2 else {}
        code, _, err = jobs.run(
            jobs.arguments(run, texts, **(options | plan | {"training__steps": steps})), ranks=ranks
        )
        assert code == 0, err
    for step in (3, 4):
        assert replay(run, step).loss == pytest.approx(record_of(run, step)["loss"], rel=2e-7)


def test_caches_that_one_process_cannot_have(texts, tmp_path, capsys):
    run = tmp_path / "run"
    options = OPTIONS | DOCUMENTS | {"training__steps": 1, "adapter__neurocache__scope": "global"}
    code, _, err = jobs.run(jobs.arguments(run, texts, **options), ranks=2)
    assert code == 0, err
    assert cli.main(["replay", str(run), "--step=1"]) == 2
    assert "the rows of each of its ranks share a cache" in capsys.readouterr().err
    for path in [*(run / "starts").glob("*.json"), *(run / "checkpoint").glob("step-*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert cli.main(["replay", str(run), "--step=1"]) == 2
    assert "each data-parallel rank reads its own rows, and nothing tells the number" in capsys.readouterr().err


def test_plan_and_samples_are_of_the_start_that_made_the_step(texts, tmp_path, capsys):
    """Steps 1 to 5 had 4 samples on one rank; the same folder goes on with 8 on two ranks."""
    folder = tmp_path / "run"
    options = OPTIONS | {"training__local_batch_size": 4, "training__global_batch_size": -1}
    jobs.train(jobs.arguments(folder, texts, **options))
    options |= {"training__steps": 7, "checkpoint__allow_config_change": '["training.global_batch_size"]'}
    code, _, err = jobs.run(jobs.arguments(folder, texts, **options), ranks=2)
    assert code == 0, err
    result = replay(folder, 2)
    assert len(result.samples) == 4 and result.start.dims().world_size == 1
    assert result.grad_norm == record_of(folder, 2)["grad_norm"]
    assert cli.main(["replay", str(folder), "--step=6", "--rank=1", "--samples=0"]) == 0
    assert "\n4 samples, highest loss first" in capsys.readouterr().out
    assert cli.main(["replay", str(folder), "--step=2", "--rank=1"]) == 2
    message = capsys.readouterr().err
    assert "--rank: given 1; allowed: 0 to 0" in message and "making steps" not in message
    for path in (folder / "checkpoint").glob("step-0000000[56]"):
        shutil.rmtree(path)
    assert cli.main(["replay", str(folder), "--step=7"]) == 2
    assert "steps from 5 on were made with training.global_batch_size = 4, and step 7 with 8" in capsys.readouterr().err
    rows = [
        json.dumps(row | {"tokens": 3 * row["tokens"]} if "tokens" in row else row) for row in jobs.logged_steps(folder)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(rows))
    assert cli.main(["replay", str(folder), "--step=4"]) == 2
    assert "of the start that made the step differ in it: [4, 12]" in capsys.readouterr().err


def test_the_job_is_the_one_of_the_start_that_made_the_step(tmp_path):
    """A run that was started again with other options made its later steps with these."""
    assert job_of_step(tmp_path, 1) == tmp_path / "config.toml"
    record_start(tmp_path, "first", 0)
    record_start(tmp_path, "second", 20)
    record_start(tmp_path, "third", 10)
    texts = {step: job_of_step(tmp_path, step).read_text() for step in (1, 10, 11, 25)}
    assert texts == {1: "first", 10: "first", 11: "third", 25: "third"}
