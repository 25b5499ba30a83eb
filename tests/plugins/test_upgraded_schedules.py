"""Tests that translated jobs of PyTorch's torchtitan have its learning rates, step by step."""

import random
from math import cos, pi, sqrt
from pathlib import Path

import pytest

from tests.support.jobs import ROOT
from torchtitan.config.manager import load
from torchtitan.job import ResolvedJob
from torchtitan.plugins.dialects.upgrade import translate
from torchtitan.rules import Facts, check

NOT_THE_SAME = "# not the same: from step "
FALLS = {"linear": lambda p: 1 - p, "sqrt": lambda p: 1 - sqrt(p), "cosine": lambda p: (1 + cos(pi * p)) / 2}


def rates_since_v0_1(run_steps, total, warmup, ratio, kind, floor) -> list[float]:
    """Return the factors of v0.1.0 to v0.2.2: the schedule has one virtual step after the last."""
    total = run_steps if total is None else total
    warmup = min(warmup, total)
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    begin = total + 1 - decay
    return [
        (s + 1) / warmup
        if s < warmup
        else 1.0
        if s < begin
        else floor + (1 - floor) * FALLS[kind]((s + 1 - begin) / decay)
        for s in range(min(run_steps, total + 1))
    ]


def rates_of_july_2024(steps: int, warmup: int) -> list[float]:
    """Return the factors of the flat dialect: a longer warmup, then a line to 0 that the run does not reach."""
    decay = max(1, steps - warmup)
    return [(s + 1) / (warmup + 1) if s < warmup else 1 - (s - warmup) / decay for s in range(steps)]


def upgraded(folder: Path, text: str) -> tuple[str, list[float], Facts]:
    (folder / "old.toml").write_text(text)
    output, _ = translate(["--job.config_file", str(folder / "old.toml")], None)
    (folder / "new.toml").write_text(output)
    facts = Facts(ResolvedJob(load(["--job.config_file", str(folder / "new.toml")])))
    return output, [facts.learning_rate.multiplier(s) for s in range(facts.steps)], facts


def toml(section: str, **values) -> str:
    entries = (f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in values.items())
    return "\n".join([f"[{section}]", *(entry for entry in entries if not entry.endswith("None")), ""])


@pytest.mark.parametrize("era", ["v0.1", "v0.2"])
def test_rates_equal_those_of_torchtitan(era, tmp_path, is_full_run):
    draw, lines = random.Random(f"rates {era}"), 0
    for _ in range(600 if is_full_run else 80):
        steps, kind = draw.choice([1, 2, 3, 7, 10, 37, 100]), draw.choice([*FALLS, None])
        total = draw.choice([None, None, 1, 5, 12, 60]) if era == "v0.2" else None
        warmup, ratio = draw.choice([0, 1, 2, 5, 9, 50, 200]), draw.choice([None, None, 0.0, 0.04, 0.2, 0.8, 0.97, 1.0])
        floor = draw.choice([0.0, 0.1, 0.5, 1.0])
        schedule = {"warmup_steps": warmup, "total_steps": total, "decay_ratio": ratio, "decay_type": kind}
        schedule["lr_min" if era == "v0.1" else "min_lr_factor"] = floor
        text, rates, facts = upgraded(tmp_path, toml("lr_scheduler", **schedule) + toml("training", steps=steps))
        expected = rates_since_v0_1(steps, total, warmup, ratio, kind or "linear", floor)
        assert rates[: len(expected)] == pytest.approx(expected, rel=1e-12, abs=1e-12), schedule
        # past the schedule's end theirs left the floor: below 0, up again, or a failed assertion
        assert (NOT_THE_SAME in text) == (len(expected) < steps)
        lines += NOT_THE_SAME in text
    assert lines or era == "v0.1"


def test_rates_equal_those_of_july_2024(tmp_path):
    for steps in (1, 2, 10, 57):
        for warmup in (0, 1, 2, 9, 10, 56, 57, 200):
            text = toml("training", steps=steps, warmup_steps=warmup, data_parallel_degree=-1)
            text, rates, _ = upgraded(tmp_path, text)
            assert rates == pytest.approx(rates_of_july_2024(steps, warmup), abs=1e-12), (steps, warmup)


def test_the_debug_model_of_v0_2_2_keeps_its_rates(tmp_path):
    file = ROOT / "tests/fixtures/old_tomls/v0_2_2_debug_model.toml"
    text, rates, facts = upgraded(tmp_path, file.read_text())
    assert [round(8 * rate, 6) for rate in rates] == [4, 8, 8, 7, 6, 5, 4, 3, 2, 1]
    assert 'convention = "torchtitan"' in text and "decay_ratio = 0.8" in text
    described = "peak 0.0008, warmup 2, stable 1, linear decay 8 to floor 0 one step after the last; total 10 steps"
    assert described in facts.learning_rate.describe(8e-4)


def test_async_tensor_parallel_gives_way_to_float8(tmp_path):
    """As in llama3_405b.toml of v0.1.0 to v0.2.2: float8 changes the numbers, async tensor parallel only the time."""
    text = 'converters = ["quantize.linear.float8"]\n[parallelism]\ntensor_parallel_degree = 8\n'
    text = f"[model]\n{text}enable_async_tensor_parallel = true\n[compile]\nenable = true\n"
    output, _, facts = upgraded(tmp_path, text)
    assert "# left out, changed no result: parallelism.enable_async_tensor_parallel (it cannot fuse" in output
    assert facts.config.training.float8 == "tensorwise"
    assert not facts.config.parallelism.enable_async_tensor_parallel
    assert not [fault for fault in check(facts.config, 8, "cuda") if "async" in fault.key]
    *_, facts = upgraded(tmp_path, text.replace('"quantize.linear.float8"', ""))
    assert facts.config.parallelism.enable_async_tensor_parallel
