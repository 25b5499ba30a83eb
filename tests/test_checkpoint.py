"""Saving and resuming in one process: bit-equal, when it is due, in the background, and what is refused."""

import copy
import json
import random
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from tests.checkpoint_job import Job, TinyModel, saved_steps
from torchtitan.checkpoint import (
    CheckpointError,
    NothingLoadable,
    folders,
    load_model_for_inference,
    read_state,
    rng_state,
    saving,
    set_rng_state,
    storage,
    tensors,
)
from torchtitan.checkpoint.layout import TensorEntry

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected call of")

KINDS = ["plain", "wrapped", "compiled", "in_backward"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(tmp_path, kind, mode):
    straight = Job(tmp_path / "straight", kind, interval=100)
    straight.train(7)
    first = Job(tmp_path / "run", kind, async_mode=mode, interval=3)
    first.train(4)
    first.checkpointer.finish()
    resumed = Job(tmp_path / "run", kind, async_mode=mode, interval=3)
    assert resumed.checkpointer.load() == 3
    assert resumed.checkpointer.maybe_save(3, last=True) is False  # it is what was loaded
    resumed.train(4, last=True)
    resumed.checkpointer.finish()
    assert resumed.losses == straight.losses[3:]
    assert resumed.digest() == straight.digest()
    assert saved_steps(tmp_path / "run") == ["step-00000003", "step-00000006", "step-00000007"]


@pytest.mark.parametrize("lost", ["optimizer", "rng", "position", "schedules"])
def test_every_part_of_the_state_matters(tmp_path, lost):
    """The negative control of the test above: without any one part, the resumed run is another one."""
    straight, first = Job(tmp_path / "straight", interval=100), Job(tmp_path / "run", interval=3)
    straight.train(6)
    first.train(3)
    resumed = Job(tmp_path / "run", exclude_from_loading=["optimizer", "rng"] if lost == "optimizer" else [lost])
    load = resumed.load_state
    fresh = {"position": 0, "schedules": [schedule.state_dict() for schedule in resumed.schedules]}
    resumed.checkpointer.load_state = lambda trainer, ranks: load(
        {"schedules": fresh["schedules"], **trainer}, [{"position": 0, **ranks[0]}]
    )
    resumed.checkpointer.load()
    resumed.train(3)
    assert resumed.losses != straight.losses[3:]


def test_excluded_parts_do_not_reach_the_trainer_and_leave_the_optimizer_fresh(tmp_path):
    Job(tmp_path).train(2)
    job = Job(tmp_path, exclude_from_loading=["optimizer", "schedules", "rng"])
    job.load_state = None
    job.checkpointer.load_state = lambda trainer, ranks: setattr(job, "resumed_with", (trainer, ranks))
    assert job.checkpointer.load() == 2
    assert job.resumed_with == ({"step": 2}, [{"position": 2}])
    assert not job.optimizers[0].state


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_of_torch(tmp_path, kind):
    job = Job(tmp_path, kind)
    job.train(1)
    sharing = StateDictOptions(flatten_optimizer_state_dict=True)
    theirs = get_model_state_dict(job.model)
    del theirs["output.weight"]  # tied: ours has it once
    ours = {name.removeprefix("model."): tensor for name, tensor in tensors.model_tensors([job.model]).items()}
    assert {name: tensor.data_ptr() for name, tensor in ours.items()} == {
        name: tensor.data_ptr() for name, tensor in theirs.items()
    }
    theirs = get_optimizer_state_dict(job.model, job.optimizers, options=sharing)
    ours, values = tensors.optimizer_state([job.model], job.optimizers)
    assert values == {}
    assert {name.removeprefix("optimizer."): tensor.data_ptr() for name, tensor in ours.items()} == {
        name: value.data_ptr() for name, value in theirs.items() if name.startswith("state.")
    }


@pytest.mark.parametrize("kind", ["fused", "foreach", "tensor_lr", "stepped"])
def test_allocating_optimizer_state_changes_nothing_else(kind):
    model = TinyModel()
    lr = torch.tensor(0.1) if kind == "tensor_lr" else 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=kind == "fused", foreach=kind == "foreach")
    model.tok_embeddings.weight.grad = torch.ones_like(model.tok_embeddings.weight)
    model.layers["0"][0].weight.requires_grad_(False)
    if kind == "stepped":
        optimizer.step()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    tensors.allocate_state([optimizer])
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] is lr
    assert model.tok_embeddings.weight.grad.eq(1).all()
    assert model.output.weight.grad is not None
    assert model.layers["1"][0].weight.grad is None
    if kind == "stepped":
        assert str(optimizer.state_dict()) == str(state)
    else:
        assert set(optimizer.state) == {p for p in model.parameters() if p.requires_grad}


class CountingSGD(torch.optim.SGD):
    """Keeps a number that is no tensor."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


def test_optimizer_state_that_is_no_tensor_is_restored(tmp_path):
    job = Job(tmp_path)
    job.checkpointer.optimizers[:] = job.optimizers = [CountingSGD(job.model.parameters(), lr=0.1, momentum=0.9)]
    job.train(2)
    again = Job(tmp_path)
    again.checkpointer.optimizers[:] = again.optimizers = [CountingSGD(again.model.parameters(), lr=0.1, momentum=0.9)]
    again.checkpointer.load()
    assert {state["count"] for state in again.optimizers[0].state.values()} == {2}


# When


def steps_saved(folder: Path, steps: int, **options) -> list[int]:
    job = Job(folder, keep_latest_k=0, **options)
    done = [step for step in range(1, steps + 1) if job.checkpointer.maybe_save(step, last=step == steps)]
    job.checkpointer.finish()
    assert saved_steps(folder) == [f"step-{step:08d}" for step in done]
    return done


def test_saves_are_due_by_steps_after_the_first_and_after_the_last(tmp_path):
    assert steps_saved(tmp_path / "a", 7, interval=3) == [3, 6, 7]
    assert steps_saved(tmp_path / "b", 6, interval=3, enable_first_step_checkpoint=True) == [1, 3, 6]
    assert steps_saved(tmp_path / "c", 2, interval=9, async_mode="async") == [2]


def test_saves_are_due_by_seconds_of_the_monotonic_clock(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    job = Job(tmp_path, interval=10, interval_type="seconds")
    done = []
    for step in range(1, 8):
        now += 4
        if job.checkpointer.maybe_save(step, last=step == 7):
            done.append(step)
    assert done == [3, 6, 7]


def test_load_only_never_saves(tmp_path):
    Job(tmp_path).train(2)
    job = Job(tmp_path, load_only=True)
    assert job.checkpointer.load() == 2
    job.train(3, last=True)
    assert saved_steps(tmp_path) == ["step-00000002"]


def test_a_complete_checkpoint_of_the_step_is_not_written_again(tmp_path, caplog):
    Job(tmp_path).train(2)
    before = (tmp_path / "step-00000002" / "manifest.json").read_bytes()
    with caplog.at_level("INFO"):
        Job(tmp_path).train(2)
    assert "there already and complete" in caplog.text
    assert (tmp_path / "step-00000002" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("unfinished", [True, False])
def test_what_is_in_the_way_is_moved_aside_and_never_written_into(tmp_path, caplog, unfinished):
    folder = tmp_path / "step-00000002"
    Job(tmp_path / "other").train(4)
    (tmp_path / "other" / "step-00000004").rename(folder)
    if unfinished:
        (folder / "manifest.json").unlink()
    held = sorted(path.name for path in folder.iterdir())
    Job(tmp_path).train(2)
    assert ("never finished" if unfinished else "another step") in caplog.text
    (aside,) = tmp_path.glob(".aside-step-00000002-*")
    assert sorted(path.name for path in aside.iterdir()) == held
    assert Job(tmp_path).checkpointer.load() == 2


def test_going_back_to_an_older_step_moves_the_newer_ones_aside(tmp_path, caplog):
    Job(tmp_path, interval=1).train(4)
    job = Job(tmp_path, interval=1, load_step=2)
    assert job.checkpointer.load() == 2
    assert "step-00000004" in saved_steps(tmp_path)  # nothing changes before something is saved
    job.train(1)
    job.train(1)
    assert [name for name in saved_steps(tmp_path) if name.startswith("step")] == [f"step-0000000{i}" for i in (1, 2, 3, 4)]
    assert len(list(tmp_path.glob(".aside-step-0000000[34]-*"))) == 2
    assert "went back to step 2" in caplog.text


def test_the_latest_are_kept_and_the_one_loaded_from(tmp_path):
    Job(tmp_path, interval=1, keep_latest_k=2).train(5)
    assert saved_steps(tmp_path) == ["step-00000004", "step-00000005"]
    job = Job(tmp_path, interval=1, keep_latest_k=2)
    job.checkpointer.load()
    job.train(4)
    assert saved_steps(tmp_path) == ["step-00000005", "step-00000008", "step-00000009"]


# In the background


def test_the_background_saves_the_values_of_the_moment(tmp_path, monkeypatch):
    """Training goes on while the writer waits; what is on disk must be the step that was asked for."""
    gate, write = threading.Event(), storage.write_tensors

    def slow(*args):
        assert gate.wait(30)
        return write(*args)

    monkeypatch.setattr(storage, "write_tensors", slow)
    job = Job(tmp_path, async_mode="async", interval=2)
    job.train(2)
    expected = job.digest()
    extra = {"nested": [1]}
    job.checkpointer.rank_state = lambda: extra
    job.interval = 100
    job.checkpointer.interval = 100
    job.train(2)
    assert not (tmp_path / "step-00000002").exists()
    gate.set()
    job.checkpointer.finish()
    resumed = Job(tmp_path)
    assert resumed.checkpointer.load() == 2
    assert resumed.digest() == expected
    assert job.digest() != expected


def test_two_saves_never_overlap_and_a_due_one_waits(tmp_path, monkeypatch):
    active, most, write = [], [], storage.write_tensors

    def watched(*args):
        active.append(1)
        most.append(len(active))
        time.sleep(0.05)
        active.pop()
        return write(*args)

    monkeypatch.setattr(storage, "write_tensors", watched)
    job = Job(tmp_path, async_mode="async", interval=1, keep_latest_k=0)
    job.train(4)
    job.checkpointer.finish()
    assert most == [1, 1, 1, 1]
    assert len(saved_steps(tmp_path)) == 4


@pytest.mark.parametrize("where", ["next step", "next save", "finish"])
def test_a_failure_in_the_background_is_raised_at_the_next_call(tmp_path, monkeypatch, where):
    def fail(*args):
        raise OSError(28, "No space left on device")

    job = Job(tmp_path, async_mode="async", interval=2)
    job.train(2)
    job.checkpointer.finish()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_tensors", fail)
        job.train(2)
        job.checkpointer.running.join()
    with pytest.raises(CheckpointError, match="step 4 was not saved: .*No space left"):
        if where == "finish":
            job.checkpointer.finish()
        else:
            job.checkpointer.maybe_save(5 if where == "next step" else 6)
    assert saved_steps(tmp_path) == ["step-00000002"]  # retention did not run, nothing is left over
    job.train(2)
    job.checkpointer.finish()
    assert saved_steps(tmp_path) == ["step-00000002", "step-00000006"]


def test_buffers_are_made_ahead_and_reused(tmp_path):
    job = Job(tmp_path, async_mode="async", interval=2)
    job.train(1)
    job.checkpointer.staging.preparing.join()
    first = {name: tensor.data_ptr() for name, tensor in job.checkpointer.staging.buffers.items()}
    job.train(4)
    job.checkpointer.finish()
    assert {name: tensor.data_ptr() for name, tensor in job.checkpointer.staging.buffers.items()} == first


def test_a_tensor_of_another_shape_gets_another_buffer():
    staging = tensors.Staging(pinned=False)
    assert staging.copy({"a": torch.ones(3)})["a"].tolist() == [1, 1, 1]
    assert staging.copy({"a": torch.ones(2, dtype=torch.int64)})["a"].tolist() == [1, 1]


# What cannot be saved or loaded


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(
    ("state", "reason"),
    [({"best": float("nan")}, "JSON compliant"), ({"model": torch.ones(1)}, "not JSON serializable")],
)
def test_state_that_is_no_json_fails_the_save(tmp_path, mode, state, reason):
    job = Job(tmp_path, async_mode=mode)
    job.checkpointer.trainer_state = lambda: state
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


def test_an_empty_folder_is_a_fresh_start(tmp_path):
    job = Job(tmp_path / "absent")
    assert job.checkpointer.load() is None
    (tmp_path / "notes").mkdir()
    assert Job(tmp_path).checkpointer.load() is None


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(tmp_path, caplog, name):
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
    with pytest.raises(NothingLoadable, match="step-00000004[\\s\\S]*step-00000002|step-00000002[\\s\\S]*step-00000004"):
        Job(tmp_path).checkpointer.load()


def test_a_step_asked_for_and_absent_is_refused(tmp_path):
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
        (TinyModel(width=8), r"they differ in model.layers.0.0.weight \(saved float32 \[7, 6\], job float32 \[7, 8\]\)"),
        (TinyModel().bfloat16(), r"they differ in model.* \(saved float32 .*, job bfloat16"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name_and_changes_nothing(tmp_path, model, reason):
    Job(tmp_path).train(2)
    job = Job(tmp_path, model=model)
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=reason) as caught:
        job.checkpointer.load()
    assert not isinstance(caught.value, NothingLoadable)
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.model.state_dict().items())


def test_differences_are_told_together_and_casts_only_between_floats():
    f32, bf16, i64 = (TensorEntry(dtype, [2]) for dtype in ("float32", "bfloat16", "int64"))
    wanted = {"a": f32, "b": f32, "c": i64, "e": f32}
    saved = {"a": bf16, "b": i64, "c": i64, "d": f32}
    reason, casts = tensors.differences(wanted, saved, cast=True)
    assert reason == "it lacks e; it also holds d; they differ in b (saved int64 [2], job float32 [2])"
    assert casts == {"bfloat16"}
    assert "a (saved bfloat16" in tensors.differences(wanted, saved)[0]


def test_a_trainer_that_cannot_continue_is_one_error(tmp_path):
    Job(tmp_path).train(2)
    job = Job(tmp_path)

    def refuse(trainer, ranks):
        raise KeyError("tokens")

    job.checkpointer.load_state = refuse
    with pytest.raises(CheckpointError, match="continuing from the saved state failed on rank 0: KeyError: 'tokens'"):
        job.checkpointer.load()


# Starting from another job, exports, inference


def test_starting_from_another_job_takes_the_weights_alone_or_everything(tmp_path):
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


def test_an_export_of_another_step_replaces_nothing(tmp_path):
    job = Job(tmp_path / "run")
    job.train(1)
    for step in (1, 2):
        job.checkpointer.export_model(tmp_path / "out" / "weights", torch.float32, step)
    assert len(list((tmp_path / "out").glob(".aside-weights-*"))) == 1
    assert load_model_for_inference(tmp_path / "out" / "weights", TinyModel()) == 2


def test_inference_reads_the_newest_checkpoint_into_a_model_of_any_float_type(tmp_path):
    job = Job(tmp_path)
    job.train(4)
    model = TinyModel().bfloat16()
    assert load_model_for_inference(tmp_path, model) == 4
    assert torch.equal(model.output.weight, job.model.output.weight.bfloat16())


# Random generators


def test_the_generators_continue_where_they_were():
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
    whole = rng_state()
    if state:
        state = {**whole, **state}
    with pytest.raises(CheckpointError, match="random generators"):
        set_rng_state(state)
    set_rng_state(whole)


def test_a_project_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(saving, "DISTRIBUTION", "no-such-distribution")
    assert saving.versions()["torchtitan"] == "not installed"


def test_only_temporary_folders_are_deleted(tmp_path):
    with pytest.raises(AssertionError):
        folders.delete(tmp_path)
