"""What a resume may change of its checkpoint's job: told, refused, allowed by name; and every start keeps its job."""

import json
from pathlib import Path

import pytest

from tests.support import jobs, judged
from tests.support.judged import lines
from tests.support.pool import RankFailed, run_ranks
from tests.test_checkpoint_layout import manifest_of
from torchtitan.checkpoint import folders, layout
from torchtitan.commands import estimate
from torchtitan.config.changes import KINDS, changes, kept_job, kind_of, refusable
from torchtitan.config.job import JobConfig
from torchtitan.config.manager import load
from torchtitan.config.options import options, sections
from torchtitan.launcher import run_folder
from torchtitan.planner.estimate import Prediction
from torchtitan.rules import Facts

anywhere = judged.anywhere

SMALL = "--model.overrides={n_heads = 4, n_layers = 2}"
JOB = ["--checkpoint.enable", SMALL]


def checkpoint(folder: Path, words: list[str], step: int = 60, ranks: int = 1, **left_out: object) -> None:
    """A complete step folder of that job, without tensors."""
    facts = Facts(load(["--model.tokenizer_path=bytes", *words]), ranks, "cpu")
    samples = facts.config.training.global_batch_size
    kept = kept_job(facts.config, vars(facts.args), samples if samples > 0 else facts.samples)
    kept["degrees"] = {"dp_shard": facts.shard, "cp": facts.cp, "tp": facts.tp}
    trainer = {"step": step, "tokens": 1} | {key: value for key, value in kept.items() if key not in left_out}
    state = json.dumps({"step": step, "trainer": trainer, "ranks": [], "optimizer": {}}).encode()
    target = folder / layout.step_name(step)
    temporary = folders.create_temporary(target)
    files = {layout.STATE: state, layout.METADATA: b""}
    for name, data in files.items():
        (temporary / name).write_bytes(data)
    folders.write_file(temporary / layout.MANIFEST, layout.manifest_text(manifest_of(files, step)))
    folders.publish(temporary, target)


@pytest.fixture
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    checkpoint(folder / "checkpoint", JOB)
    return folder


def test_every_section_has_a_class():
    top = {name.split(".")[0] for name in sections()}
    assert top <= KINDS.keys(), "say in KINDS what a resume may change of the new section"
    assert KINDS.keys() <= sections() | options().keys()


def test_the_classes_of_some_options_are_as_promised():
    wanted = {
        "quiet": {"job.dump_folder", "metrics.log_freq", "checkpoint.interval", "training.gc_freq"},
        "told": {"training.steps", "parallelism.tensor_parallel_degree", "optimizer.implementation", "debug.seed"},
        "refused": {"optimizer.lr", "optimizer.name", "training.dtype", "training.mixed_precision_param"},
    }
    for kind, keys in wanted.items():
        assert {kind_of(key) for key in keys} == {kind}
    assert kind_of("section_of_tomorrow.option") == "refused"


REFUSED = [
    (["--optimizer.lr=0.5"], "optimizer.lr: given 0.5; allowed: 0.0008, as in step-00000060"),
    (["--optimizer.name=Adam"], 'optimizer.name: given "Adam"; allowed: "AdamW", as in step-00000060'),
    (["--training.mixed_precision_param=float32"], 'mixed_precision_param: given "float32"; allowed: "bfloat16", as'),
    (["--training.global_batch_size=16"], "training.global_batch_size: given 16; allowed: 8, as in step-00000060"),
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


def judge(run: Path, words: list[str]) -> list[str]:
    replaced = {word.split("=")[0] for word in words}
    return lines(*(word for word in JOB if word.split("=")[0] not in replaced), *words, f"--job.dump_folder={run}")


@pytest.mark.parametrize(("words", "expected"), REFUSED, ids=lambda case: str(case)[:60])
def test_what_makes_another_curve_is_refused_before_anything_starts(run, words, expected):
    (line,) = judge(run, words)
    assert expected in line
    key = line.split(":")[0]
    key = key if "." in key else f"training.{key}"
    assert f'checkpoint.allow_config_change = ["{key}"]' in line
    assert judge(run, [*words, f"--checkpoint.allow_config_change={key}"]) == []


def test_another_choice_of_what_is_trained_needs_another_state(run):
    words = ['--training.unfrozen=["*norm*"]']
    (line,) = judge(run, words)
    allow, anew = "checkpoint.allow_config_change", "checkpoint.exclude_from_loading"
    assert f'{allow} = ["training.unfrozen"], beside {anew} = ["optimizer"], or start anew' in line
    words.append(f"--{allow}=training.unfrozen")
    (line,) = judge(run, words)
    assert line.startswith(f'{anew}: given []; allowed: "optimizer" among them, with another training.unfrozen; step-')
    assert judge(run, [*words, f"--{anew}=optimizer"]) == []


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--training.steps=99", "--metrics.log_freq=3", "--compile.enable", "--debug.seed=5"],
        ["--training.local_batch_size=4", "--training.global_batch_size=8"],  # the same samples a step
        ["--model.overrides={n_heads = 4, n_layers = 2, rope_theta = 5e5}"],  # a size as the flavor has it
    ],
)
def test_what_only_changes_how_the_run_is_made_is_not_refused(run, words):
    assert judge(run, words) == []


def test_a_folder_of_sizes_is_the_same_from_anywhere(tmp_path, monkeypatch):
    """A checkpoint's job has it by its whole name; what another one says otherwise are sizes."""
    sizes = dict(model_type="llama", vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=64)
    for name, layers in (("one", 2), ("same", 2), ("other", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(sizes | {"num_hidden_layers": layers}))
    of = ["--checkpoint.enable", "--model.flavor=from_hf", "--training.seq_len=32", f"--job.dump_folder={tmp_path}/run"]
    checkpoint(tmp_path / "run" / "checkpoint", [*of, f"--model.hf_folder={tmp_path}/one"])
    monkeypatch.chdir(tmp_path)
    assert [lines(*of, f"--model.hf_folder={name}") for name in ("one", "./same")] == [[], []]
    (line,) = lines(*of, "--model.hf_folder=other")
    assert line.startswith("model.overrides: given n_layers = 3; allowed: n_layers = 2")


def test_an_estimate_is_of_the_job_whatever_its_folder_has(run, monkeypatch, capsys):
    words = [*JOB, "--training.global_batch_size=16", "--model.tokenizer_path=bytes", f"--job.dump_folder={run}"]
    assert "global_batch_size" in judge(run, ["--training.global_batch_size=16"])[0]
    monkeypatch.setattr(estimate, "predict", lambda *job: [Prediction(0, 0, "forward", {"parameters": 1.0})])
    assert estimate.main(["--device=cpu", *words]) == 0 and "of tensors at most" in capsys.readouterr().out


def test_the_step_asked_for_is_compared_and_no_other(run):
    checkpoint(run / "checkpoint", [*JOB, "--optimizer.lr=0.5"], step=70)
    assert "as in step-00000070" in judge(run, [])[0]
    assert judge(run, ["--checkpoint.load_step=60"]) == []
    assert judge(run, ["--checkpoint.load_step=65"]) == []  # which loading refuses
    (run / "checkpoint" / "step-00000070" / "state.json").write_text("{")
    assert judge(run, ["--optimizer.lr=0.5"]) != []  # the older one is what will be loaded


def test_a_checkpoint_from_before_jobs_were_kept_goes_on(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    checkpoint(folder / "checkpoint", JOB, job=None, sizes=None, samples=None)
    assert judge(folder, ["--optimizer.lr=0.5"]) == []


def test_an_option_that_came_later_is_compared_with_its_default():
    kept = kept_job(JobConfig(), {"dim": 4}, 8)
    del kept["job"]["optimizer"]["beta1"], kept["job"]["validation"]
    assert changes(kept, kept_job(JobConfig(), {"dim": 4, "new": 1}, 8)) == []
    other = kept_job(JobConfig(), {"dim": 4}, 8)
    other["job"]["optimizer"]["beta1"] = 0.5
    assert [str(change) for change in changes(kept, other)] == ["optimizer.beta1 0.9 -> 0.5"]
    assert changes(kept, other, model_only=True) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [("optimizer.lrr", "did you mean optimizer.lr?"), ("training.steps", "a resume takes any value of it")],
)
def test_names_that_need_no_allowance_are_refused(name, why):
    (line,) = lines("--checkpoint.enable", f"--checkpoint.allow_config_change={name}")
    assert line.startswith(f'checkpoint.allow_config_change: given "{name}"') and line.endswith(why)
    assert name not in refusable()


# The whole trainer, which asks again when it has found the checkpoint that it loads


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


def saving(folder: Path, texts: Path, **changed: object) -> list[str]:
    options = dict(checkpoint__enable=True, checkpoint__interval=2, training__steps=4, lr_scheduler__total_steps=8)
    return jobs.arguments(folder, texts, **options | changed)


HEADS = "{dim=32, n_layers=4, n_heads=2, n_kv_heads=2, vocab_size=260, multiple_of=16}"


def test_a_resume_under_another_job_is_refused_and_by_name_allowed(texts, tmp_path):
    run_ranks(1, jobs.train, saving(tmp_path, texts))
    before = (tmp_path / "config.toml").read_bytes()
    for changed, said in [
        (dict(optimizer__lr=0.5), "optimizer.lr 0.01 -> 0.5"),
        (dict(model__overrides=HEADS), "model.overrides n_heads = 4 -> n_heads = 2"),
    ]:
        with pytest.raises(RankFailed, match=f"of another job: {said}"):
            run_ranks(1, jobs.train, saving(tmp_path, texts, training__steps=6, **changed))
    assert (tmp_path / "config.toml").read_bytes() == before
    allowed = dict(optimizer__lr=0.5, checkpoint__allow_config_change="optimizer.lr", training__steps=6)
    rows, _ = run_ranks(1, jobs.train, saving(tmp_path, texts, **allowed))[0]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert rows[-1]["lr"] > 0.1
    starts = sorted((tmp_path / "starts").iterdir())
    assert [path.name for path in starts] == ["0001-from-step-00000000.toml", "0002-from-step-00000004.toml"]
    assert starts[0].read_bytes() == before
    assert starts[1].read_bytes() == (tmp_path / "config.toml").read_bytes() != before


def test_weights_alone_are_compared_by_the_sizes_of_the_model(texts, tmp_path):
    run_ranks(1, jobs.train, saving(tmp_path / "a", texts))
    take = dict(checkpoint__initial_load_path=tmp_path / "a" / "checkpoint", training__steps=2)
    run_ranks(1, jobs.train, saving(tmp_path / "b", texts, optimizer__lr=0.5, **take))
    with pytest.raises(RankFailed, match="of another job: model.overrides n_heads = 4 -> n_heads = 2"):
        run_ranks(1, jobs.train, saving(tmp_path / "c", texts, model__overrides=HEADS, **take))


def test_a_link_in_the_place_of_the_job_is_replaced_and_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").symlink_to(victim)
    (tmp_path / "run" / ".config.toml.tmp").symlink_to(victim)
    for step in (0, 5):
        run_folder.keep_job(tmp_path / "run", f"step = {step}", step)
    assert victim.read_text() == "mine"
    assert not (tmp_path / "run" / "config.toml").is_symlink()
    assert (tmp_path / "run" / "config.toml").read_text() == "step = 5"
    assert len(list((tmp_path / "run" / "starts").iterdir())) == 2


def test_moments_of_flipped_sides_are_refused_under_another_plan(tmp_path):
    """They are of the matrices' other sides there; a side that both plans leave whole is the same on both."""
    words = [*JOB, f"--job.dump_folder={tmp_path}", "--optimizer.name=GaLore", "--training.global_batch_size=16"]
    flipped, right = (
        [*words, f'--optimizer.options={{rank = 8, on_conflict = "flip"{side}}}'] for side in ("", ', side = "right"')
    )
    checkpoint(tmp_path / "checkpoint", flipped, ranks=2)
    assert not lines(*flipped, ranks=2) and not lines(*flipped, '--checkpoint.exclude_from_loading=["optimizer"]')
    (line,) = lines(*flipped)
    assert line == (
        'optimizer.options: given on_conflict = "flip"; allowed: a plan that shards '
        "layers.*.feed_forward.w2.weight by the sides of step-00000060 (dp_shard 2, cp 1, tp 1); take that plan, or "
        'begin the moments anew by checkpoint.exclude_from_loading = ["optimizer"]'
    )
    checkpoint(tmp_path / "checkpoint", right, step=61, ranks=2)
    assert not lines(*right)
