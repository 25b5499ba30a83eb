"""lm-eval's task files are read as data; unsupported features are reported before the model runs."""

import os
import re

import pytest
import yaml

from tests.support.jobs import ROOT
from tests.support.lm_eval_tasks import CHOICE, WRITTEN, write_tasks
from torchtitan.core.errors import JobError
from torchtitan.plugins.eval_tasks.task_files import MAX_NEW_TOKENS, greedy_of, tasks_in, without_effect


def test_tasks_are_read_with_the_files_beside_them(tmp_path):
    folder = write_tasks(tmp_path / "tasks", CHOICE, WRITTEN)
    tasks = tasks_in(folder)
    assert list(tasks) == ["choice", "written"] and list(tasks_in(folder / "choice.yaml")) == ["choice"]
    place = str((folder / "lines.jsonl").resolve())
    assert tasks["choice"] == CHOICE | {"dataset_kwargs": {"data_files": {"test": place}}}


def test_the_task_of_the_docs_is_read(tmp_path):
    (block,) = re.findall(r"```yaml\n(# my_tasks/choice.*?)```", (ROOT / "docs/finetuning.md").read_text(), re.DOTALL)
    write_tasks(tmp_path).joinpath("choice.yaml").write_text(block)
    (tmp_path / "lines.jsonl").rename(tmp_path / "choice.jsonl")
    place = str((tmp_path / "choice.jsonl").resolve())
    assert tasks_in(tmp_path)["choice"] == CHOICE | {"dataset_kwargs": {"data_files": {"test": place}}}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"process_docs": "a.b"}, "given process_docs; allowed: task,"),
        ({"include": "other.yaml"}, "given include; allowed: .* write the content out"),
        ({"class": "a.B"}, "given class; allowed"),
        ({"task": None}, "no task, a table with task = its name"),
        ({"doc_to_txt": "a"}, "given doc_to_txt; allowed: .*; did you mean doc_to_text"),
        (
            {"dataset_path": "allenai/ai2_arc"},
            "dataset_path: given 'allenai/ai2_arc'; allowed: json, .* nothing is fetched",
        ),
        ({"dataset_kwargs": {"data_files": "a", "token": 1}}, "dataset_kwargs: given .*; allowed: data_files"),
        ({"dataset_kwargs": {"data_files": ["https://a.b/c.json"]}}, "there is no file .*; put it there"),
        (
            {"dataset_kwargs": {"data_files": {"test": "../secret.jsonl"}}},
            "'../secret.jsonl', which is .*; allowed: files in",
        ),
        (
            {"dataset_kwargs": {"data_files": "/etc/passwd"}},
            "given '/etc/passwd', which is /etc/passwd; allowed: files in",
        ),
        (
            {"dataset_kwargs": {"data_files": "link.jsonl"}},
            "given 'link.jsonl', which is .*secret.jsonl; allowed: files in",
        ),
        ({"dataset_kwargs": {"data_files": "*.jsonl"}}, r"given '\*.jsonl'; allowed: plain file names, without"),
        ({"dataset_kwargs": {"data_files": "zip://a::b.jsonl"}}, "allowed: plain file names, without"),
        ({"dataset_kwargs": {"data_files": "a\0b"}}, "allowed: plain file names, without"),
        ({"dataset_kwargs": {"data_files": 3}}, "given 3; allowed: plain file names, without"),
        ({"dataset_kwargs": {"data_files": "x" * 5000}}, "there is no file"),
        ({"dataset_kwargs": {"data_files": "loop.jsonl"}}, "there is no file"),
        ({"metric_list": [{"metric": "a", "hf_evaluate": True}]}, "allowed: tables with metric, without hf_evaluate"),
        ({"metric_list": [{"aggregation": "mean"}]}, "allowed: tables with metric, without hf_evaluate"),
        ({"metric_list": "acc"}, "metric_list: given 'acc'; allowed: a list of tables"),
        ({"filter_list": [{"name": "a", "filter": [{"function": "custom"}]}]}, "given custom, which is code"),
        ({"test_split": ["a"]}, r"test_split: given \['a'\]; allowed: the name of a split"),
        ({"num_fewshot": -1}, "num_fewshot: given -1; allowed: a number, at least 0"),
        ({"num_fewshot": 2}, "num_fewshot: given 2 without fewshot_split; allowed with a split that has the examples"),
        ({"generation_kwargs": {"do_sample": True}}, "given {'do_sample': True}; allowed: until"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_data_is_refused(tmp_path, change, message):
    task = {key: value for key, value in (CHOICE | change).items() if value is not None}
    folder = write_tasks(tmp_path / "tasks")
    (folder / "a.yaml").write_text(yaml.safe_dump(task))
    (tmp_path / "secret.jsonl").write_text("{}")
    (folder / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    (folder / "*.jsonl").write_text("{}")  # a reader of data would take link.jsonl, too
    with pytest.raises(JobError, match=message):
        tasks_in(folder)


def steps(*filters):
    return {"filter_list": [{"name": "a", "filter": list(filters)}]}


@pytest.mark.parametrize(
    "task, change, message",
    [
        (CHOICE, {"output_type": "multiple_choise"}, "given multiple_choise; .*; did you mean multiple_choice"),
        (CHOICE, {"metric_list": [{"metric": "acc_nrm"}]}, "given acc_nrm; allowed: acc, .*; did you mean acc_norm"),
        (CHOICE, {"metric_list": [{"metric": "likelihood"}]}, "given likelihood; allowed"),  # pairs, without a mean
        (CHOICE, {"metric_list": [{"metric": "acc", "agregation": "mean"}]}, "given agregation; .*mean aggregation"),
        (CHOICE, {"metric_list": [{"metric": "acc", "aggregation": "none"}]}, "aggregation: given none; allowed: mean"),
        (CHOICE, {"metric_list": [{"metric": "f1", "aggregation": "mean"}]}, "given mean; allowed: f1"),
        (CHOICE, {"metric_list": [{"metric": "exact_match", "ignore_case": 1}]}, "given ignore_case; allowed: metric"),
        (CHOICE, {"metric_list": [{"metric": "word_perplexity"}]}, "= multiple_choice: given word_perplexity"),
        (WRITTEN, {"metric_list": [{"metric": "acc"}]}, "= generate_until: given acc; allowed: exact_match"),
        (WRITTEN, {"output_type": None, "metric_list": [{"metric": "f1"}]}, "output_type = generate_until: given f1"),
        (WRITTEN, {"metric_list": [{"metric": "exact_match", "ignore_cas": True}]}, "did you mean ignore_case"),
        (WRITTEN, {"metric_list": [{"metric": "exact_match", "regexes_to_ignore": ["("]}]}, "a regular expression of"),
        (WRITTEN, {"metric_list": [{"metric": "exact_match", "regexes_to_ignore": 3}]}, "given 3; allowed: a regular"),
        (WRITTEN, {"filter_list": [{"name": "a", "fiter": []}]}, "filter_list: given fiter; .*did you mean filter"),
        (WRITTEN, {"filter_list": [{"filter": []}]}, "allowed: tables with name, a text, and filter, a list of steps"),
        (WRITTEN, steps({"function": "regx"}), "function: given regx; allowed: .*; did you mean regex"),
        (WRITTEN, steps({"function": "regex", "regex_patern": "a"}), "given regex_patern; .*mean regex_pattern"),
        (WRITTEN, steps({"function": "take_first", "k": 2}), "take_first: given k; allowed: function; leave it out"),
        (WRITTEN, steps({"function": "regex", "regex_pattern": "("}), "given '\\('; allowed: a regular expression"),
        (WRITTEN, steps({"function": "take_first_k", "k": "a"}), "take_first_k: k: given 'a'; allowed: a whole number"),
        (WRITTEN, steps({"function": "map"}), "map: mapping_dict: given None; allowed: a table"),
        (WRITTEN, steps({"function": "regex", "group_select": True}), "group_select: given True; allowed: a whole"),
        (WRITTEN, steps(), "filter_list: a: given no step; allowed: at least one; leave it out"),
        (WRITTEN, {"repeats": "a"}, "repeats: given 'a'; allowed: a whole number"),
        (WRITTEN, steps("regex"), "filter_list: given .*; allowed: a list of tables"),
    ],
)  # fmt: skip
def test_what_is_not_counted_is_refused(tmp_path, task, change, message):
    folder = write_tasks(tmp_path / "tasks", task | change)
    with pytest.raises(JobError, match=message):
        tasks_in(folder)


def test_what_has_no_effect_here_is_known():
    assert without_effect(CHOICE) == without_effect(WRITTEN) == []
    published = {"tag": "a", "metadata": {"version": 1}, "should_decontaminate": True, "num_fewshot": 0}
    assert without_effect(CHOICE | published) == ["tag", "metadata", "should_decontaminate"]
    assert without_effect(CHOICE | {"generation_kwargs": {"until": "a"}, "repeats": 3}) == [
        "generation_kwargs",
        "repeats",
    ]
    splits = {"training_split": "train", "validation_split": "val", "fewshot_split": "train"}
    assert without_effect(CHOICE | splits) == ["training_split", "validation_split", "fewshot_split"]
    assert without_effect(CHOICE | splits | {"num_fewshot": 1}) == ["validation_split"]
    assert without_effect(CHOICE | {"test_split": None, "validation_split": "val"}) == []


@pytest.mark.parametrize(
    "text",
    [
        "task: a\nprocess_docs: !function code.run\n",
        "task: !!python/object/apply:os.getcwd []\n",
        "task: [",
        "task: a\x00",
        "task: a\ntask: b\n",
        "metric_list: [&a [1, 1], &b [*a, *a]]\n",  # a short file that expands beyond the memory
        f"num_fewshot: {'1' * 5000}\n",
    ],
    ids=["function", "python", "broken", "control", "twice", "alias", "number"],
)
def test_no_function_of_a_task_is_run(tmp_path, text):
    (tmp_path / "code.py").write_text("raise SystemExit('run')")
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(JobError, match="a.yaml: .*; a task is read as data"):
        tasks_in(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.yaml")
    with pytest.raises(JobError, match="a.yaml is not a regular file"):
        tasks_in(tmp_path)


def test_tasks_that_are_not_there_or_twice(tmp_path):
    with pytest.raises(JobError, match="no file .*yaml in it"):
        tasks_in(tmp_path)
    with pytest.raises(JobError, match="No such file"):
        tasks_in(tmp_path / "none.yaml")
    folder = write_tasks(tmp_path / "tasks", CHOICE)
    (folder / "b.yaml").write_text((folder / "choice.yaml").read_text())
    with pytest.raises(JobError, match="task = 'choice' has been read from another file"):
        tasks_in(folder)


@pytest.mark.parametrize(
    "options",
    [
        "until",
        {"until": 3},
        {"until": [1]},
        {"max_gen_toks": 0},
        {"max_gen_toks": "a"},
        {"temperature": 0.5},
        {"top_k": 3},
    ],
    ids=str,
)
def test_only_the_likeliest_tokens_are_written(options):
    with pytest.raises(JobError, match="a task: generation_kwargs: given .*; allowed"):
        greedy_of(options, "a task")


def test_how_texts_are_written():
    assert greedy_of({}, "") == (MAX_NEW_TOKENS, [])
    assert greedy_of({"until": "a", "temperature": 0}, "") == (MAX_NEW_TOKENS, ["a"])
    assert greedy_of({"until": ["a", ""], "max_gen_toks": 3, "do_sample": False}, "") == (3, ["a"])
