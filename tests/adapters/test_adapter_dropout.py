"""Tests of adapter dropout by random keys: the formula, independent masks, other plans, a resume, refusals.

The table of combinations shows that every plan gives the gradients of one device.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.support import jobs, judged
from tests.support.adapted import perturb_parameters
from tests.support.judged import lines
from tests.support.pool import run_ranks
from torchtitan.adapters.low_rank import LoRA, dropout_key
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import initialize
from torchtitan.models import SIZES
from torchtitan.models.attention import SharedInputs
from torchtitan.models.dropout import Dropout, layer_keys, token_keys
from torchtitan.models.spec import MODELS
from torchtitan.parallelisms.steps import Notes, running

anywhere = judged.anywhere


def adapted(family="llama3", **options):
    """Build a tiny model with LoRA and dropout, with B nonzero."""
    with torch.device("meta"):
        model = MODELS[family].build(SIZES[family]["debugmodel"])
    adapter = LoRA(Options(kind="lora", rank=4, dropout=0.25, **options))
    adapter.install(model, MODELS[family].plan)
    model.to_empty(device="cpu")
    initialize(model, 0, model.init_rule)
    perturb_parameters(model.named_parameters())
    return model


def test_only_the_input_of_lora_a_is_dropped():
    """Each linear of a layer draws its own mask, as in peft."""
    model = adapted(target=["*wq", "*wk"])
    assert model.needs_keys
    x, keys = torch.randn(3, 8, 256), layer_keys(token_keys(1, 2, torch.arange(3), 8), 0)
    with running(Notes(SharedInputs(torch.arange(8)[None], None, None, None, keys))):
        outputs = {name: model.get_submodule(f"layers.0.attention.{name}")(x) for name in ("wq", "wk")}
    masks = []
    for name, y in outputs.items():
        linear = model.get_submodule(f"layers.0.attention.{name}")
        drop = Dropout(0.25, dropout_key(f"layers.3.attention.{name}"))  # the layer is in the keys
        masks.append(drop(torch.ones_like(x), keys))
        low_rank = F.linear(F.linear(x * masks[-1], linear.lora_A), linear.lora_B) * linear.settings.scale
        torch.testing.assert_close(y, F.linear(x, linear.weight) + low_rank, rtol=1e-5, atol=1e-4)
    # 6144 pairs of draws with p = 1/4 agree in 5/8 of the cases, give or take 0.006
    assert ((masks[0] == 0) == (masks[1] == 0)).double().mean().item() == pytest.approx(0.625, abs=0.03)


def test_evaluation_drops_nothing():
    model, tokens = adapted().eval(), torch.arange(16).view(2, 8)
    plain = adapted().eval()
    for module in plain.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
    assert torch.equal(model(tokens), plain(tokens))
    with pytest.raises(AssertionError, match="keys of its tokens"):
        model.train()(tokens)


PLANS = {
    "accumulation": (1, dict(training__local_batch_size=2)),
    "FSDP": (2, dict(training__local_batch_size=4)),
    "TP, recompute": (2, dict(parallelism__tensor_parallel_degree=2, activation_checkpoint__mode="full")),
    "PP": (2, dict(parallelism__pipeline_parallel_degree=2)),
}
DROPS = dict(adapter__kind="lora", adapter__rank=4, adapter__dropout=0.25, optimizer__lr=3e-3)


def losses(ranks, folder, texts, **options):
    rows, state = run_ranks(ranks, jobs.train, jobs.arguments(folder, texts, **DROPS | options))[0]
    return [row["loss"] for row in rows], state


def test_no_plan_and_no_resume_changes_the_dropout_masks(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts")
    saved = dict(checkpoint__enable=True, checkpoint__interval=2, lr_scheduler__total_steps=4, training__steps=4)
    straight, state = losses(1, tmp_path / "straight", texts, **saved)
    for name, (ranks, plan) in PLANS.items():
        plan_losses, _ = losses(ranks, tmp_path / name, texts, training__steps=4, lr_scheduler__total_steps=4, **plan)
        assert plan_losses == pytest.approx(straight, rel=1e-5), name
    assert losses(1, tmp_path / "straight", texts, **saved, checkpoint__load_step=2)[1] == state
    none, _ = losses(1, tmp_path / "none", texts, training__steps=4, adapter__dropout=0.0)
    assert none[0] == pytest.approx(straight[0], rel=1e-5), "B is zero in the first step"
    assert none[-1] != pytest.approx(straight[-1], rel=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (['--adapter.target=["all-linear", "output"]'], "allowed: 0 with output in adapter.target; "),
        (
            ["--model.name=qwen3_moe", '--adapter.target=["all-linear"]'],
            "allowed: 0 with layers.*.moe.experts in adapter.target; rows of experts and pieces of the loss are not",
        ),
    ],
    ids=str,
)
def test_dropout_is_refused_for_targets_without_random_keys(arguments, message):
    (fault,) = lines("--adapter.kind=lora", "--adapter.rank=4", "--adapter.dropout=0.1", *arguments)
    assert message in fault and fault.startswith("adapter.dropout: given 0.1;")


def test_dropout_of_one_is_refused():
    with pytest.raises(JobError, match="adapter.dropout: given 1"):
        lines("--adapter.kind=lora", "--adapter.dropout=1.0")
