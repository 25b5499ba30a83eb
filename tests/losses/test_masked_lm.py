"""Masked language modelling: shares of masked and replaced tokens, the same masks under every plan and on resume."""

import json

import pytest
import torch
from transformers import RobertaConfig, RobertaForMaskedLM

from tests.support import jobs, judged
from tests.support.hf_parity import build, twin
from tests.support.judged import lines
from tests.support.masked_lm_jobs import SPECIAL, job_arguments
from tests.support.pool import run_ranks
from tests.support.tiny_decoders import ROBERTA
from torchtitan import cli
from torchtitan.config.manager import load
from torchtitan.job import ResolvedJob
from torchtitan.losses.masked_lm import HELD_OUT, Masking
from torchtitan.losses.objective import IGNORE_INDEX
from torchtitan.models.roberta.model import HF, Roberta
from torchtitan.training.batches import masking

anywhere = judged.anywhere
MASK, WORDS = 99, 100
HIDE = Masking(seed=3, share=0.15, mask_id=MASK, vocab_size=WORDS, special_ids=(0, 1))


def batch(samples=64, length=256):
    tokens = torch.randint(0, MASK, (samples, length), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[:, -8:] = IGNORE_INDEX  # padding
    return {"tokens": tokens, "labels": labels}


def mask_tokens(plain, step=5, samples=None, masking=HIDE):
    """Return the batch with masked tokens and labels at a step."""
    numbers = torch.arange(len(plain["tokens"])) if samples is None else samples
    return masking.mask_tokens(plain, numbers, step)


def test_shares_of_hidden_tokens_and_their_replacements():
    plain, masked = batch(), mask_tokens(batch())
    tokens, labels = plain["tokens"], masked["labels"]
    is_masked = labels != IGNORE_INDEX
    candidates = (tokens > 1) & (plain["labels"] != IGNORE_INDEX)
    assert not (is_masked & ~candidates).any(), "no special token and no padding is masked"
    assert torch.equal(labels[is_masked], tokens[is_masked])
    assert torch.equal(masked["tokens"][~is_masked], tokens[~is_masked])
    # 15,500 candidates and about 2,330 masked: the standard deviations of the shares are 0.003 and 0.008
    share = is_masked.sum() / candidates.sum()
    replacements = masked["tokens"][is_masked]
    same = (replacements == tokens[is_masked]).float().mean().item()
    by_mask = (replacements == MASK).float().mean().item()
    assert share.item() == pytest.approx(0.15, abs=0.012)
    assert by_mask == pytest.approx(0.8 + 0.1 / WORDS, abs=0.035)
    assert same == pytest.approx(0.1 + 0.1 / WORDS, abs=0.025)
    assert len(replacements.unique()) > 80, "replacements come from the whole vocabulary"


PAD = 3


def without_pad(vocab_size=WORDS):
    return Masking(3, 0.15, vocab_size - 1, vocab_size, (0, 1), pad_id=PAD)


def test_no_random_word_is_the_pad():
    """Other draws are unchanged, and all ids except the pad are equally likely."""
    plain = batch(samples=512)
    plain["tokens"][plain["tokens"] == PAD] = 5
    before, after = mask_tokens(plain), mask_tokens(plain, masking=without_pad())
    pads = before["tokens"] == PAD
    assert pads.sum() > 5 and not (after["tokens"] == PAD).any()
    assert torch.equal(before["tokens"][~pads], after["tokens"][~pads])
    assert torch.equal(before["labels"], after["labels"])
    few = mask_tokens(
        {"tokens": torch.full((512, 256), 5), "labels": torch.full((512, 256), 5)}, masking=without_pad(8)
    )
    counts = torch.bincount(few["tokens"][few["labels"] != IGNORE_INDEX], minlength=8)
    random = counts[[0, 1, 2, 4, 6]] / counts.sum()  # without the pad, the mask and the token itself
    assert counts[PAD] == 0 and random.tolist() == pytest.approx([0.1 / 7] * 5, abs=0.004)


def test_the_pad_embedding_has_the_gradient_of_transformers():
    """`padding_idx` blocks the gradient from the input embedding, but not from the tied head."""
    args = ROBERTA["words"]
    masking = Masking(0, 0.5, args.vocab_size - 1, args.vocab_size, (), args.pad_id)
    model = build(Roberta, args)
    reference = twin(
        RobertaForMaskedLM, RobertaConfig, model, HF, tied=("lm_head.decoder.weight", "lm_head.decoder.bias")
    )
    assert reference.config.pad_token_id == args.pad_id
    tokens = torch.randint(4, args.vocab_size - 1, (32, 64), generator=torch.Generator().manual_seed(0))
    shown = masking.mask_tokens({"tokens": tokens, "labels": tokens.clone()}, torch.arange(32), 0)
    gradients = []
    for logits, weight in (
        (model(shown["tokens"]), model.tok_embeddings.weight),
        (reference(shown["tokens"]).logits, reference.roberta.embeddings.word_embeddings.weight),
    ):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), shown["labels"].flatten()).backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_a_job_s_pad_is_that_of_its_model():
    config = load([*JOB, f"--task.mask_token={SPECIAL}", "--model.tokenizer_path=debug"])
    assert masking(ResolvedJob(config), ResolvedJob(config).tokenizer()).pad_id == 1


def test_masks_depend_on_sample_and_step_and_not_on_the_rank():
    plain, full_batch = batch(), mask_tokens(batch())
    for rank in range(2):
        local_rows = torch.arange(rank, 64, 2)
        part = mask_tokens({name: tensor[local_rows] for name, tensor in plain.items()}, samples=local_rows)
        assert all(torch.equal(part[name], full_batch[name][local_rows]) for name in part)
    for other in (
        mask_tokens(plain, 6),
        mask_tokens(plain, HELD_OUT),
        mask_tokens(plain, masking=HIDE.__class__(4, 0.15, 99, 100, ())),
    ):
        agree = ((other["labels"] != IGNORE_INDEX) == (full_batch["labels"] != IGNORE_INDEX)).float().mean()
        assert 0.7 < agree.item() < 0.78  # independent masks agree on 0.15^2 + 0.85^2 = 0.745


def losses_of_run(folder):
    """Return the training losses and the validation losses."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[row[name] for row in rows if name in row] for name in ("loss", "validation_loss")]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Train on one rank; return the texts' path and the losses."""
    folder = tmp_path_factory.mktemp("masked")
    texts = jobs.write_texts(folder)
    run_ranks(1, jobs.train, job_arguments(folder / "one", texts))
    return texts, losses_of_run(folder / "one")


@pytest.mark.parametrize(
    "plan",
    [
        dict(parallelism__data_parallel_shard_degree=2, training__local_batch_size=2),
        dict(parallelism__tensor_parallel_degree=2),
        dict(parallelism__pipeline_parallel_degree=2, training__local_batch_size=4),
        dict(parallelism__context_parallel_degree=2),
    ],
    ids=lambda plan: next(iter(plan)),
)
def test_losses_are_the_same_under_every_plan(one_rank, plan, tmp_path):
    texts, expected = one_rank
    run_ranks(2, jobs.train, job_arguments(tmp_path / "two", texts, **plan))
    for ours, reference in zip(losses_of_run(tmp_path / "two"), expected, strict=True):
        assert ours == pytest.approx(reference, rel=1e-5)


def test_a_resume_repeats_the_masks(one_rank, tmp_path):
    texts, expected = one_rank
    saved = dict(checkpoint__enable=True, checkpoint__interval=2)
    horizon = dict(lr_scheduler__total_steps=4)
    for steps in (2, 4):
        run_ranks(1, jobs.train, job_arguments(tmp_path / "run", texts, training__steps=steps, **saved, **horizon))
    assert losses_of_run(tmp_path / "run")[0] == expected[0]


JOB = ("--model.name=roberta", "--training.seq_len=64", "--task.kind=masked_lm")


def test_faults_of_masked_lm_jobs():
    debug = {"tokenizer": "debug"}
    assert lines(*JOB, f"--task.mask_token={SPECIAL}", **debug) == []
    (fault,) = lines(*JOB, **debug)
    assert fault.startswith("task.mask_token: given nothing; allowed: a mask token: none of <mask>, [MASK]")
    (fault,) = lines(*JOB, "--task.mask_token=<no>", **debug)
    assert "'<no>' is none of the special tokens of the tokenizer" in fault
    faults = lines("--task.kind=masked_lm", f"--task.mask_token={SPECIAL}", **debug)
    assert faults == [
        'task.kind: given "masked_lm"; allowed: pretrain for model llama3, which has causal attention; '
        "write that, or train an encoder, such as roberta"
    ]
    assert lines("--task.mask_share=0.3") == [
        'task.mask_share: given 0.3; allowed: unset with task.kind = pretrain; drop it, or write "masked_lm"'
    ]


def test_generate_refuses_an_encoder(one_rank, tmp_path, capsys):
    texts, _ = one_rank
    argv = job_arguments(tmp_path / "run", texts, training__steps=1, checkpoint__enable=True)
    run_ranks(1, jobs.train, argv)
    assert cli.main(["generate", str(tmp_path / "run")]) != 0
    errors = capsys.readouterr().err
    assert "this roberta predicts masked words from both sides; give a causal language model" in errors


def test_preview_shows_what_is_hidden(one_rank, tmp_path, capsys):
    texts, _ = one_rank
    assert cli.main(["preview", *job_arguments(tmp_path / "run", texts), "--samples", "1"]) == 0
    output = capsys.readouterr().out
    assert SPECIAL in output and "of 32 labels trained" in output
