"""Loss functions of log-probabilities: on rows of the table against the task's objective, and a policy gradient."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.plans.combinations import Combination
from tests.support.jobs import full
from tests.support.pool import run_ranks
from tests.support.table_rows import assembled, batch, build_with_initial_weights, local_batch_size
from torchtitan.contract.step import SAMPLES
from torchtitan.datasets.samples import global_sample_numbers
from torchtitan.losses.log_probs import LogProbObjective, LossError, LossInputs, try_function
from torchtitan.losses.objective import IGNORE_INDEX, SummedCrossEntropy, entropies

ROWS = [
    Combination(ranks=2, dp_shard=2),
    Combination(ranks=2, dp_replicate=2, accumulation=2),
    Combination(ranks=2, tp=2),
    Combination(ranks=2, tp=2, loss_parallel=False, sequence_parallel=False),
    Combination(ranks=2, cp=2, method="allgather", balance=True),
    Combination(ranks=2, cp=2, method="ring", balance=False, loss_chunks=2),
    Combination(ranks=2, pp=2, schedule="1F1B"),
    Combination(ranks=2, pp=2, schedule="DualPipeV", microbatch_size=1),
    Combination(ranks=2, dp_shard=2, ep=2, model="deepseek"),
    Combination(
        ranks=4, dp_shard=2, pp=2, ep=2, schedule="DualPipeV", overlap=True, microbatch_size=1, model="deepseek"
    ),
    Combination(ranks=4, cp=2, tp=2, method="ulysses", recompute="full"),
]
EXACT = dict(precision="float64", document_mask=False)


def cross_entropy(inputs: LossInputs) -> torch.Tensor:
    return -(inputs.log_probs * inputs.mask).sum()


def policy_gradient(inputs: LossInputs) -> torch.Tensor:
    """A clipped surrogate (arXiv:1707.06347) with an entropy bonus and a weight for each sample."""
    ratio = (inputs.log_probs - inputs.columns["earlier"]).exp()
    advantages = inputs.columns["advantages"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -((gain + 0.1 * inputs.entropy) * inputs.mask).sum(1) @ inputs.columns["weights"].to(gain.dtype)


def columns() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = batch()["tokens"].shape
    draw = lambda *sizes: torch.randn(*sizes, generator=generator, dtype=torch.float64)  # noqa: E731
    return {"earlier": draw(*shape) - 4, "advantages": draw(*shape), "weights": draw(SAMPLES).abs()}


def gradients(row: Combination, kind: str) -> dict:
    """Return this rank's gradients, and the loss, of a loss function on this rank of a row."""
    model, full_batch, loss = assembled(row), batch() | columns(), None
    names = ["tokens", "labels"] + ["keys"] * model.needs_keys
    if kind != "task":
        function, extra = (cross_entropy, ()) if kind == "cross_entropy" else (policy_gradient, tuple(columns()))
        loss = LogProbObjective(
            function, model.gather_sequence, model.dims.cp, extra, kind == "policy", row.loss_chunks or 1
        )
        names += extra
    numbers = torch.arange(SAMPLES // model.dims.dp)
    samples = global_sample_numbers(numbers, model.dims.dp_rank(model.mesh), model.dims.dp, 1)
    local = {name: full_batch[name][samples] for name in names}
    size, valid = local_batch_size(row, model.dims), int((full_batch["labels"] != IGNORE_INDEX).sum())
    before, total = [part.loss for part in model.parts], torch.zeros((), dtype=torch.float64)
    for index in range(row.accumulation):
        part = {name: tensor[index * size : (index + 1) * size] for name, tensor in local.items()}
        if loss is None:
            total += model.forward_backward(part, valid, is_last=index == row.accumulation - 1)
            continue
        with model.objective(loss):  # each call reduces: several before a step may
            total += model.forward_backward(part, valid)
    assert [part.loss for part in model.parts] == before
    model.clip_gradients(0.0)
    dist.all_reduce(total)
    return {"loss": total.numpy() / row.tp} | {
        name: full(p.grad).numpy() for name, p in model.named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize("row", [replace(row, **EXACT) for row in ROWS], ids=str)
def test_cross_entropy_of_a_user_has_the_gradients_of_the_task(row):
    expected, got = (run_ranks(row.ranks, gradients, row, kind) for kind in ("task", "cross_entropy"))
    for of_task, of_user in zip(expected, got, strict=True):
        assert of_task.keys() == of_user.keys()
        for name, value in of_task.items():
            assert np.abs(of_user[name] - value).max() <= 1e-12 * max(np.abs(value).max(), 1e-3), name


@cache
def plain_policy_gradients(pp: int) -> dict[str, torch.Tensor]:
    """Compute the policy gradient in a plain loop over samples, on the whole logits of one device."""
    model = build_with_initial_weights(Combination(pp=pp, **EXACT))  # a row with pp has more layers
    data, extra = batch(), columns()
    valid = (data["labels"] != IGNORE_INDEX).sum()
    total = torch.zeros((), dtype=torch.float64)
    for sample in range(SAMPLES):
        log_probs = model(tokens=data["tokens"][sample : sample + 1])[0].log_softmax(-1)
        for position, label in enumerate(data["labels"][sample].tolist()):
            if label == IGNORE_INDEX:
                continue
            ratio = (log_probs[position, label] - extra["earlier"][sample, position]).exp()
            advantage = extra["advantages"][sample, position]
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            entropy = -(log_probs[position].exp() * log_probs[position]).sum()
            total = total - extra["weights"][sample] * (gain + 0.1 * entropy) / valid
    total.backward()
    return {"loss": total.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("row", [replace(row, **EXACT) for row in ROWS if row.model == Combination().model], ids=str)
def test_a_policy_gradient_equals_a_plain_loop(row):
    of_plain_loop = plain_policy_gradients(row.pp)
    for rank in run_ranks(row.ranks, gradients, row, "policy"):
        for name, value in rank.items():
            expected = of_plain_loop[name if name in of_plain_loop else "tok_embeddings.weight"]
            assert (torch.as_tensor(value) - expected).abs().max() <= 1e-10 * expected.abs().max(), name


def test_entropies_are_those_of_the_distribution():
    logits = torch.randn(7, 11, dtype=torch.float64, requires_grad=True)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropies(logits), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(entropies, (logits,))
    assert entropies(logits.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda inputs: -inputs.log_probs.mean(), "looks like a mean: twice the same samples have"),
        (lambda inputs: -inputs.log_probs.sum() / inputs.mask.sum(), "looks like a mean"),
        (lambda inputs: -inputs.log_probs.sum(1), r"a tensor of shape \[2\]"),
        (lambda inputs: 3.0, "returns a float; return the sum of the losses of all tokens, a scalar tensor"),
        (lambda inputs: None, "returns a NoneType"),
        (lambda inputs: inputs.mask.sum(), "and torch.int64"),
        (lambda inputs: -inputs.log_probs.detach().sum(), "does not depend on log_probs"),
        (lambda inputs: inputs.columns["reward"].sum(), r"raised KeyError: 'reward'"),
        (lambda inputs: inputs.entropy.sum(), "raised AttributeError"),
    ],
)
def test_what_is_no_sum_is_refused_before_the_model_runs(function, reason):
    labels = torch.tensor([[1, 2, IGNORE_INDEX], [3, 1, 2]])
    with pytest.raises(LossError, match=reason):
        try_function(function, {"labels": labels}, (), False)


def test_sums_are_accepted():
    data = {"labels": torch.tensor([[1, 2, 3]]), "weight": torch.tensor([0.5])}
    for function in (
        lambda inputs: -inputs.log_probs.sum(),
        lambda inputs: -(inputs.log_probs.sum(1) / inputs.mask.sum(1)).sum(),  # a mean for each sample, summed
        lambda inputs: (inputs.log_probs.sum(1) * inputs.columns["weight"]).sum(),
        lambda inputs: inputs.log_probs.sum() * 0,
    ):
        try_function(function, data, ("weight",), False)


def test_without_a_function_log_probabilities_are_collected():
    head, hidden = torch.nn.Linear(4, 9), torch.randn(2, 3, 4)
    labels = torch.tensor([[1, 2, IGNORE_INDEX], [3, 1, 2]])
    objective = LogProbObjective(None, lambda x: x, 1)
    total = objective(hidden, head, {"labels": labels})
    (collected,) = objective.collected
    assert collected.shape == (2, 3) and collected[0, 2] == 0 and not collected.requires_grad
    torch.testing.assert_close(-total, SummedCrossEntropy()(hidden, head, {"labels": labels}))
