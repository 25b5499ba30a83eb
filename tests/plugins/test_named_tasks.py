"""lm-eval's own tasks by name, and our model as one of its model classes.

Where lm-eval is installed, tasks read data sets from folders of the working folder, as `datasets` does, and the metrics
are compared with those of lm-eval's class for transformers models.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.hf_parity import build
from torchtitan import cli
from torchtitan.core.errors import JobError
from torchtitan.datasets.tokenizer.byte_level import ByteTokenizer
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.llama.model import HF, Llama
from torchtitan.plugins.eval_tasks import __main__ as lm_eval_command
from torchtitan.plugins.eval_tasks.named_tasks import is_names, open_named_tasks

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, of extra eval")
ARGS = LlamaArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16, max_seq_len=256)
BYTES = ByteTokenizer()


def test_an_argument_is_a_path_if_it_exists_or_looks_like_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arc").mkdir()
    assert [is_names(text) for text in ("hellaswag", "a,b", "arc", "tasks/a", "b.yaml")] == [
        True,
        True,
        False,
        False,
        False,
    ]


class FakeTask:
    def __init__(self, **flags):
        self.__dict__ |= flags
        self.config = {"num_fewshot": flags.get("shots")}

    def get_config(self, key):
        return self.config[key]

    def set_config(self, key, value):
        self.config[key] = value


def fake_package(monkeypatch, tasks):
    """Put a module in the place of lm_eval.tasks, whose manager knows these tasks; an exception is raised."""

    def load(self, names):
        for name in names:
            if isinstance(tasks[name], Exception):
                raise tasks[name]
        return {"tasks": {name: tasks[name] for name in names}, "groups": {}, "group_map": {}}

    manager = type("TaskManager", (), {"all_tasks": sorted(tasks), "load": load})
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", SimpleNamespace(TaskManager=manager))


def test_names_are_judged_before_their_tasks_are_opened(monkeypatch):
    far = ConnectionError("no route")
    tasks = {"arc_easy": FakeTask(), "gsm8k": FakeTask(shots=5), "humaneval": FakeTask(UNSAFE_CODE=True), "far": far}
    fake_package(monkeypatch, tasks)
    opened = open_named_tasks(["arc_easy", "gsm8k"])["tasks"]
    assert [task.config["num_fewshot"] for task in opened.values()] == [0, 5]
    for names, message in (
        (
            ["arc_eazy"],
            "given 'arc_eazy'; allowed: a file, a folder, or tasks of lm-eval by name; did you mean one of arc_easy",
        ),
        (["zzzz"], "`lm_eval ls tasks` lists them"),
        (["gsm8k", "humaneval"], "given humaneval; allowed: tasks of text that do not run what the model writes"),
        (["far"], "does not open it: ConnectionError: no route; data that are not on this machine need a connection"),
    ):
        with pytest.raises(JobError) as error:
            open_named_tasks(names)
        assert message in str(error.value)


def test_the_command_of_lm_eval_needs_the_package(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert lm_eval_command.main() == 2
    assert "pip install 'torchtitan-toml[eval]'" in capsys.readouterr().err


WORDS = ("bake", "cut", "mend", "paint", "fold")
DATA = {
    "Rowan/hellaswag": (
        ("train", "validation"),
        [
            {"ind": i, "activity_label": word, "ctx_a": f"they {word}", "ctx_b": "it", "ctx": f"they {word} it",
             "endings": [f"then {other}." for other in WORDS[:4]], "label": str(i % 4)}
            for i, word in enumerate(WORDS)
        ],
        "default",
    ),
    "allenai/ai2_arc": (
        ("train", "validation", "test"),
        [
            {"id": word, "question": f"Who can {word}?", "answerKey": "ABC"[i % 3],
             "choices": {"text": ["a cook", f"a {word}er", "no one"], "label": ["A", "B", "C"]}}
            for i, word in enumerate(WORDS)
        ],
        "ARC-Easy",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Create a folder with a tiny model, and data sets in the folders that their names stand for."""
    folder = tmp_path_factory.mktemp("named")
    HF.save_hf(folder / "model", build(Llama, ARGS).state_dict(), ARGS)
    for name, content in BYTES.as_hf_files().items():
        (folder / "model" / name).write_bytes(content)
    for path, (splits, rows, config) in DATA.items():
        (folder / path).mkdir(parents=True)
        for split in splits:
            (folder / path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = "".join(f"  - {{split: {split}, path: {split}.jsonl}}\n" for split in splits)
        (folder / path / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")
    return folder


@needs_lm_eval
def test_registered_tasks_by_name_equal_lm_eval_for_transformers(home, monkeypatch, capsys):
    """Of the registry's fourteen thousand files only those of these tasks are read here."""
    from lm_eval import simple_evaluate
    from lm_eval import tasks as registry

    from torchtitan.plugins.eval_tasks import lm_eval_model

    monkeypatch.chdir(home)
    monkeypatch.setenv("HF_HOME", str(home / "cache"))
    folder = Path(registry.__file__).parent
    manager = registry.TaskManager(include_path=[folder / "hellaswag", folder / "arc"], include_defaults=False)
    monkeypatch.setattr(registry, "TaskManager", lambda: manager)
    argv = ["evaluate", "model", "--tasks=hellaswag,arc_easy", "--training.seq_len=256", "--out=found.json"]
    assert cli.main(argv) == 0, capsys.readouterr().err
    results = json.loads((home / "found.json").read_text())["tasks"]
    options = dict(tasks=["hellaswag", "arc_easy"], task_manager=manager, bootstrap_iters=0, log_samples=False)
    hf = "pretrained=model,dtype=float32,max_length=256,logits_cache=False"
    expected = simple_evaluate("hf", hf, device="cpu", batch_size=2, **options)["results"]
    of_model = dict(model_args="path=model,training.seq_len=256", batch_size=2, device="cuda:0")  # lm-eval's default
    ours = simple_evaluate(lm_eval_model.NAME, **of_model, **options)["results"]
    for name, row in results.items():
        assert row.pop("documents") == len(WORDS)
        plain = {key: value for key, value in row.items() if "_stderr" not in key}
        assert {*plain} == {"acc,none", "acc_norm,none"}
        for other in (expected, ours):
            assert plain == pytest.approx({key: other[name][key] for key in plain})
    assert cli.main([*argv[:2], "--tasks=hellaswagg"]) == 2
    assert "did you mean one of hellaswag" in " ".join(capsys.readouterr().err.split())


@needs_lm_eval
def test_the_model_class_refuses_what_it_cannot_do(home, monkeypatch):
    from torchtitan.plugins.eval_tasks.lm_eval_model import FolderModel

    monkeypatch.chdir(home)
    for options, message in (
        ({}, "given no path"),
        ({"path": "model", "batch_size": "auto"}, "--batch_size: given auto; allowed: a number"),
        ({"path": "nowhere"}, "no such file or folder"),
    ):
        with pytest.raises(JobError, match=message):
            FolderModel(**options)
    with pytest.raises(JobError, match="evaluate an export with hf"):
        FolderModel.apply_chat_template(None, [])
