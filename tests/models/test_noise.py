"""Tests of NEFTune noise on embeddings: its size by record length, the same under every plan, in training only."""

import pytest
import torch

from tests.support import jobs
from tests.support.pool import run_ranks
from tests.support.sft_jobs import sft_arguments, write_rows
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import initialize
from torchtitan.job import ResolvedJob
from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.models.dropout import (
    Dropout,
    EmbeddingNoise,
    add_embedding_noise,
    layer_keys,
    record_lengths,
    token_keys,
)
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.parallelisms.plan import ParallelPlan
from torchtitan.rules import check
from torchtitan.training.batches import BatchPreparer, BatchSpec

SAMPLES, LENGTH, WIDTH, ALPHA = 64, 32, 128, 5.0


def keys(seed=1, step=2, samples=SAMPLES, length=LENGTH):
    return layer_keys(token_keys(seed, step, torch.arange(samples), length), -1)


def noise(keys, lengths=LENGTH):
    lengths = lengths if torch.is_tensor(lengths) else torch.full_like(keys, lengths)
    return EmbeddingNoise(ALPHA)(torch.zeros(*keys.shape, WIDTH), keys, lengths)


def test_noise_is_uniform_up_to_its_bound():
    drawn = noise(keys()).double() * (LENGTH * WIDTH) ** 0.5 / ALPHA  # 262144 of them
    assert -1 <= drawn.min() < -0.9999 and 0.9999 < drawn.max() <= 1
    assert drawn.mean().item() == pytest.approx(0, abs=0.005)  # standard error 0.0011
    assert drawn.square().mean().item() == pytest.approx(1 / 3, abs=0.003)  # standard error 0.0006
    shares = torch.histc(drawn, 8, -1, 1) / drawn.numel()
    assert shares.tolist() == pytest.approx([1 / 8] * 8, abs=0.003)
    # the norm of a record is alpha / sqrt(3); the mean square of these many draws is known to 1.4 %
    norms = noise(keys()).flatten(1).norm(dim=1)
    assert norms.tolist() == pytest.approx([ALPHA / 3**0.5] * SAMPLES, rel=0.05)


def test_noise_is_independent_of_neighbours_dropout_steps_and_seeds():
    drawn = noise(keys()).double()
    assert drawn.unique().numel() > 0.9 * drawn.numel()
    dropped = Dropout(0.5)(torch.ones(SAMPLES, LENGTH, WIDTH), keys()).double() - 1
    other_draws = [drawn.roll(1, axis) for axis in range(3)] + [dropped, noise(keys(step=3)), noise(keys(seed=2))]
    for other_draw in other_draws:  # coefficients of correlation, standard error 0.002
        correlation = (drawn * other_draw).mean() / (drawn.square().mean() * other_draw.square().mean()).sqrt()
        assert abs(correlation.item()) < 0.01


def test_noise_depends_on_the_length_of_the_record():
    documents = torch.tensor(
        [[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0]]
    )  # the last document of the first row is padding
    lengths = record_lengths({"tokens": documents, "document_ids": documents})
    assert lengths.tolist() == [[3, 3, 3, 2, 2, 3, 3, 3], [8] * 8]
    assert record_lengths({"tokens": documents}).tolist() == [[8] * 8] * 2
    assert (
        record_lengths({"tokens": documents, "document_ids": torch.arange(1, 9).expand(2, 8)}).tolist() == [[1] * 8] * 2
    )
    record_keys = keys(samples=2, length=8)
    unpacked, packed = noise(record_keys, 3), noise(record_keys, lengths)
    assert torch.equal(unpacked[0, :3], packed[0, :3])  # equal in a padded and in a packed row
    torch.testing.assert_close(packed[0, 3:5], unpacked[0, 3:5] * 1.5**0.5)


def model_of(*arguments):
    """Build a job's model with initial weights; return it and its plan."""
    model, plan, _ = ModelBuilder(ResolvedJob(load(["--model.tokenizer_path=bytes", *arguments]))).adapted_model()
    model = model.to_empty(device="cpu")
    initialize(model, 0, model.init_rule)
    return model, plan


SMALL = "--model.overrides={dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, vocab_size = 260, multiple_of = 16}"


def test_noise_is_added_to_embeddings_in_training_only():
    noisy, plan = model_of(SMALL, "--training.neftune_alpha=5.0")
    plain, _ = model_of(SMALL)
    assert noisy.needs_keys and not plain.needs_keys and noisy.state_dict().keys() == plain.state_dict().keys()
    assert plan.with_embedding == ("noise",) and noisy.noise.alpha == 5.0
    tokens = torch.randint(260, (3, 8), generator=torch.Generator().manual_seed(0))
    noise_arguments = {"keys": token_keys(0, 1, torch.arange(3), 8), "lengths": record_lengths({"tokens": tokens})}
    shift = EmbeddingNoise(5.0)(
        torch.zeros(3, 8, 32), layer_keys(noise_arguments["keys"], -1), noise_arguments["lengths"]
    )
    assert shift.abs().max() > 0.2
    assert torch.equal(noisy.eval()(tokens), plain(tokens))
    plain.tok_embeddings.register_forward_hook(lambda module, inputs, output: output + shift)
    assert torch.equal(noisy.train()(tokens, **noise_arguments), plain(tokens))
    with pytest.raises(AssertionError, match="needs keys and record lengths"):
        noisy(tokens)


def test_training_batches_hold_the_lengths_of_records():
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    batch = {"tokens": documents, "labels": documents, "positions": documents, "document_ids": documents}
    for masked, expected in ((True, [2, 2, 3, 3, 3]), (False, [5] * 5)):
        spec = BatchSpec(document_mask=masked, seed=3, has_noise=True)
        preparer = BatchPreparer(SummedCrossEntropy(), ParallelDims(1, 1, 1), 0, torch.device("cpu"), spec)
        assert preparer.to_device_for_training(batch, index=0, step=7)["lengths"].tolist() == [expected]
        assert "lengths" not in preparer.to_device(batch)  # validation batches


def test_noise_is_refused_where_it_cannot_be_repeated():
    arguments = ["--model.tokenizer_path=bytes", "--training.neftune_alpha=5.0"]
    assert check(load(arguments), 1, "cpu") == []
    deep = [*arguments, "--model.name=deepseek", "--model.overrides={n_mtp_layers = 1}"]
    (fault,) = check(load(deep), 1, "cpu")
    assert str(fault).partition("training.")[2] == (
        "neftune_alpha: given 5.0; allowed: 0 for a model with n_mtp_layers = 1, as these layers embed tokens "
        "without noise; "
        "leave it out, or write model.overrides = {n_mtp_layers = 0}"
    )
    lanes = ["--task.kind=documents", "--adapter.kind=neurocache", "--training.dataset=text"]
    faults = [
        str(fault) for fault in check(load([*arguments, *lanes, f"--training.dataset_path={__file__}"]), 1, "cpu")
    ]
    message = (
        'neftune_alpha: given 5.0; allowed: 0 with task.kind = "documents", because a resumed run replays cached '
        "documents without noise; leave it out"
    )
    assert any(fault.endswith(message) for fault in faults)
    with pytest.raises(JobError, match="allowed: 0 for Linear, which is no Decoder"):
        add_embedding_noise(torch.nn.Linear(2, 2), ParallelPlan(), 5.0)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


def losses(ranks, folder, rows):
    options = dict(training__epochs=1, training__neftune_alpha=5.0)
    steps, _ = run_ranks(ranks, jobs.train, sft_arguments(folder, rows, **options))[0]
    return [step["loss"] for step in steps]


def test_noise_does_not_depend_on_the_plan(rows, tmp_path):
    """Compare two microbatches a step on one rank with one on each of two ranks."""
    expected = losses(1, tmp_path / "one", rows)
    assert losses(2, tmp_path / "two", rows) == pytest.approx(expected, rel=1e-4) and len(expected) > 2
