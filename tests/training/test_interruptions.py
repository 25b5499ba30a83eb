"""Runs that fail or are asked to stop save the last step that all ranks completed, and resume bit-equal to an
uninterrupted run."""

import logging
import os
import signal
from contextlib import suppress

import pytest
import torch

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.config import manager
from torchtitan.core.machine_errors import MachineError
from torchtitan.datasets.sources import DataError
from torchtitan.guards import NonFiniteError
from torchtitan.metrics.json_lines import JsonLinesWriter, read_records
from torchtitan.process.ranks import read_ranks
from torchtitan.training.batches import PeerStopped
from torchtitan.training.trainer import Trainer

BAD_STEP = 5
KILLED = "a kill ahead of the last validation"
UNREADABLE, WITHOUT_MEMORY = "data that are gone in the last validation", "no memory in the last validation"
STOPS_IN_THE_LAST_STEP = ("a stop in the last step", KILLED, UNREADABLE, WITHOUT_MEMORY)


def failing_disk():
    raise MachineError("texts.jsonl: the machine cannot read it now (Input/output error)")
    yield


class InterruptedTrainer(Trainer):
    """A trainer with a failure or stop request, `event`: most events hit rank 1 in step `BAD_STEP` after one of its two
    batches, others all ranks in the last step or the last validation.
    """

    event = "nothing"

    def fetch(self):
        if self.current_step == BAD_STEP - 2 and self.ranks.rank == 1 and self.event == "data":  # a step ahead
            next(self.batches)
            self.batches = iter(())
        if self.current_step == BAD_STEP - 2 and self.ranks.rank == 1 and self.event == "disk":
            self.batches = failing_disk()
        if self.current_step == BAD_STEP - 1 and self.event == "gradient" and not hasattr(self.model, "clipped"):
            self.model.clipped = self.model.clip_gradients
            self.model.clip_gradients = lambda max_norm: self.model.clipped(max_norm) * float("nan")
        if self.current_step == self.config.training.steps - 1 and self.event in STOPS_IN_THE_LAST_STEP:
            self.stops.requested = self.ranks.rank == self.ranks.world_size - 1
        return super().fetch()

    def validate(self, stop, phase="validate"):
        if self.event == KILLED and self.done:
            raise KeyboardInterrupt
        if self.event == UNREADABLE and self.done and self.ranks.rank == 1:
            self.validator.held_out.loader = ()
        if self.event == WITHOUT_MEMORY and self.done:
            raise MemoryError("no more")
        return super().validate(stop, phase)

    def maybe_validate(self, done):
        if self.current_step == BAD_STEP - 1 and self.ranks.rank == 1:
            self.stops.requested = self.event == "a stop in validation"
            if self.event == "validation data":
                self.validator.held_out.loader = ()
        return super().maybe_validate(done)


def train_with_event(argv, event):
    trainer = InterruptedTrainer(manager.load(argv), read_ranks())
    trainer.event = event
    raised = None
    try:
        trainer.train()
    except (DataError, MachineError, PeerStopped, NonFiniteError, KeyboardInterrupt) as error:
        raised = type(error).__name__
    trainer.metrics.close()
    return raised, trainer.current_step


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


def options(texts, **more):
    return dict(
        training__local_batch_size=2, training__steps=8, checkpoint__enable=True, checkpoint__interval=100
    ) | dict(
        validation__enable=True,
        validation__dataset="text",
        validation__dataset_path=texts,
        validation__local_batch_size=2,
        validation__freq=4,
        validation__steps=2,
        **more,
    )


@pytest.fixture(scope="module")
def uninterrupted(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return *run_ranks(2, jobs.train, jobs.arguments(folder, texts, **options(texts)))[0], validations(folder)


ENDS = {
    "data": ["PeerStopped", "DataError"],
    "disk": ["UnreadableData"] * 2,  # not PeerStopped, whose exit code the launcher takes for a refused job
    "gradient": ["NonFiniteError"] * 2,
    "validation data": ["PeerStopped", "DataError"],
    "a stop in validation": [None, None],
}


@pytest.mark.parametrize("event", ENDS)
def test_the_last_complete_step_is_saved_and_resumes_bit_equal(event, uninterrupted, texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, **options(texts))
    assert run_ranks(2, train_with_event, argv, event) == [(raised, BAD_STEP - 1) for raised in ENDS[event]]
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == [f"step-{BAD_STEP - 1:08d}"]
    rows, state = run_ranks(2, jobs.train, argv)[0]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["loss"] for row in rows] == [row["loss"] for row in uninterrupted[0]]
    assert state == uninterrupted[1]


def validations(folder):
    return [row for row in read_records(folder / "metrics.jsonl") if "validation_loss" in row]


def test_a_stop_in_the_last_step_saves_first_and_validates_then(uninterrupted, texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, **options(texts))
    assert run_ranks(2, train_with_event, argv, "a stop in the last step") == [(None, 8)] * 2
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == ["step-00000008"]
    assert [row["step"] for row in uninterrupted[2]] == [4, 8]
    assert validations(tmp_path) == uninterrupted[2]


@pytest.mark.parametrize(("event", "ranks"), [(UNREADABLE, 2), (WITHOUT_MEMORY, 1)])
def test_a_complete_run_is_exported_though_its_last_validation_fails(event, ranks, texts, tmp_path):
    """The same job started again, after its last step, exports too."""
    argv = jobs.arguments(tmp_path, texts, **options(texts, checkpoint__last_save_model_only=True))
    for _ in range(2):
        assert run_ranks(ranks, train_with_event, argv, event) == [(None, 8)] * ranks
        assert [row["step"] for row in validations(tmp_path)] == [4]
        assert (tmp_path / "model").is_dir() and (tmp_path / "checkpoint/step-00000008").is_dir()


def test_a_last_validation_that_was_killed_is_done_on_restart(uninterrupted, texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, **options(texts))
    assert run_ranks(2, train_with_event, argv, KILLED) == [("KeyboardInterrupt", 8)] * 2
    assert [row["step"] for row in validations(tmp_path)] == [4]
    run_ranks(2, jobs.train, argv)
    assert validations(tmp_path) == uninterrupted[2]


def random_numbers_by_step(argv, event):
    """Train, and return the numbers that torch's generator drew in each step, as dropout would."""
    trainer, numbers = InterruptedTrainer(manager.load(argv), read_ranks()), {}
    trainer.event, forward = event, trainer.model.forward_backward

    def draws(*args, **kwargs):
        numbers.setdefault(trainer.current_step + 1, []).append(torch.rand(2).tolist())
        return forward(*args, **kwargs)

    trainer.model.forward_backward = draws
    with suppress(DataError, PeerStopped, NonFiniteError):
        trainer.train()
    trainer.metrics.close()
    return numbers


@pytest.mark.parametrize("event", ["data", "gradient"])
def test_an_abandoned_step_restores_the_random_state(event, texts, tmp_path):
    argv = jobs.arguments(tmp_path / "straight", texts, **options(texts) | dict(validation__enable=False))
    uninterrupted = run_ranks(2, random_numbers_by_step, argv, "nothing")
    argv = jobs.arguments(tmp_path / "stopped", texts, **options(texts) | dict(validation__enable=False))
    run_ranks(2, random_numbers_by_step, argv, event)
    assert run_ranks(2, random_numbers_by_step, argv, "nothing") == [
        {step: numbers for step, numbers in drawn_by_step.items() if step >= BAD_STEP}
        for drawn_by_step in uninterrupted
    ]


def test_a_bad_step_in_backward_is_not_saved(texts, tmp_path):
    """With steps in backward a bad gradient reaches the weights before it is detected."""
    argv = jobs.arguments(tmp_path, texts, **options(texts, optimizer__lr=1e30, training__local_batch_size=8))
    argv += ["--optimizer.early_step_in_backward", "--training.max_norm=0"]
    (raised, _) = run_ranks(1, train_with_event, argv, "nothing")[0]
    assert raised == "NonFiniteError" and not list((tmp_path / "checkpoint").glob("step-*"))


class Disk:
    """A file on a disk with `space` bytes left, which the test can change."""

    name = "metrics.jsonl"

    def __init__(self, space):
        self.space, self.content = space, b""

    def write(self, data):
        if not self.space:
            raise OSError(28, "No space left on device")
        accepted = data[: self.space]
        self.content += accepted
        self.space -= len(accepted)
        return len(accepted)

    def close(self):
        pass


def test_rows_are_buffered_while_the_disk_is_full(tmp_path, caplog):
    lines = JsonLinesWriter(tmp_path / "metrics.jsonl", None)
    disk = lines._file = Disk(space=30)
    with caplog.at_level(logging.INFO, logger="torchtitan"):
        for step in range(1, 5):
            lines.write({"step": step, "loss": 0.5})
        assert disk.content.count(b"\n") == 1 and len(disk.content) == 30
        disk.space = 10**6
        lines.write({"step": 5, "loss": 0.5})
        disk.space = 0
        lines.write({"step": 6, "loss": 0.5})
        lines.close()
    (tmp_path / "copy.jsonl").write_bytes(disk.content)
    assert [row["step"] for row in read_records(tmp_path / "copy.jsonl")] == [1, 2, 3, 4, 5]
    full = "metrics.jsonl cannot be written (No space left on device); "
    full += "the run continues, and rows are buffered until it can"
    recovered, lost = "metrics.jsonl is written again, 3 rows that waited too", "1 rows of metrics.jsonl are lost"
    assert [record.getMessage() for record in caplog.records] == [full, recovered, full, lost]


# Jobs under the launcher


def test_a_stop_request_to_a_rank_and_then_the_launcher_saves_once(texts, tmp_path):
    """A rank that is asked twice saves once, and all ranks save the same step."""
    more = dict(training__local_batch_size=4, training__steps=100000, validation__enable=False)
    process = jobs.start(jobs.arguments(tmp_path, texts, **(options(texts) | more)), ranks=2)
    jobs.wait_for_step(tmp_path, 3, process)
    ranks = jobs.children(process.pid)
    os.kill(ranks[0], signal.SIGSTOP)  # a stopped rank keeps the other from ending before the launcher gets its signal
    os.kill(ranks[1], signal.SIGUSR1)
    process.send_signal(signal.SIGINT)
    os.kill(ranks[0], signal.SIGCONT)
    code, out, err = jobs.finish(process)
    assert (code, err) == (130, "")
    last = jobs.logged_steps(tmp_path)[-1]["step"]
    assert [path.name for path in (tmp_path / "checkpoint").iterdir() if path.name[0] == "s"] == [f"step-{last:08d}"]


def test_a_rank_terminated_during_startup_ends_the_others(texts, tmp_path):
    """The others wait for it inside a library, where no signal handler runs."""
    process = jobs.start(jobs.arguments(tmp_path, texts, **options(texts)), ranks=2)
    os.kill(jobs.started_ranks(process, 2)[1], signal.SIGTERM)
    code, out, err = jobs.finish(process)
    assert (code, err) == (143, "")
