"""The command `torchtitan check`. Rules and translations are tested elsewhere."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli

from torchtitan import cli
from torchtitan.commands import check as command
from torchtitan.config.manager import load
from torchtitan.config.options import options
from torchtitan.models import SIZES
from torchtitan.rules.loading import fewest_ranks

REPOSITORY = Path(__file__).parents[2]
TOKENIZER = REPOSITORY / "tests/assets/tokenizer/tiktoken.model"


@pytest.fixture(autouse=True)
def anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(capsys, *argv: str, memory: bool = False) -> tuple[int, str, str]:
    code = cli.main(["check", *argv] if memory or not argv else ["check", "--no-memory", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_ok_with_a_summary(capsys):
    arguments = [f"--model.tokenizer_path={TOKENIZER}", "--training.seq_len=256", "--training.steps=100"]
    arguments += ["--parallelism.data_parallel_replicate_degree=2", "--training.global_batch_size=64"]
    code, out, err = run(capsys, "--world-size=4", "--device", "cpu", *arguments)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "the default job: OK",
        "  model     llama3 debugmodel, 6,163,712 parameters",
        "  ranks     4 ranks (cpu): 2 shards (FSDP) x 2 replicas",
        "  state     47.0 MiB a rank (parameters, gradients, two moments in float32)",
        "  data      python_stdlib, 64 samples of 256 tokens a step, in 2 forward passes",
        "  tokens    16,384 a step, 1,638,400 in 100 steps",
        "  schedule  peak 0.0008, warmup 10, linear decay 90 to floor 8e-05; total 100 steps",
        "  cadence   a line every 10 steps",
        "  memory    `torchtitan estimate` with the same words foretells the most that a rank has at once",
    ]


# The memory estimate


@pytest.fixture
def rehearsals(monkeypatch):
    """Replace the estimate's process: record its arguments and return a fixed result. Works without torch."""
    requests, find_spec = [], importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torch" or find_spec(name))

    def run(command_line, **_):
        requests.append(command_line[command_line.index("estimate") + 1 :])
        return rehearsals.given or subprocess.CompletedProcess(command_line, 0, f"memory of {len(requests)}\n", "")

    rehearsals = SimpleNamespace(asked=requests, given=None)
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(run=run))
    return rehearsals


def test_memory_estimates_of_valid_jobs_come_last(rehearsals, capsys, tmp_path):
    for name, more in (("a", ""), ("b", "[training]\nsteps = 0\n"), ("c", "")):
        (tmp_path / f"{name}.toml").write_text(f'[model]\ntokenizer_path = "{TOKENIZER}"\n{more}')
    code, out, err = run(capsys, "a.toml", "b.toml", "c.toml", "--device=cpu", "--training.seq_len=64", memory=True)
    assert code == 2 and "training.steps" in err
    # what costs nothing comes first, and a job is only called OK after a step of it was rehearsed
    lines = [f"{name}.toml: no faults\n|memory of {number}\n{name}.toml: OK\n" for number, name in ((1, "a"), (2, "c"))]
    order = [out.index(text) for text in "|".join(lines).split("|")]
    assert order == sorted(order)
    tail = ["--training.seq_len=64", "--world-size=1", "--device=cpu", "--no-remedies"]
    assert rehearsals.asked == [["--job.config_file", name, *tail] for name in ("a.toml", "c.toml")]


@pytest.mark.parametrize(
    ("result", "last_line"),
    [
        ((1, "does not fit\n", ""), "does not fit"),
        ((-9, "", ""), "  memory    not foretold: `torchtitan estimate` was ended by signal 9"),
        ((1, "", "Traceback\n  File\nOSError: no libtorch.so\n"), "  memory    not foretold: OSError: no libtorch.so"),
        ((2, "", "a.b: given 3;\n    allowed: 4\n"), "a.b: given 3; allowed: 4"),
        ((4, "", ""), "  memory    not foretold: exit code 4"),
    ],
)
def test_a_failed_estimate_does_not_fail_the_check(result, last_line, rehearsals, capsys):
    rehearsals.given = subprocess.CompletedProcess([], *result)
    code, out, err = run(capsys, f"--model.tokenizer_path={TOKENIZER}", memory=True)
    assert (code, err) == (0, "") and out.splitlines()[-2].endswith(last_line)


def test_the_summary_does_not_wait_for_the_memory(capsys, monkeypatch):
    printed = []
    monkeypatch.setattr(command, "_memory", lambda arguments: printed.append(capsys.readouterr().out) or ("", ""))
    code, out, _ = run(capsys, f"--model.tokenizer_path={TOKENIZER}", memory=True)
    assert code == 0 and out == "the default job: OK\n"
    assert printed[0].startswith("the default job: no faults\n") and "  schedule  peak" in printed[0]


def test_a_job_whose_step_fails_is_not_ok(rehearsals, capsys):
    rehearsals.given = subprocess.CompletedProcess([], 3, "", "Traceback\n  File\nRuntimeError: shapes differ\n")
    code, out, err = run(capsys, f"--model.tokenizer_path={TOKENIZER}", memory=True)
    assert code == 2 and "the default job: not OK\n" in out and ": OK" not in out
    assert err.startswith("the default job: a step of it fails: RuntimeError: shapes differ; `torchtitan estimate`")
    code, out, err = run(capsys, "--json", f"--model.tokenizer_path={TOKENIZER}", memory=True)
    (job,) = json.loads(out)["jobs"]
    assert code == 2 and not job["ok"] and job["faults"][0]["given"] == "RuntimeError: shapes differ"


def test_json(rehearsals, capsys, tmp_path):
    """Its keys are documented in docs/jobs.md."""
    (tmp_path / "a.toml").write_text(f'[model]\ntokenizer_path = "{TOKENIZER}"\n[lr_scheduler]\nwarmup_steps = 50\n')
    code, out, err = run(capsys, "--json", "a.toml", "--training.steps=5", memory=True)
    record = json.loads(out)
    notice = "a trial run by training.steps = 5: the job's schedule does not fit, and is shortened: "
    job = {"job": "a.toml", "ok": True, "faults": [], "ranks": 1, "memory": "memory of 1"}
    assert record == {
        "ok": True,
        "exit_code": 0,
        "jobs": [job | {"warnings": [f"{notice}lr_scheduler.warmup_steps 50 -> 1"]}],
    }
    code, out, err = run(capsys, "--json", "a.toml", "--training.stepz=5", "--optimizer.name=Adm", memory=True)
    (job,) = json.loads(out)["jobs"]
    assert (code, err, job["ok"], job["ranks"]) == (2, "", False, None)
    assert [fault["option"] for fault in job["faults"]] == ["training.stepz", "optimizer.name"]
    assert job["faults"][0] == {
        "file": "command line",
        "option": "training.stepz",
        "given": '"5"',
        "allowed": "a known option",
        "remedy": "did you mean training.steps?",
    }


def test_records_that_train_no_end_token_are_counted(capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    job = ["--task.kind=sft", "--training.dataset=text", "--training.dataset_path=rows.jsonl", "--training.steps=9"]
    job.append(f"--model.tokenizer_path={TOKENIZER}")
    code, out, _ = run(capsys, *job)
    assert code == 0 and "\n  ends      3 of the first 3 records train an end token\n" in out
    code, out, _ = run(capsys, *job, "--data.train_on_eos=none")
    assert code == 0 and "\n  ends      0 of the first 3 records train an end token: the model will not learn to" in out
    code, out, _ = run(capsys, "--json", *job, "--data.train_on_eos=none")
    assert "0 of the first 3 records" in json.loads(out)["jobs"][0]["warnings"][0]
    assert "  ends " not in run(capsys, f"--model.tokenizer_path={TOKENIZER}")[1]  # text has no records


def test_a_job_is_checked_without_torch(rehearsals, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, out, _ = run(capsys, f"--model.tokenizer_path={TOKENIZER}", memory=True)
    assert code == 0 and "\n  memory    not foretold: torch is not installed\nthe default job: OK\n" in out
    assert rehearsals.asked == []


# The summary of a job


def test_the_summary_of_an_adapter_job_has_no_state(capsys):
    arguments = [f"--model.tokenizer_path={TOKENIZER}", "--adapter.kind=qlora", "--memory.limit=20GiB"]
    code, out, _ = run(capsys, "--device=cpu", *arguments)
    assert code == 0 and "  state " not in out and "torchtitan estimate" in out
    assert "  memory    at most 20 GiB of a GPU for each rank\n" in out
    assert "  types     frozen weights in bfloat16 where they are not quantized, trained ones and their state in" in out


def test_the_summary_has_the_active_parameters_of_experts(capsys):
    args = SIZES["deepseek"]["debugmodel"]
    code, out, _ = run(capsys, "--device=cpu", "--model.name=deepseek", f"--model.tokenizer_path={TOKENIZER}")
    assert code == 0 and args.num_active_parameters < args.num_parameters
    description = (
        f"deepseek debugmodel, {args.num_parameters:,} parameters, {args.num_active_parameters:,} of them for a token"
    )
    assert description in out


def test_a_plan_in_the_summary(capsys):
    arguments = [f"--parallelism.{axis}_parallel_degree=2" for axis in ("tensor", "context", "pipeline")]
    arguments += ["--parallelism.pipeline_parallel_schedule=Interleaved1F1B", "--training.local_batch_size=4"]
    code, out, err = run(capsys, "--world-size=16", "--device=cpu", f"--model.tokenizer_path={TOKENIZER}", *arguments)
    assert (code, err) == (0, "")
    assert out.splitlines()[2:5] == [
        "  ranks     16 ranks (cpu): 2 shards (FSDP) x context parallel 2 (allgather) x tensor parallel 2 with "
        "sequence parallel x pipeline parallel 2",
        "  pipeline  Interleaved1F1B, 4 stages of 1, 2, 2, 1 layers, 4 microbatches of 1 sample",
        "  state     5.9 MiB a rank on average (parameters, gradients, two moments in float32)",
    ]


PARTS = "--parallelism.module_fqns_per_model_part=[['tok_embeddings', 'layers.0'], ['layers.1', 'norm', 'output']]"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["schedule=LoopedBFS", "layers_per_stage=2", "--model.overrides={n_layers = 21}"],
            "LoopedBFS, 12 stages of 1 to 2 layers, 8 microbatches of 1 sample",
        ),
        (
            ["schedule_csv=two.csv", "microbatch_size=8"],
            "two.csv, 2 stages of 3, 3 layers, 1 microbatch of 8 samples",
        ),
        (
            [PARTS, "--model.overrides={n_layers = 2}"],
            "1F1B, 2 stages of 1, 1 layers, 8 microbatches of 1 sample",
        ),
    ],
)
def test_stages_in_the_summary(options, expected, capsys, tmp_path):
    (tmp_path / "two.csv").write_text("0F0,,0B0\n1F0,1B0\n")
    options = [option if option.startswith("--") else f"--parallelism.pipeline_parallel_{option}" for option in options]
    _, out, err = run(
        capsys, f"--model.tokenizer_path={TOKENIZER}", "--parallelism.pipeline_parallel_degree=2", *options
    )
    assert f"  pipeline  {expected}\n" in out, err


@pytest.mark.parametrize(
    "arguments, state",
    [
        ([], "two moments"),
        (["--optimizer.name=SGD"], "no moments"),
        (["--optimizer.name=SGD", "--optimizer.options={momentum = 0.9}"], "one moment"),
        (["--optimizer.name=AdamW8bit"], "what AdamW8bit keeps"),
    ],
)
def test_the_state_is_that_of_the_optimizer(arguments, state, capsys):
    code, out, _ = run(capsys, f"--model.tokenizer_path={TOKENIZER}", *arguments)
    assert code == 0 and f"(parameters, gradients, {state} in float32)" in out


def test_without_a_world_size_the_fewest_ranks_are_taken(capsys):
    option = "--parallelism.data_parallel_replicate_degree=2"
    code, out, _ = run(capsys, f"--model.tokenizer_path={TOKENIZER}", option)
    assert code == 0 and "ranks     2 ranks" in out and "in one forward pass\n" in out


def test_each_job_is_checked_by_itself(capsys, tmp_path):
    (tmp_path / "a.toml").write_text(f'[model]\ntokenizer_path = "{TOKENIZER}"\n')
    (tmp_path / "b.toml").write_text(f'[model]\ntokenizer_path = "{TOKENIZER}"\n[training]\nstps = 1\nseq_len = 0\n')
    code, out, err = run(capsys, "a.toml", "b.toml", "--training.steps", "7")
    assert code == 2 and out.startswith("a.toml: OK") and "7 steps" in out
    assert [line.split(";")[0] for line in err.splitlines()] == [
        "b.toml: training.stps: given 1",
        "b.toml: training.seq_len: given 0",
        "2 faults",
    ]


def test_print_config(capsys):
    code, out, _ = run(capsys, f"--model.tokenizer_path={TOKENIZER}", "--job.print_config", memory=True)
    assert code == 0 and tomli.loads(out[out.index("[job]") :])["model"]["tokenizer_path"] == str(TOKENIZER)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--world-size", "0"], "--world-size: given '0'; allowed: a whole number >= 1"),
        (["--world-size=two"], "--world-size: given 'two'; allowed: a whole number >= 1"),
        (["--world-size"], "--world-size: given no value; one that starts with a dash is written --world-size=VALUE"),
        (["--device=tpu"], "--device: given 'tpu'; allowed: cpu, cuda"),
        (["a.toml", "b.toml", "--upgrade"], "--upgrade takes one job"),
    ],
)
def test_wrong_flags(argv, expected, capsys):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "") and expected in err


def test_usage(capsys):
    code, _, err = run(capsys)
    assert code == 2 and "torchtitan check: no job is given" in err
    code, out, _ = run(capsys, "--help")
    assert code == 0 and out.startswith("usage: torchtitan check ")
    code, out, _ = run(capsys, "--help-config")
    assert code == 0 and all(f"--{key}  (" in out for key in options())


def test_neither_checking_nor_loading_needs_torch_or_numpy():
    program = "import sys, torchtitan.cli; from torchtitan.commands import check; "
    program += "assert check.main(sys.argv[1:]) == 0; assert not {'torch', 'numpy'} & sys.modules.keys()"
    argv = [f"--model.tokenizer_path={TOKENIZER}", "--validation.enable", "--world-size=2", "--no-memory"]
    subprocess.run([sys.executable, "-c", program, *argv], check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)


def test_fewest_ranks():
    arguments = ["--parallelism.data_parallel_replicate_degree=3", "--parallelism.data_parallel_shard_degree"]
    assert fewest_ranks(load([*arguments, "-1"]).parallelism) == 3
    assert fewest_ranks(load([*arguments, "4"]).parallelism) == 12
    degrees = [f"--parallelism.{axis}_parallel_degree=2" for axis in ("tensor", "context", "pipeline")]
    assert fewest_ranks(load([*arguments, "4", *degrees]).parallelism) == 96
    experts = ["--parallelism.expert_parallel_degree=8"]
    assert fewest_ranks(load(experts).parallelism) == 8
    assert fewest_ranks(load([*experts, *degrees]).parallelism) == 8 * 2
