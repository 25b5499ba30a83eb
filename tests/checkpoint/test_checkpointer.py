"""Saving and resuming in one process: bit-equality, cadence, background saves, and errors."""

import copy
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from tests.support.checkpoint_job import Job, TinyModel, saved_steps
from torchtitan.checkpoint import CheckpointError, checkpointer, saving, storage, tensors

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
    assert resumed.checkpointer.maybe_save(3, last=True) is False  # it was loaded and has not changed
    resumed.train(4, last=True)
    resumed.checkpointer.finish()
    assert resumed.losses == straight.losses[3:]
    assert resumed.digest() == straight.digest()
    assert saved_steps(tmp_path / "run") == ["step-00000003", "step-00000006", "step-00000007"]


@pytest.mark.parametrize("lost", ["optimizer", "rng", "dataloader", "lr_scheduler"])
def test_every_part_of_the_state_matters(tmp_path, lost):
    """Control of the test above: without any one part, the resumed run differs."""
    straight, first = Job(tmp_path / "straight", interval=100), Job(tmp_path / "run", interval=3)
    straight.train(6)
    first.train(3)
    resumed = Job(tmp_path / "run", exclude_from_loading=["optimizer", "rng"] if lost == "optimizer" else [lost])
    load = resumed.load_state
    fresh = {"dataloader": 0, "lr_scheduler": [schedule.state_dict() for schedule in resumed.schedules]}
    resumed.checkpointer.hooks.load_state = lambda trainer, ranks: load(
        {"lr_scheduler": fresh["lr_scheduler"], **trainer}, [{"dataloader": 0, **ranks[0]}]
    )
    resumed.checkpointer.load()
    resumed.train(3)
    assert resumed.losses != straight.losses[3:]


def test_excluded_parts_do_not_reach_the_trainer_and_leave_the_optimizer_fresh(tmp_path):
    Job(tmp_path).train(2)
    job = Job(tmp_path, exclude_from_loading=["optimizer", "lr_scheduler", "rng"])
    job.load_state = None
    job.checkpointer.hooks.load_state = lambda trainer, ranks: setattr(job, "resumed_with", (trainer, ranks))
    assert job.checkpointer.load() == 2
    assert job.resumed_with == ({"step": 2}, [{"dataloader": 2}])
    assert not job.optimizers[0].state


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_of_torch(tmp_path, kind):
    job = Job(tmp_path, kind)
    job.train(1)
    sharing = StateDictOptions(flatten_optimizer_state_dict=True)
    torch_state = get_model_state_dict(job.model)
    del torch_state["output.weight"]  # tied, so our state has it once
    ours = {name.removeprefix("model."): tensor for name, tensor in tensors.model_tensors([job.model]).items()}
    assert {name: tensor.data_ptr() for name, tensor in ours.items()} == {
        name: tensor.data_ptr() for name, tensor in torch_state.items()
    }
    torch_state = get_optimizer_state_dict(job.model, job.optimizers, options=sharing)
    ours, values = tensors.optimizer_state([job.model], job.optimizers)
    assert values == {}
    assert {name.removeprefix("optimizer."): tensor.data_ptr() for name, tensor in ours.items()} == {
        name: value.data_ptr() for name, value in torch_state.items() if name.startswith("state.")
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
    resumed = Job(tmp_path)
    resumed.checkpointer.optimizers[:] = resumed.optimizers = [
        CountingSGD(resumed.model.parameters(), lr=0.1, momentum=0.9)
    ]
    resumed.checkpointer.load()
    assert {state["count"] for state in resumed.optimizers[0].state.values()} == {2}
    with pytest.raises(CheckpointError, match="it lacks optimizer.state.tok_embeddings.weight.count"):
        tensors.set_optimizer_values([resumed.model], resumed.optimizers, {})


# Cadence and retention


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
    # not the module's function, with which thread pools end
    monkeypatch.setattr(checkpointer, "time", SimpleNamespace(monotonic=lambda: now))
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
    names = sorted(path.name for path in folder.iterdir())
    Job(tmp_path).train(2)
    assert ("never finished" if unfinished else "another step") in caplog.text
    (aside,) = tmp_path.glob(".aside-step-00000002-*")
    assert sorted(path.name for path in aside.iterdir()) == names
    assert Job(tmp_path).checkpointer.load() == 2


def test_going_back_to_an_older_step_moves_the_newer_ones_aside(tmp_path, caplog):
    Job(tmp_path, interval=1).train(4)
    job = Job(tmp_path, interval=1, load_step=2)
    assert job.checkpointer.load() == 2
    assert "step-00000004" in saved_steps(tmp_path)  # nothing changes before something is saved
    job.train(1)
    job.train(1)
    assert sorted(path.name[-1] for path in tmp_path.glob("step-*")) == ["1", "2", "3", "4"]
    assert len(list(tmp_path.glob(".aside-step-0000000[34]-*"))) == 2
    assert "went back to step 2" in caplog.text


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_that_went_back_has_not_forgotten_it_after_a_save_that_failed(tmp_path, monkeypatch, mode):
    Job(tmp_path, interval=1).train(4)
    job = Job(tmp_path, interval=1, load_step=2, on_save_error="continue", async_mode=mode)
    job.checkpointer.load()
    job.position += 10  # other data than before
    with monkeypatch.context() as patch:
        patch.setattr(saving, "_look_for_space", lambda root, needed: root / needed)
        job.train(1)
        if job.checkpointer.running is not None:
            job.checkpointer.running.join()
    job.train(1)
    job.checkpointer.finish()
    assert len(list(tmp_path.glob(".aside-step-0000000[34]-*"))) == 2
    resumed = Job(tmp_path)
    assert resumed.checkpointer.load() == 4 and resumed.digest() == job.digest()


def test_the_latest_are_kept_and_the_one_loaded_from(tmp_path):
    Job(tmp_path, interval=1, keep_latest_k=2).train(5)
    assert saved_steps(tmp_path) == ["step-00000004", "step-00000005"]
    job = Job(tmp_path, interval=1, keep_latest_k=2)
    job.checkpointer.load()
    job.train(4)
    assert saved_steps(tmp_path) == ["step-00000005", "step-00000008", "step-00000009"]


# In the background


def test_the_background_saves_the_values_of_the_moment(tmp_path, monkeypatch):
    """The checkpoint on disk has the state of its step, although training continues while the writer waits."""
    gate, write = threading.Event(), storage.write_tensors

    def slow(*args):
        assert gate.wait(30)
        return write(*args)

    monkeypatch.setattr(storage, "write_tensors", slow)
    job = Job(tmp_path, async_mode="async", interval=2)
    job.train(2)
    expected = job.digest()
    job.checkpointer.options.interval = 100
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
    assert saved_steps(tmp_path) == ["step-00000002"]  # retention did not run, and nothing is left
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


def test_one_piece_of_memory_is_pinned_for_all_tensors(monkeypatch):
    """One by one, torch would round each up to a power of two."""
    pinned = {}
    monkeypatch.setattr(tensors, "pin_memory", pinned.__setitem__)
    monkeypatch.setattr(tensors, "unpin_memory", pinned.pop)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    staging = tensors.Staging(pinned=True)
    live = {
        "a": torch.arange(3.0),
        "b": torch.tensor(7),
        "c": torch.ones(5, 9, dtype=torch.bfloat16),
        "d": torch.ones(0),
    }
    copies = staging.copy(live)
    assert all(torch.equal(copies[name], tensor) for name, tensor in live.items())
    assert list(pinned.values()) == [64 + 64 + 128]
    assert {copied.untyped_storage().data_ptr() for copied in copies.values()} == set(pinned)
    assert staging.copy({"a": torch.ones(100)})["a"].sum() == 100
    assert list(pinned.values()) == [448]


def test_a_tensor_of_another_shape_gets_another_buffer():
    staging = tensors.Staging(pinned=False)
    assert staging.copy({"a": torch.ones(3)})["a"].tolist() == [1, 1, 1]
    assert staging.copy({"a": torch.ones(2, dtype=torch.int64)})["a"].tolist() == [1, 1]
