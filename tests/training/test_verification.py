"""Tests of `torchtitan verify`: a run follows from its job, data and checkpoints, and a changed one does not."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from tests.support import jobs
from torchtitan import cli
from torchtitan.checkpoint import layout
from torchtitan.checkpoint.hashed_files import hash_files
from torchtitan.checkpoint.stored_tensors import open_tensors
from torchtitan.training.verification import has_one_plan, segment_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
OPTIONS = {
    "checkpoint__enable": True,
    "checkpoint__interval": 2,
    "training__steps": 5,
    "model__overrides": jobs.SHALLOW,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of a run of five steps on one rank and its data, saved at steps 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("verified")
    jobs.train(jobs.arguments(folder / "run", jobs.write_texts(folder), **OPTIONS))
    return folder


@pytest.fixture
def changed(finished, tmp_path):
    """Return a copy of the run, to be changed. Its job reads the data of the original."""
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


def verify(capsys, run, *arguments):
    code = cli.main(["verify", str(run), *arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out + err


def rewrite(folder: Path, ending: str, change: float) -> None:
    """Change the first element of a tensor, and the hashes, as someone would who wants it to look untouched."""
    with open_tensors("native", folder) as stored:
        name = min(name for name in stored.names if name.endswith(ending))
        tensor = stored.read(name)
    path, before = folder / "__0_0.distcp", tensor.numpy().tobytes()
    content = path.read_bytes()
    assert content.count(before) == 1
    tensor.view(-1)[0] += change
    replace_file(path, content.replace(before, tensor.numpy().tobytes()))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file of a checkpoint, and its hash into the manifest."""
    path.write_bytes(content)
    manifest, (digest,) = layout.read_manifest(path.parent), hash_files([path])
    files = {**manifest.files, path.name: layout.FileEntry(len(content), digest)}
    (path.parent / layout.MANIFEST).write_text(layout.manifest_text(dataclasses.replace(manifest, files=files)))


def test_a_run_follows_from_its_records_bit_for_bit(finished, capsys):
    before = {path: path.read_bytes() for path in sorted(finished.rglob("*")) if path.is_file()}
    code, out = verify(capsys, finished / "run", "--steps=9", "--seed=1")
    lines = out.splitlines()
    assert code == 0 and lines[-1] == "verified"
    assert lines[0].endswith("5 of 5 logged steps, by --seed 1: 1, 2, 3, 4, 5") and len(lines) == 5
    assert lines[1].startswith("steps 1 to 2, from the initial weights, on one device: 2 logged steps and ")
    assert lines[2].startswith("steps 3 to 4, from the checkpoint of step 2") and "tensors of step-00000004" in lines[2]
    assert all(line.endswith("equal bit for bit") for line in lines[1:4])
    assert {path: path.read_bytes() for path in sorted(finished.rglob("*")) if path.is_file()} == before


def test_another_plan_is_equal_up_to_rounding(finished, capsys):
    code, out = verify(capsys, finished / "run", "--steps=1", "--under", "tp=2")
    assert code == 0 and "step 5, from the checkpoint of step 4, on tp=2: 1 logged step and" in out
    assert "equal up to rounding (0.0001 of a value, 0.01 of a tensor)" in out


def test_ranks_of_a_pipeline_compare_different_tensors(tmp_path, capsys):
    sizes = "{dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16}"
    options = OPTIONS | {"training__steps": 2, "training__local_batch_size": 4, "model__overrides": sizes}
    jobs.train(jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), **options))
    code, out = verify(capsys, tmp_path / "run", "--steps=1", "--under=pp=2", "--timeout=120")
    assert code == 0 and "on pp=2: 2 logged steps and 84 tensors of step-00000002 equal up to rounding" in out, out


def test_a_run_of_two_ranks_is_made_on_its_own_plan(tmp_path, capsys):
    options = OPTIONS | {"training__steps": 2, "training__local_batch_size": 4}
    code, _, err = jobs.run(jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), **options), ranks=2)
    assert code == 0, err
    code, out = verify(capsys, tmp_path / "run", "--steps=1")
    assert code == 0 and "steps 1 to 2, from the initial weights, on dp_shard=2: 2 logged steps" in out
    assert "equal bit for bit" in out


def test_steps_of_another_start_are_not_held_against_the_job_of_the_first(tmp_path, capsys):
    """The checkpoint from which the run went on with another job is gone, as checkpoint.keep_latest_k leaves it."""
    run, texts = tmp_path / "run", jobs.write_texts(tmp_path)
    allowed = '["optimizer.weight_decay"]'
    options = OPTIONS | {"lr_scheduler__warmup_steps": 0, "checkpoint__allow_config_change": allowed}
    jobs.train(jobs.arguments(run, texts, **options | {"training__steps": 4}))
    jobs.train(jobs.arguments(run, texts, **options | {"training__steps": 6, "optimizer__weight_decay": 0.9}))
    shutil.rmtree(run / "checkpoint/step-00000004")
    code, out = verify(capsys, run, "--steps=6")
    assert code == 1 and "step 5: cannot be made again: " in out and "step 6: cannot be made again: " in out
    assert "steps 3 to 4, from the checkpoint of step 2, on one device: 2 logged steps equal bit for bit\n" in out
    code, out = verify(capsys, run, "--steps=1")
    assert code == 2 and out.endswith("none of these steps can be made again\n")


def test_steps_of_two_plans_are_not_expected_to_have_the_same_bits(changed):
    segment = segment_of(changed, 5, 5)
    assert (segment.first, segment.last) == (5, 5) and has_one_plan(segment)
    shutil.rmtree(changed / "checkpoint/step-00000004")
    (start,) = (changed / "starts").glob("*.toml")
    start = start.with_suffix(".json")
    plan = json.loads(start.read_text())
    later = start.with_name("0002-from-step-00000004.json")
    later.write_text(json.dumps(plan | {"ranks": 2, "degrees": plan["degrees"] | {"tp": 2}}))
    later.with_suffix(".toml").write_text(start.with_suffix(".toml").read_text())
    segment = segment_of(changed, 5, 5)
    assert (segment.first, segment.last) == (3, 5) and not has_one_plan(segment)


def test_a_changed_weight_is_noticed_where_it_is_used_and_where_it_was_made(changed, capsys):
    rewrite(changed / "checkpoint/step-00000004", "model.layers.0.attention.wq.weight", 0.01)
    code, out = verify(capsys, changed, "--steps=1")
    assert code == 1 and "step 5: loss " in out and "NOT verified" in out
    code, out = verify(capsys, changed, "--steps=5")
    assert "step-00000004: 1 of " in out and "attention.wq.weight: 1 of 1,024 elements" in out


def test_a_changed_last_checkpoint_is_noticed(changed, capsys):
    rewrite(changed / "checkpoint/step-00000005", "norm.weight.exp_avg", 1e-3)
    code, out = verify(capsys, changed, "--steps=1")
    assert code == 1 and "step-00000005: 1 of " in out and "(saved -> made again)" in out


def test_a_changed_number_of_the_optimizer_is_noticed(tmp_path, capsys):
    """Adafactor counts steps in whole numbers, which are not among the tensors."""
    run, options = tmp_path / "run", OPTIONS | {"training__steps": 2, "optimizer__name": "Adafactor"}
    jobs.train(jobs.arguments(run, jobs.write_texts(tmp_path), **options))
    assert verify(capsys, run, "--steps=1")[0] == 0
    saved = run / "checkpoint/step-00000002"
    state = layout.read_state(saved)
    name = next(name for name, number in state["optimizer"].items() if number == 2)
    for numbers, finding in (
        (state["optimizer"] | {name: 3}, f"{name}: 3 -> 2"),
        (state["optimizer"] | {name: 2.0}, f"{name}: 2.0 -> 2"),
        ({key: value for key, value in state["optimizer"].items() if key != name}, f"{name}: absent -> 2"),
        (state["optimizer"] | {"optimizer.state.more": 1}, "optimizer.state.more is in the checkpoint and not in the"),
    ):
        replace_file(saved / layout.STATE, layout.dump_json(state | {"optimizer": numbers}).encode())
        code, out = verify(capsys, run, "--steps=1")
        assert code == 1 and finding in out and "NOT verified" in out, out
    numbers = state["optimizer"] | {name: 3}  # another plan's rounding changes no count
    replace_file(saved / layout.STATE, layout.dump_json(state | {"optimizer": numbers}).encode())
    code, out = verify(capsys, run, "--steps=1", "--under=tp=1")
    assert code == 1 and f"{name}: 3 -> 2" in out


def test_a_damaged_checkpoint_is_noticed(changed, capsys):
    path = changed / "checkpoint/step-00000004/__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, out = verify(capsys, changed, "--steps=1")
    assert code == 1 and "cannot be made again: step-00000004 is damaged" in out


def test_a_changed_record_is_noticed(changed, capsys):
    rows = [json.loads(line) for line in (changed / "metrics.jsonl").read_text().splitlines()]
    lines = [
        json.dumps(row | {"loss": row["loss"] * 0.999} if row["step"] == 3 and "loss" in row else row) for row in rows
    ]
    (changed / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    code, out = verify(capsys, changed, "--steps=5")
    assert code == 1 and out.count("made again\n") == 1 and "  step 3: loss " in out


def test_changed_data_are_noticed(finished, tmp_path, capsys):
    texts = finished / "texts.jsonl"
    before = texts.read_text()
    texts.write_text(before.replace("alpha", "omega", 40))
    try:
        code, out = verify(capsys, finished / "run", "--steps=5")
    finally:
        texts.write_text(before)
    assert code == 1 and "NOT verified" in out


def test_checkpoints_that_are_cut_off_or_missing_are_noticed(changed, capsys):
    """The steps are then made from earlier ones, and follow from these: the end of the run does not."""
    path = changed / "checkpoint/step-00000005/__0_0.distcp"
    path.write_bytes(path.read_bytes()[:1000])
    code, out = verify(capsys, changed, "--steps=1")
    assert code == 1 and "step-00000005 is incomplete: __0_0.distcp" in out and "1 logged step equal bit for bit" in out
    aside = path.parent.rename(changed / "checkpoint/.aside-step-00000005-abc")  # as a rollback does
    code, out = verify(capsys, changed, "--steps=1")
    assert code == 0 and "missing" not in out
    shutil.rmtree(aside)
    code, out = verify(capsys, changed, "--steps=1")
    assert code == 1 and "step-00000005, which the run saved last by its last_checkpoint, is missing\n" in out
    (changed / "last_checkpoint").unlink()
    code, out = verify(capsys, changed, "--steps=1")
    assert code == 0 and out.endswith("\nverified, by the records alone: the run has no checkpoint after these steps\n")


def test_a_record_far_after_the_end_is_answered_at_once(changed, capsys):
    """The steps up to it are not counted one by one."""
    with open(changed / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 10**15, "loss": 1.0}) + "\n")
    code, out = verify(capsys, changed, "--steps=1")
    assert code == 1 and f"--step: given {10**15}; allowed: 1 to 5" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps=0"], "--steps: given '0'; allowed: a whole number >= 1"),
        (["--under=tp=3"], "parallelism.tensor_parallel_degree: given 3"),
        (["--under=tp=2", "--training.seq_len=8"], "--training.seq_len: allowed: options of the section parallelism"),
    ],
)
def test_bad_arguments_are_a_line(arguments, message, finished, capsys):
    code, out = verify(capsys, finished / "run", *arguments)
    assert code == 2 and message in out


def test_a_folder_without_a_run_is_a_line(tmp_path, capsys):
    assert verify(capsys, tmp_path)[0] == 2
    (tmp_path / "config.toml").write_text("")
    code, out = verify(capsys, tmp_path)
    assert code == 2 and "no logged step in its metrics.jsonl" in out
