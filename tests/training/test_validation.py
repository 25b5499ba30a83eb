"""Texts that a validation generates: equal to `torchtitan generate`, under every plan, without effect on training."""

import json
from pathlib import Path

import pytest
import torch

from tests.support import jobs, judged
from tests.support.expert_jobs import EP, JOB
from tests.support.judged import CP, PP, lines
from tests.support.pool import run_ranks
from torchtitan.commands.generate import sample
from torchtitan.config import manager
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.process.ranks import read_ranks
from torchtitan.training import validation
from torchtitan.training.inference_model import load_model
from torchtitan.training.trainer import Trainer

anywhere = judged.anywhere
BYTES = build_tokenizer("bytes")


# Prompts


def batch_of(tokens, labels, documents):
    tensors = {"tokens": tokens, "labels": labels, "document_ids": documents}
    return {name: torch.tensor([row]) for name, row in tensors.items()}


@pytest.mark.parametrize(
    ("labels", "documents", "prompt", "answer"),
    [
        ([-100, -100, 4, 5, 9, -100], [0, 0, 0, 0, 0, 1], [1, 2, 3], [4, 5]),  # up to the end of the answer
        ([-100, 3, -100, -100, 6, 9], [0] * 6, [1, 2], [3]),  # the first of two answers
        ([-100, -100, -100, 5, 9, -100], [0, 0, 1, 1, 1, 2], [3, 4], [5]),  # padding before it
        ([2, 3, 4, 5, 6, 9], [0] * 6, [1, 2, 3], [4, 5, 6]),  # learned from its beginning
        ([2, -100, 4, 5, 6, 7], [0, 0, 1, 1, 1, 1], [1], [2]),
    ],
)
def test_the_prompt_ends_before_the_first_answer(labels, documents, prompt, answer):
    batch = batch_of([1, 2, 3, 4, 5, 6], labels, documents)
    assert validation.prompt_of(batch, {9}) == (prompt, answer)


def test_texts_of_an_earlier_run_are_moved_away(tmp_path):
    config = manager.load([f"--job.dump_folder={tmp_path}"])
    (tmp_path / "generated.jsonl").write_text('{"step": 1}\n')
    validation.Generations(ResolvedJob(config), BYTES, True, None).close()
    assert (tmp_path / "generated.previous.jsonl").read_text() == '{"step": 1}\n'
    assert (tmp_path / "generated.jsonl").read_text() == ""


# Jobs


def write_rows(path: Path) -> Path:
    rows = [{"prompt": f"{chr(97 + i)} is ", "completion": chr(97 + i) * 3 + "!"} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job_arguments(folder, rows, **options):
    settings = dict(task__kind="sft", training__seq_len=16, training__local_batch_size=4, training__steps=4)
    settings |= dict(validation__enable=True, validation__split=0.2, validation__samples=0, validation__freq=2)
    settings |= dict(validation__local_batch_size=2, checkpoint__enable=True, training__global_batch_size=4)
    settings |= dict(validation__generated=3, validation__generated_tokens=6)
    return jobs.arguments(folder, rows, **settings | options)


def train(argv):
    """Train; return logged steps, hashes of final state and generator, and whether all modules are in training mode."""
    trainer = Trainer(manager.load(argv), read_ranks())
    trainer.train()
    trainer.metrics.close()
    modules = [module.training for part in trainer.model.parts for module in part.modules()]
    state = jobs.state_hash(trainer), torch.get_rng_state().numpy().tobytes(), all(modules)
    return jobs.logged_steps(trainer.exports.folder), state


def generated_rows(folder):
    return [json.loads(line) for line in (folder / validation.FILE).read_text().splitlines()]


def validations(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["validation_loss"] for row in rows if "validation_loss" in row]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated")
    rows = write_rows(folder / "rows.jsonl")
    ((steps, state),) = run_ranks(1, train, job_arguments(folder / "one", rows))
    return rows, steps, state, folder / "one"


def test_texts_equal_those_of_generate(one_rank):
    """`torchtitan generate` with the last checkpoint gives the same texts for prompts of held-out records."""
    rows, _, _, folder = one_rank
    config = manager.load(job_arguments(folder, rows))
    model, _ = load_model(ResolvedJob(config), folder / "checkpoint/step-00000004", torch.device("cpu"))
    prompts = validation.Generations(ResolvedJob(config), BYTES, False, None).prompts
    assert [(row["step"], row["number"]) for row in generated_rows(folder)] == [
        (2, 0),
        (2, 1),
        (2, 2),
        (4, 0),
        (4, 1),
        (4, 2),
    ]
    options = dict(max_new_tokens=6, context=16, temperature=0, top_k=0, seed=0)
    for row, prompt in zip(generated_rows(folder)[3:], prompts, strict=True):
        assert row["prompt"][1:] == " is " and row["wanted"] == row["prompt"][0] * 3 + "!"
        assert BYTES.decode(prompt.ids) == row["prompt"]
        assert row["generated"] == BYTES.decode(sample(model, prompt.ids, BYTES, **options))


def test_generating_does_not_change_training(one_rank, tmp_path):
    """Losses, validation, weights, moments, the generator's state and modules' modes are bit-equal."""
    rows, steps, state, folder = one_rank
    ((other_steps, other_state),) = run_ranks(
        1, train, job_arguments(tmp_path, rows, validation__generated=0, validation__generated_tokens=64)
    )
    assert (
        [step["loss"] for step in other_steps] == [step["loss"] for step in steps]
        and other_state == state
        and state[-1]
    )
    assert validations(tmp_path) == validations(folder) and not (tmp_path / validation.FILE).exists()


PLANS = {
    "FSDP 2": dict(parallelism__data_parallel_shard_degree=2, training__local_batch_size=2),
    "TP 2": dict(parallelism__tensor_parallel_degree=2),
}


@pytest.mark.parametrize("plan", PLANS)
def test_texts_are_the_same_under_every_plan(one_rank, plan, tmp_path):
    rows, _, _, folder = one_rank
    run_ranks(2, train, job_arguments(tmp_path, rows, **PLANS[plan]))
    assert generated_rows(tmp_path) == generated_rows(folder)


def test_generating_with_expert_parallel(one_rank, tmp_path):
    """Generated tokens do not count for the biases of experts."""
    rows = one_rank[0]
    job = JOB | dict(training__steps=2, training__local_batch_size=2, parallelism__data_parallel_shard_degree=-1)
    ((_, state),) = run_ranks(1, train, job_arguments(tmp_path / "one", rows, **job))
    without = job | dict(validation__generated=0, validation__generated_tokens=64)
    assert run_ranks(1, train, job_arguments(tmp_path / "without", rows, **without))[0][1] == state
    run_ranks(2, train, job_arguments(tmp_path / "two", rows, **job, **EP))
    assert generated_rows(tmp_path / "two") == generated_rows(tmp_path / "one")


def test_a_resumed_run_drops_texts_of_repeated_steps(one_rank, tmp_path):
    rows, _, _, folder = one_rank
    run_ranks(
        1, train, job_arguments(tmp_path, rows, training__steps=2, lr_scheduler__total_steps=4, checkpoint__interval=2)
    )
    (tmp_path / validation.FILE).open("a").write(json.dumps({"step": 3, "number": 0}) + "\n")
    run_ranks(1, train, job_arguments(tmp_path, rows, lr_scheduler__total_steps=4))
    assert generated_rows(tmp_path) == generated_rows(folder)
    assert json.loads((tmp_path / "generated.redone.jsonl").read_text()) == {"step": 3, "number": 0}


# Decoding


class CountingModel:
    """A model that predicts the next id. Rows without a token have the largest logits."""

    def __init__(self, size):
        self.size, self.calls, self.shapes = size, 0, set()

    def __call__(self, tokens, last):
        self.calls += 1
        self.shapes.add(tuple(tokens.shape))
        ids = tokens.gather(1, last[:, None])[:, 0]
        logits = torch.nn.functional.one_hot((ids + 1) % self.size, self.size + 3).float()
        logits[:, self.size :] = 2
        return logits


def continued(prompts, **options):
    model = CountingModel(50)
    options = dict(max_new_tokens=4, context=12, multiple=1, vocab_size=50, end_ids={20}) | options
    return validation.generate(model, prompts, **options), model


def test_each_continuation_ends_at_its_end_token(monkeypatch):
    monkeypatch.setattr(validation.distributed, "broadcast_floats", lambda *values: list(values))
    answers, model = continued([[1], [17], [5, 6, 19], list(range(30, 40)), list(range(12))], multiple=4)
    assert answers == [[2, 3, 4, 5], [18, 19], [], [40, 41], []]
    assert model.shapes == {(5, 12)} and model.calls == 4
    answers, model = continued([[18]], multiple=4)
    assert answers == [[19]] and model.shapes == {(1, 8)} and model.calls == 2


# Rules

SFT = ["--task.kind=sft", "--validation.enable", "--validation.samples=0"]


def test_rules(tmp_path):
    data = ["--training.dataset=text", f"--training.dataset_path={write_rows(tmp_path / 'rows.jsonl')}"]
    arguments = [*SFT, *data, "--validation.split=0.1", "--validation.generated=2"]
    assert lines(*arguments) == [] and lines("--validation.enable", "--validation.generated=2") == []
    assert lines("--validation.generated_tokens=3") == [
        "validation.generated_tokens: given 3; allowed: unset without validation.generated; set both, or leave it out"
    ]
    assert lines("--validation.generated=2") == [
        "validation.generated: given 2; allowed: 0 without validation.enable; turn it on, or leave it out"
    ]
    for axis, name in ((PP, "pipeline"), (CP, "context")):
        (line,) = lines(*arguments, f"{axis}2")
        assert f"allowed: 0 with {name}_parallel_degree = 2, as no single rank can generate text; leave it" in line
    (line,) = lines("--validation.enable", "--validation.generated=2", "--task.kind=documents")
    assert "allowed: 0 with task.kind = documents, or one of pretrain, sft, dpo, ipo, orpo; leave it out" in line
