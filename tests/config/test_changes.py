"""Tests of the changes to a job that a resume accepts, logs, or refuses unless allowed by name."""

import json
from pathlib import Path

import pytest

from tests.support import jobs, judged
from tests.support.changed_jobs import checkpoint
from tests.support.judged import lines
from tests.support.pool import RankFailed, run_ranks
from torchtitan import cli
from torchtitan.commands import estimate
from torchtitan.config.changes import KINDS, changes, kept_job, kind_of, refusable
from torchtitan.config.changes import remedy as changes_remedy
from torchtitan.config.job import JobConfig
from torchtitan.config.manager import load
from torchtitan.config.options import options, sections
from torchtitan.launcher import run_folder
from torchtitan.planner.estimate import Prediction

anywhere = judged.anywhere

SMALL = "--model.overrides={n_heads = 4, n_layers = 2}"
JOB = ["--checkpoint.enable", SMALL]


@pytest.fixture
def run(tmp_path_factory):
    """Create the folder of a run with one checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    checkpoint(folder / "checkpoint", JOB)
    return folder


def test_every_section_has_a_kind():
    top = {name.split(".")[0] for name in sections()}
    assert top <= KINDS.keys(), "add the new section to KINDS: which of its options may a resume change?"
    assert KINDS.keys() <= sections() | options().keys()


def test_kinds_of_some_options():
    expected = {
        "quiet": {"job.dump_folder", "metrics.log_freq", "checkpoint.interval", "training.gc_freq"},
        "told": {"training.steps", "parallelism.tensor_parallel_degree", "optimizer.implementation", "debug.seed"},
        "refused": {"optimizer.lr", "optimizer.name", "training.dtype", "training.mixed_precision_param"},
    }
    for kind, keys in expected.items():
        assert {kind_of(key) for key in keys} == {kind}
    assert kind_of("section_of_tomorrow.option") == "refused"


REFUSED = [
    (["--optimizer.lr=0.5"], "optimizer.lr: given 0.5; allowed: 0.0008, as in step-00000060"),
    (["--optimizer.name=Adam"], 'optimizer.name: given "Adam"; allowed: "AdamW", as in step-00000060'),
    (["--training.mixed_precision_param=float32"], 'mixed_precision_param: given "float32"; allowed: "bfloat16", as'),
    (["--training.global_batch_size=16"], "training.global_batch_size: given 16; allowed: 8, as in step-00000060"),
    (
        ["--training.local_batch_size=4"],
        "as in step-00000060; it follows from the number of ranks: give as many, or set",
    ),
    (["--lr_scheduler.warmup_steps=7"], "lr_scheduler.warmup_steps: given 7; allowed: nothing, as in step-00000060"),
    (
        ["--model.overrides={n_heads = 2, n_layers = 2}"],
        "model.overrides: given n_heads = 2; allowed: n_heads = 4, as in step-00000060",
    ),
    (
        ["--model.overrides={n_heads = 4, n_layers = 2, rope_theta = 1e4}"],
        "model.overrides: given rope_theta = 10000.0; allowed: rope_theta = 500000.0, as in step-00000060",
    ),
]


def faults_of_resume(run: Path, arguments: list[str]) -> list[str]:
    replaced = {argument.split("=")[0] for argument in arguments}
    return lines(
        *(argument for argument in JOB if argument.split("=")[0] not in replaced),
        *arguments,
        f"--job.dump_folder={run}",
    )


@pytest.mark.parametrize(("arguments", "expected"), REFUSED, ids=lambda case: str(case)[:60])
def test_changes_of_the_loss_curve_are_refused_before_a_start(run, arguments, expected):
    (line,) = faults_of_resume(run, arguments)
    assert expected in line
    key = line.split(":")[0]
    key = key if "." in key else f"training.{key}"
    assert f'checkpoint.allow_config_change = ["{key}"]' in line
    assert faults_of_resume(run, [*arguments, f"--checkpoint.allow_config_change={key}"]) == []


def test_other_trained_parameters_need_a_new_optimizer_state(run):
    arguments = ['--training.unfrozen=["*norm*"]']
    (line,) = faults_of_resume(run, arguments)
    allow, exclude = "checkpoint.allow_config_change", "checkpoint.exclude_from_loading"
    assert f'{allow} = ["training.unfrozen"], together with {exclude} = ["optimizer"], or start from scratch' in line
    arguments.append(f"--{allow}=training.unfrozen")
    (line,) = faults_of_resume(run, arguments)
    assert line.startswith(f'{exclude}: given []; allowed: a list with "optimizer" if training.unfrozen changes; step-')
    assert faults_of_resume(run, [*arguments, f"--{exclude}=optimizer"]) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--training.steps=99", "--metrics.log_freq=3", "--compile.enable", "--debug.seed=5"],
        ["--training.local_batch_size=4", "--training.global_batch_size=8"],  # the same samples a step
        ["--model.overrides={n_heads = 4, n_layers = 2, rope_theta = 5e5}"],  # the flavor's own value
    ],
)
def test_changes_that_keep_the_loss_curve_are_accepted(run, arguments):
    assert faults_of_resume(run, arguments) == []


def test_hf_folders_are_compared_by_their_sizes(tmp_path, monkeypatch):
    """The checkpoint stores the absolute path of the folder; another folder of equal sizes is the same model."""
    sizes = dict(model_type="llama", vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=64)
    for name, layers in (("one", 2), ("same", 2), ("other", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(sizes | {"num_hidden_layers": layers}))
    arguments = [
        "--checkpoint.enable",
        "--model.flavor=from_hf",
        "--training.seq_len=32",
        f"--job.dump_folder={tmp_path}/run",
    ]
    checkpoint(tmp_path / "run" / "checkpoint", [*arguments, f"--model.hf_folder={tmp_path}/one"])
    monkeypatch.chdir(tmp_path)
    assert [lines(*arguments, f"--model.hf_folder={name}") for name in ("one", "./same")] == [[], []]
    (line,) = lines(*arguments, "--model.hf_folder=other")
    assert line.startswith("model.overrides: given n_layers = 3; allowed: n_layers = 2")


def test_estimate_ignores_checkpoints_of_the_dump_folder(run, monkeypatch, capsys):
    arguments = [*JOB, "--training.global_batch_size=16", "--model.tokenizer_path=bytes", f"--job.dump_folder={run}"]
    assert "global_batch_size" in faults_of_resume(run, ["--training.global_batch_size=16"])[0]
    monkeypatch.setattr(estimate, "predict", lambda *job: [Prediction(0, 0, "forward", {"parameters": 1.0})])
    assert estimate.main(["--device=cpu", *arguments]) == 0 and "of tensors at most" in capsys.readouterr().out


def test_only_the_step_to_load_is_compared(run):
    checkpoint(run / "checkpoint", [*JOB, "--optimizer.lr=0.5"], step=70)
    assert "as in step-00000070" in faults_of_resume(run, [])[0]
    assert faults_of_resume(run, ["--checkpoint.load_step=60"]) == []
    assert faults_of_resume(run, ["--checkpoint.load_step=65"]) == []  # refused later, when it is loaded
    (run / "checkpoint" / "step-00000070" / "state.json").write_text("{")
    assert faults_of_resume(run, ["--optimizer.lr=0.5"]) != []  # the older one is what will be loaded


def test_a_checkpoint_without_a_job_resumes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    checkpoint(folder / "checkpoint", JOB, job=None, sizes=None, samples=None)
    assert faults_of_resume(folder, ["--optimizer.lr=0.5"]) == []


def test_a_newer_option_is_compared_with_its_default():
    job_record = kept_job(JobConfig(), {"dim": 4}, 8)
    del job_record["job"]["optimizer"]["beta1"], job_record["job"]["validation"]
    assert changes(job_record, kept_job(JobConfig(), {"dim": 4, "new": 1}, 8)) == []
    other = kept_job(JobConfig(), {"dim": 4}, 8)
    other["job"]["optimizer"]["beta1"] = 0.5
    assert [str(change) for change in changes(job_record, other)] == ["optimizer.beta1 0.9 -> 0.5"]
    assert changes(job_record, other, model_only=True) == []


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("optimizer.lrr", "did you mean optimizer.lr?"), ("training.steps", "a resume accepts any value of it")],
)
def test_names_that_need_no_allowance_are_refused(name, remedy):
    (line,) = lines("--checkpoint.enable", f"--checkpoint.allow_config_change={name}")
    assert line.startswith(f'checkpoint.allow_config_change: given "{name}"') and line.endswith(remedy)
    assert name not in refusable()


# The trainer, which compares again when it has found the checkpoint to load


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


def job_with_saves(folder: Path, texts: Path, **changed: object) -> list[str]:
    options = dict(checkpoint__enable=True, checkpoint__interval=2, training__steps=4, lr_scheduler__total_steps=8)
    return jobs.arguments(folder, texts, **options | changed)


HEADS = "{dim=32, n_layers=4, n_heads=2, n_kv_heads=2, vocab_size=260, multiple_of=16}"


def test_a_changed_job_is_refused_on_resume_unless_allowed_by_name(texts, tmp_path):
    run_ranks(1, jobs.train, job_with_saves(tmp_path, texts))
    before = (tmp_path / "config.toml").read_bytes()
    for changed, change in [
        (dict(optimizer__lr=0.5), "optimizer.lr 0.01 -> 0.5"),
        (dict(model__overrides=HEADS), "model.overrides n_heads = 4 -> n_heads = 2"),
    ]:
        with pytest.raises(RankFailed, match=f"of another job: {change}"):
            run_ranks(1, jobs.train, job_with_saves(tmp_path, texts, training__steps=6, **changed))
    assert (tmp_path / "config.toml").read_bytes() == before
    allowed = dict(optimizer__lr=0.5, checkpoint__allow_config_change="optimizer.lr", training__steps=6)
    rows, _ = run_ranks(1, jobs.train, job_with_saves(tmp_path, texts, **allowed))[0]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert rows[-1]["lr"] > 0.1
    starts = sorted((tmp_path / "starts").glob("*.toml"))
    assert [path.name for path in starts] == ["0001-from-step-00000000.toml", "0002-from-step-00000004.toml"]
    assert starts[0].read_bytes() == before
    assert starts[1].read_bytes() == (tmp_path / "config.toml").read_bytes() != before


def test_the_recorded_job_of_a_run_is_ok(texts, tmp_path):
    run_ranks(1, jobs.train, jobs.arguments(tmp_path / "run", texts, training__steps=1))
    another = ["--no-memory", "--world-size", "1", "--job.dump_folder", str(tmp_path / "new")]
    assert cli.main(["check", str(tmp_path / "run/config.toml"), *another]) == 0


def test_initial_weights_are_compared_by_model_sizes_only(texts, tmp_path):
    run_ranks(1, jobs.train, job_with_saves(tmp_path / "a", texts))
    weights_only = dict(checkpoint__initial_load_path=tmp_path / "a" / "checkpoint", training__steps=2)
    run_ranks(1, jobs.train, job_with_saves(tmp_path / "b", texts, optimizer__lr=0.5, **weights_only))
    with pytest.raises(RankFailed, match="of another job: model.overrides n_heads = 4 -> n_heads = 2"):
        run_ranks(1, jobs.train, job_with_saves(tmp_path / "c", texts, model__overrides=HEADS, **weights_only))


def test_a_symlink_at_config_toml_is_replaced_and_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").symlink_to(victim)
    (tmp_path / "run" / ".config.toml.tmp").symlink_to(victim)
    for step in (0, 5):
        run_folder.record_start(tmp_path / "run", f"step = {step}", step)
    assert victim.read_text() == "mine"
    assert not (tmp_path / "run" / "config.toml").is_symlink()
    assert (tmp_path / "run" / "config.toml").read_text() == "step = 5"
    assert len(list((tmp_path / "run" / "starts").iterdir())) == 2


def test_moments_of_flipped_sides_need_the_same_plan(tmp_path):
    """Another plan may flip to the other side of a matrix; a side that neither plan shards is the same for both."""
    arguments = [*JOB, f"--job.dump_folder={tmp_path}", "--optimizer.name=GaLore", "--training.global_batch_size=16"]
    flipped, right = (
        [*arguments, f'--optimizer.options={{rank = 8, on_conflict = "flip"{side}}}']
        for side in ("", ', side = "right"')
    )
    checkpoint(tmp_path / "checkpoint", flipped, ranks=2)
    assert not lines(*flipped, ranks=2) and not lines(*flipped, '--checkpoint.exclude_from_loading=["optimizer"]')
    (line,) = lines(*flipped)
    assert line == (
        'optimizer.options: given on_conflict = "flip"; allowed: a plan that shards '
        "layers.*.feed_forward.w2.weight by the sides of step-00000060 (dp_shard 2, cp 1, tp 1); use that plan, or "
        'reset the moments: checkpoint.exclude_from_loading = ["optimizer"]'
    )
    checkpoint(tmp_path / "checkpoint", right, step=61, ranks=2)
    assert not lines(*right)


def test_a_size_that_a_folder_has_otherwise_now_can_be_written_out():
    """A later version may read a folder otherwise, as one with tied weights and another head: no option has changed."""
    job = load(["--model.tokenizer_path=bytes"])
    saved, now = (kept_job(job, {"tied_embeddings": tied, "rope_scaling": None}, 8) for tied in (True, False))
    (change,) = changes(saved, now)
    assert changes_remedy(change).startswith("write model.overrides = {tied_embeddings = true} to go on as the run")
