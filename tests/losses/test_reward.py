"""Reward models: loss and gradients of transformers with trl's formula, records, plans, start and export."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from torch.nn.functional import logsigmoid

from tests.support import jobs, tiny_decoders
from tests.support.pool import run_ranks
from tests.support.preference_jobs import dpo_arguments, validation_losses, write_pairs
from torchtitan import cli
from torchtitan.config import manager
from torchtitan.core.random_draws import initialize
from torchtitan.job import ResolvedJob
from torchtitan.losses.reward import Reward
from torchtitan.models.gemma2 import Gemma2Args
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.qwen2 import Qwen2Args
from torchtitan.models.qwen3 import Qwen3Args
from torchtitan.models.spec import MODELS
from torchtitan.rules import check
from torchtitan.training.inference_model import load_model

_TINY: dict = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, vocab_size=64)
FAMILIES = {
    "llama3": LlamaArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64, tied_embeddings=True),
    "qwen2": Qwen2Args(**_TINY, tied_embeddings=True),
    "qwen3": Qwen3Args(**_TINY),
    # rewards are not capped, unlike logits, which are capped at a value that any reward would show
    "gemma2": Gemma2Args(**_TINY, sliding_window=5, query_scalar=8, logit_cap=0.01),
    "gpt2": tiny_decoders.GPT2["words"],
    "opt": tiny_decoders.OPT["words"],
}


def pair_batch(seed):
    """Return four pairs of random texts of up to 12 tokens: rows [8, 12], the label of the last token of each is 0."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (8, 1), generator=generator)
    index, tokens = torch.arange(12), torch.randint(1, 64, (8, 12), generator=generator)
    padding = index >= lengths
    tokens[padding] = 0
    labels = torch.full((8, 12), -100).scatter(1, lengths - 1, 0)
    labels[6 if seed else 8 :] = -100  # a pair that fills a step up
    positions = torch.where(padding, index - lengths, index)
    return {"tokens": tokens, "labels": labels, "positions": positions, "document_ids": padding.long()}


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers_with_trls_formula(name):
    """In float64, but for norms of transformers; all gradients; also where padding is left out, and in chunks."""
    args, spec = replace(FAMILIES[name], n_classes=1), MODELS[name]
    model = spec.build(args).double()
    initialize(model, 7, model.init_rule)
    config = spec.hf.config_to_hf(args)
    assert config["id2label"] == {0: "LABEL_0"}
    (kind,) = config["architectures"]
    hf_config = transformers.AutoConfig.for_model(**config | {"attn_implementation": "eager", "pad_token_id": 0})
    hf_model = getattr(transformers, kind)(hf_config).double()
    hf_model.load_state_dict(spec.hf.to_hf(model.state_dict(), args))
    for seed, coefficient in enumerate((0.0, 0.01)):
        batch = pair_batch(seed)
        is_pair = (batch["labels"] != -100).any(1)
        texts = [row[row != 0] for row in batch["tokens"][is_pair]]  # its masks make NaN of padding in float64
        rewards = torch.cat([hf_model(text[None]).logits for text in texts])
        chosen, rejected = rewards[::2], rewards[1::2]
        expected = -logsigmoid(chosen - rejected).sum() + coefficient * ((chosen + rejected) ** 2).sum()
        hf_model.zero_grad()
        expected.backward()
        gradients = {n: p.grad for n, p in hf_model.named_parameters() if p.grad is not None}
        for num_chunks in (1, 3):
            model.loss = Reward(num_chunks, coefficient)
            for inputs in (batch, model.loss.join_documents(batch)):
                model.zero_grad()
                loss = model(**inputs)
                torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
                loss.backward()
                ours = spec.hf.to_hf({n: p.grad for n, p in model.named_parameters()}, args)
                assert ours.keys() == gradients.keys() and any(".score." in f".{n}" for n in ours)
                torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-5)
                first, other, correct, margin, pairs = model.loss.take_sums().tolist()
                assert pairs == len(chosen) and correct == (chosen > rejected).sum()
                assert [first, other] == pytest.approx([chosen.sum().item(), rejected.sum().item()], abs=1e-5)
                assert margin == pytest.approx((chosen - rejected).sum().item(), abs=1e-5)


# Jobs

SIZES = "{dim=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, vocab_size=260, n_classes=1}"
HEAD_OF_WORDS = SIZES.replace(", n_classes=1", ", tied_embeddings=true")


def reward_arguments(folder, rows, **options):
    settings = dict(task__kind="reward", model__name="qwen3", model__overrides=SIZES)
    settings |= dict(checkpoint__last_save_model_only=True, checkpoint__last_save_in_hf=True)
    return dpo_arguments(folder, rows, **settings | options)


@pytest.fixture(scope="module")
def one_rank_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    rows = write_pairs(folder / "rows.jsonl")
    ((steps, _),) = run_ranks(1, jobs.train, reward_arguments(folder / "one", rows))
    return rows, steps, folder / "one"


def test_the_preferred_answer_gets_the_larger_reward(one_rank_run):
    _, steps, folder = one_rank_run
    assert steps[-1]["reward_accuracy"] == 1 and steps[-1]["loss"] < 0.4 < steps[0]["loss"]
    gain = steps[-1]["reward_chosen"] - steps[-1]["reward_rejected"]
    assert gain == pytest.approx(steps[-1]["reward_margin"], rel=1e-4)
    assert validation_losses(folder)[-1] < 0.4


PLANS = {
    "FSDP 2": dict(parallelism__data_parallel_shard_degree=2),
    "PP 2": dict(parallelism__pipeline_parallel_degree=2, parallelism__pipeline_parallel_microbatch_size=1)
    | dict(validation__local_batch_size=2),
}


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_logs_the_same_losses_and_rewards(one_rank_run, plan, tmp_path):
    rows, steps, folder = one_rank_run
    logged, _ = run_ranks(2, jobs.train, reward_arguments(tmp_path, rows, **PLANS[plan]))[0]
    for name in ("loss", "reward_margin", "reward_chosen", "reward_accuracy"):
        assert [step[name] for step in logged] == pytest.approx([step[name] for step in steps], rel=1e-4, abs=1e-5)
    assert validation_losses(tmp_path) == pytest.approx(validation_losses(folder), rel=1e-4)


def test_transformers_and_a_next_run_read_the_exported_folder(one_rank_run, tmp_path):
    """The reward of a text is that of transformers, and a folder of a reward model starts the next run as it is."""
    rows, _, run = one_rank_run
    hf_model = transformers.AutoModelForSequenceClassification.from_pretrained(run / "model_hf").eval()
    assert type(hf_model).__name__ == "Qwen3ForSequenceClassification" and hf_model.config.num_labels == 1
    started = dict(model__flavor="from_hf", model__hf_folder=run / "model_hf", model__overrides="{}")
    started |= dict(checkpoint__initial_load_path=run / "model_hf", checkpoint__initial_load_in_hf=True)
    config = manager.load(reward_arguments(tmp_path, rows, **started))
    assert check(config, 1, "cpu") == []
    model, _ = load_model(ResolvedJob(config), run / "model_hf", torch.device("cpu"))
    tokens = torch.randint(0, 256, (3, 9))
    with torch.no_grad():
        expected = torch.cat([hf_model(text[None]).logits for text in tokens])  # without padding no batches there
        torch.testing.assert_close(model(tokens)[:, -1], expected, rtol=1e-4, atol=1e-5)


def test_a_language_model_starts_with_a_new_head(one_rank_run, tmp_path):
    """Tied or not, its head is left out; with an adapter the new one has to be trained."""
    rows, _, _ = one_rank_run
    for sizes in (HEAD_OF_WORDS, HEAD_OF_WORDS.replace("true", "false")):
        words = tmp_path / sizes[-6:-1]
        quick = dict(training__steps=1, lr_scheduler__warmup_steps=0, validation__freq=1)
        argv = reward_arguments(words, rows, task__kind="orpo", model__overrides=sizes, **quick)
        run_ranks(1, jobs.train, argv)
        folder = words / "model_hf"
        start = dict(model__flavor="from_hf", model__hf_folder=folder, model__overrides="{n_classes=1}", **quick)
        start |= dict(checkpoint__initial_load_path=folder, checkpoint__initial_load_in_hf=True)
        ((steps, _),) = run_ranks(1, jobs.train, reward_arguments(tmp_path / f"from {sizes[-6:-1]}", rows, **start))
        assert len(steps) == 1
    saved = dict(checkpoint__last_save_in_hf=False, checkpoint__last_save_model_only=True)
    words = dict(task__kind="orpo", model__overrides=sizes, **quick)
    run_ranks(1, jobs.train, reward_arguments(tmp_path / "native", rows, **words | saved))
    start_here = dict(
        checkpoint__initial_load_path=tmp_path / "native/checkpoint", checkpoint__initial_load_in_hf=False
    )
    for name, options in (("rewards", quick), ("words", words)):  # one with a new head, one with all weights
        ((steps, _),) = run_ranks(1, jobs.train, reward_arguments(tmp_path / name, rows, **options | start_here))
        assert len(steps) == 1
    lora = dict(adapter__kind="lora", adapter__rank=2)
    faults = check(manager.load(reward_arguments(tmp_path / "lora", rows, **start | lora)), 1, "cpu")
    assert any("the head of classes" in str(fault) for fault in faults)
    lora |= dict(adapter__train_fully='["output.weight"]')
    run_ranks(1, jobs.train, reward_arguments(tmp_path / "lora", rows, **start | lora))


def test_the_last_token_is_read(tmp_path, capsys):
    """A pair of seq_len tokens has room, one of one more has none: its last token would not be read."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "ab", "chosen": "c" * 20, "rejected": "d"}) + "\n")
    options = dict(validation__enable=False, validation__split=None, training__epochs=1, training__steps=None)
    drop = [name for name, value in options.items() if value is None]

    def argv(seq_len):
        every = reward_arguments(tmp_path / "run", rows, **options | {"training__seq_len": seq_len})
        return [a for a in every if not any(a.startswith(f"--{name.replace('__', '.')}=") for name in drop)]

    assert cli.main(["prepare", *argv(24)]) == 0
    assert cli.main(["prepare", *argv(23)]) == 2
    assert "24 tokens, but a sample of training.seq_len = 23 has room for 23; raise" in capsys.readouterr().err
    assert cli.main(["prepare", *argv(23), "--data.too_long=drop"]) == 2
    assert "training.seq_len = 24 would keep 99 % whole" in capsys.readouterr().err


REFUSED = {
    "n_classes = 0; allowed: n_classes = 1 of a causal model": dict(model__overrides="{}"),
    "n_classes = 2; allowed: n_classes = 1 of a causal": dict(model__overrides="{n_classes=2}"),
    "n_classes = 0; allowed: n_classes = 1 of a causal model with task.kind": dict(
        model__name="mistral", model__overrides="{}"
    ),
    'n_classes = 1; allowed: n_classes = 0 with task.kind = "sft"': dict(task__kind="sft"),
    "parallelism.context_parallel_degree: given 2": dict(parallelism__context_parallel_degree=2),
    "parallelism.tensor_parallel_degree: given 2, which does not divide n_classes 1": dict(
        parallelism__tensor_parallel_degree=2
    ),
    "data.padding: given 'left'": dict(data__padding="left"),
    "data.train_on: given": dict(data__train_on="all"),
    "dpo.beta: given 0.3": dict(dpo__beta=0.3),
    "task.options: given margin = 2": dict(task__options="{margin = 2}"),
    "validation.generated": dict(validation__generated=2),
    "data.max_tokens: given 25; allowed: at most 24": dict(data__max_tokens=25),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(tmp_path, message):
    config = manager.load(reward_arguments(tmp_path, write_pairs(tmp_path / "rows.jsonl"), **REFUSED[message]))
    faults = [*map(str, check(config, 2, "cpu"))]
    assert any(message.replace("'", '"') in fault or message in fault for fault in faults), faults


@pytest.mark.parametrize("command", ["generate", "evaluate", "chat"])
def test_commands_that_predict_words_say_what_the_model_is(one_rank_run, command, capsys):
    *_, run = one_rank_run
    more = ["--prompt", "a"] if command == "generate" else []
    assert cli.main([command, str(run), *more]) == 2
    message = "pairs of answers are no documents" if command == "evaluate" else "this qwen3 gives rewards"
    assert message in capsys.readouterr().err
