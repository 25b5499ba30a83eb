"""Keyed dropout, of features and of probabilities: as many as asked, no pattern in them, the same ones whatever cuts
the batch.
"""

from unittest.mock import patch

import pytest
import torch

from tests.support import jobs, other_families
from tests.support.no_exchange import NoExchange
from tests.support.other_families import Other, OtherArgs
from tests.support.pool import run_ranks
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.core.initialization import initialize
from torchtitan.core.keyed_rng import scrambled
from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.models import FAMILIES
from torchtitan.models.attention import AttentionKernel
from torchtitan.models.dropout import Dropout, DroppingKernel, head_keys, layer_keys, token_keys
from torchtitan.parallelisms.attention_kernel import Tokens
from torchtitan.parallelisms.context_parallel import require_part
from torchtitan.parallelisms.pipeline.overlap.chunk import Chunk, Loop
from torchtitan.parallelisms.pipeline.overlap.segments import NodeLists, Policy, alone
from torchtitan.parallelisms.pipeline.overlap.stage import programs_of
from torchtitan.rules import check

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
    x, y = x[: 10**5], y[: 10**5]
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


# Of the probabilities of attention

QUERIES, KEYS, GROUPED = (3, 4, 6, 8), (3, 2, 6, 8), 2
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [0] * 6, [0, 1, 1, 1, 2, 2]])


def attention_inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = (QUERIES, KEYS, KEYS)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def kept_pairs(own, heads, p):
    """[B, H, Q, S], as Dropout drops of rows that each have a key."""
    keys = head_keys(own, 0, heads)
    return Dropout(p)(torch.ones(*keys.shape, keys.shape[-1], dtype=torch.float64), keys)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
@pytest.mark.parametrize("causal", [True, False])
def test_probabilities_are_dropped_behind_the_softmax(documents, causal):
    """Against the formula, one query after the other; and every gradient."""
    own, kernel = keys(samples=3, length=6), DroppingKernel(0.4, causal=causal)
    q, k, v = inputs = attention_inputs()
    counted = kept_pairs(own, 4, 0.4)
    rows = []
    for sample, head, query in torch.cartesian_prod(torch.arange(3), torch.arange(4), torch.arange(6)).tolist():
        seen = torch.arange(6) <= query if causal else torch.ones(6, dtype=torch.bool)
        if documents is not None:
            seen = seen & (documents[sample] == documents[sample, query])
        scores = (k[sample, head // GROUPED] @ q[sample, head, query] / 8**0.5)[seen]
        weights = scores.exp() / scores.exp().sum() * counted[sample, head, query, seen]
        rows.append(weights @ v[sample, head // GROUPED, seen])
    expected = torch.stack(rows).view(QUERIES)
    mask = kernel.prepare(Tokens(torch.arange(6), documents))
    y = kernel(q, k, v, mask, own)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for got, wanted in zip(
        *(torch.autograd.grad((each * direction).sum(), inputs) for each in (y, expected)), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_the_share_of_dropped_probabilities_is_even_and_its_draws_apart():
    own = keys(samples=16)
    dropped = (kept_pairs(own, 4, 0.25) == 0).double()  # [16, 4, 32, 32]
    for axes, draws in (((0, 1, 2), 2048), ((0, 1, 3), 2048), ((0, 2, 3), 16384), ((1, 2, 3), 4096)):
        assert (dropped.mean(axes) - 0.25).abs().max() < 5 * (0.25 * 0.75 / draws) ** 0.5
    neighbours = {axis: (dropped == dropped.roll(1, axis)).double().mean().item() for axis in range(4)}
    features = (Dropout(0.25)(torch.ones(*own.shape, LENGTH), own) == 0).double()  # of what the block adds
    assert list(neighbours.values()) == pytest.approx([0.625] * 4, abs=0.01)
    assert (dropped == features[:, None]).double().mean().item() == pytest.approx(0.625, abs=0.01)


def test_a_share_of_the_heads_and_of_the_queries_drops_what_the_whole_does():
    """Of tensor and of context parallel."""
    own, kernel = keys(samples=3, length=6), DroppingKernel(0.4)
    q, k, v = attention_inputs()
    whole, part = kernel(q, k, v, None, own), DroppingKernel(0.4)
    part.share = 1
    assert torch.equal(part(q[:, 2:], k[:, 1:], v[:, 1:], None, own), whole[:, 2:])
    some = torch.tensor([1, 4])
    mask = kernel.prepare(Tokens(some, None), Tokens(torch.arange(6), None))
    torch.testing.assert_close(kernel(q[:, :, some], k, v, mask, own[:, some]), whole[:, :, some], rtol=1e-12, atol=0)


def test_outside_of_training_no_probability_is_dropped():
    q, k, v = attention_inputs()
    kernel = DroppingKernel(0.4)
    with pytest.raises(AssertionError, match="keys of its tokens"):
        kernel(q, k, v, None)
    assert torch.equal(kernel.eval()(q, k, v, None), AttentionKernel()(q, k, v, None))
    assert torch.equal(
        kernel.with_backend("sdpa")(q, k, v, None), AttentionKernel()(q, k, v, None)
    )  # as generating asks


@pytest.mark.parametrize("method", ["ring", "alltoall", "ulysses"])
def test_context_parallel_that_has_parts_of_rows_is_refused(method):
    require_part(DroppingKernel(0.4), "allgather")
    said = f'context_parallel_rotate_method: given "{method}"; allowed: "allgather" for a model with attention_dropout'
    with pytest.raises(JobError, match=said):
        require_part(DroppingKernel(0.4), method)
    job = ["--model.name=gpt2", "--parallelism.context_parallel_degree=2", "--model.tokenizer_path=bytes"]
    job += ["--training.seq_len=64", f"--parallelism.context_parallel_rotate_method={method}"]
    assert check(load(job), 2, "cpu") == []
    (fault,) = check(load([*job, "--model.overrides={attention_dropout = 0.1}"]), 2, "cpu")
    assert said in str(fault)


def model_and_batch():
    model = Other(OtherArgs(dropout=0.25, attention_dropout=0.25)).double()
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
    with patch.dict(FAMILIES, other_families.FAMILIES):
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
    size = dict(
        model__name="other_decoder", model__overrides="{vocab_size = 260, max_seq_len = 64, attention_dropout = 0.1}"
    )
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
