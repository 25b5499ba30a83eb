"""Every file that a user names is opened by torchtitan/core/files.py.

Pipes do not block, devices do not fill the memory, and files that are far larger than expected are refused. The tables
below have to name every option and every argument that takes a path: a new one without an entry fails.
"""

import ast
import json
import os
from contextlib import ExitStack
from functools import partial
from os.path import expanduser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.hostile_paths import KINDS, in_child, make, outcomes
from tests.support.package_sources import FILES, PACKAGE
from torchtitan.adapters import peft_config
from torchtitan.checkpoint import layout
from torchtitan.commands.command_lines import PARSERS
from torchtitan.config.options import columns, options
from torchtitan.core.errors import JobError
from torchtitan.core.files import DeclaredKeys, agreed_value, load_json
from torchtitan.core.hub import local_folder
from torchtitan.datasets.labelled import open_labelled_files
from torchtitan.datasets.record_format import LabelledFields, RecordReader
from torchtitan.datasets.sources import pretokenized
from torchtitan.datasets.sources.files import open_text_files
from torchtitan.datasets.sources.tables import saved_split
from torchtitan.datasets.token_shards import TokenShards
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.datasets.tokenizer.hf_files import read_json as read_tokenizer_file
from torchtitan.metrics.json_lines import read_records
from torchtitan.models.hf import load as hf_load
from torchtitan.models.hf.config import find_config
from torchtitan.models.hf.packed import PackedFormat
from torchtitan.plugins.eval_tasks.task_files import tasks_in

# Options of a job

CHECK = ["check", "--world_size=1"]
PACKED = ["--task.kind=sft", "--data.too_long=drop"]


def options_with_paths() -> set[str]:
    """Return the options, also of tables in lists, with a type that expands ~, as all paths have (kinds.Place)."""
    names = set()
    for name, option in options().items():
        rows = {f"{name}[].{key}": column for key, column in columns(name).items()}
        for key, column in ({name: option} | rows).items():
            if "AfterValidator" in repr(column.annotation) and "expanduser" in repr(column.annotation):
                names.add(key)
    return names


def test_options_named_like_paths_have_the_path_type():
    """`options_with_paths` relies on it. Options without the type are names inside job.dump_folder."""
    endings = ("path", "file", "folder", "dir", "csv")
    by_name = {name for name in options() if name.rpartition(".")[2].split("_")[-1] in endings}
    inside = {"checkpoint.folder", "metrics.save_tb_folder", "profiling.save_traces_folder"}
    inside |= {"profiling.save_memory_snapshot_folder"}
    assert by_name - options_with_paths() - inside == {"job.config_file"}


# option -> (suffix of the file's name, further arguments of the command that reads it)
READ_BY = {
    "job.config_file": (".toml", []),
    "job.dump_folder": ("", []),
    "model.hf_folder": ("", ["--model.name=llama3", "--model.flavor=from_hf"]),
    "model.tokenizer_path": ("", []),
    "adapter.initial_path": ("", ["--adapter.kind=lora"]),
    "checkpoint.initial_load_path": ("", ["--checkpoint.enable"]),
    "data.chat_template": (".jinja", PACKED),
    "data.cache_dir": ("", PACKED),
    "dpo.reference": ("", ["--task.kind=dpo", "--data.too_long=drop"]),
    "parallelism.pipeline_parallel_schedule_csv": (
        ".csv",
        ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_microbatch_size=2"],
    ),
    "training.dataset_path": (".jsonl", ["--training.dataset=text"]),
    "training.sources[].dataset_path": (".jsonl", []),
    "validation.dataset_path": (".jsonl", ["--validation.enable", "--validation.dataset=text"]),
    "validation.sources[].dataset_path": (".jsonl", ["--validation.enable"]),
}
ACCEPTED = {("job.dump_folder", "folder"), ("data.cache_dir", "folder")}
ACCEPTED |= {(option, "oversize") for option in READ_BY if option.endswith("dataset_path")}
"""Cases that are accepted: data may have any size, and an existing folder may be written to."""


def command_of(option: str, path: Path) -> list[str]:
    _, more = READ_BY[option]
    if "[]." in option:
        table = option.partition("[]")[0]
        return [*CHECK, *more, f'--{table}=[{{dataset = "text", dataset_path = "{path}"}}]']
    ranks = ["--world_size=2"] if "pipeline" in option else []
    return [*CHECK, *ranks, *more, f"--{option}={path}"]


def test_every_path_option_refuses_unsuitable_files(tmp_path):
    assert READ_BY.keys() == options_with_paths() | {"job.config_file"}
    cases = {(option, kind): make(kind, tmp_path / f"{option}-{kind}{READ_BY[option][0]}")
             for option in READ_BY for kind in KINDS if (option, kind) not in ACCEPTED}  # fmt: skip
    commands = [command_of(option, path) for (option, _), path in cases.items()]
    results = outcomes(commands, tmp_path)
    problems = {case: got.problem(path.name) for (case, path), got in zip(cases.items(), results, strict=True)}
    assert [f"{case}: {problem}" for case, problem in problems.items() if problem] == []


# Files of folders that a user names


def hf_folder(folder: Path) -> Path:
    """Write a folder with a tokenizer, weights and a config."""
    folder.mkdir(parents=True)
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 256, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {chr(number): number - 33 for number in range(33, 127)} | {"<|endoftext|>": 94}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    table = {"version": "1.0", "added_tokens": [], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(table))
    return folder


def read_tokenizer(folder: Path) -> object:
    return build_tokenizer(folder).as_hf_files()


def read_tokenizer_without_json(folder: Path) -> object:
    """Read the older tokenizer files, without tokenizer.json; a vocab.json is created if it is not the file tested."""
    (folder / "tokenizer.json").unlink(missing_ok=True)
    if not os.path.lexists(folder / "vocab.json"):
        (folder / "vocab.json").write_text('{"<|endoftext|>": 0}')
    return build_tokenizer(folder)


def read_weights(folder: Path) -> object:
    return hf_load.Shards(folder, hf_load.tensor_files(folder), PackedFormat(), ExitStack())


# file of a folder -> function that reads it
FILES_OF_FOLDERS = {
    "tokenizer.json": read_tokenizer,
    "tokenizer.model": read_tokenizer_without_json,
    "a.tiktoken": read_tokenizer_without_json,
    "vocab.json": read_tokenizer_without_json,
    "merges.txt": read_tokenizer_without_json,
    "tokenizer_config.json": read_tokenizer,
    "chat_template.jinja": read_tokenizer,
    "special_tokens_map.json": read_tokenizer,
    "added_tokens.json": read_tokenizer,
    "config.json": find_config,
    "model.safetensors": read_weights,
    "model.safetensors.index.json": read_weights,
    "adapter_config.json": peft_config.read_config,
    "header.json": TokenShards,
    "dataset_dict.json": partial(saved_split, split="train"),
    "args.json": pretokenized._read_args,
    "part.jsonl": lambda folder: open_text_files(str(folder), RecordReader("text")),
    "part.parquet": lambda folder: open_text_files(str(folder), RecordReader("text")),
    "part.csv": lambda folder: open_labelled_files(str(folder), LabelledFields("text", "label", 2)).probe(),
    "manifest.json": layout.read_manifest,
    "state.json": layout.read_state,
    "task.yaml": tasks_in,
    "metrics.jsonl": lambda folder: read_records(folder / "metrics.jsonl"),
}
DATA = ("part.jsonl", "part.parquet", "part.csv")
ACCEPTED_IN_FOLDERS = {(name, kind) for name in DATA for kind in ("folder", "oversize")}
ACCEPTED_IN_FOLDERS |= {("model.safetensors", "oversize"), ("metrics.jsonl", "oversize")}
"""Data may have any size, and a data folder may hold folders of any name."""


@pytest.mark.parametrize("name", FILES_OF_FOLDERS)
def test_unsuitable_files_in_a_folder_are_refused(tmp_path, name):
    for kind in KINDS:
        if (name, kind) in ACCEPTED_IN_FOLDERS:
            continue
        folder = tmp_path / kind if name in DATA else hf_folder(tmp_path / kind)
        make(kind, folder / name)
        got = in_child(partial(FILES_OF_FOLDERS[name], folder))
        problem = got.problem(name)
        assert problem is None, f"{kind}: {problem}"


# Arguments of commands

# (command, argument) -> further arguments; FOLDER is replaced by a model's folder, TARGET by a path that is free
READ_ARGUMENTS = {
    ("check", "job"): [],
    ("import", "line"): [],
    ("generate", "folder"): ["--prompt=a"],
    ("generate", "--prompt-file"): ["FOLDER"],
    ("generate", "--config"): ["FOLDER"],
    ("chat", "folder"): [],
    ("chat", "--config"): ["FOLDER"],
    ("evaluate", "folder"): [],
    ("evaluate", "--config"): ["FOLDER"],
    ("convert", "source"): ["TARGET"],
    ("export", "folder"): ["--to=TARGET"],
    ("export", "--config"): ["FOLDER", "--to=TARGET"],
    ("checkpoints", "folder"): [],
    ("plot", "folder"): [],
    ("report", "runs"): [],
    ("why", "run"): [],
    ("diff", "a"): ["FOLDER"],
    ("diff", "b"): ["FOLDER"],
    ("replay", "run"): ["--step=1"],
    ("verify", "run"): [],
    ("presets", "--model"): ["cp", "sft_lora", "TARGET"],
    ("prepare", "--dataset-path"): ["--tokenizer_path=bytes", "--output=TARGET"],
    ("prepare", "--tokenizer-path"): ["--output=TARGET", "--dataset=python_stdlib"],
    ("prepare", "--verify"): [],
    ("schedule", "--csv"): ["--pp=2"],
}
NO_FILES_TO_READ = {
    *(("contract", name) for name in ("package", "--options", "--only")),
    *(("bench", "--out"), ("bench", "--plot"), ("evaluate", "--out"), ("evaluate", "--plot"), ("plot", "--to")),
    *(("estimate", "--gpu"), ("why", "--gpu"), ("report", "--to"), ("sweep", "--over"), ("sweep", "--to")),
    *(("export", "--to"), ("convert", "target"), ("schedule", "--out"), ("prepare", "--output")),
    *(("bench", "--sweep"), ("chat", "--system"), ("convert", "--add-tokens"), ("convert", "--eos-token")),
    *(("generate", "--prompt"), ("init", "file"), ("prepare", "--text-field"), ("presets", "arguments")),
    *(("presets", "--data"), ("schedule", "--schedule"), ("schedule", "--write-csv"), ("bench", "--hardware")),
    *(("export", "--push"), ("download", "source")),
    *(("plan", "--gpu"), ("plan", "--from"), ("plan", "--plot"), ("plan", "--write")),
    *(("plan", "--trace"), ("rehearse", "--trace")),
    *(("manifest", f"--{name}") for name in ("image", "volume", "shm", "time", "queue", "name")),
}
"""Arguments for files that are written, which may be pipes, and for text that is no path."""


def text_arguments() -> set[tuple[str, str]]:
    """Return (command, argument) of all that take free text: no number, flag or choice. Jobs are listed as `check`."""
    arguments = {("check", "job")}
    for command, parser in ((command, make_parser()) for command, make_parser in PARSERS.items()):
        jobs = ("job", "--config") if parser.takes == "job" else ()
        for action in parser._actions:
            name = (action.option_strings or [action.dest])[0]
            if action.nargs != 0 and action.type in (None, Path, expanduser, local_folder) and name not in jobs:
                arguments.add((command, name))
    return arguments


def test_every_path_argument_refuses_unsuitable_files(tmp_path):
    # lm-eval is needed, and its reader is tested above; a script is run by Python (tests/launcher/test_script.py)
    other_tests = {("evaluate", "--tasks"), ("run", "script")}
    assert text_arguments() == READ_ARGUMENTS.keys() | NO_FILES_TO_READ | other_tests
    folder, cases, commands = hf_folder(tmp_path / "model"), [], []
    for (command, argument), more in READ_ARGUMENTS.items():
        for kind in KINDS:
            if argument.startswith("--") or kind != "folder" or argument in ("job", "line"):
                path = make(kind, tmp_path / f"{command}{argument}-{kind}")
                path_arguments = [f"{argument}={path}"] if argument.startswith("--") else [str(path)]
                replacements = {"FOLDER": str(folder), "--to=TARGET": f"--to={tmp_path}/new"}
                replacements |= {"TARGET": f"{tmp_path}/new", "--output=TARGET": f"--output={tmp_path}/new"}
                cases.append((command, argument, kind, path.name))
                commands.append([command, *path_arguments, *(replacements.get(part, part) for part in more)])
    modules = [
        f"torchtitan.commands.{command}" for command in ("generate", "evaluate", "chat", "convert", "export", "report")
    ]
    problems = [(*case, got.problem(case[-1])) for case, got in
                zip(cases, outcomes(commands, tmp_path, *modules), strict=True)]  # fmt: skip
    failures = [part for part in problems if part[-1] is not None]
    assert not failures, "\n".join(map(str, failures))


# All readers

READS = ("open", "os.open", "gzip.open", "read_text", "read_bytes", "safe_open", "load_file", "json.load", "memmap")
READS += ("read_table", "read_metadata", "ParquetFile", "memory_map", "fromfile", "loadtxt")
OF_CHECKPOINTS = ("read_bytes", "layout.read_bytes", "storage.read_metadata")
"""Functions of torchtitan/checkpoint that read by files.read_file."""
CHECKED = {
    "plugins/neurocache/authors_format.py": "require_file before load_file",
    "adapters/peft_folder.py": "require_file before load_file",
    "datasets/labelled.py": "require_file before pyarrow's",
    "datasets/sources/tables.py": "require_file before memory_map and pyarrow's",
    "datasets/token_shards.py": "maps what TokenReader has opened; writes",
    "models/hf/load.py": "require_file before safe_open",
    "training/reference_logprobs.py": "require_file before safe_open",
}
OWN_FILES = {
    "contract/checks.py": "in a temporary folder",
    "commands/script_rank.py": "the end that an engine of this rank has passed on",
    "core/files.py": "the one function",
    "checkpoint/folders.py": "writes, and syncs its files",
    "checkpoint/hashed_files.py": "writes",
    "cli.py": "/dev/null",
    "commands/bench.py": "writes; the log of a job that it has started",
    "commands/plan.py": "writes; the first bytes of a regular file that it would replace",
    "commands/report.py": "a picture that it has drawn",
    "commands/sweep.py": "writes",
    "commands/presets.py": "writes; presets of the package",
    "datasets/preparing.py": "a lock",
    "datasets/template_worker.py": "/proc",
    "launcher/forks.py": "a file that the launcher or the fork server has written; /proc",
    "launcher/hangs.py": "writes",
    "launcher/run_folder.py": "/proc; writes",
    "launcher/admission.py": "writes; reads its secret without following links, at most 65 bytes of a regular file",
    "launcher/processes.py": "/proc",
    "planner/rehearsal.py": "the current folder, to return to it",
    "process/exit.py": "/dev/null",
    "training/plan_replay.py": "what its own ranks have written to a temporary folder",
    "process/gloo_ranks.py": "stacks of its own ranks, in a temporary folder",
    "metrics/json_lines.py": "writes",
    "metrics/run_end.py": "writes",
    "models/hf/save.py": "writes",
    "plugins/gguf/export.py": "the weights that the export has written and read again",
    "process/machine.py": "/sys",
    "process/ranks.py": "/proc",
    "training/preflight.py": "sources of the package",
    "process/heartbeat.py": "memory that ranks share",
}


def test_only_listed_modules_open_files():
    """OWN_FILES open no user's file; CHECKED call libraries that open a path after `require_file`."""
    files = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                is_method = called.endswith(".open") and not called.endswith(("image.open", "self.open", "source.open"))
                if called in OF_CHECKPOINTS:
                    continue
                if called in READS or called.rpartition(".")[2] in READS[3:] or is_method:
                    files.add(str(path.relative_to(PACKAGE)))
    assert files == CHECKED.keys() | OWN_FILES.keys()
    for name in CHECKED.keys() - {"datasets/token_shards.py"}:
        assert "require_file(" in (PACKAGE / name).read_text()


KEYS = DeclaredKeys(
    used=frozenset({"hidden_size"}),
    harmless=frozenset({"use_cache"}),
    defaults={"is_causal": True, "pretraining_tp": 1},
    read_when_private=frozenset({"_attn_implementation"}),
)


@pytest.mark.parametrize(
    "content",
    [
        {"hidden_size": 8},
        {"use_cache": True},
        {"is_causal": True, "pretraining_tp": 1},
        {"next_month": None, "b": False, "c": 0, "d": "", "e": [], "f": {}, "g": 0.0},
        {"_name_or_path": "x/y"},
    ],
    ids=["used", "harmless", "default", "empty", "underscore"],
)
def test_keys_without_effect(content):
    assert KEYS.unknown(content) == {}
    KEYS.check(content, "config.json", "remove it")


@pytest.mark.parametrize(
    "content",
    [
        {"is_causal": "no"},
        {"is_causal": False},
        {"pretraining_tp": 2},
        {"next_month": 1},
        {"_attn_implementation": "x"},
        {"next": [0]},
    ],
    ids=["not the default", "off where the default is on", "another number", "unknown", "read underscore", "list"],
)
def test_keys_that_may_have_an_effect_are_refused_by_name(content):
    (key,) = content
    with pytest.raises(JobError, match=rf"^config.json has a key .*: {key} = .*; remove it$"):
        KEYS.check({"hidden_size": 8} | content, "config.json", "remove it")


TWICE = """{"a": {"b": 1, "c": 2, "b": true}}"""


@pytest.mark.parametrize(
    "name, read",
    [
        ("config.json", lambda path: find_config(path.parent)),
        (hf_load.INDEX, lambda path: hf_load.tensor_files(path.parent)),
        (peft_config.CONFIG, lambda path: peft_config.read_config(path.parent)),
        ("tokenizer_config.json", read_tokenizer_file),
        ("args.json", lambda path: pretokenized.PretokenizedBlocks(str(path.parent), "train")),
        ("header.json", lambda path: TokenShards(path.parent)),
        ("dataset_dict.json", lambda path: saved_split(str(path.parent), "train")),
    ],
)
def test_a_key_that_is_there_twice_is_refused_in_every_json_file(name, read, tmp_path):
    """Readers would take the last of its values, also where the first is the one that was meant."""
    (tmp_path / name).write_text(TWICE)
    with pytest.raises(JobError, match=f"{name}.*the key 'b' is there twice"):
        read(tmp_path / name)
    assert load_json('{"a": {"b": 1}, "b": 2}') == {"a": {"b": 1}, "b": 2}
    assert load_json('{"a": [1], "b": 2, "a": [1]}') == {"a": [1], "b": 2}, "its values agree"


def test_all_unknown_keys_are_named_and_long_values_cut():
    with pytest.raises(JobError, match=r"has keys .* first = 1, second = '(x){119}\.\.\.; ask"):
        KEYS.check({"first": 1, "second": "x" * 1000}, "config.json", "ask")


def test_sources_agree_or_are_refused():
    assert agreed_value("theta", {"a": None, "b": None}, "fix") is None
    assert agreed_value("theta", {"a": None, "b": 2.0, "c": 2}, "fix") == 2
    with pytest.raises(JobError, match=r"^theta: a is 1, but c is 2; they must be equal; remove one$"):
        agreed_value("theta", {"a": 1, "b": None, "c": 2}, "remove one")
