"""Step hooks: they run in order, and their state is saved and restored. Which models leave tokens out."""

from unittest.mock import patch

import pytest

from tests.plans.combinations import Combination
from tests.support import jobs, table_rows
from tests.support.pool import run_ranks
from torchtitan.adapters.interface import Adapter
from torchtitan.adapters.low_rank import DoRA, LoRA
from torchtitan.adapters.quantized import Int8LoRA, QLoRA
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config.sections.model import Adapter as AdapterOptions
from torchtitan.contract.step import local_batch
from torchtitan.losses.objective import IGNORE_INDEX
from torchtitan.parallelisms.parallel_model import StatefulAdapter, StepHooks, computes_by_token


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


def tokens_computed(row):
    """Return the tokens of this rank's samples of the table, and those that the model computes of them."""
    model, seen = table_rows.assembled(row), []
    batch = local_batch(model, table_rows.with_task_labels(row))
    batch = {name: batch[name] for name in table_rows.model_input_names(row, model.needs_keys)}
    batch["labels"][1:] = IGNORE_INDEX
    model.parts[0].tok_embeddings.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    model.forward_backward(batch, 100)
    return batch["tokens"].numel(), seen[0]


@pytest.mark.parametrize(
    ("ranks", "row", "leaves_out"),
    [
        (1, {}, True),
        (2, {"dp_shard": 2}, True),
        (2, {"tp": 2}, False),
        (1, {"model": "deepseek"}, False),
        (1, {"model": "gemma4"}, True),
        (1, {"model": "gemma4_moe"}, False),
        (1, {"adapter": "lora"}, True),
        (1, {"adapter": "scale"}, False),
    ],
)
def test_documents_without_labels_are_left_out_where_a_batch_may_have_any_length(ranks, row, leaves_out):
    """The table of combinations compares gradients with those of the whole batch on one device."""
    for tokens, computed in run_ranks(ranks, tokens_computed, Combination(ranks=ranks, document_mask=True, **row)):
        assert computed < tokens if leaves_out else computed == tokens


class StatefulLoRA(LoRA, StatefulAdapter):
    """An adapter of a package that keeps state across batches, and has not thought of padding."""


class Mixing(LoRA):
    """An adapter that may connect tokens."""

    def convert(self, model, plan):
        return super().convert(model, plan)


class Declared(Mixing):
    by_token, convert = True, Mixing.convert


class OfNeighbours(LoRA):
    """An adapter whose linears may read other tokens."""

    linear_class = type("Shifting", (LoRA.linear_class,), {})


def test_an_adapter_gets_all_tokens_unless_it_declares_to_compute_each_alone():
    kinds = {LoRA: True, StatefulLoRA: False, Mixing: False, Declared: True, Adapter: False, OfNeighbours: False}
    kinds |= dict.fromkeys((DoRA, QLoRA, Int8LoRA), True)
    assert {kind: computes_by_token(kind(AdapterOptions(kind="lora"))) for kind in kinds} == kinds


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
