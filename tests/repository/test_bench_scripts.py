"""The benchmarks run and print their rows, and their arithmetic is right. No measured time is judged here."""

import importlib
import json
import subprocess
import sys
from collections import defaultdict

import pytest

from scripts import learn_made_task
from scripts.bench_timing import WARM_UP, Goal, Guest, Turns, order, row, seconds_to_first_step, steps, take_turns
from tests.support.jobs import ROOT
from tests.support.pool import run_script
from torchtitan.config.manager import load
from torchtitan.job import ResolvedJob
from torchtitan.rules import check


def run(script: str, *arguments: str) -> list[str]:
    code, out, err = run_script(ROOT, ROOT / script, *arguments)
    assert code == 0, err
    return out.splitlines()


REAL_SIZES = ("scripts/bench_real_sizes.py", "--size", "quick", "--turns", "1", "--steps", "3")


def check_real_size(cell: str, tokens: int | None, steps: int) -> None:
    """Check a cell of bench_real_sizes.py; without `tokens` of a unit it has no rate."""
    seconds, *rates, peak, program = (float(text.split()[0]) for text in cell.split(", "))
    assert rates == ([] if tokens is None else [pytest.approx(tokens / seconds, rel=0.05)])
    assert 0.1 < peak < 4 and program > steps * seconds - 0.5 and seconds > 0  # the program's are whole ones


def test_real_sizes_are_measured_next_to_a_peer():
    *_, row = run(*REAL_SIZES, "--only", "LoRA", "--recompute", "default")
    name, *cells = row.strip("| ").split(" | ")
    assert name == "LoRA, quick" and len(cells) == 2
    for cell in cells:
        check_real_size(cell, 512, 3)


def test_rows_of_training_are_measured_with_defaults_and_with_nothing_recomputed(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    bench_real_sizes = importlib.import_module("bench_real_sizes")

    def names_and_recompute(name: str, *recompute: str) -> list[tuple[str, str, bool]]:
        rows = bench_real_sizes.ROWS[name].variants(name, recompute)
        return [(title, row.options[-1], row.peer_recomputes) for title, row in rows]

    none = "--activation_checkpoint.mode=none"
    assert names_and_recompute("AdamW8bit", "default", "none") == [
        ("AdamW8bit", "--optimizer.name=AdamW8bit", False),
        ("AdamW8bit, nothing recomputed", none, False),
    ]
    assert names_and_recompute("QLoRA", "default", "none") == [
        ("QLoRA", "--adapter.save=alone", True),
        ("QLoRA, nothing recomputed", none, False),
    ]
    full = [("LoRA, 6,144 tokens", "--activation_checkpoint.mode=full", True)]
    assert names_and_recompute("LoRA, 6,144 tokens", "none") == full
    assert [name for name, _ in bench_real_sizes.ROWS["save"].variants("save", ["none"])] == ["save"]


def test_records_saves_and_new_tokens_are_measured_at_real_sizes():
    units = {"LoRA, records": 263, "save": None, "generate, bfloat16": 1}
    rows = run(*REAL_SIZES, "--alone", "--recompute", "default", "--only", *units)[-len(units) :]
    for (expected, tokens), line in zip(units.items(), rows, strict=True):
        name, cell, peer = line.strip("| ").split(" | ")
        assert (name, peer) == (f"{expected}, quick", "-")
        check_real_size(cell, tokens, 1 if tokens is None else 24)


def test_turns_alternate_abba():
    assert order(4) == "ABBAABBA"
    done = []
    turns = take_turns(lambda: done.append("A"), lambda: done.append("B"), pairs=2, repeats=3)
    assert "".join(done) == order(WARM_UP + 6)
    assert len(turns.ratios(turns.wall)) == len(turns.ratios(turns.cpu)) == 3


def test_the_ratio_is_of_medians_per_repeat_without_the_warm_up():
    turns = Turns(repeats=2)
    turns.wall = {"A": [100.0] * WARM_UP + [2, 2, 9, 6, 6, 0], "B": [50.0] * WARM_UP + [1, 1, 1, 2, 2, 2]}
    assert turns.ratios(turns.wall) == [2.0, 3.0]
    assert turns.ratios(turns.wall, "B", "A") == [1 / 2, 1 / 3]
    assert turns.median(turns.wall, "A") == 4.0


def test_a_guest_runs_between_the_steps_of_a_loop():
    done = []
    guest = Guest(iter(range(100)), lambda: done.append("B"), pairs=2, repeats=1)
    batches = iter(guest)
    for step in range(steps(pairs=2, repeats=1)):
        assert next(batches) == step
        done.append("A")
    assert "".join(done) == order(WARM_UP + 2) + "A"  # the last one is not counted
    assert len(guest.turns.wall["A"]) == len(guest.turns.wall["B"]) == WARM_UP + 2


@pytest.mark.parametrize(
    ("goal", "values", "verdict"),
    [
        (Goal("<=", 1.03), [1.0, 1.02], "met"),
        (Goal("<=", 1.03), [1.0, 1.0, 1.0, 1.02, 1.3], "met"),  # one of five may be off
        (Goal("<=", 1.03), [1.0, 1.06], "cannot tell"),
        (Goal(">=", 1.45), [1.2, 1.4], "missed"),
        (Goal(">=", 1.45), [1.5, 1.6], "met"),
        (Goal("=", 1.0, 0.001), [1.0009], "met"),
        (Goal("=", 1.0, 0.001), [0.998], "missed"),
    ],
)
def test_verdict_of_a_goal(goal, values, verdict):
    assert goal.judge(values) == verdict
    assert verdict in row("name", values, goal, "note")


def test_a_program_without_a_first_step_is_an_error():
    with pytest.raises(RuntimeError, match="ended with 3"):
        seconds_to_first_step([sys.executable, "-c", "print('step 1', flush=True); raise SystemExit(3)"], threads=1)
    with pytest.raises(RuntimeError, match="ended with 0"):
        seconds_to_first_step([sys.executable, "-c", "print('no such line')"], threads=1)


def test_the_bare_script_makes_a_step():
    assert seconds_to_first_step([sys.executable, "scripts/bench_bare.py"], threads=1) > 0


def test_bench_trainer():
    lines = run("scripts/bench_trainer.py", "--quick", "--only", "1", "3", "4", "5")
    assert "torch 2." in lines[0] and "load average" in lines[1]
    assert [line.split()[0] for line in lines[3:]] == list("113334") + ["5", "5"]
    waits = next(line for line in lines if "host waits" in line)
    assert " met " in waits, waits  # a count, not a clock
    assert all(" 1.000000 " in line and " met" in line for line in lines[-2:])


def test_bench_trainer_against_itself():
    lines = run("scripts/bench_trainer.py", "--quick", "--aa", "--only", "3")
    assert [line.split()[0] for line in lines[3:]] == ["3"]


def test_bench_adapters():
    lines = run("scripts/bench_adapters.py", "--quick", "--rank", "4")
    rows = ["lora / full step, rank 4", "  operations", "lora / full step, rank 4, attention alone", "  operations"]
    rows += ["dora / lora step", "qlora / lora step", "lora_int8 / lora step", "folding in"]
    assert all(line.startswith(row) for line, row in zip(lines, rows, strict=True))


def test_bench_neurocache():
    entries, absorbed = run("scripts/bench_neurocache.py", "--quick")
    assert entries.split()[:4] == ["1,024", "entries", "0.8", "MB"] and "of full attention" in entries
    assert absorbed.startswith("brought to the entries / written out")


def test_bench_finetuning():
    *packs, tokens, plain, packed = run("scripts/bench_finetuning.py", "--quick")
    fullness = [float(line.split("full")[1].split()[0]) for line in packs]
    assert len(packs) == 3 and fullness == sorted(fullness) and fullness[-1] > 0.98
    assert tokens.startswith("tokens of records, packed / padded")
    assert [float(line.split()[6]) for line in (plain, packed)] == [4.0, pytest.approx(0.516, abs=0.02)]


def test_bench_records():
    lines = run("scripts/bench_records.py", "--quick", "--only", "records", "pairs")[3:]
    rows = [
        f"{name}: transformers / torchtitan, {clock} time" for name in ("records", "pairs") for clock in ("CPU", "wall")
    ]
    assert all(line.startswith(row) and line.endswith(" s") for line, row in zip(lines, rows, strict=True))


def test_learn_made_task():
    """Run two steps; test_chat.py shows that more steps learn the task."""
    *_, shown, last = run("scripts/learn_made_task.py", "--quick", "--ranks", "1")
    assert shown.startswith("6,000 of 9,216 questions shown, 2 steps, ranks: 1, ")
    assert last == "step 2: 0% of 2 others answered"


def test_questions_and_answers_of_the_learning_task(tmp_path, monkeypatch):
    """Test questions are not in the training data, two ranks share one rank's samples, answers must match in full."""
    asked_questions, trained_questions, number = learn_made_task.questions(5)
    assert number == 2 * (8**3 + 8**4) and len({*asked_questions, *trained_questions}) == 5 + 6000
    assert [learn_made_task.answer(f"{order} a b c") for order in ("again", "backwards")] == ["a b c", "c b a"]
    for ranks in (1, 2):
        job = learn_made_task.write_job(tmp_path, trained_questions, ranks, 240)
        config = load([f"--job.config_file={job}"])
        assert check(config, ranks, "cpu") == []
        assert ranks * config.training.local_batch_size == 8
    rows = [json.loads(row)["messages"] for row in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [question["content"] for question, _ in rows] == trained_questions
    right = [learn_made_task.answer(question) for question in asked_questions]
    for answers, share in ((right, 1.0), ([right[0] + " a", *right[1:]], 0.8), ([*right, ""], 0.0)):
        out = "".join(f"{line}\n" for line in answers)
        monkeypatch.setattr(subprocess, "run", lambda *_, out=out, **__: subprocess.CompletedProcess([], 0, out))
        assert learn_made_task.share_answered(tmp_path, asked_questions) == share


def test_bench_optimizers():
    lines = run("scripts/bench_optimizers.py", "--quick", "--ranks", "2")
    fields = [line.split(" bytes a parameter")[0].split() for line in lines[1:-4]]
    assert [" ".join(parts[:-1]) for parts in fields][:3] == ["AdamW, fused", "AdamW, again", "AdamW8bit"]
    assert [float(parts[-1]) for parts in fields][:3] == [8.001, 8.001, 2.110] and len(fields) == 10
    assert all(line.startswith("bases by ") and "at gap 200" in line for line in lines[-4:])


@pytest.mark.parametrize("ranks, name", [(1, "same settings"), (2, "replicas")])
def test_bench_debug(ranks, name):
    speed, cpu, job_line = run("scripts/bench_debug.py", "--quick", "--ranks", str(ranks), "--only", name)[3:]
    assert speed.startswith(f"{ranks} rank(s), {name} / plain loop, tokens/s") and "tok/s" in speed
    assert cpu.startswith(f"{ranks} rank(s), {name} / plain loop, CPU time") and "CPU seconds a step" in cpu
    assert job_line.startswith(f"{ranks} rank(s), {name}: first step after") and "GiB resident" in job_line


def test_bench_debug_refuses_settings_that_do_not_run_on_the_ranks(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setattr(sys, "argv", ["bench_debug.py", "--ranks", "1", "--only", "replicas"])
    with pytest.raises(SystemExit):
        importlib.import_module("bench_debug").main()
    assert "--ranks 1: none of these settings runs on as many ranks: replicas" in capsys.readouterr().err


def test_bench_debug_plans():
    (line,) = run("scripts/bench_debug.py", "--quick", "--plans", "one rank")[3:]
    assert line.startswith("one rank  ") and "tok/s" in line and "CPU seconds a step" in line


def test_bench_guards():
    lines = run("scripts/bench_guards.py", "--quick", "--ranks", "2")
    paired, compared, timed, checksums, agreed = lines[3:]
    assert paired.startswith("launcher and guards, 2 rank(s)") and compared.startswith("replicas compared every 100th")
    assert timed.startswith("both, counted within a step, 2 rank(s)") and "within their calls: " in timed
    assert checksums.startswith("checksums of shards, 2 rank(s)") and "within their calls: " in checksums
    assert agreed.startswith("agreed a step ahead / at once") and "the host waits for " in agreed


def test_bench_scaling(tmp_path):
    lines = run(
        "scripts/bench_scaling.py", "--quick", "--only", "layers", "data", "generate", "--folder", str(tmp_path)
    )
    heads = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    assert heads[:5] == ["layers", "---", "1", "", "---"] and heads[-4:] == ["prompt", "---", "8", "16"]
    assert heads[5:-4] == ["prepare, one process", "prepare, 2 processes"] + [
        f"loader, prepared shards{more}" for more in ("", ", document mask")
    ]
    (layer,) = json.loads((tmp_path / "measured.json").read_text())["layers"]["rows"]
    assert layer["tokens"] == 4 * 32 and 0 < layer["estimated"] < layer["gib"]


def test_the_page_and_the_picture_of_the_scaling_benchmark(tmp_path, monkeypatch):
    """Every table has equally many cells in each line, text around the tables is unchanged, and a PNG is drawn."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    page = importlib.import_module("bench_scaling_page")
    row = defaultdict(lambda: 2.0, what="loader", by="by a copy", millions=6, ranks=1)
    tables = {name: {"when": "today", "rows": [row, row]} for name in page.TABLES}
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text(f"before\n{page.BEGIN}\nwas here\n{page.END}\nbehind\n")
    page.write_page(tables)
    text = page.PAGE.read_text()
    assert text.startswith("before\n") and text.endswith("behind\n") and "was here" not in text
    for table in text.split("`, today:\n\n")[1:]:
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    page.draw(tables, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_bench_schedules():
    lines = run("scripts/bench_schedules.py", "--quick", "--only", "DualPipeV in pairs")
    assert [line.split(":")[0] for line in lines[3:]] == ["DualPipeV in pairs"]


def test_every_plan_of_the_benchmarks_is_valid(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.chdir(ROOT)
    bench_debug, compare_plans = (importlib.import_module(name) for name in ("bench_debug", "compare_plans"))
    jobs = [bench_debug.job_of_plan(name, bench_debug.SIZES, tmp_path, 5) for name in bench_debug.PLANS]
    jobs += [compare_plans.job_of_plan(plan, tmp_path, 20, []) for plan in compare_plans.PLANS.values()]
    moe = ["--model.name=deepseek"]
    jobs += [compare_plans.job_of_plan(plan, tmp_path, 20, moe) for plan in compare_plans.EXPERT_PLANS.values()]
    for ranks, argv in jobs:
        assert check(load(argv), ranks, "cpu") == [], argv


def test_the_moe_benchmark_has_the_sizes_of_torchtitans_debug_model(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.chdir(ROOT)
    bench_debug = importlib.import_module("bench_debug")
    args = ResolvedJob(load(bench_debug.job_of_plan("MoE, EP 2", bench_debug.SIZES, tmp_path, 5)[1])).model.args
    assert (args.dim, args.n_layers, args.n_dense_layers, args.n_heads, args.vocab_size) == (256, 6, 1, 16, 2048)
    latent = (args.kv_lora_rank, args.qk_nope_head_dim, args.qk_rope_head_dim, args.v_head_dim)
    assert latent == (512, 128, 64, 128)
    assert (args.n_experts, args.top_k, args.n_shared_experts, args.expert_dim) == (8, 3, 2, 256)
    assert args.bias_rate == 0.001  # the rate at which the router's biases move
