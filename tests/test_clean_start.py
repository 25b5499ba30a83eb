"""job.clean_start: a run's own folder is emptied, and nothing that anybody could miss."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import jobs
from tests.test_resume_changes import checkpoint
from torchtitan import launch, train
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.launcher import run_folder
from torchtitan.launcher.clean_folder import clean
from torchtitan.metrics.trackers import TRACKERS
from torchtitan.metrics.trackers.interface import Tracker
from torchtitan.rules import check

TOKENIZED = "0123456789abcdef"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of an earlier run, which has saved nothing, beside the one that commands are given in."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    folder = tmp_path / "runs" / "one"
    run_folder.keep_job(folder, "", 0)
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "data" / TOKENIZED).mkdir(parents=True)
    (folder / "data" / TOKENIZED / "tokens").write_text("x")
    return folder


def job(folder, mode="unsaved", *words):
    return load([f"--job.dump_folder={folder}", f"--job.clean_start={mode}", "--checkpoint.enable", *words])


def listed(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_runs_folder_is_emptied_but_for_the_lock(run):
    (run / "run.lock.1").write_text("{}")
    outside = run.parent / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (run / "logs").symlink_to(outside)
    (run / "data" / TOKENIZED / "link").symlink_to(outside / "kept")
    (run / "training.png").symlink_to(run.parent / "absent")
    assert clean(job(run)) == f"{run} is emptied of what an earlier run has left (job.clean_start), 6 entries"
    assert listed(run) == ["run.lock.1"] and (outside / "kept").read_text() == "x"
    assert clean(job(run)) == "" and clean(job(run.parent / "new")) == ""


def test_nothing_is_emptied_unless_it_is_asked_for_or_when_a_scheduler_starts_the_job_again(run):
    before = listed(run)
    assert clean(job(run, "never")) == ""
    assert clean(job(run, "always"), started_before=1).endswith("SLURM has started this job before")
    assert listed(run) == before


def test_checkpoints_go_only_if_that_is_said(run, monkeypatch):
    checkpoint(run / "checkpoint", ["--checkpoint.enable"])
    with pytest.raises(JobError, match='step 60 is saved in it.*write "always"'):
        clean(job(run))
    other = ["--model.tokenizer_path=bytes", "--optimizer.lr=0.5"]  # which a resume would refuse
    assert any("optimizer.lr" in fault.key for fault in check(job(run, "unsaved", *other), 1, "cpu"))
    assert check(job(run, "always", *other), 1, "cpu") == []
    assert (run / "checkpoint").exists()
    assert clean(job(run, "always")) and listed(run) == []


def refused(config, folder):
    """What was said; that nothing was deleted."""
    before = listed(folder)
    with pytest.raises(JobError) as error:
        clean(config)
    assert listed(folder) == before
    told = str(error.value)
    assert told.startswith(
        f"job.clean_start: given {config.job.clean_start} with {config.job.dump_folder}; allowed: a "
    )
    return told.rpartition("; ")[2]


def test_steps_of_another_folder_of_checkpoints_go_only_if_that_is_said(run):
    for name in (
        "checkpoint/step-00000060",
        "checkpoint/.aside-step-00000060-0123456789abcdef",
        "tb/deep/step-00000007",
    ):
        (run / name).mkdir(parents=True)
        assert refused(job(run, "unsaved", "--checkpoint.folder=other"), run).endswith(
            f' is saved in it, {run / name}: for this to go too write "always"'
        )
        (run / name).rmdir()


@pytest.mark.parametrize("name", ["model", "model_hf", "adapter"])
def test_exports_go_only_if_that_is_said(name, run):
    (run / name).mkdir()
    told = f'the weights of a run are in it, {name}: for these to go too write "always"'
    assert refused(job(run), run) == told
    assert clean(job(run, "always")) and listed(run) == []


@pytest.mark.parametrize("inside", ["tb/starts", "tb/child/run.lock.1"])
def test_a_run_in_a_runs_folder_is_left_alone(inside, run):
    (run / inside).mkdir(parents=True)
    told = f"{(run / inside).parent} is another run's folder: move it, or name another job.dump_folder"
    assert refused(job(run, "always"), run) == told


@pytest.mark.parametrize("name", ["thesis.tex", "child", "checkpoint.old", "data/mine.jsonl", "metrics.jsonl.bak"])
def test_what_no_run_makes_is_left_alone(name, run):
    (run / name).write_text("x")
    told = f"{run / name} is nothing that a run of this job makes: move it, or name another job.dump_folder"
    assert refused(job(run, "always"), run) == told


def test_what_options_name_is_a_runs(run):
    names = {"checkpoint.folder": "saved", "metrics.save_tb_folder": "events/all", "data.cache_dir": str(run / "cache")}
    names |= {"profiling.save_traces_folder": "traces", "profiling.save_memory_snapshot_folder": "snapshots"}
    for name in names.values():
        (run / name).mkdir(parents=True)
    for name in ("metrics.previous-2.jsonl", "metrics.redone.jsonl", ".config.toml.tmp", "wandb_run_id"):
        (run / name).write_text("x")
    assert clean(job(run, "always", *(f"--{key}={name}" for key, name in names.items()))) and listed(run) == []


def test_what_a_tracker_leaves_is_a_runs(run, monkeypatch):
    ledger = type("Ledger", (Tracker,), dict(name="Ledger", package="ledgers", leaves=("ledger.csv",)))
    for name in ("ledger.csv", "ledgers_run_id"):
        (run / name).write_text("x")
    words = ("always", "--metrics.trackers=ledger")
    assert f"{run / 'ledger.csv'} is nothing that a run of this job makes" in refused(job(run, "always"), run)
    monkeypatch.setitem(TRACKERS, "ledger", ledger)
    assert clean(job(run, *words)) and listed(run) == []


def test_another_disk_in_it_is_left_alone(run, monkeypatch):
    disk = run / "data" / TOKENIZED
    monkeypatch.setattr("os.path.ismount", lambda place: Path(place) == disk)
    told = f"another disk is mounted at {disk}: empty it yourself, or name another job.dump_folder"
    assert refused(job(run, "always"), run) == told


def failing(call, at):
    def fail(path, *rest, **named):
        if Path(path) == at:
            raise PermissionError(13, "Permission denied", str(path))
        return call(path, *rest, **named)

    return fail


@pytest.mark.parametrize("call", ["os.scandir", "shutil.rmtree"])
def test_what_the_system_refuses_is_told(call, run, monkeypatch):
    at, whole = run / "data", os.scandir if call == "os.scandir" else shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(call, failing(whole, at))
        with pytest.raises(JobError) as error:
            clean(job(run, "always"))
    assert str(error.value) == (
        f"job.clean_start: given always with {run}, of which {at} cannot be read or deleted (Permission denied); "
        "mend that and start again, empty it yourself, or name another job.dump_folder"
    )
    assert (at / TOKENIZED / "tokens").exists() and (run / "starts").exists()
    assert clean(job(run, "always")) and listed(run) == []


def test_a_folder_of_nobody_is_left_alone(tmp_path, run):
    other = tmp_path / "thesis"
    (other / "starts").mkdir(parents=True)
    (other / "starts" / "chapter1.toml").write_text("x")
    assert refused(job(other, "always"), other).startswith("no run has left its starts in it: empty it yourself")


def test_links_are_not_followed_to_a_folder(run):
    link = run.parent / "link"
    link.symlink_to(run)
    assert refused(job(link, "always"), run) == f"it is a link to {run}: name the folder itself"


@pytest.mark.parametrize("depth", [".", "code/inner"])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_work_tree_of_git_is_left_alone(depth, kind, run):
    tree = run / depth
    tree.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        subprocess.run(["git", "init", "-q", str(tree)], check=True)
    else:  # of a work tree beside its repository
        (tree / ".git").write_text("gitdir: elsewhere\n")
    assert refused(job(run, "always"), run) == f"{tree.resolve()} is a work tree of git"


def test_homes_and_the_folder_of_the_command_are_left_alone(run, monkeypatch):
    (run / "user").mkdir()
    for home in (run, run / "user"):
        monkeypatch.setattr(Path, "home", lambda home=home: home)
        assert refused(job(run, "always"), run) == "a home lies in it"
    monkeypatch.undo()
    monkeypatch.chdir(run / "user")
    assert refused(job(run, "always"), run) == "it is the folder that this was started in, or holds it"


def test_the_root_is_left_alone(monkeypatch):
    monkeypatch.setattr("os.scandir", lambda folder: [type("", (), {"name": "etc"})])
    with pytest.raises(JobError, match="it is the root of all files"):
        clean(job("/", "always"))


@pytest.mark.parametrize(
    "option, name",
    [
        ("training.dataset_path", "rows.jsonl"),
        ("training.dataset_path", "data/*.jsonl"),
        ("model.hf_folder", "base"),
        ("checkpoint.initial_load_path", "base"),
        ("data.chat_template", "chat.jinja"),
        ("training.sources", "rows.jsonl"),
    ],
)
def test_what_the_job_reads_is_left_alone(option, name, run):
    (run / "base").mkdir()
    for file in ("rows.jsonl", "chat.jinja"):
        (run / file).write_text("x")
    given = run / name
    said = f'[{{dataset = "text", dataset_path = "{given}"}}]' if option == "training.sources" else given
    where = "training.sources.dataset_path" if option == "training.sources" else option
    told = refused(job(run, "always", f"--{option}={said}"), run)
    assert told == f"the job reads {given} ({where}), which lies in it: move that, or name another job.dump_folder"


@pytest.mark.parametrize("pattern", ["*/mine.jsonl", "**/tok*", "*/data/*/tokens"])
def test_what_a_glob_from_above_finds_is_left_alone(pattern, run):
    (run / "mine.jsonl").write_text("x")
    given = run.parent / pattern
    told = refused(job(run, "always", f"--training.dataset_path={given}"), run)
    assert told.startswith(f"the job reads {given} (training.dataset_path), which lies in it: ")


def test_a_file_named_with_signs_of_a_glob_is_left_alone(run):
    folder = run.rename(run.parent / "run[1]")
    (folder / "rows.jsonl").write_text("x")
    told = refused(job(folder, "always", f"--training.dataset_path={folder / 'rows.jsonl'}"), folder)
    assert "(training.dataset_path), which lies in it" in told


def test_a_job_that_lies_in_it_is_left_alone(run):
    (run / "job.toml").write_text(f'[job]\ndump_folder = "{run}"\nclean_start = "always"\n')
    assert "job.toml (job.config_file), which lies in it" in refused(load([str(run / "job.toml")]), run)


def test_a_job_that_import_has_written_into_it_outlives_its_start(run, tmp_path):
    """One of an earlier start goes with the rest, as long as no other job is started by it."""
    text = f'[job]\ndump_folder = "{run}"\nclean_start = "always"\n'
    for folder, left in ((run, [run_folder.IMPORTED]), (tmp_path / "new", [run_folder.IMPORTED])):
        folder.mkdir(exist_ok=True)
        path = folder / run_folder.IMPORTED
        path.write_text(text.replace(str(run), str(folder)))
        clean(load([str(path)]))
        assert listed(folder) == left
    (tmp_path / "job.toml").write_text(text)
    run_folder.keep_job(run, "", 0)
    assert "3 entries" in clean(load([str(tmp_path / "job.toml")])) and listed(run) == []
    run_folder.keep_job(run, "", 0)
    (run / run_folder.IMPORTED).symlink_to(tmp_path / "job.toml")
    clean(load([str(run / run_folder.IMPORTED)]))
    assert listed(run) == [run_folder.IMPORTED] and (tmp_path / "job.toml").is_file()


def test_the_launcher_empties_it_and_a_restart_does_not(tmp_path, capfd):
    texts = jobs.write_texts(tmp_path / "texts")
    words = dict(checkpoint__enable=True, job__clean_start="always", training__steps=1, metrics__log_files=True)
    for _ in range(2):
        assert launch.launch(1, jobs.arguments(tmp_path / "run", texts, **words)) == 0
    out = capfd.readouterr().out
    assert out.count("is emptied of what an earlier run has left (job.clean_start)") == 1
    assert len(list((tmp_path / "run" / "starts").iterdir())) == 1
    told = dict(words, job__clean_start="unsaved")
    assert launch.launch(1, jobs.arguments(tmp_path / "run", texts, **told)) == 2
    assert "step 1 is saved in it" in capfd.readouterr().err


def test_ranks_of_torchrun_are_refused(tmp_path, monkeypatch):
    for name, value in dict(RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2).items():
        monkeypatch.setenv(name, str(value))
    texts = jobs.write_texts(tmp_path / "texts")
    words = dict(job__clean_start="always", training__local_batch_size=4)
    with pytest.raises(JobError, match="job.clean_start: given always; allowed: never under torchrun"):
        train.main(jobs.arguments(tmp_path / "run", texts, **words))
    assert not os.path.exists(tmp_path / "run")
