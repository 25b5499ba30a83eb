"""Tests of job.clean_start: it empties the folder of an earlier run, and refuses where other files could be lost."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.changed_jobs import checkpoint
from torchtitan import launch, train
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.launcher import run_folder
from torchtitan.launcher.run_folder import empty_folder
from torchtitan.metrics.trackers import TRACKERS
from torchtitan.metrics.trackers.interface import Tracker
from torchtitan.rules import check

TOKENIZED = "0123456789abcdef"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Create the folder of an earlier run without checkpoints, outside the working directory."""
    working_directory = tmp_path / "here"
    working_directory.mkdir()
    monkeypatch.chdir(working_directory)
    folder = tmp_path / "runs" / "one"
    run_folder.record_start(folder, "", 0)
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "data" / TOKENIZED).mkdir(parents=True)
    (folder / "data" / TOKENIZED / "tokens").write_text("x")
    return folder


def job(folder, mode="unsaved", *arguments):
    return load([f"--job.dump_folder={folder}", f"--job.clean_start={mode}", "--checkpoint.enable", *arguments])


def entries(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_runs_folder_is_emptied_but_for_the_lock(run):
    (run / "run.lock.1").write_text("{}")
    outside = run.parent / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (run / "logs").symlink_to(outside)
    (run / "data" / TOKENIZED / "link").symlink_to(outside / "kept")
    (run / "training.png").symlink_to(run.parent / "absent")
    assert empty_folder(job(run)) == f"{run} is emptied of what an earlier run has left (job.clean_start), 6 entries"
    assert entries(run) == ["run.lock.1"] and (outside / "kept").read_text() == "x"
    assert empty_folder(job(run)) == "" and empty_folder(job(run.parent / "new")) == ""


def test_the_folder_is_kept_by_default_and_when_slurm_restarts_the_job(run):
    before = entries(run)
    assert empty_folder(job(run, "never")) == ""
    assert empty_folder(job(run, "always"), started_before=1).endswith("SLURM has started this job before")
    assert entries(run) == before


def test_checkpoints_are_deleted_only_by_always(run, monkeypatch):
    checkpoint(run / "checkpoint", ["--checkpoint.enable"])
    with pytest.raises(JobError, match='step 60 is saved in it.*write "always"'):
        empty_folder(job(run))
    other = ["--model.tokenizer_path=bytes", "--optimizer.lr=0.5"]  # a resume would refuse these
    assert any("optimizer.lr" in fault.key for fault in check(job(run, "unsaved", *other), 1, "cpu"))
    assert check(job(run, "always", *other), 1, "cpu") == []
    assert (run / "checkpoint").exists()
    assert empty_folder(job(run, "always")) and entries(run) == []


def refusal_remedy(config, folder):
    """Expect `clean` to refuse and to delete nothing; return the last part of the message."""
    before = entries(folder)
    with pytest.raises(JobError) as error:
        empty_folder(config)
    assert entries(folder) == before
    message = str(error.value)
    assert message.startswith(
        f"job.clean_start: given {config.job.clean_start} with {config.job.dump_folder}; allowed: a "
    )
    return message.rpartition("; ")[2]


def test_steps_in_other_checkpoint_folders_are_deleted_only_by_always(run):
    for name in (
        "checkpoint/step-00000060",
        "checkpoint/.aside-step-00000060-0123456789abcdef",
        "tb/deep/step-00000007",
    ):
        (run / name).mkdir(parents=True)
        assert refusal_remedy(job(run, "unsaved", "--checkpoint.folder=other"), run).endswith(
            f' is saved in it, {run / name}: for this to go too write "always"'
        )
        (run / name).rmdir()


@pytest.mark.parametrize("name", ["model", "model_hf", "adapter"])
def test_exports_are_deleted_only_by_always(name, run):
    (run / name).mkdir()
    remedy = f'the weights of a run are in it, {name}: for these to go too write "always"'
    assert refusal_remedy(job(run), run) == remedy
    assert empty_folder(job(run, "always")) and entries(run) == []


@pytest.mark.parametrize("inside", ["tb/starts", "tb/child/run.lock.1"])
def test_another_run_inside_the_folder_is_refused(inside, run):
    (run / inside).mkdir(parents=True)
    remedy = f"{(run / inside).parent} is another run's folder: move it, or name another job.dump_folder"
    assert refusal_remedy(job(run, "always"), run) == remedy


@pytest.mark.parametrize("name", ["thesis.tex", "child", "checkpoint.old", "data/mine.jsonl", "metrics.jsonl.bak"])
def test_unknown_files_are_refused(name, run):
    (run / name).write_text("x")
    remedy = f"{run / name} is nothing that a run of this job makes: move it, or name another job.dump_folder"
    assert refusal_remedy(job(run, "always"), run) == remedy


def test_folders_that_options_name_are_deleted(run):
    names = {"checkpoint.folder": "saved", "metrics.save_tb_folder": "events/all", "data.cache_dir": str(run / "cache")}
    names |= {"profiling.save_traces_folder": "traces", "profiling.save_memory_snapshot_folder": "snapshots"}
    for name in names.values():
        (run / name).mkdir(parents=True)
    for name in ("metrics.previous-2.jsonl", "metrics.redone.jsonl", ".config.toml.tmp", "wandb_run_id"):
        (run / name).write_text("x")
    assert empty_folder(job(run, "always", *(f"--{key}={name}" for key, name in names.items()))) and entries(run) == []


def test_files_of_trackers_are_deleted(run, monkeypatch):
    ledger = type("Ledger", (Tracker,), dict(name="Ledger", package="ledgers", entries=("ledger.csv",)))
    for name in ("ledger.csv", "ledgers_run_id"):
        (run / name).write_text("x")
    arguments = ("always", "--metrics.trackers=ledger")
    assert f"{run / 'ledger.csv'} is nothing that a run of this job makes" in refusal_remedy(job(run, "always"), run)
    monkeypatch.setitem(TRACKERS, "ledger", ledger)
    assert empty_folder(job(run, *arguments)) and entries(run) == []


def test_a_mounted_disk_inside_is_refused(run, monkeypatch):
    disk = run / "data" / TOKENIZED
    monkeypatch.setattr("os.path.ismount", lambda place: Path(place) == disk)
    remedy = f"another disk is mounted at {disk}: empty it yourself, or name another job.dump_folder"
    assert refusal_remedy(job(run, "always"), run) == remedy


def failing_at(call, failing_path):
    def fail(path, *args, **kwargs):
        if Path(path) == failing_path:
            raise PermissionError(13, "Permission denied", str(path))
        return call(path, *args, **kwargs)

    return fail


@pytest.mark.parametrize("call", ["os.scandir", "shutil.rmtree"])
def test_errors_of_the_file_system_are_reported(call, run, monkeypatch):
    folder, function = run / "data", os.scandir if call == "os.scandir" else shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(call, failing_at(function, folder))
        with pytest.raises(JobError) as error:
            empty_folder(job(run, "always"))
    assert str(error.value) == (
        f"job.clean_start: given always, but {folder} cannot be read or deleted (Permission denied); "
        f"mend that and start again, empty {run} yourself, or name another job.dump_folder"
    )
    assert (folder / TOKENIZED / "tokens").exists() and (run / "starts").exists()
    assert empty_folder(job(run, "always")) and entries(run) == []


def test_a_folder_that_no_run_made_is_refused(tmp_path, run):
    other = tmp_path / "thesis"
    (other / "starts").mkdir(parents=True)
    (other / "starts" / "chapter1.toml").write_text("x")
    assert refusal_remedy(job(other, "always"), other).startswith("no run has left its starts in it: empty it yourself")


def test_a_link_to_the_folder_is_refused(run):
    link = run.parent / "link"
    link.symlink_to(run)
    assert refusal_remedy(job(link, "always"), run) == f"it is a link to {run}: name the folder itself"


@pytest.mark.parametrize("depth", [".", "code/inner"])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_git_work_tree_is_refused(depth, kind, run):
    tree = run / depth
    tree.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        subprocess.run(["git", "init", "-q", str(tree)], check=True)
    else:  # a linked work tree
        (tree / ".git").write_text("gitdir: elsewhere\n")
    assert refusal_remedy(job(run, "always"), run) == f"{tree.resolve()} is a work tree of git"


def test_home_and_working_directories_are_refused(run, monkeypatch):
    (run / "user").mkdir()
    for home in (run, run / "user"):
        monkeypatch.setattr(Path, "home", lambda home=home: home)
        assert refusal_remedy(job(run, "always"), run) == "a home lies in it"
    monkeypatch.undo()
    monkeypatch.chdir(run / "user")
    assert refusal_remedy(job(run, "always"), run) == "it is the folder that this was started in, or holds it"


def test_the_root_is_refused(monkeypatch):
    monkeypatch.setattr("os.scandir", lambda folder: [type("", (), {"name": "etc"})])
    with pytest.raises(JobError, match="it is the root of all files"):
        empty_folder(job("/", "always"))


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
def test_inputs_of_the_job_inside_the_folder_are_refused(option, name, run):
    (run / "base").mkdir()
    for file in ("rows.jsonl", "chat.jinja"):
        (run / file).write_text("x")
    path = run / name
    value = f'[{{dataset = "text", dataset_path = "{path}"}}]' if option == "training.sources" else path
    key = "training.sources.dataset_path" if option == "training.sources" else option
    remedy = refusal_remedy(job(run, "always", f"--{option}={value}"), run)
    assert remedy == f"the job reads {path} ({key}), which lies in it: move that, or name another job.dump_folder"


@pytest.mark.parametrize("pattern", ["*/mine.jsonl", "**/tok*", "*/data/*/tokens"])
def test_matches_of_a_glob_pattern_inside_the_folder_are_refused(pattern, run):
    (run / "mine.jsonl").write_text("x")
    path = run.parent / pattern
    remedy = refusal_remedy(job(run, "always", f"--training.dataset_path={path}"), run)
    assert remedy.startswith(f"the job reads {path} (training.dataset_path), which lies in it: ")


def test_an_input_whose_name_has_glob_characters_is_refused(run):
    folder = run.rename(run.parent / "run[1]")
    (folder / "rows.jsonl").write_text("x")
    remedy = refusal_remedy(job(folder, "always", f"--training.dataset_path={folder / 'rows.jsonl'}"), folder)
    assert "(training.dataset_path), which lies in it" in remedy


def test_a_job_file_inside_the_folder_is_refused(run):
    (run / "job.toml").write_text(f'[job]\ndump_folder = "{run}"\nclean_start = "always"\n')
    assert "job.toml (job.config_file), which lies in it" in refusal_remedy(load([str(run / "job.toml")]), run)


def test_an_imported_job_file_is_kept_at_its_own_start(run, tmp_path):
    """An imported job file is kept if it is the job being started, and deleted with the rest otherwise."""
    text = f'[job]\ndump_folder = "{run}"\nclean_start = "always"\n'
    for folder, expected in ((run, [run_folder.IMPORTED_JOB_FILE]), (tmp_path / "new", [run_folder.IMPORTED_JOB_FILE])):
        folder.mkdir(exist_ok=True)
        path = folder / run_folder.IMPORTED_JOB_FILE
        path.write_text(text.replace(str(run), str(folder)))
        empty_folder(load([str(path)]))
        assert entries(folder) == expected
    (tmp_path / "job.toml").write_text(text)
    run_folder.record_start(run, "", 0)
    assert "3 entries" in empty_folder(load([str(tmp_path / "job.toml")])) and entries(run) == []
    run_folder.record_start(run, "", 0)
    (run / run_folder.IMPORTED_JOB_FILE).symlink_to(tmp_path / "job.toml")
    empty_folder(load([str(run / run_folder.IMPORTED_JOB_FILE)]))
    assert entries(run) == [run_folder.IMPORTED_JOB_FILE] and (tmp_path / "job.toml").is_file()


def test_the_launcher_empties_it_and_a_restart_does_not(tmp_path, capfd):
    texts = jobs.write_texts(tmp_path / "texts")
    options = dict(checkpoint__enable=True, job__clean_start="always", training__steps=1, metrics__log_files=True)
    for _ in range(2):
        assert launch.launch(1, jobs.arguments(tmp_path / "run", texts, **options)) == 0
    out = capfd.readouterr().out
    assert out.count("is emptied of what an earlier run has left (job.clean_start)") == 1
    assert len(list((tmp_path / "run" / "starts").glob("*.toml"))) == 1
    unsaved_only = dict(options, job__clean_start="unsaved")
    assert launch.launch(1, jobs.arguments(tmp_path / "run", texts, **unsaved_only)) == 2
    assert "step 1 is saved in it" in capfd.readouterr().err


def test_ranks_of_torchrun_are_refused(tmp_path, monkeypatch):
    for name, value in dict(RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2).items():
        monkeypatch.setenv(name, str(value))
    texts = jobs.write_texts(tmp_path / "texts")
    options = dict(job__clean_start="always", training__local_batch_size=4)
    with pytest.raises(JobError, match="job.clean_start: given always; allowed: never under torchrun"):
        train.main(jobs.arguments(tmp_path / "run", texts, **options))
    assert not os.path.exists(tmp_path / "run")
