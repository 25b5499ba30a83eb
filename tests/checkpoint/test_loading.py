"""Tests of loading: refused states, initial weights, exports, inference, random generators, earlier checkpoints."""

import json
import os
import random
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy
import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

from tests.support import jobs
from tests.support.checkpoint_job import Job, TinyModel, saved_steps
from tests.support.pool import run_ranks
from torchtitan.checkpoint import (
    CheckpointError,
    NothingLoadable,
    folders,
    load_model_for_inference,
    read_state,
    rng_state,
    saving,
    set_rng_state,
    tensors,
)
from torchtitan.checkpoint.layout import TensorEntry
from torchtitan.core.tensor_storage import Deferred

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected call of")


# States that cannot be saved or loaded


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(
    ("state", "reason"),
    [({"best": float("nan")}, "JSON compliant"), ({"model": torch.ones(1)}, "not JSON serializable")],
)
def test_state_that_is_no_json_fails_the_save(tmp_path, mode, state, reason):
    job = Job(tmp_path, async_mode=mode)
    job.checkpointer.hooks.trainer_state = lambda: state
    with pytest.raises(CheckpointError, match=reason):
        job.train(2)
        job.checkpointer.finish()
    assert saved_steps(tmp_path.parent / tmp_path.name) == []


def test_a_model_that_holds_more_than_tensors_is_refused(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return "text"

    with pytest.raises(CheckpointError, match="1._extra_state of the model is no tensor"):
        tensors.model_tensors([nn.Sequential(nn.Linear(1, 1), Extra(1, 1))])


def test_an_empty_folder_has_nothing_to_load(tmp_path):
    job = Job(tmp_path / "absent")
    assert job.checkpointer.load() is None
    (tmp_path / "notes").mkdir()
    assert Job(tmp_path).checkpointer.load() is None


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_reported_and_the_older_one_loaded(tmp_path, caplog, name):
    job = Job(tmp_path)
    job.train(2)
    expected = job.digest()
    job.train(2)
    flip_a_bit(tmp_path / "step-00000004" / name)
    resumed = Job(tmp_path)
    assert resumed.checkpointer.load() == 2
    assert resumed.digest() == expected
    assert "checkpoint not used: step-00000004" in caplog.text and name in caplog.text
    (tmp_path / "step-00000002" / name).unlink()
    with pytest.raises(NothingLoadable) as caught:
        Job(tmp_path).checkpointer.load()
    assert "step-00000002" in str(caught.value) and "step-00000004" in str(caught.value)


def test_control_torch_alone_loads_a_flipped_bit(tmp_path):
    """Control of the test above: without the manifest's checksums the damage goes unnoticed."""
    job = Job(tmp_path)
    job.train(2)
    name, expected = "model.layers.0.0.weight", job.model.layers["0"][0].weight.detach()
    (shard,) = (tmp_path / "step-00000002").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    offset = data.find(expected.numpy().tobytes())
    data[offset + 2] ^= 1 << 5
    shard.write_bytes(data)
    tensors_by_name = {name: torch.zeros_like(expected)}
    torch.distributed.checkpoint.load(tensors_by_name, checkpoint_id=tmp_path / "step-00000002", no_dist=True)
    assert offset > 0 and (tensors_by_name[name] != expected).sum() == 1
    with pytest.raises(NothingLoadable, match="other content than was written"):
        Job(tmp_path).checkpointer.load()


def test_a_damaged_checkpoint_is_replaced_by_a_later_save_of_its_step(tmp_path):
    Job(tmp_path).train(4)
    flip_a_bit(tmp_path / "step-00000004" / "__0_0.distcp")
    job = Job(tmp_path)
    job.checkpointer.load()
    job.train(2)
    assert Job(tmp_path).checkpointer.load() == 4
    assert len(list(tmp_path.glob(".aside-step-00000004-*"))) == 1


def test_other_versions_are_logged(tmp_path, caplog, monkeypatch):
    Job(tmp_path).train(2)
    monkeypatch.setattr(saving, "versions", lambda: {"torch": "9.9"})
    assert Job(tmp_path).checkpointer.load() == 2
    assert f"saved with torch {torch.__version__}, going on with 9.9" in caplog.text


def test_a_missing_or_damaged_load_step_is_refused(tmp_path):
    Job(tmp_path).train(2)
    with pytest.raises(NothingLoadable, match="of step 3 .* there is no such step"):
        Job(tmp_path, load_step=3).checkpointer.load()
    flip_a_bit(tmp_path / "step-00000002" / "__0_0.distcp")
    with pytest.raises(NothingLoadable, match="of step 2 .* damaged: __0_0.distcp"):
        Job(tmp_path, load_step=2).checkpointer.load()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (TinyModel(layers=3), "it lacks model.layers.2.0.bias, .* and 11 more"),
        (TinyModel(layers=1), "it also holds model.layers.1.0.bias"),
        (
            TinyModel(width=8),
            r"they differ in model.layers.0.0.weight \(saved float32 \[7, 6\], job float32 \[7, 8\]\)",
        ),
        (TinyModel().bfloat16(), r"they differ in model.* \(saved float32 .*, job bfloat16"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path, model, reason):
    Job(tmp_path).train(2)
    job = Job(tmp_path, model=model)
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=reason) as caught:
        job.checkpointer.load()
    assert not isinstance(caught.value, NothingLoadable)
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.model.state_dict().items())


def test_differences_are_listed_together_and_only_floats_are_cast():
    f32, bf16, i64 = (TensorEntry(dtype, [2]) for dtype in ("float32", "bfloat16", "int64"))
    expected = {"a": f32, "b": f32, "c": i64, "e": f32}
    saved = {"a": bf16, "b": i64, "c": i64, "d": f32}
    reason, casts = tensors.differences(expected, saved, cast=True)
    assert reason == "it lacks e; it also holds d; they differ in b (saved int64 [2], job float32 [2])"
    assert casts == {"bfloat16"}
    assert "a (saved bfloat16" in tensors.differences(expected, saved)[0]


def test_errors_of_the_trainer_state_are_checkpoint_errors(tmp_path):
    Job(tmp_path).train(2)
    job = Job(tmp_path)

    def refuse(trainer, ranks):
        raise KeyError("tokens")

    job.checkpointer.hooks.load_state = refuse
    with pytest.raises(CheckpointError, match="going on from step-00000002 failed on rank 0: KeyError: 'tokens'"):
        job.checkpointer.load()


# Starting from another job, exports, inference


def test_initial_load_takes_the_weights_or_everything(tmp_path):
    source = Job(tmp_path / "source")
    source.train(4)
    weights_only = Job(tmp_path / "a")
    assert weights_only.checkpointer.initial_load(tmp_path / "source") == 0
    assert weights_only.resumed_with is None
    assert {k: v for k, v in source.digest().items() if "/" not in k} == weights_only.digest()
    everything = Job(tmp_path / "b")
    assert everything.checkpointer.initial_load(tmp_path / "source" / "step-00000002", model_only=False) == 2
    everything.train(2)
    assert everything.losses == source.losses[2:]
    assert saved_steps(tmp_path / "b") == ["step-00000004"]
    with pytest.raises(NothingLoadable, match="nowhere: no complete checkpoint"):
        everything.checkpointer.initial_load(tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_export_holds_the_weights_in_its_dtype(tmp_path, caplog, dtype):
    job = Job(tmp_path / "run")
    job.train(1)
    assert job.checkpointer.export_model(tmp_path / "export", dtype, step=1)
    assert not job.checkpointer.export_model(tmp_path / "export", dtype, step=1)
    assert read_state(tmp_path / "export")["trainer"]["step"] == 1
    expected = job.model.tok_embeddings.weight.to(dtype).float()
    for target in (TinyModel(), TinyModel().to(dtype)):
        with caplog.at_level("INFO"):
            assert load_model_for_inference(tmp_path / "export", target) == 1
        assert torch.equal(target.output.weight.float(), expected)
    assert ("saved as" in caplog.text) is (dtype != torch.float32)
    with pytest.raises(CheckpointError, match="holds weights alone"):
        Job(tmp_path / "new").checkpointer.initial_load(tmp_path / "export", model_only=False)
    assert Job(tmp_path / "new").checkpointer.initial_load(tmp_path / "export") == 0


def test_deferred_tensors_of_an_export_move_to_the_host_at_once():
    device_tensor, host_tensor = Mock(), torch.ones(2)
    device_tensor.to.return_value = host_tensor
    plain = {"folded": Deferred((2,), lambda: device_tensor)}
    snapshot = saving.snapshot_of_model(1, [TinyModel()], dict, torch.bfloat16, plain)
    assert snapshot.error is None and list(snapshot.tensors.values()) == [host_tensor]
    device_tensor.to.assert_called_once_with(device="cpu", dtype=torch.bfloat16)


def test_an_export_of_another_step_moves_the_old_one_aside(tmp_path):
    job = Job(tmp_path / "run")
    job.train(1)
    for step in (1, 2):
        job.checkpointer.export_model(tmp_path / "out" / "weights", torch.float32, step)
    assert len(list((tmp_path / "out").glob(".aside-weights-*"))) == 1
    assert load_model_for_inference(tmp_path / "out" / "weights", TinyModel()) == 2


def test_an_export_of_other_weights_at_the_same_step_is_moved_aside(tmp_path):
    """A run may be rolled back and reach the same step with another learning rate."""
    for rate in (0.05, 0.01):
        job = Job(tmp_path / str(rate))
        job.schedules[0].base_lrs = [rate]
        job.train(1)
        assert job.checkpointer.export_model(tmp_path / "model", torch.float32, 1)
    (aside,) = tmp_path.glob(".aside-model-*")
    model = TinyModel()
    load_model_for_inference(tmp_path / "model", model)
    assert torch.equal(model.output.weight, job.model.output.weight)


def test_inference_reads_the_newest_checkpoint_into_a_model_of_any_float_type(tmp_path):
    job = Job(tmp_path)
    job.train(4)
    model = TinyModel().bfloat16()
    assert load_model_for_inference(tmp_path, model) == 4
    assert torch.equal(model.output.weight, job.model.output.weight.bfloat16())


# Random generators


def test_random_generators_continue_after_restoring():
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    random.gauss(0, 1)
    numpy.random.normal()
    state = json.loads(json.dumps(rng_state()))
    drawn = [random.gauss(0, 1), random.random(), numpy.random.normal(), torch.rand(3).tolist()]
    set_rng_state(state)
    assert [random.gauss(0, 1), random.random(), numpy.random.normal(), torch.rand(3).tolist()] == drawn


@pytest.mark.parametrize("state", [{}, {"python": {"words": "zz", "gauss": None}}, {"torch": "00"}])
def test_an_unusable_generator_state_is_refused(state):
    valid_state = rng_state()
    if state:
        state = {**valid_state, **state}
    with pytest.raises(CheckpointError, match="random generators"):
        set_rng_state(state)
    set_rng_state(valid_state)


def test_a_project_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(saving, "DISTRIBUTION", "no-such-distribution")
    assert saving.versions()["torchtitan"] == "not installed"


def test_only_temporary_folders_are_deleted(tmp_path):
    with pytest.raises(AssertionError):
        folders.delete(tmp_path)


# Checkpoints of earlier versions

EARLIER = {
    "before_the_seams": {4: 5.969461441040039, 5: 6.204594135284424, 6: 5.87356424331665},
    "lora_epochs": {
        13: 6.073468208312988,
        14: 5.898825168609619,
        15: 6.055591106414795,
        16: 5.960598468780518,
        17: 6.124910831451416,
        18: 6.0449934005737305,
        19: 5.982051849365234,
        20: 5.881989002227783,
        21: 6.050351142883301,
        22: 5.9064040184021,
    },
}
"""Folder of tests/assets -> the losses of the further steps, as the commit that made the folder computed them.

before_the_seams: prepared shards, by the commit of 2026-11-21, 22:57. lora_epochs: an adapter on text tokenized
before the run, by 62fd160, the last commit before the package was renamed.
"""


@pytest.mark.parametrize("name", EARLIER)
def test_a_run_of_an_earlier_commit_continues_with_the_same_losses(name, tmp_path):
    """Weights, moments, schedule and data position are restored, and tokenized text is not tokenized again.

    On the CPU that made the folders the losses are bit-equal; 1e-6 allows another order of summation.
    """
    shutil.copytree(jobs.ROOT / "tests/assets" / name, tmp_path, dirs_exist_ok=True)
    if (text := tmp_path / "text.jsonl").exists():
        os.utime(text, (1_700_000_000, 1_700_000_000))  # part of the name of the tokenized text
    tokenized, metrics = set(tmp_path.glob("run/data/[!.]*")), tmp_path / "run" / "metrics.jsonl"
    earlier_rows = metrics.read_text() if metrics.exists() else ""
    (rows,) = run_ranks(1, train_in, str(tmp_path))
    assert {row["step"]: row["loss"] for row in rows if row["step"] in EARLIER[name]} == pytest.approx(
        EARLIER[name], rel=1e-6
    )
    assert set(tmp_path.glob("run/data/[!.]*")) == tokenized
    assert metrics.read_text().startswith(earlier_rows)


def train_in(folder: str) -> list[dict]:
    """Train in a working directory, as the job's paths are relative to it."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return jobs.train(["job.toml"])[0]
    finally:
        os.chdir(before)
