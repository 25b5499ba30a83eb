"""Keyed dropout of features and attention probabilities: correct rate, independent draws, no dependence on the plan."""

from unittest.mock import patch

import pytest
import torch

from tests.support import jobs, other_families
from tests.support.no_exchange import NoExchange
from tests.support.other_families import Other, OtherArgs
from tests.support.pool import run_ranks
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import initialize, scrambled
from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.models import FAMILIES
from torchtitan.models.attention import AttentionKernel
from torchtitan.models.dropout import Dropout, DropoutKernel, head_keys, layer_keys, token_keys
from torchtitan.parallelisms.context_parallel import check_kernel_method
from torchtitan.parallelisms.pipeline.overlap.chunk import Chunk, NodeLoop
from torchtitan.parallelisms.pipeline.overlap.segments import NodeLists, RecomputePolicy, in_order
from torchtitan.parallelisms.pipeline.overlap.stage import build_programs
from torchtitan.parallelisms.sequence_layout import Tokens
from torchtitan.rules import check

SAMPLES, LENGTH, WIDTH = 64, 32, 128


def keys(seed=1, step=2, samples=SAMPLES, length=LENGTH):
    return token_keys(seed, step, torch.arange(samples), length)


def dropout_mask(keys, p=0.25, place=0):
    return Dropout(p, place)(torch.ones(*keys.shape, WIDTH), keys) != 0


def test_a_fraction_is_dropped_and_the_rest_scaled_up():
    y = Dropout(0.25)(torch.ones(SAMPLES, LENGTH, WIDTH), keys())
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    # 262144 draws: the standard deviation of the share is 0.0008
    assert (y == 0).double().mean().item() == pytest.approx(0.25, abs=0.004)


def test_rates_are_even_over_features_tokens_and_samples():
    dropped = (~dropout_mask(keys())).double()
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


@pytest.mark.parametrize("change", [*OTHERS, "place", "the next feature"])
def test_draws_are_independent(change):
    """Two independent masks agree (both keep or both drop) in 0.625 of the features."""
    mask = dropout_mask(keys())
    other_mask = (
        dropout_mask(OTHERS[change])
        if change in OTHERS
        else dropout_mask(keys(), place=1)
        if change == "place"
        else mask.roll(1, 2)
    )
    assert (mask == other_mask).double().mean().item() == pytest.approx(0.625, abs=0.005)


def test_draws_of_layers_are_independent():
    masks = (
        torch.stack([dropout_mask(layer_keys(keys(samples=4), layer)) for layer in range(-1, 12)]).flatten(1).double()
    )
    correlations = torch.corrcoef(masks) - torch.eye(13)
    assert correlations.abs().max() < 5 / masks.shape[1] ** 0.5


def test_the_hash_is_a_permutation_of_32_bits():
    x = torch.randint(2**32, (10**6,), generator=torch.Generator().manual_seed(0)).unique()
    y = scrambled(x)
    assert y.min() >= 0 and y.max() < 2**32 and len(y.unique()) == len(x)
    x, y = x[: 10**5], y[: 10**5]
    flipped = scrambled(x ^ (1 << torch.arange(32)[:, None])) ^ y
    changed = torch.stack([(flipped >> bit & 1).double().mean(1) for bit in range(32)])
    assert (changed - 0.5).abs().max() < 0.2, "each bit of the input changes each bit of the output, or nearly so"


def test_keys_are_cut_with_the_batch():
    all_keys = keys()
    assert torch.equal(token_keys(1, 2, torch.arange(SAMPLES)[1::2], LENGTH), all_keys[1::2])
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    drop = Dropout(0.5, 1)
    assert torch.equal(drop(x[3:5, 7:20], all_keys[3:5, 7:20]), drop(x, all_keys)[3:5, 7:20])


def test_outside_of_training_nothing_is_dropped():
    x = torch.randn(2, 3, 4)
    assert torch.equal(Dropout(0.5).eval()(x, None), x) and torch.equal(Dropout(0.0)(x, None), x)
    with pytest.raises(AssertionError, match="keys of its tokens"):
        Dropout(0.5)(x, None)


def test_gradients_pass_where_features_are_kept():
    x = torch.randn(2, 3, 64, dtype=torch.float64, requires_grad=True)
    drop, batch_keys = Dropout(0.3), keys(samples=2, length=3)
    (grad,) = torch.autograd.grad(drop(x, batch_keys).sum(), x)
    assert torch.equal(grad, drop(torch.ones_like(x), batch_keys))


# Attention probabilities

QUERIES, KEYS, GROUPED = (3, 4, 6, 8), (3, 2, 6, 8), 2
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [0] * 6, [0, 1, 1, 1, 2, 2]])


def attention_inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = (QUERIES, KEYS, KEYS)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def pair_factors(batch_keys, heads, p):
    """Return factors [B, H, Q, S] that Dropout applies to rows with these keys."""
    pair_keys = head_keys(batch_keys, 0, heads)
    return Dropout(p)(torch.ones(*pair_keys.shape, pair_keys.shape[-1], dtype=torch.float64), pair_keys)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
@pytest.mark.parametrize("causal", [True, False])
def test_probabilities_are_dropped_after_the_softmax(documents, causal):
    """Compare outputs and gradients to the formula, evaluated query by query."""
    batch_keys, kernel = keys(samples=3, length=6), DropoutKernel(0.4, causal=causal)
    q, k, v = inputs = attention_inputs()
    factors = pair_factors(batch_keys, 4, 0.4)
    rows = []
    for sample, head, query in torch.cartesian_prod(torch.arange(3), torch.arange(4), torch.arange(6)).tolist():
        visible = torch.arange(6) <= query if causal else torch.ones(6, dtype=torch.bool)
        if documents is not None:
            visible = visible & (documents[sample] == documents[sample, query])
        scores = (k[sample, head // GROUPED] @ q[sample, head, query] / 8**0.5)[visible]
        weights = scores.exp() / scores.exp().sum() * factors[sample, head, query, visible]
        rows.append(weights @ v[sample, head // GROUPED, visible])
    expected = torch.stack(rows).view(QUERIES)
    mask = kernel.prepare(Tokens(torch.arange(6), documents))
    y = kernel(q, k, v, mask, batch_keys)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for grad, expected_grad in zip(
        *(torch.autograd.grad((output * direction).sum(), inputs) for output in (y, expected)), strict=True
    ):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_probability_draws_have_an_even_rate_and_are_independent():
    batch_keys = keys(samples=16)
    dropped = (pair_factors(batch_keys, 4, 0.25) == 0).double()  # [16, 4, 32, 32]
    for axes, draws in (((0, 1, 2), 2048), ((0, 1, 3), 2048), ((0, 2, 3), 16384), ((1, 2, 3), 4096)):
        assert (dropped.mean(axes) - 0.25).abs().max() < 5 * (0.25 * 0.75 / draws) ** 0.5
    neighbours = {axis: (dropped == dropped.roll(1, axis)).double().mean().item() for axis in range(4)}
    features = (
        Dropout(0.25)(torch.ones(*batch_keys.shape, LENGTH), batch_keys) == 0
    ).double()  # of the block's residual
    assert list(neighbours.values()) == pytest.approx([0.625] * 4, abs=0.01)
    assert (dropped == features[:, None]).double().mean().item() == pytest.approx(0.625, abs=0.01)


def test_some_heads_or_queries_drop_the_same_probabilities():
    """Tensor parallel gives a rank some heads; context parallel gives it some queries."""
    batch_keys, kernel = keys(samples=3, length=6), DropoutKernel(0.4)
    q, k, v = attention_inputs()
    full_output, partial_kernel = kernel(q, k, v, None, batch_keys), DropoutKernel(0.4)
    partial_kernel.head_shard = 1
    assert torch.equal(partial_kernel(q[:, 2:], k[:, 1:], v[:, 1:], None, batch_keys), full_output[:, 2:])
    positions = torch.tensor([1, 4])
    mask = kernel.prepare(Tokens(positions, None), Tokens(torch.arange(6), None))
    torch.testing.assert_close(
        kernel(q[:, :, positions], k, v, mask, batch_keys[:, positions]),
        full_output[:, :, positions],
        rtol=1e-12,
        atol=0,
    )


def test_outside_of_training_no_probability_is_dropped():
    q, k, v = attention_inputs()
    kernel = DropoutKernel(0.4)
    with pytest.raises(AssertionError, match="keys of its tokens"):
        kernel(q, k, v, None)
    assert torch.equal(kernel.eval()(q, k, v, None), AttentionKernel()(q, k, v, None))
    assert torch.equal(kernel.with_backend("sdpa")(q, k, v, None), AttentionKernel()(q, k, v, None))  # as in generation


@pytest.mark.parametrize("method", ["ring", "alltoall", "ulysses"])
def test_attention_dropout_needs_full_rows_under_context_parallel(method):
    check_kernel_method(DropoutKernel(0.4), "allgather")
    message = (
        f'context_parallel_rotate_method: given "{method}"; allowed: "allgather" for a model with attention_dropout'
    )
    with pytest.raises(JobError, match=message):
        check_kernel_method(DropoutKernel(0.4), method)
    job = ["--model.name=gpt2", "--parallelism.context_parallel_degree=2", "--model.tokenizer_path=bytes"]
    job += ["--training.seq_len=64", f"--parallelism.context_parallel_rotate_method={method}"]
    assert check(load(job), 2, "cpu") == []
    (fault,) = check(load([*job, "--model.overrides={attention_dropout = 0.1}"]), 2, "cpu")
    assert message in str(fault)


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


@pytest.mark.parametrize(
    "policy", [RecomputePolicy(), RecomputePolicy("full", preserve_rng_state=False)], ids=["none", "full"]
)
def test_segments_drop_what_the_forward_drops(policy):
    """This holds too with recompute, which saves no random generator's state."""
    model, batch = model_and_batch()
    expected = gradients(model, model(**batch))
    segmented, _ = model_and_batch()
    tokens, other_inputs = batch["tokens"], {name: x for name, x in batch.items() if name != "tokens"}
    lists = NodeLists(build_programs(segmented), policy)
    chunk, loop = Chunk(lists, NoExchange(), tokens, segmented.context(tokens, **other_inputs)), NodeLoop()
    loop.run(in_order(lists.forward), lambda: chunk)
    chunk.output.backward()
    chunk.start_backward(None)
    loop.run(in_order(lists.backward), lambda: chunk)
    loop.run_deferred(lambda _: True)
    for name, parameter in segmented.named_parameters():
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
