"""The engine driven from Python: the losses of `torchtitan train` to the bit under plans, and its refusals."""

import json
import re
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support import jobs
from tests.support.pool import run_alone, run_ranks
from tests.support.preference_jobs import dpo_arguments, write_pairs
from torchtitan.checkpoint import CheckpointError
from torchtitan.config import manager
from torchtitan.config.options import ConfigError
from torchtitan.core.errors import JobError
from torchtitan.engine import Engine, EngineError
from torchtitan.process import distributed

EXPERTS = dict(
    model__name="deepseek",
    model__overrides="{dim=32, n_layers=3, n_heads=2, vocab_size=260, ffn_dim=64, expert_dim=32, kv_lora_rank=16, "
    "qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8}",
)
DUAL = dict(
    parallelism__pipeline_parallel_degree=2,
    parallelism__pipeline_parallel_schedule="DualPipeV",
    parallelism__pipeline_parallel_microbatch_size=1,
    training__local_batch_size=8,
)
PLANS = {
    "one": (1, {}),
    "fsdp": (2, dict(training__local_batch_size=2)),
    "tp": (2, dict(parallelism__tensor_parallel_degree=2)),
    "cp": (2, dict(parallelism__context_parallel_degree=2)),
    "pp": (2, DUAL),
    "ep": (2, EXPERTS | dict(training__local_batch_size=4, parallelism__expert_parallel_degree=2)),
}
SHORT = dict(training__steps=4)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


def drive(argv):
    """Run a job by the engine; return the logged rows, the hash of the final state, and the results of the steps."""
    results = []
    with Engine.from_job(manager.load(argv)) as engine:
        for batch in engine.data:
            loss = engine.forward_backward(batch)
            result = engine.optim_step()
            results.append((result.step, float(loss), float(result.grad_norm), result.lr))
        final = jobs.state_hash(engine)
    dist.barrier()  # the first rank writes the rows that all ranks read
    return jobs.logged_steps(Path(engine.config.job.dump_folder)), final, results


@pytest.mark.parametrize("plan", PLANS)
def test_the_losses_are_those_of_train(plan, texts, tmp_path):
    ranks, options = PLANS[plan]
    options = SHORT | options
    trained = run_ranks(ranks, jobs.train, jobs.arguments(tmp_path / "trained", texts, **options))
    driven = run_ranks(ranks, drive, jobs.arguments(tmp_path / "driven", texts, **options))
    for (rows, state), (other_rows, other_state, results) in zip(trained, driven, strict=True):
        names = ("step", "loss", "grad_norm", "lr", "tokens")
        assert [[row.get(name) for name in names] for row in rows] == [
            [row.get(name) for name in names] for row in other_rows
        ]
        assert state == other_state
        assert [result[:3] for result in results] == [
            (row["step"], pytest.approx(row["loss"], rel=1e-6), pytest.approx(row["grad_norm"], rel=1e-6))
            for row in rows
        ]


# Batches and losses of a caller


def own_batch(engine, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a batch of random tokens, the same on the ranks that work on the same samples."""
    generator = torch.Generator().manual_seed(100 * seed + engine.dp_rank)
    tokens = torch.randint(0, 256, (engine.caller_batches.rows, 33), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, : 5 + engine.dp_rank] = -100
    return {"tokens": tokens[:, :-1], "labels": labels}


def engine_of(argv, **options):
    """Return an engine in the pool's process group, which stays."""
    return Engine.from_job(manager.load(argv), **options)


def use_everything(argv):
    """Accumulate batches of the caller's; return results that no plan changes, each a number or a list of numbers."""
    with engine_of(argv) as engine:
        first, second = own_batch(engine), own_batch(engine, 1)
        log_probs = engine.forward(first)
        results = {"evaluated": engine.evaluate([first, second])["loss"]}
        total = torch.where(first["labels"] != -100, log_probs, 0).sum() / (engine.ranks.world_size / engine.dp_size)
        results["log_probs"] = float(total_over_ranks(total))
        weighted = {**first, "advantages": torch.linspace(-1, 1, 32).expand(first["tokens"].shape)}
        losses = [
            engine.forward_backward(weighted, loss=weighted_loss, normalizer=100.0, is_last=False, entropy=True),
            engine.forward_backward(second),
        ]
        results["losses"] = [float(loss) for loss in losses]
        results["labels"] = [loss.valid_tokens for loss in losses]
        step = engine.optim_step(lr=1e-2)
        results |= {"norm": float(step.grad_norm), "lr": step.lr, "step": step.step}
        results["after"] = float(
            total_over_ranks(engine.forward(first).sum() / (engine.ranks.world_size / engine.dp_size))
        )
        norms = {name: tensor.double().norm().item() for name, tensor in engine.weights()}
        results["weights"] = [norms[name] for name in sorted(norms) if name != "output.weight"]
    return results


def total_over_ranks(value):
    value = value.detach().double()
    dist.all_reduce(value)
    return value


def weighted_loss(inputs):
    gain = inputs.log_probs * inputs.columns["advantages"] + 0.1 * inputs.entropy
    return -(gain * inputs.mask).sum()


CALLER_PLANS = {
    "fsdp": (2, dict(training__local_batch_size=4)),
    "hsdp": (2, dict(training__local_batch_size=4, parallelism__data_parallel_replicate_degree=2)),
    "tp": (2, dict(parallelism__tensor_parallel_degree=2)),
    "cp": (2, dict(parallelism__context_parallel_degree=2)),
    "pp": (2, DUAL),
}


def test_batches_of_a_caller_give_the_same_under_every_plan(texts, tmp_path):
    """One device has the samples of both ranks in two calls, so only plans with one sample order are compared."""
    by_plan = {}
    for plan in ("tp", "cp", "pp"):
        ranks, options = CALLER_PLANS[plan]
        argv = jobs.arguments(tmp_path / plan, texts, **options)
        by_plan[plan] = run_ranks(ranks, use_everything, argv)
        assert by_plan[plan][0] == by_plan[plan][1]
    (expected,) = run_ranks(1, use_everything, jobs.arguments(tmp_path / "one", texts))
    assert expected["step"] == 1 and expected["lr"] == 1e-2
    for plan, results in by_plan.items():
        for name, value in results[0].items():
            assert value == pytest.approx(expected[name], rel=2e-5), (plan, name)


@pytest.mark.parametrize("plan", ["fsdp", "hsdp"])
def test_data_parallel_ranks_of_a_caller_share_a_step(plan, texts, tmp_path):
    ranks, options = CALLER_PLANS[plan]
    first, second = run_ranks(ranks, use_everything, jobs.arguments(tmp_path, texts, **options))
    assert first == second and first["labels"] == [2 * 4 * 32 - 5 - 6] * 2
    assert first["losses"][1] == pytest.approx(5.6, abs=0.7) and first["evaluated"] == pytest.approx(5.6, abs=0.7)


def refusals(argv):
    """Return the sentences of calls that are refused, and whether a step is still possible after all of them."""
    sentences = []

    def refused(call, *args, **options):
        try:
            call(*args, **options)
        except (JobError, RuntimeError) as error:
            sentences.append(str(error))
        else:
            sentences.append("nothing")

    with engine_of(argv) as engine:
        good = own_batch(engine)
        columns = {**good, "advantages": torch.ones(good["tokens"].shape)}
        refused(engine.optim_step)
        refused(engine.forward_backward, [1, 2])
        refused(engine.forward_backward, {"tokens": good["tokens"]})
        refused(engine.forward_backward, {name: x[:1] for name, x in good.items()})
        refused(engine.forward_backward, {name: x[:, :7] for name, x in good.items()})
        refused(engine.forward_backward, {**good, "labels": good["labels"] + 250})
        refused(engine.forward_backward, {**good, "tokens": good["tokens"].float()})
        refused(engine.forward_backward, {**good, "advantages": torch.ones(3)})
        refused(engine.forward_backward, good, loss="mean")
        refused(engine.forward_backward, good, loss=lambda inputs: -inputs.log_probs.mean())
        refused(engine.forward_backward, columns, loss=lambda inputs: inputs.columns["advantage"].sum())
        refused(engine.forward_backward, good, normalizer=0)
        if engine.dp_size > 1:  # only one rank is wrong, and the other one learns it
            odd = {name: x[: len(x) - engine.dp_rank] for name, x in good.items()}
            refused(engine.forward_backward, odd)
            refused(engine.forward_backward, good, normalizer=engine.dp_rank)  # the local count of something
            refused(engine.forward_backward, good, normalizer=5 + engine.dp_rank)
            refused(engine.forward_backward, good, is_last=engine.dp_rank == 0)
            refused(engine.forward if engine.dp_rank else engine.forward_backward, good)
            refused(engine.evaluate, [good] * (1 + engine.dp_rank))
            strange = {**good, "tokens": good["tokens"].to(torch.complex64)} if engine.dp_rank else good
            refused(engine.forward_backward, strange)
        engine.forward_backward(good, is_last=False)
        refused(engine.optim_step)
        engine.forward_backward(good)
        for call in (engine.save, engine.evaluate, lambda: engine.forward(good), lambda: next(engine.data)):
            refused(call)
        refused(engine.optim_step, lr=-1)
        result = engine.optim_step()
        refused(engine.save)
        refused(engine.load)
        refused(engine.evaluate)
        refused(engine.evaluate, [])
        refused(engine.evaluate, [{**good, "labels": torch.full_like(good["labels"], -100)}])
        refused(engine.disable_adapter)
        refused(engine.generate, "one text")
        refused(engine.generate, ["one", "two"][: 1 + engine.dp_rank])
        refused(engine.sample, ["one"], seed=engine.dp_rank)
        refused(engine.sample, ["one"], temperature=float("nan"))
        refused(engine.batch_of, engine.sample(["one"], 2))
        refused(engine.forward_backward, {**good, "advantages": [1.0] * 4})
        refused(engine.forward_backward, {**good, "advantages": torch.full((4,), float("nan"))}, loss=weighted_loss)
    return sentences, result.step


def test_every_wrong_call_is_a_sentence_on_all_ranks(texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, training__local_batch_size=4)
    (first, step), (second, _) = run_ranks(2, refusals, argv)
    assert step == 1 and "nothing" not in first + second
    expected = [
        "optim_step: no forward_backward before it",
        "batch: given a list; allowed: what engine.data yields, or a mapping",
        "batch: labels missing",
        r"batch: tokens of shape \[1, 32\]; allowed: \[4, 32\]",
        r"batch: tokens of shape \[4, 7\]",
        r"batch: labels has \d+; allowed: 0 to 259, or -100",
        "batch: tokens of torch.float32; allowed: whole numbers",
        r"batch: advantages of shape \[3\]; allowed: \[4, 32\], as tokens have, or one value a sample",
        "loss: given a str; allowed: a function of LossInputs",
        "looks like a mean",
        "raised KeyError: 'advantage'",
        "normalizer: given 0; allowed: a number above 0",
        "another rank's batch or loss was refused",
        "normalizer: given 0",
        "forward_backward: another rank makes another call, or passes another normalizer, is_last, entropy or loss",
        "forward_backward: another rank makes another call",
        "forward_backward: another rank makes another call",
        "evaluate: given 1 batches here and 3 on all ranks; allowed: as many on each rank",
        "another rank's batch or loss was refused",
        "optim_step: the last one had is_last = False",
        "save: the gradients of a forward_backward were not used yet; call optim_step first",
        "evaluate: the gradients",
        "forward: the gradients",
        "the data of another step: the gradients",
        "lr: given -1",
        "save: checkpoint.enable is off",
        "load: the run has no checkpoint",
        "evaluate: the job has no held-out data",
        "evaluate: given 0 batches here",
        "evaluate: no batch of any rank has a label",
        "disable_adapter: the job has no adapter",
        "generate: prompts: allowed: a list of texts",
        "generate: ranks pass other prompts, max_new_tokens, temperature or seed",
        "generate: ranks pass other prompts",
        "generate: given max_new_tokens = 64, temperature = nan; allowed: at least 1, and 0 or more",
        r"batch_of: given 1 samples; allowed: 4 \(training.local_batch_size\)",
        r"batch: advantages is a list; allowed: a tensor \[B, S\] or \[B\]",
        "batch: advantages has values that are not finite",
    ]
    assert len(first) == len(expected)
    for sentence, pattern in zip(first, expected, strict=True):
        assert re.search(pattern, sentence), sentence
    assert r"batch: tokens of shape [3, 32]" in second[12] and "another rank's batch" in second[13]
    assert second[16].startswith("forward: another rank makes another call")


def mix(argv):
    """Add a batch of the caller's to one of the job's; return what a second engine in this process resumes with."""
    with engine_of(argv, **{"checkpoint.enable": True}) as engine:
        first, second = islice(engine.data, 2)  # fetched before the first step
        documents = torch.arange(32).div(8, rounding_mode="floor").expand(first.microbatches[0]["tokens"].shape)
        batch = own_batch(engine)
        by_documents = {**batch, "document_ids": documents, "positions": torch.arange(32).expand(documents.shape) % 8}
        log_probs = engine.forward(by_documents)
        engine.forward_backward(first, is_last=False)
        loss = engine.forward_backward(by_documents)
        losses = torch.where(batch["labels"] != -100, -log_probs, 0).sum().item(), float(loss.share) * loss.valid_tokens
        engine.optim_step()
        engine.step(second)
        engine.step(batch)
        tokens, position, folder = engine.state.tokens, engine.state.position, engine.save()
        assert folder.is_dir()
    with engine_of(argv, **{"checkpoint.enable": True}) as again:
        resumed = again.current_step, again.state.tokens, again.state.position.samples
        drawn = again.generate(["a"], max_new_tokens=2)
        assert drawn == again.generate(["a"], max_new_tokens=2)
        again.step(next(again.data))  # the weights are shards again after generating
    again.close()  # has no effect, as the context is left
    return losses, tokens, position.samples, resumed


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_of_job_and_caller_share_steps(ranks, texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, training__local_batch_size=8 // ranks)
    for losses, tokens, position, resumed in run_ranks(ranks, mix, argv):
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert tokens == 4 * 8 * 32 and position == 16  # two batches of the job's and two of the caller's
        assert resumed == (3, tokens, position)


def stop_between(argv):
    """Ask one rank to stop; return the step at which each kind of loop ends."""
    with engine_of(argv, **{"validation.enable": True}) as engine:
        for batch in engine.data:
            engine.step(batch)
            if engine.current_step == 2 and engine.dp_rank == 0:
                engine.request_stop()
            engine.evaluate()
        first, engine.stops.requested, engine.stops.agreed = engine.current_step, False, False
        while not engine.stopping and engine.current_step < 9:
            engine.forward_backward(own_batch(engine))
            engine.optim_step()
            if engine.current_step == 6 and engine.dp_rank == 0:
                engine.request_stop()
        engine.stops.agreed = False
        return first, engine.current_step


def test_a_stop_ends_loops_that_evaluate_and_loops_over_own_batches(texts, tmp_path):
    argv = jobs.arguments(
        tmp_path, texts, training__local_batch_size=4, validation__dataset="text", validation__dataset_path=texts
    )
    assert run_ranks(2, stop_between, argv) == [(3, 7)] * 2


# The run


def save_and_go_back(argv):
    """Return the losses of steps 1 to 4, of 3 and 4 again after going back, and the text that the model continues."""
    options = {"checkpoint.enable": True, "checkpoint.interval": 100, "guard.shard_checksums": True}
    losses = []
    engine = Engine.from_job(manager.load(argv), **options)
    data = engine.data
    for _ in range(4):
        losses.append(float(engine.step(next(data)).loss_share))
        if engine.current_step == 2:
            folder = engine.save()
    assert folder.name == "step-00000002"
    with pytest.raises(CheckpointError, match="step 3"):
        engine.load(3)
    engine.forward_backward(own_batch(engine))
    assert engine.load() == 2 and engine.pending is None
    again = [float(engine.step(batch).loss_share) for batch in islice(engine.data, 2)]
    texts = engine.generate(["once", "upon a"], max_new_tokens=5)
    drawn = [engine.generate(["once"], 5, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    for prompts in ([], ["x" * 32]):
        with pytest.raises(EngineError, match="a list of texts|fewer than 32"):
            engine.generate(prompts)
    engine.close()
    return losses, again, texts, drawn


def test_a_run_goes_back_to_its_checkpoint_and_generates(texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, training__steps=6, training__local_batch_size=4)
    results = run_ranks(2, save_and_go_back, argv)
    for losses, again, answers, drawn in results:
        assert losses[2:] == again and len(set(losses)) == 4
        assert len(answers) == 2 and drawn[0] == drawn[1] != drawn[2]
        assert answers == results[0][2] and drawn == results[0][3]


def adapter_off_and_on(argv):
    """Return log-probabilities of a LoRA model: trained, with the adapter off, and before it was trained."""
    with engine_of(argv) as engine:
        batch = own_batch(engine)
        before = engine.forward(batch)
        engine.forward_backward(batch)
        engine.optim_step(lr=0.1)
        with engine.disable_adapter():
            off = engine.forward(batch)
        return before.numpy(), off.numpy(), engine.forward(batch).numpy()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_can_be_disabled(kind, texts, tmp_path):
    options = dict(adapter__kind=kind, adapter__rank=4, parallelism__tensor_parallel_degree=2)
    for before, off, after in run_ranks(2, adapter_off_and_on, jobs.arguments(tmp_path, texts, **options)):
        np.testing.assert_allclose(off, before, rtol=1e-5)
        assert np.abs(after - before).max() > 1e-3


def test_a_job_comes_from_a_file_tables_or_a_config(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[training]\nsteps = 7\n")
    of_file = manager.load_from(path, {"training.seq_len": 64})
    of_tables = manager.load_from({"training": {"steps": 7}}, {"training.seq_len": 64})
    assert replace(of_file, job=of_tables.job) == of_tables and of_file.training.seq_len == 64
    assert manager.load_from(of_tables, {"training.steps": 9}).training.steps == 9
    assert manager.load_from("debug_model", {}).model.flavor == "debugmodel"
    for source, options, reason in (
        ({"training": {"step": 7}}, {}, "training.step"),
        ({}, {"training.steps": "many"}, "training.steps"),
        (tmp_path / "missing.toml", {}, "no such file"),
        (7, {}, "a TOML file, a mapping of tables or a JobConfig"),
    ):
        with pytest.raises(ConfigError, match=reason):
            manager.load_from(source, options)
    with pytest.raises(ConfigError, match="tensor_parallel"):
        Engine.from_job("debug_model", **{"parallelism.tensor_parallel_degree": 3})


def separate(argv):
    with engine_of(argv) as engine, pytest.raises(EngineError, match="early_step_in_backward"):
        engine.forward_backward(own_batch(engine))


def test_steps_in_backward_cannot_be_separate(texts, tmp_path):
    run_alone(separate, jobs.arguments(tmp_path, texts, optimizer__early_step_in_backward=True, training__max_norm=0))


def pairs_of_a_caller(argv):
    """Return the sentence on pairs without their references, the count of pairs, and the loss beside the formula."""
    with engine_of(argv) as engine:
        batch = own_batch(engine)
        with pytest.raises(EngineError) as refusal:
            engine.forward_backward(batch)
        of_answers = engine.forward(batch).sum(1).view(-1, 2)
        loss = engine.forward_backward(batch | {"reference": torch.zeros(len(batch["tokens"]))})
        gain = engine.config.dpo.beta * (of_answers[:, 0] - of_answers[:, 1])
        expected = torch.nn.functional.softplus(-gain).mean()
        return str(refusal.value), loss.valid_tokens, float(loss), float(expected)


def test_pairs_of_a_caller_count_as_pairs(tmp_path):
    settings = dict(training__seq_len=32, training__local_batch_size=4, training__global_batch_size=4)
    argv = dpo_arguments(tmp_path / "run", write_pairs(tmp_path / "rows.jsonl"), **settings)
    ((sentence, count, loss, expected),) = run_ranks(1, pairs_of_a_caller, argv)
    assert "batch: reference missing, which the objective of task.kind = dpo reads" in sentence
    assert count == 4 and loss == pytest.approx(expected, rel=1e-5)  # of 8 rows


class Spoiled(Engine):
    """An engine whose gradients are not finite in its third step, once."""

    spoiled = False

    def fetch(self):
        data = super().fetch()
        if self.current_step == 2 and not self.spoiled:
            self.spoiled = True
            next(iter(self.model.named_parameters()))[1].grad = None
            self.model.clip_gradients, clip = (lambda norm: clip(norm) * float("nan")), self.model.clip_gradients
            self.restore = lambda: setattr(self.model, "clip_gradients", clip)
        return data


def roll_back_in_a_script(argv):
    """Return (step, reason) of each step of a script whose guard rolls back."""
    steps = []
    engine = Spoiled.from_job(manager.load(argv))
    for batch in engine.data:
        engine.forward_backward(batch)
        result = engine.optim_step()
        steps.append((result.step, result.skip_reason))
        if result.skip_reason:
            engine.restore()
        if engine.current_step == 1:
            engine.save()
    engine.report()
    engine.resources.close()
    return steps


def test_a_guard_that_rolls_back_tells_the_script(texts, tmp_path):
    options = dict(training__steps=4, checkpoint__enable=True, checkpoint__interval=100)
    options |= dict(guard__non_finite="rollback")
    steps = run_alone(roll_back_in_a_script, jobs.arguments(tmp_path, texts, **options))
    assert [step for step, _ in steps] == [1, 2, 1, 2, 3, 4]
    assert "back to the checkpoint of an earlier step" in steps[2][1] and not any(reason for _, reason in steps[3:])


def leave_by_exit(argv, code):
    config = manager.load(argv)
    try:
        with Engine.from_job(config) as engine:
            engine.step(next(engine.data))
            sys.exit(code)
    except SystemExit:
        pass
    last = (Path(config.job.dump_folder) / "metrics.jsonl").read_text().splitlines()[-1]
    return json.loads(last)["exit_code"]


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (None, 0), (3, 3), ("no luck", 1)])
def test_a_script_that_exits_has_its_own_code(code, expected, texts, tmp_path):
    assert run_alone(leave_by_exit, jobs.arguments(tmp_path, texts), code) == expected


def losses_of_accumulated_data(argv):
    """Return the loss of the job's data of one step, two microbatches, by the job's objective and by a function."""
    with engine_of(argv) as engine:
        data = next(engine.data)
        losses = [engine.forward_backward(data, loss=loss) for loss in (None, negated)]
        return len(data.microbatches), [float(loss) for loss in losses]


def negated(inputs):
    return -(inputs.log_probs * inputs.mask).sum()


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_a_loss_function_takes_data_of_several_microbatches(axis, texts, tmp_path):
    plan = {f"parallelism__{axis}_parallel_degree": 2}
    argv = jobs.arguments(tmp_path, texts, training__local_batch_size=4, training__global_batch_size=8, **plan)
    for microbatches, (expected, loss) in run_ranks(2, losses_of_accumulated_data, argv):
        assert microbatches == 2 and loss == pytest.approx(expected, rel=1e-5)


def differ_in_a_group(argv):
    """Return the sentence on batches that differ between the ranks of one tensor-parallel group."""
    with engine_of(argv) as engine:
        batch = own_batch(engine) | {"weight": torch.full((8,), 1.0 + engine.ranks.rank)}
        with pytest.raises(EngineError) as refusal:
            engine.forward_backward(batch, loss=by_weight)
        return str(refusal.value)


def by_weight(inputs):
    return -(inputs.log_probs.sum(1) @ inputs.columns["weight"])


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_ranks_of_one_group_pass_the_same_batch(axis, texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, **{f"parallelism__{axis}_parallel_degree": 2})
    for sentence in run_ranks(2, differ_in_a_group, argv):
        assert "ranks of one tensor, context or pipeline parallel group pass different ones" in sentence


def train_on_samples(argv):
    """Return the samples of an untrained model of bytes, and the labels of the batch of them."""
    with engine_of(argv) as engine:
        samples = engine.sample(["ab", "c"] * 4, max_new_tokens=12, seed=3)
        batch = engine.batch_of(samples)
        before = engine.forward(batch)
        engine.forward_backward(batch)
        engine.optim_step(lr=1e-2)
        after = engine.forward(batch)
        return samples, batch["labels"].tolist(), float(before.sum()), float(after.sum()), engine.tokenizer.eos_id


def test_samples_are_trained_on_as_they_were_drawn(texts, tmp_path):
    ((samples, labels, before, after, end_id),) = run_ranks(1, train_on_samples, jobs.arguments(tmp_path, texts))
    assert after > before
    for sample, row in zip(samples, labels, strict=True):
        first = len(sample.prompt_ids) - 1
        assert row[first : first + len(sample.ids)] == sample.ids  # also where the text is no UTF-8
        assert row.count(-100) == 32 - len(sample.ids)
        assert sample.ended == (sample.ids[-1] == end_id) and (sample.ended or len(sample.ids) == 12)
    assert any("\ufffd" in sample.text for sample in samples)


class Failing(Engine):
    def _begin(self, *args):
        raise ValueError("no parts")


def fail_to_begin(argv):
    """Return the recorded end of an engine that cannot be built, and whether another one can have its folder."""
    config = manager.load(argv)
    with pytest.raises(ValueError, match="no parts"):
        Failing.from_job(config)
    last = (Path(config.job.dump_folder) / "metrics.jsonl").read_text().splitlines()[-1]
    with engine_of(argv) as engine:
        engine.step(next(engine.data))
    return json.loads(last)


def test_an_engine_that_cannot_be_built_records_its_end(texts, tmp_path):
    end = run_alone(fail_to_begin, jobs.arguments(tmp_path, texts))
    assert (end["event"], end["cause"], end["exit_code"]) == ("end", "crashed", 1)
    assert end["reason"] == "ValueError: no parts"


def time_out_of_steps(argv):
    """Return the limits that were set for collectives while a program makes steps of its own batches."""
    limits = []
    with engine_of(argv) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "set_timeout", limits.append)
        for _ in range(3):
            engine.step(own_batch(engine))
    return limits


def test_collectives_have_the_time_of_a_step_after_the_first_one(texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, comm__train_timeout_seconds=50)
    (limits,) = run_ranks(1, time_out_of_steps, argv)
    assert len(limits) == 1 and limits[0] >= 50
