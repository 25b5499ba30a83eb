"""Step hooks: they run in order, and their state is saved and restored."""

from unittest.mock import patch

import pytest

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.parallelisms.parallel_model import StepHooks


class Diary:
    """A hook that records the step numbers."""

    def __init__(self, name="diary"):
        self.name, self.steps, self.parts = name, [], None

    def after_step(self, step, parts, optimizers):
        self.steps, self.parts = [*self.steps, step], (len(parts), len(optimizers))

    def state_dict(self):
        return {"steps": self.steps} if self.steps else {}

    def load_state_dict(self, state):
        self.steps = list(state.get("steps", []))


def test_hooks_run_in_order_and_are_saved_by_name():
    hooks = StepHooks()
    for name in ("one", "two"):
        hooks.append(Diary(name))
    assert hooks.state_dict() == {}
    hooks.after_step(1, [object()], [])
    hooks[0].after_step(2, [], [])
    assert hooks.state_dict() == {"one": {"steps": [1, 2]}, "two": {"steps": [1]}}
    restored = StepHooks()
    restored.append(Diary("two"))
    restored.append(Diary("new"))
    restored.load_state_dict({"step": 2, **hooks.state_dict()})
    assert restored.state_dict() == {"two": {"steps": [1]}}
    with pytest.raises(AssertionError, match="a second hook called two"):
        restored.append(Diary("two"))


def train_with_a_diary(argv):
    """Train a job with a Diary hook; return the steps and the model parts that it recorded."""
    make, diary = ModelBuilder.model, Diary()

    def with_diary(*args, **options):
        model = make(*args, **options)
        model.hooks.append(diary)
        return model

    with patch.object(ModelBuilder, "model", with_diary):
        jobs.train(argv)
    return diary.steps, diary.parts


def test_hook_state_is_restored_on_resume(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts")
    options = dict(checkpoint__enable=True, checkpoint__interval=2, lr_scheduler__total_steps=4)
    for steps in (2, 4):
        argv = jobs.arguments(tmp_path / "run", texts, training__steps=steps, **options)
        assert run_ranks(1, train_with_a_diary, argv) == [(list(range(1, steps + 1)), (1, 1))]
