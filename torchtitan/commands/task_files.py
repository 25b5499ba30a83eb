"""What lm-eval (0.4.13) makes of answers: the filters that they go through, and what is counted of a kind of request.

It would tell only behind the last answer what it does not count, and leaves out in silence what it has no use for.

Tasks of lm-eval as files: a YAML says which lines of data are asked in which words, and what is counted.

They are read as data: a tag of YAML, such as the one that names a function of Python, is refused, and so is every key
by which lm-eval would import or fetch something. Data are files of this machine, beside the YAML or below it.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.options import hint
from torchtitan.core.errors import JobError
from torchtitan.importers import yaml_file

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
"""By output_type, each figure and how the documents' values become one."""
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
"""By a filter that takes them."""


def refuse_unknown(where: str, given: Iterable[object], known: Iterable[str], remedy: str = "") -> None:
    """JobError where `given` has what is not in `known`, with what was meant where that is near."""
    allowed = list(known)
    if strange := [str(key) for key in given if key not in allowed]:
        near = "; ".join(filter(None, [*(hint(key, allowed) for key in strange), remedy]))
        told = f"{where}: given {', '.join(strange)}; allowed: {', '.join(allowed) or 'nothing'}"
        raise JobError(f"{told}; {near or 'leave it out'}")


def refuse_what_is_not_counted(task: Mapping[str, Any], where: str) -> None:
    """JobError for a figure or a filter that is none, for what these do not take, and for what is no pattern."""
    kind = task.get("output_type", "generate_until")
    refuse_unknown(f"{where}: output_type", [kind], FIGURES)
    _refuse_kind("repeats", task.get("repeats", 1), *WHOLE, where)
    for entry in tables(task.get("metric_list") or [], f"{where}: metric_list"):
        _refuse_figure(entry, kind, f"{where}: metric_list")
    for entry in tables(task.get("filter_list") or [], f"{where}: filter_list"):
        refuse_unknown(f"{where}: filter_list", entry, ("name", "filter"))
        if set(entry) != {"name", "filter"} or not isinstance(entry["name"], str):
            told = f"given {entry}; allowed: tables with name, a text, and filter, a list of steps"
            raise JobError(f"{where}: filter_list: {told}")
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
    name, how = entry.get("metric"), entry.get("aggregation")
    if name is None or "hf_evaluate" in entry:
        raise JobError(f"{where}: given {entry}; allowed: tables with metric, without hf_evaluate")
    refuse_unknown(f"{where} with output_type = {kind}", [name], FIGURES[kind])
    more = OF_EXACT_MATCH if (name, kind) == ("exact_match", "generate_until") else ()
    refuse_unknown(f"{where}: {name}", entry, ("metric", "aggregation", "higher_is_better", *more))
    own = FIGURES[kind][name]
    if how is not None:
        refuse_unknown(f"{where}: {name}: aggregation", [how], AVERAGES if own in AVERAGES else (own,))
    _refuse_patterns(entry, where)


def _refuse_step(step: Mapping[str, Any], where: str) -> None:
    name = step.get("function")
    if name == "custom":
        raise JobError(f"{where}: given custom, which is code; allowed: filters by name")
    refuse_unknown(f"{where}: function", [name], FILTERS)
    taken = FILTERS[str(name)]
    refuse_unknown(f"{where}: {name}", step, ("function", *taken))
    for key in taken:
        if key in KINDS and (key in step or key in NEEDED):
            _refuse_kind(key, step.get(key), *KINDS[key], f"{where}: {name}")
    _refuse_patterns(step, where)


def _refuse_kind(key: str, given: object, kind: type, words: str, where: str) -> None:
    if not isinstance(given, kind) or isinstance(given, bool) != (kind is bool):
        raise JobError(f"{where}: {key}: given {given!r}; allowed: {words}")


def _refuse_patterns(entry: Mapping[str, Any], where: str) -> None:
    several = entry.get("regexes_to_ignore") or []
    for pattern in [entry.get("regex_pattern", ""), *(several if isinstance(several, list) else [several])]:
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
"""Keys whose values are words and numbers, which lm-eval judges."""
KEYS = (*WORDS, "dataset_path", "dataset_kwargs", "generation_kwargs", "metric_list", "filter_list")
NOTED = ("task_alias", "tag", "metadata", "should_decontaminate", "doc_to_decontamination_query")
GREEDY = {"do_sample": (False,), "temperature": (0, 0.0)}
MAX_NEW_TOKENS = 256
PATTERNS = re.compile(r"[][*?\0]|::")
"""Of a name: what a reader of data would look for, or open, as something else than this file."""


def tasks_in(path: Path) -> dict[str, dict[str, Any]]:
    """Those of a YAML file, or of all in a folder, by name, as lm-eval takes them. JobError where there are none, where
    two have one name, and where one is no data.
    """
    files = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        task = _read(file)
        if task["task"] in found:
            raise JobError(f"{file}: task = {task['task']!r} has been read from another file; give it another name")
        found[task["task"]] = task
    if not found:
        raise JobError(f"--tasks {path}: no file *.yaml in it; give a folder of lm-eval's tasks, or one's file")
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        task = yaml_file.read(file)
    except JobError as error:
        raise JobError(f"{error}; a task is read as data: give a YAML without tags such as !function") from None
    if not isinstance(task.get("task"), str):
        raise JobError(f"{file}: no task, a table with task = its name; take the file out of the folder, or mend it")
    code = "what names code, fetches something or includes another file is not read: write out what it stands for"
    refuse_unknown(str(file), task, KEYS, code)
    greedy_of(task.get("generation_kwargs") or {}, file)
    refuse_what_is_not_counted(task, str(file))
    _refuse_examples(task, file)
    return task | {"dataset_kwargs": {"data_files": _data_of(task, file)}}


def _refuse_examples(task: Mapping[str, Any], file: Path) -> None:
    """lm-eval would take those of another split, which may be the one that is asked."""
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
    """Keys that a task of lm-eval may have and that change nothing here."""
    found = [key for key in NOTED if task.get(key)]
    if task.get("output_type", "generate_until") != "generate_until":
        found += ["generation_kwargs"] if task.get("generation_kwargs") else []
    if task.get("repeats", 1) != 1:  # of the likeliest tokens, which are the same again
        found.append("repeats")
    asked = task.get("test_split") or task.get("validation_split")
    read = {asked, task.get("fewshot_split") if task.get("num_fewshot") else None}
    return found + [key for key in SPLITS if key != "test_split" and task.get(key) and task[key] not in read]


def _data_of(task: Mapping[str, Any], file: Path) -> object:
    """`data_files` with whole paths."""
    given, told = task.get("dataset_path"), task.get("dataset_kwargs")
    if given not in READERS:
        raise JobError(
            f"{file}: dataset_path: given {given!r}; allowed: {', '.join(READERS)}, of a file of this machine; nothing "
            "is fetched"
        )
    if not isinstance(told, dict) or list(told) != ["data_files"]:
        raise JobError(f"{file}: dataset_kwargs: given {told!r}; allowed: data_files, the files of each split")

    def place(name: object) -> object:
        if isinstance(name, dict):
            return {split: place(each) for split, each in name.items()}
        if isinstance(name, list):
            return [place(each) for each in name]
        if not isinstance(name, str) or PATTERNS.search(name):
            told = "allowed: names of files, without * ? [ ] and ::, which would stand for others"
            raise JobError(f"{file}: data_files: given {name!r}; {told}")
        home, found = file.parent.resolve(), Path(os.path.realpath(file.parent / name))  # a loop of links is left so
        if home not in found.parents:
            raise JobError(f"{file}: data_files: given {name!r}, which is {found}; allowed: files in {home}")
        if not os.path.isfile(found):
            raise JobError(f"{file}: data_files: given {name!r}; there is no file {found}; put it there")
        return str(found)

    return place(told["data_files"])


def greedy_of(options: object, where: object) -> tuple[int, list[str]]:
    """Of `generation_kwargs`: how many tokens to write at most, and the texts that end them."""
    if not isinstance(options, dict):
        raise JobError(f"{where}: generation_kwargs: given {options!r}; allowed: a table")
    most, until = options.get("max_gen_toks", MAX_NEW_TOKENS), options.get("until") or []
    until = [until] if isinstance(until, str) else until
    strange = {key: value for key, value in options.items() if value not in GREEDY.get(key, (value,))}
    strange |= {key: value for key, value in options.items() if key not in (*GREEDY, "until", "max_gen_toks")}
    if type(most) is not int or most < 1:
        strange["max_gen_toks"] = most
    if not isinstance(until, list) or not all(isinstance(text, str) for text in until):
        strange["until"] = until
    if strange:
        raise JobError(
            f"{where}: generation_kwargs: given {strange}; allowed: until, texts, max_gen_toks, at least 1, "
            "do_sample = false, temperature = 0: the likeliest tokens are written"
        )
    return most, [text for text in until if text]
