"""Keyed dropout: as many features as asked, no pattern in them, and the same ones whatever cuts the batch."""

from unittest.mock import patch

import pytest
import torch

from tests.support import jobs, other_families
from tests.support.no_exchange import NoExchange
from tests.support.other_families import Other, OtherArgs
from tests.support.pool import run_ranks
from torchtitan.initialization import initialize
from torchtitan.keyed import scrambled
from torchtitan.loss import SummedCrossEntropy
from torchtitan.models import SIZES
from torchtitan.models.dropout import Dropout, layer_keys, token_keys
from torchtitan.models.registry import MODELS
from torchtitan.parallelisms.pipeline.overlap.chunk import Chunk
from torchtitan.parallelisms.pipeline.overlap.merging import Loop, alone
from torchtitan.parallelisms.pipeline.overlap.programs import programs_of
from torchtitan.parallelisms.pipeline.overlap.segments import NodeLists, Policy

SAMPLES, LENGTH, WIDTH = 64, 32, 128


def keys(seed=1, step=2, samples=SAMPLES, length=LENGTH):
    return token_keys(seed, step, torch.arange(samples), length)


def kept(keys, p=0.25, place=0):
    return Dropout(p, place)(torch.ones(*keys.shape, WIDTH), keys) != 0


def test_a_share_is_dropped_and_the_rest_made_up_for():
    y = Dropout(0.25)(torch.ones(SAMPLES, LENGTH, WIDTH), keys())
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    # 262144 draws: the standard deviation of the share is 0.0008
    assert (y == 0).double().mean().item() == pytest.approx(0.25, abs=0.004)


def test_shares_of_features_tokens_samples_are_even():
    dropped = (~kept(keys())).double()
    for axes, draws in (((0, 1), SAMPLES * LENGTH), ((0, 2), SAMPLES * WIDTH), ((1, 2), LENGTH * WIDTH)):
        deviation = (0.25 * 0.75 / draws) ** 0.5
        assert (dropped.mean(axes) - 0.25).abs().max() < 5 * deviation


OTHERS = {
    "seed": keys(seed=2),
    "step": keys(step=3),
    "layer": layer_keys(keys(), 0),
    "the next token": keys().roll(1, 1),
    "the next sample": keys().roll(1, 0),
}


@pytest.mark.parametrize("what", [*OTHERS, "place", "the next feature"])
def test_draws_tell_apart(what):
    """Two masks agree where both keep or both drop: 0.625 of the features, if they know nothing of one another."""
    one = kept(keys())
    other = kept(OTHERS[what]) if what in OTHERS else kept(keys(), place=1) if what == "place" else one.roll(1, 2)
    assert (one == other).double().mean().item() == pytest.approx(0.625, abs=0.005)


def test_layers_tell_apart():
    masks = torch.stack([kept(layer_keys(keys(samples=4), layer)) for layer in range(-1, 12)]).flatten(1).double()
    together = torch.corrcoef(masks) - torch.eye(13)
    assert together.abs().max() < 5 / masks.shape[1] ** 0.5


def test_the_hash_is_a_permutation_of_32_bits():
    x = torch.randint(2**32, (10**6,), generator=torch.Generator().manual_seed(0)).unique()
    y = scrambled(x)
    assert y.min() >= 0 and y.max() < 2**32 and len(y.unique()) == len(x)
    flipped = scrambled(x ^ (1 << torch.arange(32)[:, None])) ^ y
    changed = torch.stack([(flipped >> bit & 1).double().mean(1) for bit in range(32)])
    assert (changed - 0.5).abs().max() < 0.2, "each bit of the input changes each bit of the output, or nearly so"


def test_keys_are_cut_with_the_batch():
    whole = keys()
    assert torch.equal(token_keys(1, 2, torch.arange(SAMPLES)[1::2], LENGTH), whole[1::2])
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    drop = Dropout(0.5, 1)
    assert torch.equal(drop(x[3:5, 7:20], whole[3:5, 7:20]), drop(x, whole)[3:5, 7:20])


def test_outside_of_training_nothing_is_dropped():
    x = torch.randn(2, 3, 4)
    assert torch.equal(Dropout(0.5).eval()(x, None), x) and torch.equal(Dropout(0.0)(x, None), x)
    with pytest.raises(AssertionError, match="keys of its tokens"):
        Dropout(0.5)(x, None)


def test_gradients_pass_where_features_are_kept():
    x = torch.randn(2, 3, 64, dtype=torch.float64, requires_grad=True)
    drop, own = Dropout(0.3), keys(samples=2, length=3)
    (grad,) = torch.autograd.grad(drop(x, own).sum(), x)
    assert torch.equal(grad, drop(torch.ones_like(x), own))


def model_and_batch():
    model = Other(OtherArgs(dropout=0.25)).double()
    model.loss = SummedCrossEntropy()
    initialize(model, 0, model.init_rule)
    tokens = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "keys": keys(samples=4, length=8)}
    return model, batch


def gradients(model, loss):
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("policy", [Policy(), Policy("full", preserve_rng_state=False)], ids=["none", "full"])
def test_segments_drop_what_the_forward_drops(policy):
    """Also where they are computed again, without any generator's state."""
    model, batch = model_and_batch()
    expected = gradients(model, model(**batch))
    again, _ = model_and_batch()
    tokens, rest = batch["tokens"], {name: x for name, x in batch.items() if name != "tokens"}
    lists = NodeLists(programs_of(again), policy)
    chunk, loop = Chunk(lists, NoExchange(), tokens, again.context(tokens, **rest)), Loop()
    loop.run(alone(lists.forward), lambda: chunk)
    chunk.output.backward()
    chunk.start_backward(None)
    loop.run(alone(lists.backward), lambda: chunk)
    loop.finish(lambda _: True)
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-12, msg=name)


def test_another_step_drops_something_else():
    model, batch = model_and_batch()
    losses = {model(**batch | {"keys": keys(step=step, samples=4, length=8)}).item() for step in range(4)}
    assert len(losses) == 4 and len({model(**batch).item() for _ in range(2)}) == 1
    assert model.eval()(tokens=batch["tokens"], labels=batch["labels"]).item() not in losses


# The trainer


def train_other(argv):
    with patch.dict(SIZES.data, other_families.SIZES), patch.dict(MODELS.data, other_families.MODELS):
        return jobs.train(argv)


PLANS = {
    "accumulation": (1, dict(training__local_batch_size=2)),
    "FSDP": (2, dict(training__local_batch_size=2)),
    "TP, recompute": (2, dict(parallelism__tensor_parallel_degree=2, activation_checkpoint__mode="full")),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


def losses(ranks, folder, texts, **options):
    size = dict(model__name="other_decoder", model__overrides="{vocab_size = 260, max_seq_len = 64}")
    rows, state = run_ranks(ranks, train_other, jobs.arguments(folder, texts, **size, **options))[0]
    return [row["loss"] for row in rows], state


@pytest.fixture(scope="module")
def straight(texts, tmp_path_factory):
    return losses(1, tmp_path_factory.mktemp("straight"), texts, training__steps=6)


@pytest.mark.parametrize("plan", PLANS)
def test_the_plan_of_a_job_changes_no_draw(plan, straight, texts, tmp_path):
    ranks, options = PLANS[plan]
    assert losses(ranks, tmp_path, texts, training__steps=6, **options)[0] == pytest.approx(straight[0], rel=1e-5)


def test_a_resume_changes_no_draw(straight, texts, tmp_path):
    saved = dict(checkpoint__enable=True, checkpoint__interval=3, lr_scheduler__total_steps=6)
    losses(1, tmp_path, texts, training__steps=3, **saved)
    assert losses(1, tmp_path, texts, training__steps=6, **saved) == straight
