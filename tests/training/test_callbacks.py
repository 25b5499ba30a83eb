"""Callbacks: their order and failures, the options of a job, their state in checkpoints under other plans."""

import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support import jobs
from tests.support.packages import install
from tests.support.pool import run_ranks
from torchtitan.checkpoint import CheckpointError
from torchtitan.checkpoint.layout import TensorEntry
from torchtitan.config import manager
from torchtitan.config.changes import kind_of
from torchtitan.core import registry
from torchtitan.core.callbacks import HOOKS
from torchtitan.core.errors import JobError
from torchtitan.engine import Callback, CallbackError
from torchtitan.guards import NonFiniteError, ReplicasDiffer, RollBack
from torchtitan.process.exit import REFUSED
from torchtitan.process.ranks import read_ranks
from torchtitan.rules import check
from torchtitan.training.callbacks import CallbackRunner, callbacks_of
from torchtitan.training.trainer import Trainer

SHORT = dict(training__steps=4, lr_scheduler__decay_type="constant", lr_scheduler__warmup_steps=0)
FSDP = dict(training__local_batch_size=2)
TP = dict(parallelism__tensor_parallel_degree=2)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


def train(argv, *callbacks):
    """Train a job with callbacks; return its logged rows and the names of the callbacks."""
    torch._dynamo.reset()
    trainer = Trainer(manager.load(argv), read_ranks(), callbacks)
    with trainer.callbacks:
        trainer.train()
        trainer.callbacks.end()
    trainer.metrics.close()
    dist.barrier()  # the first rank writes the rows that all ranks read
    return jobs.logged_steps(Path(trainer.config.job.dump_folder)), list(trainer.callbacks.by_name)


class Quiet(Callback):
    """Overrides every hook and does nothing."""

    def start(self, engine): ...

    def before_step(self, batch): ...

    def after_backward(self): ...

    def after_step(self, result): ...

    def on_log(self, metrics): ...

    def after_validation(self, results): ...

    def after_save(self, path): ...

    def on_error(self, error): ...

    def end(self): ...

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


def recorded(hook):
    def call(self, *args):
        self.calls.append((self.name, hook, *args))
        return {} if hook == "state_dict" else None

    return call


Recorder = type("Recorder", (Callback,), {hook: recorded(hook) for hook in HOOKS})


def recorders():
    calls: list[tuple] = []
    both = Recorder(), Recorder()
    for name, callback in zip("ab", both, strict=True):
        callback.name, callback.calls = name, calls
    return calls, both


def test_the_hooks():
    around_a_step = ("start", "before_step", "after_backward", "after_step", "on_log", "after_validation", "after_save")
    assert (*around_a_step, "on_error", "end", "state_dict", "load_state_dict") == HOOKS
    assert kind_of("callbacks.use") == "told"


def in_order(argv):
    calls, both = recorders()
    _, names = train(argv, *both)
    return names, [(name, hook, str(args[-1])[-8:] if args else "") for name, hook, *args in calls]


@pytest.mark.parametrize("options", [FSDP, TP], ids=["fsdp", "tp"])
def test_callbacks_that_do_nothing_change_no_bit(options, texts, tmp_path):
    saves = dict(checkpoint__enable="true", checkpoint__interval=2)
    argv = [jobs.arguments(tmp_path / name, texts, **SHORT, **options, **saves) for name in ("without", "quiet")]
    without, quiet = run_ranks(2, train, argv[0]), run_ranks(2, train, argv[1], Quiet())
    names = ("step", "loss", "grad_norm", "lr", "tokens")
    for (rows, _), (other_rows, _) in zip(without, quiet, strict=True):
        assert [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in other_rows]
        assert len(rows) == 4


def test_the_order_of_all_hooks(texts, tmp_path):
    argv = jobs.arguments(
        tmp_path,
        texts,
        training__steps=2,
        checkpoint__enable="true",
        checkpoint__interval=1,
        checkpoint__async_mode="async",
        validation__enable="true",
        validation__dataset="text",
        validation__dataset_path=texts,
        validation__freq=2,
        validation__steps=1,
    )
    ((names, calls),) = run_ranks(1, in_order, argv)
    assert names == ["tests.training.test_callbacks:Recorder", "tests.training.test_callbacks:Recorder-2"]
    hooks = [hook for name, hook, _ in calls if name == "a"]
    step = ["before_step", "after_backward", "on_log", "after_step"]
    assert [hook for hook in hooks if hook != "after_save"] == [
        *("start", *step, "state_dict", *step, "after_validation", "state_dict", "end")
    ]
    saved = [path for name, hook, path in calls if (name, hook) == ("a", "after_save")]
    assert saved == ["00000001", "00000002"]
    assert [name for name, hook, _ in calls if hook == "end"] == ["b", "a"]
    assert [name for name, hook, _ in calls if hook == "start"] == ["a", "b"]


# The examples of the page


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Write the Python of docs/callbacks.md to a module, and return its folder."""
    folder = tmp_path_factory.mktemp("examples")
    code = re.findall(
        r"^```python\n(.*?)^```$", (jobs.ROOT / "docs/callbacks.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(code) == 5
    (folder / "my_callbacks.py").write_text("\n\n".join(code))
    return folder


def train_with_examples(folder, argv, names, decay):
    """Train a job with examples of the page; return its rows, its last step, and the full tensors of an Ema."""
    sys.path.insert(0, str(folder))
    torch._dynamo.reset()
    options = {"Ema": f"decay = {decay}", "StopBelow": "loss = 5.0", "Samples": "every = 2"}
    tables = ", ".join(f'"my_callbacks:{name}" = {{{options[name]}}}' for name in names if name in options)
    use = ",".join(f"my_callbacks:{name}" for name in names)
    config = manager.load([*argv, f"--callbacks.use={use}", f"--callbacks.options={{{tables}}}"])
    assert not check(config, dist.get_world_size(), "cpu")
    trainer = Trainer(config, read_ranks())
    trainer.train()
    trainer.metrics.close()
    dist.barrier()
    ema = trainer.callbacks.by_name.get("my_callbacks:Ema")
    weights = {} if ema is None else {name: jobs.full(tensor).tolist() for name, tensor in ema.weights.items()}
    sharded = [] if ema is None else [isinstance(tensor, DTensor) for tensor in ema.weights.values()]
    return jobs.logged_steps(Path(config.job.dump_folder)), trainer.current_step, weights, sharded


SAVES = dict(checkpoint__enable="true", checkpoint__interval=2)


PP = dict(parallelism__pipeline_parallel_degree=2, parallelism__pipeline_parallel_microbatch_size=2)
TIED = dict(model__name="gpt2", model__overrides="{dim=32, n_layers=2, n_heads=4, vocab_size=260}")
PLANS = {
    "fsdp_tp": (FSDP, TP, {}),
    "background": (TP, FSDP, dict(checkpoint__async_mode="async")),
    "tied_in_stages": (PP, FSDP, TIED),
    "to_tied_in_stages": (FSDP, PP, TIED),
}


@pytest.mark.parametrize("case", PLANS)
def test_an_average_of_weights_is_resumed_on_another_plan(case, examples, texts, tmp_path):
    before, after, options = PLANS[case]
    one = jobs.arguments(tmp_path / "one", texts, **SHORT, **options)
    ((_, _, expected, _),) = run_ranks(1, train_with_examples, examples, one, ["Ema"], 0.5)
    for plan, steps in ((before, 2), (after, 4)):
        argv = jobs.arguments(
            tmp_path / "two", texts, **SAVES, **options, **plan, **SHORT | dict(training__steps=steps)
        )
        results = run_ranks(2, train_with_examples, examples, argv, ["Ema"], 0.5)
    weights = {name: values for _, _, part, _ in results for name, values in part.items()}
    assert all(step == 4 for _, step, *_ in results)
    assert weights.keys() - {"output.weight"} == expected.keys() - {"output.weight"}
    assert after is PP or all(any(sharded) for *_, sharded in results)
    if after is PP and options is TIED:
        assert weights["output.weight"] == weights["tok_embeddings.weight"]
    for name in weights.keys() & expected.keys():
        torch.testing.assert_close(torch.tensor(weights[name]), torch.tensor(expected[name]), rtol=1e-3, atol=1e-5)


def test_the_other_examples(examples, texts, tmp_path):
    names = ["LayerNorms", "StopBelow", "Samples"]
    argv = jobs.arguments(tmp_path, texts, **FSDP, training__steps=40)
    (rows, step, *_), *_ = run_ranks(2, train_with_examples, examples, argv, names, 0.5)
    assert 2 <= step < 40 and rows[-1]["loss"] < 5.0 <= rows[-2]["loss"]
    assert re.findall(r"^step (\d+): The", (tmp_path / "samples.txt").read_text(), re.MULTILINE) == [
        str(number) for number in range(2, step + 1, 2)
    ]


def test_norms_of_layers_are_those_of_one_device(examples, texts, tmp_path):
    """Under each plan a rank sees another part: of the samples, of a sequence, of the layers."""
    plans = {
        "one": (1, {}),
        "fsdp": (2, FSDP),
        "tp": (2, dict(parallelism__tensor_parallel_degree=2, activation_checkpoint__mode="full")),
        "pp": (2, dict(parallelism__pipeline_parallel_degree=2)),
    }
    norms = {}
    for plan, (ranks, options) in plans.items():
        argv = jobs.arguments(tmp_path / plan, texts, **SHORT | options)
        ((rows, *_), *_) = run_ranks(ranks, train_with_examples, examples, argv, ["LayerNorms"], 0.5)
        norms[plan] = [value for name, value in rows[0].items() if name.startswith("layer_norms/")]
    assert len(norms["one"]) == 4 and min(norms["one"]) > 0
    for plan in plans:
        assert norms[plan] == pytest.approx(norms["one"], rel=1e-5), plan


# The job


MODULE = """
from dataclasses import dataclass, field
from typing import Any

from torchtitan.core.callbacks import Callback


@dataclass
class Beat(Callback):
    every: int
    notes: list[str] = field(default_factory=list)
    file: Any = None

    def __post_init__(self):
        if self.every < 1:
            raise ValueError("every is below 1")


class Backward(Callback):
    def after_backward(self):
        raise ValueError("no such gradient")


class Plain:
    pass
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    entries = "[torchtitan.callbacks]\nbackward = acme_calls.light:Backward\nbeat = acme_calls.light:Beat\n"
    install(tmp_path / "site", "acme-calls", entries, light=MODULE, broken="1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    registry.installed_entries.cache_clear()
    yield
    registry.installed_entries.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_calls"]:
        del sys.modules[name]


BEAT = '"acme_calls.light:Beat"'


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["backwards"], 'use[0]: given "backwards"; allowed: an installed callback; did you mean "backward"?'),
        (["x.y:Z"], "there is no module x; install its package or add its folder to PYTHONPATH"),
        (
            ["acme_calls.light:Bat"],
            "acme_calls.light:Bat cannot be imported (module 'acme_calls.light' has no attribute",
        ),
        (["acme_calls.broken:Beat"], "cannot be imported (ZeroDivisionError: division by zero)"),
        (["acme_calls.light:Plain"], "is no class derived from torchtitan.engine.Callback; derive it"),
        (["backward,backward"], 'use[1]: given "backward"; allowed: each callback once; drop one'),
        (
            ["acme_calls.light:Beat"],
            "options: given nothing for every; allowed: every = a whole number, which acme_calls",
        ),
        (["acme_calls.light:Beat", f"{{{BEAT} = {{evry = 1, every = 1}}}}"], "did you mean every?"),
        (
            ["acme_calls.light:Beat", f"{{{BEAT} = {{every = 1.5}}}}"],
            "given every = 1.5; allowed: every = a whole number",
        ),
        (
            ["acme_calls.light:Beat", f'{{{BEAT} = {{every = 1, file = "a"}}}}'],
            "allowed: options of acme_calls.light:Beat",
        ),
        (
            ["acme_calls.light:Beat", f"{{{BEAT} = {{every = 0}}}}"],
            "(ValueError: every is below 1); correct its options",
        ),
        (
            ["beat", "{beat = {every = 0}}"],
            "beat cannot be created (ValueError: every is below 1); correct its options",
        ),
        (
            ["backward", "{backwrd = {every = 1}}"],
            'given a table of "backwrd"; allowed: tables of the callbacks in use',
        ),
        (["backward", "{}", "--optimizer.early_step_in_backward"], "which frees gradients early"),
    ],
)
def test_a_check_judges_callbacks(installed, arguments, line):
    options = [f"--callbacks.{key}={value}" for key, value in zip(("use", "options"), arguments, strict=False)]
    argv = ["--model.tokenizer_path=bytes", *options, *arguments[2:]]
    (fault,) = [str(fault) for fault in check(manager.load(argv), 1, "cpu") if "callbacks" in str(fault)]
    assert line in fault


def test_a_job_of_an_installed_callback_is_right(installed):
    options = '{"acme_calls.light:Beat" = {every = 3, notes = ["a"]}}'
    argv = ["--model.tokenizer_path=bytes", "--callbacks.use=backward,acme_calls.light:Beat"]
    config = manager.load([*argv, f"--callbacks.options={options}"])
    assert not check(config, 1, "cpu")
    made = callbacks_of(config.callbacks)
    assert list(made) == ["backward", "acme_calls.light:Beat"] and made["acme_calls.light:Beat"].notes == ["a"]
    with pytest.raises(
        CallbackError, match="callbacks: given <class .* allowed: objects of classes derived from Callback"
    ):
        callbacks_of(config.callbacks, [Quiet])


# State that is refused, left out or new


class Stateful(Callback):
    def __init__(self, kind):
        self.kind, self.loaded = kind, None

    def state_dict(self):
        name, parameter = next(iter(self.engine.model.named_parameters()))
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return {
            "count": {"steps": 3, "names": ["a"]},
            "lambda": {"note": lambda: None},
            "nan": {"value": float("nan")},
            "shape": {"rows": {name: parameter.detach()[:1]}},
            "local": {"rows": {name: local.detach()}},
            "name": {"rows": {"other": parameter.detach()}},
            "tensor": {"value": torch.ones(2)},
            "number": {"losses": {1: 2.5}},  # JSON would make "1" of it
            "numbers": {3: 2.5},
            "nothing": None,
        }[self.kind]

    def load_state_dict(self, state):
        self.loaded = state


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *(("lambda", "'note'"), ("nan", "'value'"), ("shape", "'rows'"), ("local", "'rows'"), ("name", "'rows'")),
        *(("tensor", "'value'"), ("raises", "fails at"), ("number", "'losses'"), ("numbers", "has the key 3;")),
        ("nothing", "returns a NoneType;"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_before_anything_is_written(kind, key, texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, **SAVES, **FSDP, training__steps=2)
    for message in run_ranks(2, failure_of, argv, Stateful(kind)):
        assert re.search(f"rank 0, 1: callback tests.*test_callbacks:Stateful: state_dict.*{key}", message)
    assert not list((tmp_path / "checkpoint").glob("*step*"))


@pytest.mark.parametrize(
    ("values", "dtype", "sentence"),
    [
        ([1], "float32", "no table of tables"),
        ({"a": "text"}, "float32", "no table of tables"),
        ({"a": {}}, "load", "callback.a.weights.w has the type 'load', which is not known"),
    ],
)
def test_foreign_state_in_a_checkpoint_is_refused_in_a_sentence(values, dtype, sentence):
    model = SimpleNamespace(parts=[], named_parameters=lambda: [("w", torch.ones(2))])
    with pytest.raises(CheckpointError, match=sentence):
        CallbackRunner(model, {"a": Quiet()}).targets(values, {"callback.a.weights.w": TensorEntry(dtype, [2])})


def failure_of(argv, *callbacks):
    with pytest.raises(JobError) as error:
        train(argv, *callbacks)
    return str(error.value)


def resumed(argv, *callbacks):
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torchtitan").addHandler(handler)
    logging.getLogger("torchtitan").setLevel(logging.INFO)
    try:
        train(argv, *callbacks)
    finally:
        logging.getLogger("torchtitan").removeHandler(handler)
    return [line for line in lines if line.startswith("callback ")], [getattr(c, "loaded", None) for c in callbacks]


class Later(Quiet):
    pass


def test_values_of_rank_0_are_resumed_and_absent_and_new_callbacks_named(texts, tmp_path):
    def argv(steps):
        return jobs.arguments(tmp_path, texts, **SAVES, **FSDP, training__steps=steps)

    assert run_ranks(2, resumed, argv(2), Stateful("count"))[0] == ([], [None])
    lines, (loaded,) = run_ranks(2, resumed, argv(4), Stateful("count"))[0]
    assert not lines and loaded == {"steps": 3, "names": ["a"]}
    assert run_ranks(2, resumed, argv(6), Later())[0][0] == [
        "callback tests.training.test_callbacks:Stateful is not in the job: its state in the checkpoint is left out",
        "callback tests.training.test_callbacks:Later starts without a state: the checkpoint has none of it",
    ]


# Failures


def failure_in(argv, hook):
    calls, (other, _) = recorders()

    class Failing(Callback):
        pass

    def fail(self, *args):
        raise ValueError("nothing to see")

    setattr(Failing, hook, fail)
    return failure_of(argv, other, Failing()), [hook for _, hook, *_ in calls]


@pytest.mark.parametrize(
    "hook", ["start", "before_step", "after_backward", "after_step", "on_log", "after_save", "end"]
)
def test_a_failing_hook_ends_the_run_and_all_callbacks_hear_of_it(hook, texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, **SAVES, training__steps=2)
    ((message, calls),) = run_ranks(1, failure_in, argv, hook)
    assert re.search(rf"Failing: {hook} fails at \S*test_callbacks.py:\d+: ValueError: nothing to see$", message)
    assert calls[-1] == "on_error" and calls.count("on_error") == 1
    assert ("end" in calls) == (hook == "end")


@pytest.mark.parametrize("kind", [NonFiniteError, ReplicasDiffer, RollBack])
def test_an_end_by_a_guard_stays_one_in_a_hook(kind):
    """A hook may save, and a guard may refuse that."""

    class Saves(Callback):
        def after_step(self, result):
            raise kind("damaged")

    with pytest.raises(kind, match="^damaged$"):
        CallbackRunner(None, {"a": Saves()}).run("after_step", None)


def test_a_number_of_another_name_is_added_and_a_logged_one_stays():
    class Adds(Callback):
        def on_log(self, metrics):
            metrics["half"] = torch.tensor(metrics["loss"] / 2)

    class Changes(Callback):
        def on_log(self, metrics):
            metrics["loss"] = 0.0

    class Texts(Callback):
        def on_log(self, metrics):
            metrics["note"] = "x"

    assert CallbackRunner(None, {"a": Adds()}).on_log({"loss": 4.0}) == {"half": 2.0}
    for callback, text in ((Changes(), "on_log changes loss"), (Texts(), "on_log adds 'note' of type str")):
        with pytest.raises(CallbackError, match=text):
            CallbackRunner(None, {"a": callback}).on_log({"loss": 4.0})


def test_after_backward_of_a_program_is_refused_with_steps_in_backward():
    with pytest.raises(CallbackError, match="callback a: after_backward has no gradients"):
        CallbackRunner(None, {"a": Quiet()}, steps_in_backward=True)


ON_ONE_RANK = """
import os
from torchtitan.core.callbacks import Callback

class Fails(Callback):
    def after_step(self, result):
        if result.step == 2 and os.environ["RANK"] == "1":
            raise ValueError("only here")
"""


def test_a_hook_that_fails_on_one_rank_ends_all_under_the_launcher(texts, tmp_path):
    (tmp_path / "one_rank.py").write_text(ON_ONE_RANK)
    argv = jobs.arguments(tmp_path / "run", texts, **FSDP, **SHORT, callbacks__use="one_rank:Fails")
    code, out, errors = jobs.finish(jobs.start(argv, 2, PYTHONPATH=str(tmp_path)))
    assert code == REFUSED
    assert "callback one_rank:Fails: after_step fails at" in out + errors and "ValueError: only here" in out + errors
