"""ReLoRA: published values of its schedules, merges that keep the outputs, resets of optimizer state, faults of jobs.

The toy problem is LT(32, 2, 600) of the specification, section 10. Runs are in test_relora_jobs.py.
"""

import pytest
import torch
from torch import nn

from tests.support import judged
from tests.support.judged import lines
from torchtitan import cli
from torchtitan.adapters.low_rank import (
    LoRA,
    LoRASettings,
    LowRankLinear,
    Restarts,
    is_due,
    largest_mask,
    merge_product,
    restart_matrices,
)
from torchtitan.config import manager
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.config.sections.model import Relora
from torchtitan.job import ResolvedJob
from torchtitan.lr_schedules import LRSchedule, Ramps, cyclical, jagged
from torchtitan.models import SIZES
from torchtitan.models.spec import MODELS

anywhere = judged.anywhere
JAGGED = dict(warmup_steps=10, decay_type="relora_cosine", cycle_length=20, restart_warmup_steps=5)
# measured in section 2.4 of the specification
PUBLISHED = {0: 0, 5: 0.5, 10: 1, 19: 0.9780, 20: 0, 21: 0.1879, 25: 0.9397, 30: 0.8947, 40: 0, 45: 0.7039, 99: 0.1003}


def test_the_jagged_schedule_has_the_published_values():
    schedule = LRSchedule(100, **JAGGED)
    for step, value in PUBLISHED.items():
        assert schedule.multiplier(step) == pytest.approx(value, abs=5e-5), step
    assert [step for step in range(100) if schedule.multiplier(step) == 0] == [0, 20, 40, 60, 80]
    for cut in (20, 40, 60, 80):  # the linear ramp ends on the cosine
        before, after = jagged(cut + 4, 100, 10, 20, 5, 0.1), jagged(cut + 5, 100, 10, 20, 5, 0.1)
        assert after - before == pytest.approx(after / 5)
    assert schedule.describe(1e-3) == (
        "learning rate: peak 0.001, warmup 10, relora_cosine in cycles of 20, floor 0.0001; total 100 steps"
    )


def test_adjust_step_moves_the_restarts():
    moved = [step for step in range(100) if jagged(step, 100, 5, 20, 5, 0.1, adjust=10) == 0]
    assert moved == [0, 10, 30, 50, 70, 90], "adjust_step moves the first restart too"


def test_the_cyclical_schedule():
    values = [cyclical(step, 4, 20, 0.1) for step in range(40)]
    assert values[:5] == [0, 0.25, 0.5, 0.75, 1.0]
    assert values[20:22] == [1e-7, 1e-7] and values[22:25] == [0.5, 0.75, 1.0] and values[25:] == values[5:20]
    assert LRSchedule(40, 4, decay_type="relora_cyclical", cycle_length=20).multiplier(24) == 1.0


def test_axolotls_ramps_multiply_any_schedule():
    """At each restart the rate drops to a thousandth and rises over 5 steps; `anneal_steps` lowers it over 4 before."""
    plain = LRSchedule(100, 10, decay_type="cosine")
    for anneal in (1, 4):
        ramps = Ramps(20, 5, anneal)
        ramped = LRSchedule(100, 10, decay_type="cosine", ramps=ramps)
        share = [ramped.multiplier(step) / plain.multiplier(step) for step in range(100)]
        assert share[:15] == pytest.approx([1.0] * 15), "the first warmup is that of the schedule itself"
        for cut in (20, 40, 60, 80):
            assert share[cut : cut + 6] == pytest.approx([0.001, 0.2008, 0.4006, 0.6004, 0.8002, 1.0])
        assert share[36:40] == pytest.approx([1.0] * 4 if anneal == 1 else [1.0, 0.75025, 0.5005, 0.25075])
    assert "floor 0.0001, ramps of 5 every 20; total 100" in ramped.describe(1e-3)
    options = ["--adapter.kind=lora", "--adapter.relora.every=10", "--training.steps=40", "--adapter.rank=4"]
    assert lines(*options, "--adapter.relora.warmup_steps=3") == []
    for suffixes, message in (
        (["warmup_steps=10"], "given 10; allowed: with anneal_steps 1 at most the 10 steps between; shorten one"),
        (["anneal_steps=2", "reset_step"], "anneal_steps: given 2; allowed: 1 without adapter.relora.warmup_steps"),
    ):
        assert any(message in line for line in lines(*options, *(f"--adapter.relora.{suffix}" for suffix in suffixes)))
    (both,) = lines(*SOUND, "--adapter.relora.warmup_steps=3")
    assert 'allowed: 0 with decay_type = "relora_cosine", which has restarts itself' in both
    config = manager.load([*options, "--adapter.relora.warmup_steps=3", "--lr_scheduler.warmup_steps=4"])
    assert ResolvedJob(config).schedule.learning_rate().ramps == Ramps(10, 3)


def linear(out=12, inputs=8, rank=3, dtype=torch.float64, scale=0.5, learns=False):
    module = nn.Linear(inputs, out, bias=False, dtype=dtype)
    module.weight.requires_grad_(False)
    module.__class__ = LowRankLinear
    module.add_low_rank_parameters(LoRASettings(rank, scale, learns))
    restart_matrices(module, "first")
    return module


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_merge_changes_no_output(dtype, tolerance):
    module = linear(dtype=dtype)
    with torch.no_grad():
        module.lora_B.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 8, dtype=dtype)
    before, old = module(x), {name: p.detach().clone() for name, p in module.named_parameters()}
    parameter_ids = {name: id(p) for name, p in module.named_parameters()}
    with torch.no_grad():
        merge_product(module)
        restart_matrices(module, "second")
    assert (module(x) - before).abs().max() < tolerance
    assert {name: id(p) for name, p in module.named_parameters()} == parameter_ids, (
        "parameters must stay the same objects, since optimizers hold them"
    )
    assert not module.lora_B.any() and not torch.equal(module.lora_A, old["lora_A"])
    change = 0.5 * old["lora_B"] @ old["lora_A"]
    torch.testing.assert_close(module.weight - old["weight"], change, rtol=tolerance, atol=tolerance)


def test_a_new_adapter_gets_gradients_from_the_first_step():
    """B first, and A from the second step on. If both were zero, neither would ever get a gradient."""
    module, x = linear(), torch.randn(6, 8, dtype=torch.float64)
    torch.testing.assert_close(module(x), x @ module.weight.T, rtol=1e-14, atol=1e-14)  # as it was
    optimizer = torch.optim.AdamW([module.lora_A, module.lora_B], lr=1e-2)
    for step in range(2):
        module(x).square().sum().backward()
        assert module.lora_B.grad.any() and bool(module.lora_A.grad.any()) == (step == 1)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("merges", [0, 1])
def test_a_trained_scale_gets_gradients_before_and_after_a_merge(merges):
    """If a merge set the scale to 0, as one of the original scripts did, A, B and scale would never get a gradient."""
    module, x = linear(scale=1.0, learns=True), torch.randn(6, 8, dtype=torch.float64)
    with torch.no_grad():
        for number in range(merges):
            module.lora_B.normal_(generator=torch.Generator().manual_seed(0))
            module.lora_scaling.fill_(0.3)
            before = module(x)
            merge_product(module)
            restart_matrices(module, f"restart {number}")
            assert (module(x) - before).abs().max() < 1e-12
    assert module.lora_scaling.item() == 1.0 and not module.lora_B.any()
    optimizer = torch.optim.AdamW([module.lora_A, module.lora_B, module.lora_scaling], lr=1e-2)
    for step in range(2):
        module(x).square().sum().backward()
        assert module.lora_B.grad.any() and bool(module.lora_scaling.grad.any()) == (step == 1)
        optimizer.step()
        optimizer.zero_grad()
    expected = x @ module.weight.T + module.lora_scaling.tanh() * (x @ module.lora_A.T @ module.lora_B.T)
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(x @ module.merged_weight("weight", module.weight).T, expected)


def test_a_merge_does_not_recompile():
    """Values change in place, so compiled code and recorded CUDA graphs stay valid."""
    module, x = linear(dtype=torch.float32, scale=1.0, learns=True), torch.randn(6, 8)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    model = nn.ModuleDict({"m": module})
    restarts = Restarts(Relora(every=2), 0)
    for step in range(1, 7):
        with torch.compiler.set_stance("fail_on_recompile" if step > 2 else "default"):
            compiled(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        restarts.after_step(step, [model], [optimizer])
    assert restarts.merges == 2
    torch.testing.assert_close(compiled(x), module(x))


def test_largest_mask_keeps_an_exact_count():
    for values in (torch.randn(1000), torch.full((1000,), 2.0), torch.zeros(1000)):
        assert largest_mask(values, 0.9).sum() == 100
    assert largest_mask(torch.full((10,), 3.0), 0.7).tolist() == [1.0] * 3 + [0.0] * 7
    assert largest_mask(torch.tensor([1.0, -5.0, 2.0, -3.0]), 0.5).tolist() == [0, 1, 0, 1]
    assert largest_mask(torch.arange(2**24 + 8.0), 0.5).sum() == 2**23 + 4


@pytest.mark.parametrize("reset, share", [("zero", 1.0), ("magnitude", 0.9), ("random", 0.9)])
def test_a_reset_changes_only_the_moments_of_adapters(reset, share):
    module, other_layer = linear(64, 64, 16), nn.Linear(64, 64, dtype=torch.float64)
    model = nn.ModuleDict({"lora": module, "rest": other_layer})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(3):
        other_layer(module(torch.randn(4, 64, dtype=torch.float64))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    untouched = [{key: value.clone() for key, value in optimizer.state[p].items()} for p in other_layer.parameters()]
    restarts = Restarts(Relora(every=2, reset=reset), seed=0)
    with torch.no_grad():
        restarts.reset_moments([model], [optimizer])
    for parameter in (module.lora_A, module.lora_B):
        first, second = (optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq"))
        assert (second == 0).double().mean().item() == pytest.approx(share, abs=0.03 if reset == "random" else 1e-3)
        assert not (first != 0)[second == 0].any(), "both moments are pruned together"
        assert optimizer.state[parameter]["step"] == 3
    for parameter, before in zip(other_layer.parameters(), untouched, strict=True):
        assert all(torch.equal(value, before[key]) for key, value in optimizer.state[parameter].items())


@pytest.mark.parametrize("reset_step, first", [(False, (1 - 0.9) / (1 - 0.999) ** 0.5), (True, 1.0)])
def test_the_first_step_after_zeroed_moments_depends_on_reset_step(reset_step, first):
    module = linear()
    optimizer = torch.optim.Adam([module.lora_A, module.lora_B], lr=1e-3)
    for _ in range(4000):
        module.lora_A.grad, module.lora_B.grad = torch.ones_like(module.lora_A), torch.ones_like(module.lora_B)
        optimizer.step()
    with torch.no_grad():
        Restarts(Relora(every=2, reset_step=reset_step), 0).reset_moments([nn.ModuleDict({"m": module})], [optimizer])
    before = module.lora_A.detach().clone()
    optimizer.step()
    moved = (before - module.lora_A).mean().item() / 1e-3
    assert moved == pytest.approx(first, rel=0.02)


# The toy problem: a target of full rank, learned by matrices of low rank


def train_toy(relora, steps=600, n=32, rank=2, rate=1e-2, warmup=10, stop=None):
    """Train, by default to the end, or for `stop` steps.

    Returns the squared distance to the target and the rank of the change of the matrix.
    """
    torch.manual_seed(0)
    sigma = torch.linspace(1, 0.2, n, dtype=torch.float64)
    u, v = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] for _ in range(2))
    start = torch.randn(n, n, dtype=torch.float64) / n**0.5
    target = start + u @ sigma.diag() @ v.T
    inputs = torch.randn(4096, n, dtype=torch.float64)
    module = linear(n, n, rank, scale=1.0)
    module.weight.data.copy_(start)
    model, restarts = nn.ModuleDict({"m": module}), None if relora is None else Restarts(relora, 0)
    optimizer = torch.optim.Adam([module.lora_A, module.lora_B], lr=rate)
    schedule_options = (
        dict(decay_type="cosine")
        if relora is None
        else dict(decay_type="relora_cosine", cycle_length=relora.every, restart_warmup_steps=warmup)
    )
    schedule, order = LRSchedule(steps, warmup, **schedule_options), torch.Generator().manual_seed(1)
    for step in range(steps if stop is None else stop):
        x = inputs[torch.randint(4096, (64,), generator=order)]
        (module(x) - x @ target.T).square().sum(1).mean().backward()
        optimizer.param_groups[0]["lr"] = rate * schedule.multiplier(step)
        optimizer.step()
        optimizer.zero_grad()
        if restarts is not None:
            restarts.after_step(step + 1, [model], [optimizer])
    merged = module.merged_weight("weight", module.weight)
    return (merged - target).square().sum().item(), torch.linalg.matrix_rank(merged - start, atol=1e-6).item()


def test_restarts_get_below_the_best_of_their_rank():
    floor = torch.linspace(1, 0.2, 32, dtype=torch.float64)[2:].square().sum().item()  # the best of rank 2
    lora, rank = train_toy(None)
    assert lora >= floor and rank <= 2
    zero, rank = train_toy(Relora(every=50))
    assert floor > 5 * zero and rank > 4
    joint, _ = train_toy(Relora(every=50, reset="magnitude"))
    assert joint < 2
    independent, _ = train_toy(Relora(every=50, reset="magnitude", mask="independent"))
    assert not independent <= 1e6, "independent masks diverge, so the mask is joint"


def test_the_larger_toy():
    floor = torch.linspace(1, 0.2, 64, dtype=torch.float64)[4:].square().sum().item()
    assert floor > 20 * train_toy(Relora(every=100), steps=2000, n=64, rank=4, rate=3e-3, warmup=20)[0]


def test_each_restart_adds_its_rank():
    for stop, least, most in ((50, 2, 2), (52, 2, 4), (101, 4, 4), (152, 6, 8)):
        assert least <= train_toy(Relora(every=50), stop=stop)[1] <= most, stop
    assert train_toy(None, stop=152)[1] == 2


def test_all_faults_of_a_job_are_reported_together(capsys):
    """Each line names an option, its allowed values and the remedy."""
    options = [*SOUND, "--adapter.rank=0", '--adapter.target=["*nothing*"]', "--adapter.save=alone"]
    options[options.index("--adapter.kind=lora")] = "--adapter.kind=qlora"
    options[options.index("--training.steps=40")] = "--training.steps=45"
    options.remove("--lr_scheduler.restart_warmup_steps=5")
    options += ["--checkpoint.enable", "--checkpoint.initial_load_path=nowhere", "--training.global_batch_size=9"]
    assert cli.main(["check", *options, "--model.tokenizer_path=bytes"]) == 2
    errors = capsys.readouterr().err
    for part in (
        "adapter.rank: given 0; allowed: a whole number >= 1",
        "lr_scheduler.cycle_length: given nothing; allowed: a divisor of the 45 steps in all",
        "training.global_batch_size: given 9",
        'checkpoint.initial_load_path: given "nowhere"; allowed: a path with weights; nowhere: no such file or folder',
    ):
        assert part in errors, errors
    options.remove("--adapter.rank=0")
    options[options.index("--training.steps=45")] = "--training.steps=40"
    assert cli.main(["check", *options, "--model.tokenizer_path=bytes"]) == 2
    errors = capsys.readouterr().err
    for part in (
        'adapter.target: given ["*nothing*"]; allowed: patterns that fit one of layers.*.attention.wq',
        'adapter.relora.every: given 10; allowed: unset, except with adapter.kind = "lora"; each restart would quan',
        'adapter.save: given "alone"; allowed: "whole" with adapter.relora',
        "lr_scheduler.restart_warmup_steps: given nothing",
        "training.global_batch_size: given 9",
        "checkpoint.initial_load_path",
    ):
        assert part in errors, errors


@pytest.mark.parametrize(
    "options, message",
    [
        (["--adapter.kind=dora"], "false with adapter.kind"),
        (["--adapter.alpha=16.0"], "adapter.alpha: given 16.0; allowed: unset with adapter.train_scaling"),
        (["--adapter.rslora"], "adapter.rslora: given true; allowed: unset with adapter.train_scaling"),
        (
            ["--adapter.last_save_in_peft", "--checkpoint.enable"],
            "adapter.last_save_in_peft: given true; allowed: false with adapter.train_scaling",
        ),
        (
            ["--adapter.initial_path=nowhere", "--checkpoint.enable"],
            'adapter.initial_path: given "nowhere"; allowed: unset with adapter.train_scaling',
        ),
        (
            ["--model.name=deepseek", '--adapter.target=["*experts"]'],
            "adapter.train_scaling: given true; allowed: false with layers.*",
        ),
    ],
    ids=str,
)
def test_faults_of_a_trained_scale(options, message):
    kind = [] if any("kind" in option for option in options) else ["--adapter.kind=lora"]
    assert any(message in line for line in lines("--adapter.train_scaling", *kind, *options))


def test_is_due_after_every_interval():
    assert [step for step in range(1, 35) if is_due(step, 10)] == [11, 21, 31]
    assert not any(is_due(step, None) for step in range(5)) and [s for s in range(1, 8) if is_due(s, 2)] == [3, 5, 7]


COUNTS = {  # parameters, and trained parameters at rank 128: section 7 of the specification
    "9m": (8_995_968, None),
    "20m": (19_548_416, None),
    "35m": (35_197_824, None),
    "40m": (42_392_480, None),
    "60m": (58_073_600, 42_770_944),
    "71m": (70_578_688, None),
    "100m": (99_989_120, None),
    "130m": (134_105_856, 71_584_512),
    "250m": (247_370_496, 98_734_848),
    "250m_50k": (275_413_248, None),
    "350m": (367_969_280, 125_404_160),
    "1b": (1_339_082_752, 250_706_944),
    "3b": (2_685_831_680, None),
    "7b": (6_738_415_616, None),
}


@pytest.mark.parametrize("flavor", COUNTS)
def test_presets_have_the_published_sizes(flavor):
    total, trained = COUNTS[flavor]
    assert SIZES["llama2"][flavor].num_parameters == total
    if trained is not None:
        with torch.device("meta"):
            model = MODELS["llama2"].build(SIZES["llama2"][flavor])
        adapter = LoRA(Options(kind="lora", rank=128, train_dense_rest=True))
        adapter.install(model, MODELS["llama2"].plan)
        assert adapter.num_trained == trained


SOUND = ["--adapter.kind=lora", "--adapter.relora.every=10", "--lr_scheduler.decay_type=relora_cosine"]
SOUND += ["--lr_scheduler.warmup_steps=5", "--lr_scheduler.restart_warmup_steps=5", "--training.steps=40"]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["--training.steps=45"],
            "lr_scheduler.cycle_length: given nothing; allowed: a divisor of the 45 steps in all; train 40 or 50",
        ),
        (["--training.steps=9"], "allowed: a divisor of the 9 steps in all; train 10 steps, or change it"),
        (["--lr_scheduler.warmup_steps=11"], "at most the cycle's 10; shorten one of the two"),
        (["--lr_scheduler.adjust_step=6"], "with adjust_step 6 at most the cycle's 10"),
        (["--lr_scheduler.restart_warmup_steps=11"], "at most the cycle's 10; shorten it"),
        (["--lr_scheduler.min_lr_factor=0"], "more than 0 with relora_cosine"),
        (["--lr_scheduler.decay_ratio=0.5"], 'unset with decay_type = "relora_cosine"'),
        (["--lr_scheduler.restart_warmup_steps=0"], "at least 1 with adapter.relora.reset; give it, otherwise a"),
        (
            ["--lr_scheduler.decay_type=relora_cyclical", "--lr_scheduler.warmup_steps=0"],
            "lr_scheduler.warmup_steps: given 0; allowed: at least 1 with adapter.relora.reset",
        ),
        (
            ["--lr_scheduler.adjust_step=3"],
            "given 3; allowed: 0 with adapter.relora.reset; leave it out, otherwise a r",
        ),
        (["--lr_scheduler.cycle_length=20"], "allowed: a divisor of the 10 steps between resets; leave it out"),
        (["--adapter.kind=qlora"], "each restart would quantize the matrices again"),
        (["--adapter.kind=dora"], "it is made for A and B"),
        (["--adapter.relora.prune_ratio=0.5"], 'unset with reset = "zero"'),
        (["--optimizer.name=SGD", "--optimizer.implementation=foreach"], "it is made for the two moments of Adam"),
    ],
    ids=str,
)
def test_faults(options, message):
    assert lines(*SOUND) == []
    changed = {option.partition("=")[0] for option in options}
    unchanged = [option for option in SOUND if option.partition("=")[0] not in changed]
    assert any(message in line for line in lines(*unchanged, *options))


@pytest.mark.parametrize("options", [["--lr_scheduler.cycle_length=5"], ["--adapter.relora.reset_every=20"]], ids=str)
def test_resets_at_some_restarts_or_with_reset_step_are_allowed(options):
    assert lines(*SOUND, *options) == []
    assert lines(*SOUND, "--lr_scheduler.cycle_length=20", "--adapter.relora.reset_step=true") == []


@pytest.mark.parametrize(
    "options, message",
    [
        (["--adapter.relora.every=10"], 'set lr_scheduler.decay_type = "relora_cosine", or adapter.relora.reset_step'),
        (["--adapter.relora.reset=magnitude"], "nothing without adapter.relora.every"),
        (["--lr_scheduler.decay_type=relora_cosine"], "set it, or adapter.relora.every"),
        (["--lr_scheduler.decay_type=relora_cosine", "--lr_scheduler.cycle_length=10"], "restart_warmup_steps"),
        (["--lr_scheduler.cycle_length=10"], 'unset, except with decay_type = "relora_cosine" or "relora_cyclical"'),
        (["--lr_scheduler.adjust_step=3"], 'unset, except with decay_type = "relora_cosine"'),
        (["--adapter.relora.every=10", "--adapter.save=alone"], "the matrices themselves change at each restart"),
    ],
    ids=str,
)
def test_faults_of_incomplete_relora_jobs(options, message):
    assert any(message in line for line in lines("--adapter.kind=lora", *options))
