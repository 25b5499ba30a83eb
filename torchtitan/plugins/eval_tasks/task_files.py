"""Read and check task files of lm-eval (0.4.13).

A YAML file describes the prompts made from each record of the data, the filters applied to the answers, and the
metrics. Filters and metrics are checked here because lm-eval reports an unknown metric only after the last answer and
silently ignores options that it does not use.

Task files are read as data: YAML tags, for example for a Python function, are refused, and so is every key
that makes lm-eval import or download something. Data files must be in the YAML's folder or below it.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.options import hint
from torchtitan.core import yaml_file
from torchtitan.core.errors import JobError

AVERAGES = ("mean", "nanmean", "median")
FIGURES = {
    "multiple_choice": {
        **dict.fromkeys(("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match"), "mean"),
        **{"f1": "f1", "mcc": "matthews_corrcoef", "brier_score": "brier_score"},
    },
    "loglikelihood": {"acc": "mean", "perplexity": "perplexity"},
    "loglikelihood_rolling": {
        **dict.fromkeys(("word_perplexity", "byte_perplexity"), "weighted_perplexity"),
        "bits_per_byte": "bits_per_byte",
    },
    "generate_until": {"exact_match": "mean", "bleu": "bleu", "chrf": "chrf", "chrf++": "chrf++", "ter": "ter"},
}
"""output_type -> metric -> aggregation over the documents."""
OF_EXACT_MATCH = ("regexes_to_ignore", "ignore_case", "ignore_punctuation", "ignore_numbers")
OF_REGEX = ("regex_pattern", "group_select", "fallback")
FILTERS: dict[str, tuple[str, ...]] = {
    "regex": OF_REGEX,
    "regex_pos": OF_REGEX,
    "multi_choice_regex": (*OF_REGEX, "ignore_case", "ignore_punctuation", "regexes_to_ignore"),
    "map": ("mapping_dict", "default_value"),
    "take_first_k": ("k",),
    **dict.fromkeys(("take_first", "majority_vote", "lowercase", "uppercase", "remove_whitespace", "format_span"), ()),
}
WHOLE, TABLE = (int, "a whole number"), (dict, "a table")
KINDS: dict[str, tuple[type, str]] = {
    **{"k": WHOLE, "group_select": WHOLE, "mapping_dict": TABLE},
    **{"ignore_case": (bool, "true or false"), "ignore_punctuation": (bool, "true or false")},
}
NEEDED = ("k", "mapping_dict")
"""Options that a filter requires if it takes them."""


def refuse_unknown(where: str, names: Iterable[object], allowed_names: Iterable[str], remedy: str = "") -> None:
    """Raise JobError if `names` has entries that are not in `allowed_names`, suggesting similar names."""
    allowed = list(allowed_names)
    if unknown_names := [str(key) for key in names if key not in allowed]:
        near = "; ".join(filter(None, [*(hint(key, allowed) for key in unknown_names), remedy]))
        message = f"{where}: given {', '.join(unknown_names)}; allowed: {', '.join(allowed) or 'nothing'}"
        raise JobError(f"{message}; {near or 'leave it out'}")


def refuse_what_is_not_counted(task: Mapping[str, Any], where: str) -> None:
    """Raise JobError for unknown metrics or filters, options that these do not take, and invalid patterns."""
    kind = task.get("output_type", "generate_until")
    refuse_unknown(f"{where}: output_type", [kind], FIGURES)
    _refuse_kind("repeats", task.get("repeats", 1), *WHOLE, where)
    for entry in tables(task.get("metric_list") or [], f"{where}: metric_list"):
        _refuse_figure(entry, kind, f"{where}: metric_list")
    for entry in tables(task.get("filter_list") or [], f"{where}: filter_list"):
        refuse_unknown(f"{where}: filter_list", entry, ("name", "filter"))
        if set(entry) != {"name", "filter"} or not isinstance(entry["name"], str):
            message = f"given {entry}; allowed: tables with name, a text, and filter, a list of steps"
            raise JobError(f"{where}: filter_list: {message}")
        steps = list(tables(entry["filter"], f"{where}: filter_list"))
        if not steps:
            raise JobError(f"{where}: filter_list: {entry['name']}: given no step; allowed: at least one; leave it out")
        for step in steps:
            _refuse_step(step, f"{where}: filter_list")


def tables(entries: object, where: str) -> Iterator[Mapping[str, Any]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise JobError(f"{where}: given {entries!r}; allowed: a list of tables")
    yield from entries


def _refuse_figure(entry: Mapping[str, Any], kind: str, where: str) -> None:
    name, aggregation = entry.get("metric"), entry.get("aggregation")
    if name is None or "hf_evaluate" in entry:
        raise JobError(f"{where}: given {entry}; allowed: tables with metric, without hf_evaluate")
    refuse_unknown(f"{where} with output_type = {kind}", [name], FIGURES[kind])
    extra_keys = OF_EXACT_MATCH if (name, kind) == ("exact_match", "generate_until") else ()
    refuse_unknown(f"{where}: {name}", entry, ("metric", "aggregation", "higher_is_better", *extra_keys))
    default = FIGURES[kind][name]
    if aggregation is not None:
        refuse_unknown(f"{where}: {name}: aggregation", [aggregation], AVERAGES if default in AVERAGES else (default,))
    _refuse_patterns(entry, where)


def _refuse_step(step: Mapping[str, Any], where: str) -> None:
    name = step.get("function")
    if name == "custom":
        raise JobError(f"{where}: given custom, which is code; allowed: filters by name")
    refuse_unknown(f"{where}: function", [name], FILTERS)
    allowed_keys = FILTERS[str(name)]
    refuse_unknown(f"{where}: {name}", step, ("function", *allowed_keys))
    for key in allowed_keys:
        if key in KINDS and (key in step or key in NEEDED):
            _refuse_kind(key, step.get(key), *KINDS[key], f"{where}: {name}")
    _refuse_patterns(step, where)


def _refuse_kind(key: str, value: object, kind: type, description: str, where: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise JobError(f"{where}: {key}: given {value!r}; allowed: {description}")


def _refuse_patterns(entry: Mapping[str, Any], where: str) -> None:
    ignored_patterns = entry.get("regexes_to_ignore") or []
    for pattern in [
        entry.get("regex_pattern", ""),
        *(ignored_patterns if isinstance(ignored_patterns, list) else [ignored_patterns]),
    ]:
        try:
            re.compile(pattern)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise JobError(f"{where}: given {pattern!r}; allowed: a regular expression of Python; {error}") from None


READERS = ("json", "csv", "parquet", "text")
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
WORDS = (
    *("task", "task_alias", "tag", "description", "gen_prefix", "target_delimiter", "fewshot_delimiter"),
    *("doc_to_text", "doc_to_target", "doc_to_choice", "output_type", "should_decontaminate"),
    *SPLITS,
    *("num_fewshot", "repeats", "metadata", "doc_to_decontamination_query"),
)
"""Keys with text and numbers as values, which lm-eval checks itself."""
KEYS = (*WORDS, "dataset_path", "dataset_kwargs", "generation_kwargs", "metric_list", "filter_list")
NOTED = ("task_alias", "tag", "metadata", "should_decontaminate", "doc_to_decontamination_query")
GREEDY = {"do_sample": (False,), "temperature": (0, 0.0)}
MAX_NEW_TOKENS = 256
PATTERNS = re.compile(r"[][*?\0]|::")
"""Parts of a file name that a data reader would treat as a glob or as another kind of path."""


def tasks_in(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tasks of a YAML file, or of all YAML files in a folder, by name, as lm-eval takes them.

    Raises JobError if there are none, if two have the same name, or if a file is not plain data.
    """
    files = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
    tasks: dict[str, dict[str, Any]] = {}
    for file in files:
        task = _read(file)
        if task["task"] in tasks:
            raise JobError(f"{file}: task = {task['task']!r} has been read from another file; give it another name")
        tasks[task["task"]] = task
    if not tasks:
        raise JobError(f"--tasks {path}: no file *.yaml in it; give a folder of lm-eval's tasks, or one's file")
    return tasks


def _read(file: Path) -> dict[str, Any]:
    try:
        task = yaml_file.read(file)
    except JobError as error:
        raise JobError(f"{error}; a task is read as data: give a YAML without tags such as !function") from None
    if not isinstance(task.get("task"), str):
        raise JobError(f"{file}: no task, a table with task = its name; take the file out of the folder, or mend it")
    code = "keys that name code, download data or include other files are not read: write the content out"
    refuse_unknown(str(file), task, KEYS, code)
    greedy_of(task.get("generation_kwargs") or {}, file)
    refuse_what_is_not_counted(task, str(file))
    _refuse_examples(task, file)
    return task | {"dataset_kwargs": {"data_files": _data_of(task, file)}}


def _refuse_examples(task: Mapping[str, Any], file: Path) -> None:
    """Refuse few-shot examples without a split for them: lm-eval may take them from the evaluated split."""
    for key in SPLITS:
        if not isinstance(task.get(key, ""), str | None):
            raise JobError(f"{file}: {key}: given {task[key]!r}; allowed: the name of a split")
    number = task.get("num_fewshot") or 0
    if type(number) is not int or number < 0:
        raise JobError(f"{file}: num_fewshot: given {number!r}; allowed: a number, at least 0")
    if number and not task.get("fewshot_split"):
        raise JobError(
            f"{file}: num_fewshot: given {number} without fewshot_split; allowed with a split that has the examples; "
            "name it and its file in data_files"
        )


def without_effect(task: Mapping[str, Any]) -> list[str]:
    """Return the keys of a task that have no effect here."""
    unused_keys = [key for key in NOTED if task.get(key)]
    if task.get("output_type", "generate_until") != "generate_until":
        unused_keys += ["generation_kwargs"] if task.get("generation_kwargs") else []
    if task.get("repeats", 1) != 1:  # greedy decoding repeats the same answer
        unused_keys.append("repeats")
    evaluated_split = task.get("test_split") or task.get("validation_split")
    read = {evaluated_split, task.get("fewshot_split") if task.get("num_fewshot") else None}
    return unused_keys + [key for key in SPLITS if key != "test_split" and task.get(key) and task[key] not in read]


def _data_of(task: Mapping[str, Any], file: Path) -> object:
    """Return `data_files` with absolute paths."""
    kind, data_kwargs = task.get("dataset_path"), task.get("dataset_kwargs")
    if kind not in READERS:
        raise JobError(
            f"{file}: dataset_path: given {kind!r}; allowed: {', '.join(READERS)}, of a file of this machine; nothing "
            "is fetched"
        )
    if not isinstance(data_kwargs, dict) or list(data_kwargs) != ["data_files"]:
        raise JobError(f"{file}: dataset_kwargs: given {data_kwargs!r}; allowed: data_files, the files of each split")

    def place(name: object) -> object:
        if isinstance(name, dict):
            return {split: place(entry) for split, entry in name.items()}
        if isinstance(name, list):
            return [place(entry) for entry in name]
        if not isinstance(name, str) or PATTERNS.search(name):
            message = "allowed: plain file names, without the patterns * ? [ ] and ::"
            raise JobError(f"{file}: data_files: given {name!r}; {message}")
        # realpath does not fail on a cycle of links
        folder, target = file.parent.resolve(), Path(os.path.realpath(file.parent / name))
        if folder not in target.parents:
            raise JobError(f"{file}: data_files: given {name!r}, which is {target}; allowed: files in {folder}")
        if not os.path.isfile(target):
            raise JobError(f"{file}: data_files: given {name!r}; there is no file {target}; put it there")
        return str(target)

    return place(data_kwargs["data_files"])


def greedy_of(options: object, where: object) -> tuple[int, list[str]]:
    """Return the maximum number of new tokens and the stop strings of `generation_kwargs`."""
    if not isinstance(options, dict):
        raise JobError(f"{where}: generation_kwargs: given {options!r}; allowed: a table")
    most, until = options.get("max_gen_toks", MAX_NEW_TOKENS), options.get("until") or []
    until = [until] if isinstance(until, str) else until
    unsupported = {key: value for key, value in options.items() if value not in GREEDY.get(key, (value,))}
    unsupported |= {key: value for key, value in options.items() if key not in (*GREEDY, "until", "max_gen_toks")}
    if type(most) is not int or most < 1:
        unsupported["max_gen_toks"] = most
    if not isinstance(until, list) or not all(isinstance(text, str) for text in until):
        unsupported["until"] = until
    if unsupported:
        raise JobError(
            f"{where}: generation_kwargs: given {unsupported}; allowed: until, texts, max_gen_toks, at least 1, "
            "do_sample = false, temperature = 0: the likeliest tokens are written"
        )
    return most, [text for text in until if text]
