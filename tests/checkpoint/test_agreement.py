"""Tests of saving and resuming on several ranks, on fewer and on more, and of failures of single ranks."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from tests.support.checkpoint_job import Job, TinyModel, rank, saved_steps, tensor_hash
from tests.support.pool import RankFailed, run_ranks
from torchtitan.checkpoint import (
    CheckpointError,
    checkpointer,
    folders,
    hashed_files,
    layout,
    load_model_for_inference,
    saving,
    storage,
    tensors,
)
from torchtitan.checkpoint.agreement import Peers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def train(folder: Path, kind: str, steps: int, options: dict) -> tuple[list[float], dict[str, str]]:
    """Resume if possible, train, and return this rank's losses and the digest of its state."""
    job = Job(folder, kind, **options)
    job.checkpointer.load()
    job.train(steps)
    job.checkpointer.finish()
    return job.losses, job.digest()


def load(folder: Path, kind: str) -> tuple[int, dict[str, str], int]:
    """Load a checkpoint; return its step, the digest, and the number of ranks that saved it."""
    job = Job(folder, kind)
    step = job.checkpointer.load()
    return step, job.digest(), len(job.resumed_with[1])


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("ddp", 2), ("hsdp", 4)])
def test_a_resumed_run_is_bit_equal(tmp_path, kind, world, mode):
    options = {"interval": 3, "async_mode": mode}
    straight = run_ranks(world, train, tmp_path / "straight", kind, 6, {"interval": 100})
    run_ranks(world, train, tmp_path / "run", kind, 4, options)
    resumed = run_ranks(world, train, tmp_path / "run", kind, 3, options)
    assert [losses for losses, _ in resumed] == [losses[3:] for losses, _ in straight]
    assert [digest for _, digest in resumed] == [digest for _, digest in straight]
    assert saved_steps(tmp_path / "run") == ["step-00000003", "step-00000006"]


def test_a_checkpoint_loads_bit_equal_on_any_number_of_ranks_and_kind_of_sharding(tmp_path):
    (_, expected), (_, same) = run_ranks(2, train, tmp_path, "fsdp", 2, {})
    assert expected == same
    for world, kind in [(1, "plain"), (1, "fsdp"), (2, "ddp"), (4, "fsdp"), (4, "hsdp")]:
        assert run_ranks(world, load, tmp_path, kind) == [(2, expected, 2)] * world, (world, kind)


def test_one_and_two_ranks_resume_a_checkpoint_of_four(tmp_path):
    ((_, expected), *_) = run_ranks(4, train, tmp_path, "hsdp", 2, {"async_mode": "async"})
    assert run_ranks(1, load, tmp_path, "plain") == [(2, expected, 4)]
    assert run_ranks(2, load, tmp_path, "fsdp") == [(2, expected, 4)] * 2


def compare_names_with_torch(folder: Path, kind: str) -> None:
    """Compare tensor names and values with torch's own state dicts."""
    job = Job(folder, kind)
    job.train(1)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    torch_tensors = get_model_state_dict(job.model)
    torch_tensors.pop("output.weight")
    torch_tensors = {f"model.{name}": value for name, value in torch_tensors.items()}
    torch_optimizer = get_optimizer_state_dict(job.model, job.optimizers, options=options)
    torch_tensors |= {
        f"optimizer.{name}": value for name, value in torch_optimizer.items() if name.startswith("state.")
    }
    ours = tensors.model_tensors([job.model]) | tensors.optimizer_state([job.model], job.optimizers)[0]
    assert {n: tensor_hash(t) for n, t in ours.items()} == {n: tensor_hash(t) for n, t in torch_tensors.items()}


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_tensor_names_equal_those_of_torch(tmp_path, kind):
    run_ranks(2, compare_names_with_torch, tmp_path, kind)


def export_and_infer(folder: Path) -> dict[str, str]:
    """Train and export on two ranks, load the export, and return its digest."""
    job = Job(folder / "run", "fsdp")
    job.train(2)
    assert job.checkpointer.export_model(folder / "export", torch.bfloat16, job.step)
    model = TinyModel()
    assert load_model_for_inference(folder / "export", model) == 2
    expected = {name: value for name, value in job.digest().items() if "/" not in name}
    exact = TinyModel()
    load_model_for_inference(folder / "run", exact)
    assert {name: tensor_hash(value.detach()) for name, value in exact.named_parameters()} == expected
    return {name: tensor_hash(value) for name, value in model.state_dict().items()}


def infer(folder: Path) -> dict[str, str]:
    model = TinyModel()
    load_model_for_inference(folder / "export", model)
    return {name: tensor_hash(value) for name, value in model.state_dict().items()}


def test_an_export_of_two_ranks_is_read_by_one(tmp_path):
    one, two = run_ranks(2, export_and_infer, tmp_path)
    assert one == two == infer(tmp_path)


# One clock, one decision


def saves_by_seconds(folder: Path) -> list[int]:
    """Save by the clock, with rank 1's clock a day ahead; return the saved steps."""
    now = [0.0 if rank() == 0 else 86400.0]
    done = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer, "time", SimpleNamespace(monotonic=lambda: now[0]))
        job = Job(folder, "fsdp", interval=10, interval_type="seconds")
        for step in range(1, 7):
            now[0] += 4 if rank() == 0 else 1000
            if job.checkpointer.maybe_save(step):
                done.append(step)
    return done


def test_the_clock_of_rank_0_decides(tmp_path):
    assert run_ranks(2, saves_by_seconds, tmp_path) == [[3, 6], [3, 6]]


# A failure on one rank is a failure on all, and the older checkpoint remains


def fail_on(failing_rank: int, owner, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(owner, name)

    def failing(*args, **kwargs):
        if rank() == failing_rank:
            raise OSError(28, "No space left on device")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


POINTS = [
    (1, tensors, "model_tensors"),
    (0, folders, "create_temporary"),
    (1, DefaultSavePlanner, "create_local_plan"),
    (1, DefaultSavePlanner, "finish_plan"),
    (1, FileSystemWriter, "write_data"),
    (0, FileSystemWriter, "finish"),
    (1, hashed_files, "sha256_of"),
    (0, folders, "write_file"),
    (0, folders, "publish"),
]


def failing_save(folder: Path, mode: str, number: int) -> tuple[list[str], int | None, bool]:
    """Let a save fail on one rank; return the saved steps, the loaded step, and if its state is equal."""
    failing_rank, owner, name = POINTS[number]
    job = Job(folder, "fsdp", async_mode=mode)
    job.train(2)
    job.checkpointer.finish()
    expected = job.digest()
    job.train(1)
    raised = ""
    with pytest.MonkeyPatch.context() as patch:
        fail_on(failing_rank, owner, name, patch)
        try:
            job.train(1)
            job.checkpointer.finish()
        except CheckpointError as error:
            raised = str(error)
    assert "No space left" in raised and f"rank {failing_rank}" in raised, raised
    dist.barrier()
    saved = saved_steps(folder)
    dist.barrier()
    resumed = Job(folder, "fsdp")
    step = resumed.checkpointer.load()
    equal = resumed.digest() == expected
    job.train(2)  # there is space again
    job.checkpointer.finish()
    dist.barrier()
    assert saved_steps(folder) == ["step-00000002", "step-00000006"]
    return saved, step, equal


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("number", range(len(POINTS)))
def test_a_failing_rank_fails_the_save_on_all_and_the_next_one_works(tmp_path, mode, number):
    assert run_ranks(2, failing_save, tmp_path, mode, number) == [(["step-00000002"], 2, True)] * 2


def failure_is_seen_at_one_step(folder: Path) -> int:
    """Let rank 1's background save fail only after step 5; return the step at which this rank raises."""
    job = Job(folder, "fsdp", async_mode="async", interval=2)
    may_end, save = threading.Event(), job.checkpointer._save_in_background

    def lingering(*args):
        save(*args)
        assert rank() == 0 or may_end.wait(300)

    job.checkpointer._save_in_background = lingering
    with pytest.MonkeyPatch.context() as patch:
        fail_on(1, FileSystemWriter, "write_data", patch)
        job.train(2)
        job.checkpointer.options.interval = 10**6
        if rank() == 0:
            job.checkpointer.running.join()
        job.train(3)
        may_end.set()
        job.checkpointer.running.join()
        try:
            job.train(1)
        except CheckpointError:
            return job.step
    raise AssertionError("the failure was not raised")


def test_a_failure_in_the_background_is_raised_on_all_ranks_at_the_same_step(tmp_path):
    assert run_ranks(2, failure_is_seen_at_one_step, tmp_path) == [6, 6]


def damage_seen_by_one_rank(folder: Path) -> tuple[int, str]:
    """Damage rank 1's shard; return the step that loads and the error for the damaged one."""
    job = Job(folder, "fsdp", interval=1)
    job.train(2)
    dist.barrier()
    if rank() == 0:
        shard = folder / "step-00000002" / "__1_0.distcp"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    dist.barrier()
    step = Job(folder, "fsdp").checkpointer.load()
    try:
        Job(folder, "fsdp", load_step=2).checkpointer.load()
    except CheckpointError as error:
        return step, str(error)
    raise AssertionError("a damaged shard was loaded")


def test_all_ranks_fall_back_together(tmp_path):
    answers = run_ranks(2, damage_seen_by_one_rank, tmp_path)
    assert [step for step, _ in answers] == [1, 1]
    assert all("damaged: __1_0.distcp" in text for _, text in answers)


def load_nothing_for_inference(folder: Path) -> str:
    with pytest.raises(layout.NothingLoadable) as caught:
        load_model_for_inference(folder, TinyModel())
    return str(caught.value)


def test_nothing_to_load_is_an_error_on_all_ranks(tmp_path):
    answers = run_ranks(2, load_nothing_for_inference, tmp_path / "absent")
    assert all("no such folder" in text for text in answers)


def save_without_a_shared_folder(folder: Path) -> str:
    """Hide rank 1's file from rank 0, as without a shared file system; return the error."""
    job = Job(folder, "fsdp", verify=False)
    job.train(1)
    original = saving._write

    def hide(snapshot, temporary, peers):
        share = original(snapshot, temporary, peers)
        if rank() == 1:
            (temporary / "__1_0.distcp").unlink()
        return share

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "_write", hide)
        with pytest.raises(CheckpointError) as caught:
            job.train(1)
    return str(caught.value)


def test_a_folder_that_the_hosts_do_not_share_is_reported(tmp_path):
    assert all("a folder that all hosts share" in text for text in run_ranks(2, save_without_a_shared_folder, tmp_path))


def agree_on_failures() -> list:
    """Return what `Peers.agree` raises and returns on this rank."""
    peers = Peers("test")
    texts = []
    for failing in ([1], [0, 1]):
        try:
            peers.agree("testing", lambda failing=failing: 1 / 0 if rank() in failing else 5)
        except CheckpointError as error:
            texts.append(str(error))

    def refuse():
        raise layout.NothingLoadable("the same everywhere")

    with pytest.raises(layout.NothingLoadable, match="^the same everywhere$"):
        peers.agree("testing", refuse)
    return [*texts, peers.agree("testing", rank), peers.maximum(rank(), -rank())]


def test_agreement_names_the_failing_ranks():
    expected = [
        "testing failed on rank 1: ZeroDivisionError: division by zero",
        "testing failed on rank 0, 1: ZeroDivisionError: division by zero",
    ]
    assert run_ranks(2, agree_on_failures) == [[*expected, rank, [1, 0]] for rank in (0, 1)]


# Killed between any two steps of a save

KILLS = [
    (0, folders, "create_temporary"),
    (1, storage, "write_tensors"),
    (0, storage, "write_tensors"),
    (1, hashed_files, "sha256_of"),
    (0, saving, "_commit"),
    (0, folders, "write_file"),
    (0, layout, "manifest_text"),
    (0, folders, "publish"),
    (0, saving, "delete_old"),
]


def killed_save(folder: Path, mode: str, number: int, after: bool) -> None:
    """Save on two ranks, one of which exits before or after a function of the save."""
    failing_rank, module, name = KILLS[number]
    job = Job(folder, "fsdp", async_mode=mode)
    job.train(2)
    job.checkpointer.finish()
    original = getattr(module, name)

    def dying(*args, **kwargs):
        if rank() == failing_rank:
            if after:
                original(*args, **kwargs)
            os._exit(9)
        return original(*args, **kwargs)

    setattr(module, name, dying)
    job.train(2)
    job.checkpointer.finish()


@pytest.mark.parametrize("number", range(len(KILLS)))
def test_a_rank_killed_during_a_save_leaves_a_complete_checkpoint(tmp_path, number):
    """The points alternate between inline and background saves, and between kills before and after."""
    mode, after = ("disabled", "async")[number % 2], number % 3 == 0
    reference = run_ranks(2, train, tmp_path / "reference", "fsdp", 2, {})[0][1]
    with pytest.raises(RankFailed, match="process ended with exit code"):
        run_ranks(2, killed_save, tmp_path / "run", mode, number, after)
    published = KILLS[number][2] == "delete_old" or (KILLS[number][2] == "publish" and after)
    step, digest, _ = run_ranks(1, load, tmp_path / "run", "plain")[0]
    assert step == (4 if published else 2)
    assert published or digest == reference
    losses, _ = run_ranks(2, train, tmp_path / "run", "fsdp", 6 - step, {})[0]
    assert len(losses) == 6 - step
    assert [name for name in saved_steps(tmp_path / "run") if name.startswith(".")] == []
    assert saved_steps(tmp_path / "run")[-1] == "step-00000006"
