"""Tests of loading jobs: each bad input gives exactly its fault lines, and the resolved TOML reproduces the job."""

import json
import os
import random
import re
import types
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import tomli

from torchtitan.config.job import JobConfig
from torchtitan.config.layers import assemble, nest
from torchtitan.config.manager import ConfigError, load, to_toml
from torchtitan.config.options import Fault, columns, describe, help_text, options, options_of, sections, show

REPOSITORY = Path(__file__).parents[2]
SHORTENED = f'"{"x" * 47}...{"x" * 48}"'
"""How a message shows a long text: both ends, as the end of a path names its file."""
STEPS_HELP = options()["training.steps"].help.splitlines()[0]


def write(path: Path, text: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def faults_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(list(argv))
    lines = str(caught.value).split("\n")
    assert lines == [str(fault) for fault in caught.value.faults]
    return lines


# Valid jobs


def test_defaults_without_any_argument():
    assert load([]) == JobConfig()


def test_command_line_over_toml_over_defaults(tmp_path):
    file = write(tmp_path / "job.toml", "[training]\nsteps = 7\nseq_len = 64\n[optimizer]\nlr = 1\n")
    config = load(["--job.config_file", file, "--training.steps", "9"])
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (9, 64, 8)
    assert (config.optimizer.lr, type(config.optimizer.lr)) == (1.0, float)
    assert config.job.config_file == [file]


RUN_FOLDER_OPTIONS = {"checkpoint.folder", "metrics.save_tb_folder"}
RUN_FOLDER_OPTIONS |= {"profiling.save_traces_folder", "profiling.save_memory_snapshot_folder"}
"""Options that name folders inside the run's folder."""
PATH_OPTIONS = {key for key in options() if key.endswith(("_path", "_folder"))} - RUN_FOLDER_OPTIONS
PATH_OPTIONS |= {"data.chat_template", "data.cache_dir", "dpo.reference", "parallelism.pipeline_parallel_schedule_csv"}


def test_a_tilde_is_expanded_in_every_path_option(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    toml = "".join(f'{key} = "~/x"\n' for key in sorted(PATH_OPTIONS))
    write(tmp_path / "base.toml", f'{toml}[[training.sources]]\ndataset = "text"\ndataset_path = "~/x"\n')
    write(tmp_path / "job.toml", 'extends = "~/base.toml"\njob.description = "~/x"\n')
    config = load(["--job.config_file=~/job.toml"])
    values = {key: attrgetter(key)(config) for key in PATH_OPTIONS}
    assert values == dict.fromkeys(PATH_OPTIONS, str(tmp_path / "x")) and len(PATH_OPTIONS) >= 11
    assert config.training.sources[0].dataset_path == str(tmp_path / "x") and config.job.description == "~/x"


def test_extends_finds_a_shipped_job_unless_a_file_has_its_name(tmp_path):
    file = write(tmp_path / "mine.toml", 'extends = "debug_model"\n[training]\nsteps = 7\n')
    training = load([f"--job.config_file={file}"]).training
    assert (training.steps, training.seq_len) == (7, load(["--job.config_file=debug_model"]).training.seq_len)
    write(tmp_path / "debug_model", "[training]\nseq_len = 3\n")
    with pytest.raises(ConfigError, match=r"debug_model.*a name in \.toml"):  # the file is meant
        load([f"--job.config_file={file}"])


def test_files_merge_in_order_after_those_that_they_extend(tmp_path):
    write(tmp_path / "base/a.toml", "[training]\nsteps = 1\nseq_len = 1\nlocal_batch_size = 1\ngc_freq = 1\n")
    write(tmp_path / "base/b.toml", "[training]\nseq_len = 2\nlocal_batch_size = 2\ngc_freq = 2\n")
    first = write(tmp_path / "first.toml", 'extends = ["base/a.toml", "base/b.toml"]\n[training]\ngc_freq = 3\n')
    write(tmp_path / "other.toml", "[training]\nlocal_batch_size = 4\n")
    second = write(tmp_path / "second.toml", 'extends = "other.toml"\n')
    training = load([f"--job.config_file={first}", "--job.config_file", second]).training
    assert (training.steps, training.seq_len, training.gc_freq, training.local_batch_size) == (1, 2, 3, 4)


def test_a_file_may_be_extended_twice_and_tables_are_replaced(tmp_path):
    write(tmp_path / "root.toml", "[model]\noverrides = {n_layers = 2, dim = 64}\n")
    write(tmp_path / "a.toml", 'extends = "root.toml"\n')
    write(tmp_path / "b.toml", 'extends = "root.toml"\n[model.overrides]\nn_heads = 4\n')
    file = write(tmp_path / "c.toml", 'extends = ["a.toml", "b.toml"]\n')
    assert load([f"--job.config_file={file}"]).model.overrides == {"n_heads": 4}


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--training.steps=5"], "training.steps", 5),
        (["--training.steps", "1_000"], "training.steps", 1000),
        (["--training.seq-len", "5"], "training.seq_len", 5),
        (["--checkpoint.load_step", "-1"], "checkpoint.load_step", -1),
        (["--optimizer.lr", "3e-4"], "optimizer.lr", 3e-4),
        (["--optimizer.lr", ".5"], "optimizer.lr", 0.5),
        (["--training.dataloader.num_workers", "2"], "training.dataloader.num_workers", 2),
        (["--compile.enable"], "compile.enable", True),
        (["--compile.enable", "true"], "compile.enable", True),
        (["--compile.enable=True"], "compile.enable", True),
        (["--training.no-shuffle"], "training.shuffle", False),
        (["--training.no_shuffle"], "training.shuffle", False),
        (["--training.shuffle=false"], "training.shuffle", False),
        (["--compile.components", "loss"], "compile.components", ["loss"]),
        (["--compile.components", "loss,model"], "compile.components", ["loss", "model"]),
        (["--compile.components=['loss']"], "compile.components", ["loss"]),
        (["--checkpoint.exclude_from_loading="], "checkpoint.exclude_from_loading", []),
        (["--model.overrides", "{n_layers=4, rope_theta=1e4}"], "model.overrides", {"n_layers": 4, "rope_theta": 1e4}),
        (
            ["--parallelism.module_fqns_per_model_part", '[["a"], ["b", "c"]]'],
            "parallelism.module_fqns_per_model_part",
            [["a"], ["b", "c"]],
        ),
        (["--job.description", "true"], "job.description", "true"),
        (["--job.description=--odd = 1"], "job.description", "--odd = 1"),
        (["--job.description", ""], "job.description", ""),
        (["--activation_checkpoint.selective_ac_option", "3"], "activation_checkpoint.selective_ac_option", "3"),
    ],
)
def test_command_line_forms(arguments, key, value):
    config: Any = load(arguments)
    for part in key.split("."):
        config = getattr(config, part)
    assert config == value and type(config) is type(value)


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path):
    file = write(tmp_path / "job.toml", b"\xef\xbb\xbf[training]\r\nsteps = 3\r\n")
    assert load(["--job.config_file", file]).training.steps == 3


# Invalid files: content -> fault lines; FILE is replaced by the file's name

NO_OPTION = (
    "given no option at all; allowed: a job's options; "
    'write them, or extends = "debug_model" for the job of a first run'
)
BAD_FILES = {
    "unknown option, near": (
        "[training]\nstep = 3\n",
        ["FILE: training.step: given 3; allowed: a known option; did you mean training.steps?"],
    ),
    "unknown option, at home elsewhere": (
        "[optimizer]\nwarmup_steps = 3\n",
        ["FILE: optimizer.warmup_steps: given 3; allowed: a known option; did you mean lr_scheduler.warmup_steps?"],
    ),
    "unknown option, like nothing": (
        "[optimizer]\nfoo = 3\n",
        ["FILE: optimizer.foo: given 3; allowed: a known option; `torchtitan check --help-config` lists them"],
    ),
    "unknown table in a section": (
        "[training.dataloadr]\nnum_workers = 1\n",
        [
            "FILE: training.dataloadr: given {num_workers = 1}; allowed: a known option; "
            "did you mean training.dataloader?"
        ],
    ),
    "unknown section": (
        "[trainin]\nsteps = 3\nseq_len = 1\n",
        ["FILE: trainin: given the section [trainin]; allowed: a section of the job; did you mean training?"],
    ),
    "unknown section, like nothing": (
        "[zzz]\n",
        [
            "FILE: zzz: given the section [zzz]; allowed: a section of the job; sections are "
            + ", ".join(sorted(field.name for field in fields(JobConfig)))
        ],
    ),
    "section as a value": (
        "training = 3\n",
        ["FILE: training: given 3; allowed: a table: [training] and options under it"],
    ),
    "option outside sections": (
        "steps = 3\n",
        ["FILE: steps: given 3; allowed: a known option; did you mean training.steps?"],
    ),
    "quoted key with a dot": (
        '"training.steps" = 3\n',
        ['FILE: "training.steps": given 3; allowed: a known option; did you mean training.steps?'],
    ),
    "number in quotes": (
        '[training]\nsteps = "10"\n',
        ['FILE: training.steps: given "10"; allowed: a whole number >= 1; write 10, without quotes'],
    ),
    "float for a whole number": (
        "[training]\nsteps = 1e3\n",
        ["FILE: training.steps: given 1000.0; allowed: a whole number >= 1; write 1000"],
    ),
    "flag as a number": (
        "[compile]\nenable = 1\n",
        ["FILE: compile.enable: given 1; allowed: true or false; write true"],
    ),
    "flag for a number": (
        "[training]\nsteps = true\n",
        ["FILE: training.steps: given true; allowed: a whole number >= 1; help: " + STEPS_HELP],
    ),
    "out of range": (
        "[optimizer]\nlr = 0\n[optimizer2]\n[training]\nsteps = 0\n",
        [
            "FILE: optimizer2: given the section [optimizer2]; allowed: a section of the job; did you mean optimizer?",
            "FILE: optimizer.lr: given 0; allowed: a number > 0; help: Peak learning rate.",
            "FILE: training.steps: given 0; allowed: a whole number >= 1; help: " + STEPS_HELP,
        ],
    ),
    "unknown word": (
        '[optimizer]\nimplementation = "fusd"\n',
        [
            'FILE: optimizer.implementation: given "fusd"; allowed: one of "for-loop", "foreach", "fused"; '
            'did you mean "fused"?'
        ],
    ),
    "not of the pattern": (
        '[activation_checkpoint]\nselective_ac_option = "0"\n',
        [
            'FILE: activation_checkpoint.selective_ac_option: given "0"; allowed: "op" or a whole number >= 1 in '
            'quotes, as "2"; help: "op": keep matrix products and attention, recompute the rest; a number n: recompute '
            "every n-th block."
        ],
    ),
    "wrong elements of a list, one line for the list": (
        '[compile]\ncomponents = ["modl", 3]\n',
        [
            'FILE: compile.components: given ["modl", 3]; allowed: a list, each one of "model", "loss"; '
            "help: Parts that are compiled."
        ],
    ),
    "wrong values of a table, one line for the table": (
        '[model.overrides]\nn_layers = "4"\ndim = []\n',
        [
            'FILE: model.overrides: given {n_layers = "4", dim = []}; allowed: a table, each value a whole number or a '
            "number or true or false or text or a table, each value a whole number or a number or text; help: Sizes to "
            "change in the flavor, by the field names of the family's arguments, e.g. {n_layers = 4} or {rope_scaling "
            '= {kind = "yarn", factor = 4.0}}; rope_scaling = false turns the scaling off.'
        ],
    ),
    "table for a value": (
        "[training.steps]\nx = 1\n",
        ["FILE: training.steps: given {x = 1}; allowed: a whole number >= 1; help: " + STEPS_HELP],
    ),
    "not numbers": (
        "[optimizer]\nlr = nan\neps = inf\nweight_decay = 1e999\n",
        [
            "FILE: optimizer.lr: given nan; allowed: a number > 0; the number must be finite",
            "FILE: optimizer.eps: given inf; allowed: a number > 0; the number must be finite",
            "FILE: optimizer.weight_decay: given inf; allowed: a number >= 0; the number must be finite",
        ],
    ),
    "not a number in a table": (
        "[model]\noverrides = {norm_eps = nan}\n",
        [
            "FILE: model.overrides: given nan; allowed: a table, each value a whole number or a number or true or "
            "false or text or a table, each value a whole number or a number or text; the number must be finite"
        ],
    ),
    "dates and times": (
        "[job]\ndescription = 1979-05-27\n[training]\nsteps = 07:32:00\n",
        [
            "FILE: job.description: given a date or time, 1979-05-27; allowed: text; quote it if it is meant as text",
            "FILE: training.steps: given a date or time, 07:32:00; allowed: a whole number >= 1; "
            "quote it if it is meant as text",
        ],
    ),
    "too large a number": (
        "[training]\nsteps = 9223372036854775808\n",
        ["FILE: training.steps: given a number of more than 63 bits; allowed: a whole number >= 1"],
    ),
    "a number of thousands of digits": (
        f"[training]\nsteps = {'1' * 5000}\n",
        ["FILE: given a number of thousands of digits; allowed: valid TOML of a job's size"],
    ),
    "brackets without end": (
        f"[training]\nsteps = {'[' * 5000}\n",
        ["FILE: given brackets in hundreds of brackets; allowed: valid TOML of a job's size"],
    ),
    "no TOML": (
        "[training]\nsteps 3\n",
        [
            'FILE: given "steps 3" in line 2, column 7; allowed: valid TOML; '
            "not TOML: Expected '=' after a key in a key/value pair"
        ],
    ),
    "the same key twice": (
        "[training]\nsteps = 3\nsteps = 4\nseq_len = 1\n",
        [
            'FILE: given "steps = 4" in line 3, column 10; allowed: valid TOML; '
            "the same key or table twice: Cannot overwrite a value"
        ],
    ),
    "the same table twice": (
        "[training]\nsteps = 3\n[training]\n",
        [
            'FILE: given "[training]" in line 3, column 10; allowed: valid TOML; '
            "the same key or table twice: Cannot declare ('training',) twice"
        ],
    ),
    "not UTF-8": (
        b'[job]\ndescription = "caf\xe9"\n',
        [
            "FILE: given byte 0xe9 at offset 24, which is not UTF-8; allowed: TOML in UTF-8; save the file as UTF-8",
        ],
    ),
    "UTF-16": (
        "[job]\n".encode("utf-16"),
        ["FILE: given byte 0xff at offset 0, which is not UTF-8; allowed: TOML in UTF-8; save the file as UTF-8"],
    ),
    "job.config_file in a file": (
        '[job]\nconfig_file = ["other.toml"]\n',
        [
            'FILE: job.config_file: given ["other.toml"]; allowed: the command line only; '
            'in a file, write extends = "..."'
        ],
    ),
    "nothing": ("", [f"FILE: {NO_OPTION}"]),
    "comments and empty tables alone": ("# a job\nextends = []\n[training]\n[metrics]\n", [f"FILE: {NO_OPTION}"]),
    "extends nothing sensible": (
        "extends = 3\n[training]\nsteps = 0\n",
        [
            "FILE: extends: given 3; allowed: a file name or a list of them",
            "FILE: training.steps: given 0; allowed: a whole number >= 1; help: " + STEPS_HELP,
        ],
    ),
    "a key that would break the line": (
        '[training]\n"a\\nb" = 1\n',
        [
            "FILE: training.a\\nb: given 1; allowed: a known option; `torchtitan check --help-config` lists them",
        ],
    ),
    "a text that no file can be called": (
        '[job]\ndescription = "a\\u0000b"\n[parallelism]\nmodule_fqns_per_model_part = [["norm\\u0000"]]\n',
        [
            'FILE: job.description: given "a\\u0000b"; allowed: text; the text must not have NUL characters (\\u0000) '
            "in it",
            'FILE: parallelism.module_fqns_per_model_part: given "norm\\u0000"; allowed: a list, each a list, each '
            "text; the text must not have NUL characters (\\u0000) in it",
        ],
    ),
    "an old option that moved": (
        "[training]\nbatch_size = 4\n",
        [
            "FILE: training.batch_size: given 4; allowed: training.local_batch_size, where it has moved; write "
            "training.local_batch_size = 4, or let `torchtitan check FILE --upgrade` translate the file"
        ],
    ),
    "an old option that moved and turned round": (
        "[training]\nenable_loss_parallel = true\n",
        [
            "FILE: training.enable_loss_parallel: given true; allowed: parallelism.disable_loss_parallel, where it has "
            "moved; write parallelism.disable_loss_parallel = false, or let `torchtitan check FILE --upgrade` "
            "translate the file"
        ],
    ),
    "an old option that takes a person": (
        "[experimental]\npipeline_parallel_microbatches = 4\npipeline_parallel_split_points = []\n",
        [
            "FILE: experimental.pipeline_parallel_microbatches: given 4; allowed: "
            "parallelism.pipeline_parallel_microbatch_size, where it has moved; give the samples of one microbatch "
            "there: the batch size divided by the number of microbatches, or let `torchtitan check FILE --upgrade` "
            "translate the file",
            "FILE: experimental.pipeline_parallel_split_points: given []; allowed: "
            "parallelism.module_fqns_per_model_part, where it has moved; leave it out",
        ],
    ),
    "an old option without meaning": (
        '[model]\nnorm_type = "layernorm"\n[quantize.linear.mx]\nrecipe_name = "x"\n',
        [
            'FILE: model.norm_type: given "layernorm"; allowed: no such option here (norms are RMSNorm); leave it out',
            'FILE: quantize.linear.mx.recipe_name: given "x"; allowed: no such option here (mx formats are not in this '
            "version); leave it out",
        ],
    ),
    "unknown in an old section": (
        "[experimental]\nfoo = 1\n",
        ["FILE: experimental.foo: given 1; allowed: a known option; `torchtitan check --help-config` lists them"],
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(name, tmp_path):
    content, expected = BAD_FILES[name]
    file = write(tmp_path / "job.toml", content)
    assert faults_of("--job.config_file", file) == [line.replace("FILE", file) for line in expected]


NAMED = "every option is named; jobs are .toml files, or names of `torchtitan list jobs`"
BAD_ARGUMENTS = {
    "no option": (
        ["steps", "5"],
        [f'given "{argument}"; allowed: --section.key value; {NAMED}' for argument in ("steps", "5")],
    ),
    "one dash": (["-x"], [f'given "-x"; allowed: --section.key value; {NAMED}']),
    "no value": (
        ["--training.steps", "--compile.enable"],
        ["training.steps: given nothing; allowed: a whole number >= 1; write --training.steps VALUE"],
    ),
    "unknown, without a value": (
        ["--foo.bar"],
        ["foo.bar: given nothing; allowed: a known option; `torchtitan check --help-config` lists them"],
    ),
    "unknown": (
        ["--training.stepz", "5"],
        ['training.stepz: given "5"; allowed: a known option; did you mean training.steps?'],
    ),
    "unknown section": (
        ["--trainng.steps", "5"],
        ['trainng.steps: given "5"; allowed: a known option; did you mean training.steps?'],
    ),
    "without its section": (["--lr=1"], ['lr: given "1"; allowed: a known option; did you mean optimizer.lr?']),
    "no number": (
        ["--training.steps=many"],
        ['training.steps: given "many"; allowed: a whole number >= 1; help: ' + STEPS_HELP],
    ),
    "no whole number": (
        ["--training.steps", "1.5"],
        ["training.steps: given 1.5; allowed: a whole number >= 1; help: " + STEPS_HELP],
    ),
    "not finite": (
        ["--optimizer.lr", "nan"],
        ["optimizer.lr: given nan; allowed: a number > 0; the number must be finite"],
    ),
    "no flag": (
        ["--compile.enable=yes"],
        ['compile.enable: given "yes"; allowed: true or false; write true'],
    ),
    "a word after a flag": (
        ["--training.shuffle", "0"],
        ['training.shuffle: given "0"; allowed: true or false; write false'],
    ),
    "no- before an option that is no flag": (
        ["--training.no-steps", "1"],
        ['training.no_steps: given "1"; allowed: a known option; did you mean training.steps?'],
    ),
    "twice": (
        ["--training.steps=1", "--training.steps=2", "--compile.enable", "--compile.no-enable"],
        [
            "training.steps: given 2 after 1; allowed: once; keep one",
            "compile.enable: given false after true; allowed: once; keep one",
        ],
    ),
    "no TOML list": (
        ["--compile.components", '["model"'],
        [
            'compile.components: given "[\\"model\\""; allowed: a list, each one of "model", "loss"; '
            "help: Parts that are compiled."
        ],
    ),
    "more than a value": (
        ["--compile.components", "['loss']\nsteps = 3"],
        [
            'compile.components: given "[\'loss\']\\nsteps = 3"; allowed: a list, each one of "model", "loss"; '
            "help: Parts that are compiled."
        ],
    ),
    "no UTF-8": (
        ["--job.description", os.fsdecode(b"caf\xe9")],
        # written with escapes throughout, as a lone surrogate cannot be printed
        ['job.description: given "caf\\udce9"; allowed: text; the text must be UTF-8'],
    ),
    "old": (
        ["--training.batch_size", "4", "--training.no-compile"],
        [
            'training.batch_size: given "4"; allowed: training.local_batch_size, where it has moved; '
            "write --training.local_batch_size=4",
            "training.compile: given false; allowed: compile.enable, where it has moved; write --compile.enable=false",
        ],
    ),
    "an empty file name": (
        ["--job.config_file", ""],
        ['job.config_file: given "" (an empty name); allowed: the path of a TOML file'],
    ),
    "a folder": (
        ["--job.config_file", "/"],
        ['job.config_file: given "/" (a folder); allowed: the path of a TOML file'],
    ),
    "no regular file": (
        ["--job.config_file", "/dev/null"],
        [
            'job.config_file: given "/dev/null" (is not a regular file but a device); allowed: a regular file of at '
            "most 1048576 bytes; give a job's TOML"
        ],
    ),
    "a folder that is not there": (
        ["--job.config_file", "/no/such/job.toml"],
        [
            'job.config_file: given "/no/such/job.toml" (no such file); allowed: the path of a TOML file; '
            "looked for it as /no/such/job.toml"
        ],
    ),
    "too long a name": (
        ["--job.config_file", "x" * 5000],
        [f"job.config_file: given {SHORTENED} (File name too long); allowed: the path of a readable TOML file"],
    ),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(name):
    argv, expected = BAD_ARGUMENTS[name]
    assert faults_of(*argv) == [f"command line: {line}" for line in expected]


def test_missing_file_names_the_nearest_one(tmp_path):
    write(tmp_path / "llama3_8b.toml", "")
    file = tmp_path / "lama3_8b.toml"
    assert faults_of("--job.config_file", str(file)) == [
        f'command line: job.config_file: given "{file}" (no such file); allowed: the path of a TOML file; '
        "did you mean llama3_8b.toml?"
    ]


def test_a_huge_file_is_not_read(tmp_path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as opened:
        opened.truncate(2**40)
    (line,) = faults_of("--job.config_file", str(file))
    assert line.endswith("allowed: a regular file of at most 1048576 bytes; give a job's TOML")


def test_circular_links_are_refused(tmp_path):
    (tmp_path / "a.toml").symlink_to(tmp_path / "b.toml")
    (tmp_path / "b.toml").symlink_to(tmp_path / "a.toml")
    (line,) = faults_of("--job.config_file", str(tmp_path / "a.toml"))
    assert "a.toml" in line and "allowed: the path of a" in line


def test_a_missing_file_is_reported_with_the_file_that_extends_it(tmp_path):
    file = write(tmp_path / "job.toml", 'extends = ["zzzzzzz.toml", "", "a\\u0000b"]\n')
    missing, empty, null = faults_of("--job.config_file", file)
    assert missing == (
        f'{file}: extends: given "{tmp_path}/zzzzzzz.toml" (no such file); allowed: the path of a TOML file; '
        f"looked for it as {tmp_path}/zzzzzzz.toml"
    )
    assert empty == f'{file}: extends: given "" (an empty name); allowed: the path of a TOML file'
    assert null.startswith(f'{file}: extends: given "{tmp_path}/a\\u0000b" (')
    assert null.endswith("); allowed: the path of a readable TOML file")


def test_cycles_are_named(tmp_path):
    write(tmp_path / "b.toml", 'extends = "c.toml"\n')
    write(tmp_path / "c.toml", 'extends = "b.toml"\n')
    file = write(tmp_path / "a.toml", 'extends = "b.toml"\n')
    assert faults_of("--job.config_file", file) == [
        f'{tmp_path}/c.toml: extends: given "{tmp_path}/b.toml"; allowed: a file that does not extend this one; '
        "the cycle is b.toml -> c.toml -> b.toml"
    ]


def test_faults_of_all_files_and_the_command_line_are_reported_together(tmp_path):
    """Each planted fault gives one line with its place, even for a value that a later file replaces."""
    base = write(tmp_path / "base.toml", "[training]\nsteps = 0\n[foo]\n")
    first = write(tmp_path / "first.toml", 'extends = "base.toml"\n[training]\nsteps = 5\nseq_len = 0\n')
    second = write(tmp_path / "second.toml", "[training\n")
    third = str(tmp_path / "third.toml")
    lines = faults_of(*(f"--job.config_file={file}" for file in (first, second, third)), "--training.max_norm", "-1")
    places = [line.split(": ")[0] for line in lines]
    assert places == [base, base, first, second, "command line", "command line"]


def test_a_shared_base_is_reported_once(tmp_path):
    base = write(tmp_path / "base.toml", "[training]\nsteps = 0\n")
    first = write(tmp_path / "first.toml", 'extends = "base.toml"\n')
    assert len(faults_of("--job.config_file", first, "--job.config_file", first)) == 1
    assert base in faults_of("--job.config_file", first)[0]


def test_a_fault_is_one_printable_line():
    fault = Fault("job.toml", "a\u2028b", show("x\ny\x1b[31m"), "é", "")
    assert str(fault).isprintable() and "\\x1b" not in show("é")
    assert show("x" * 300) == SHORTENED and len(SHORTENED) == 100


# Round trips


def random_value(random: random.Random, annotation: Any) -> Any:
    """Draw a value that an option's type allows."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        limits = {
            name: getattr(limit, name)
            for some in extra
            for limit in (getattr(some, "metadata", None) or [some])
            for name in ("ge", "gt", "le", "lt", "pattern", "multiple_of")
            if getattr(limit, name, None) is not None
        }
        if "pattern" in limits:
            examples = ("op", "1", "17", "1:00:00", "2-03:00:00", "batch", "2/4", "epoch", "12/epoch", "[:20%]")
            matches = [example for example in examples if re.match(limits["pattern"], example)]
            return random.choice(matches)
        if inner is str:
            return random_value(random, inner)
        low, high = limits.get("ge", limits.get("gt", -1)), limits.get("le", limits.get("lt", 1e6))
        if inner is int:
            multiple = limits.get("multiple_of", 1)
            return random.randint(-(-low // multiple), int(high) // multiple) * multiple
        value = random.choice([random.uniform(low, high), random.uniform(0, 1e-9), low + 1e-5])
        return value if low < value < high else (low + high) / 2
    kind = annotation
    if get_origin(kind) in (Union, types.UnionType):
        return random_value(random, random.choice([part for part in get_args(kind) if part is not type(None)]))
    if get_origin(kind) is Literal:
        return random.choice(get_args(kind))
    if get_origin(kind) is list:
        return [random_value(random, get_args(kind)[0]) for _ in range(random.randrange(3))]
    if is_dataclass(kind):
        return nest({key: random_value(random, option.annotation) for key, option in options_of(kind, "")})
    if get_origin(kind) is dict:
        return {random_text(random): random_value(random, get_args(kind)[1]) for _ in range(random.randrange(4))}
    return {
        str: lambda: random_text(random),
        bool: lambda: random.random() < 0.5,
        int: lambda: random.randint(-(2**62), 2**62),
        float: lambda: random.choice([random.gauss(0, 1e10), 1.0, -0.0, 5e-324, 1.7e308]),
    }[kind]()


def random_text(random: random.Random) -> str:
    letters = "ab '\"\\\n\t\r\x1b\x7f#=[]{},.é\u2028\U0001f600\ufeff"
    return "".join(random.choice(letters) for _ in range(random.randrange(6)))


@pytest.mark.parametrize("seed", range(150))
def test_the_resolved_toml_reproduces_the_job(seed, tmp_path):
    generator = random.Random(seed)
    chosen = [key for key in options() if generator.random() < 0.5 and key != "job.config_file"]
    values = {key: random_value(generator, options()[key].annotation) for key in chosen}
    config = assemble(values, ["a.toml"])
    file = write(tmp_path / "config.toml", to_toml(config))
    reloaded = load(["--job.config_file", file])
    assert to_toml(reloaded) == to_toml(config)
    reloaded.job.config_file, reloaded.job.print_config = config.job.config_file, config.job.print_config
    assert reloaded == config
    assert json.dumps(tomli.loads(to_toml(config)), default=str) == json.dumps(
        tomli.loads(to_toml(reloaded)), default=str
    )


def test_the_resolved_toml_omits_loading_options(tmp_path):
    file = write(tmp_path / "job.toml", "[training]\nsteps = 7\n")
    job = tomli.loads(to_toml(load(["--job.config_file", file, "--job.print_config"])))["job"]
    assert "config_file" not in job and "print_config" not in job


def test_every_unset_option_can_be_written():
    """TOML has no null, so an option that may be unset must be unset by default; else config.toml could not say it."""
    for key, option in options().items():
        can_be_unset = type(None) in get_args(option.annotation)
        assert not can_be_unset or option.default is None or key in CANNOT_BE_UNSET, key


CANNOT_BE_UNSET: set[str] = set()


@pytest.mark.parametrize("file", sorted((REPOSITORY / "train_configs").glob("*.toml")), ids=lambda file: file.name)
def test_every_shipped_job_loads(file):
    head = file.read_text().split("\n[")[0].lower()
    assert all(term in head for term in ("hardware", "cost", "expected"))
    assert load(["--job.config_file", str(file)]).job.dump_folder.startswith("./outputs/")


# Help


def test_help_lists_every_option_with_type_default_and_text(capsys):
    with pytest.raises(SystemExit) as exit:
        load(["--job.config_file", "ignored.toml", "--help", "all"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert text.strip() == help_text().strip()
    for key, option in options().items():
        assert f"--{key}  (" in text and option.help, key
        assert option.help.splitlines()[0].strip() in text
        assert all(column.help.splitlines()[0].strip() in text for column in columns(key).values()), key
    assert "  --training.steps  (a whole number >= 1; default 10000)\n      Optimizer steps." in text
    assert "  --training.dataset_path  (text; default unset)\n" in text
    assert all(f"[{section}]" in text for section in sections())


def test_descriptions_of_types():
    assert describe(options()["optimizer.beta1"].annotation) == "a number >= 0 and < 1"
    assert describe(options()["lr_scheduler.restart_warmup_steps"].annotation) == "a whole number >= 0"
    assert describe(options()["parallelism.module_fqns_per_model_part"].annotation) == "a list, each a list, each text"


def test_a_chain_of_extends_is_limited(tmp_path):
    for n in range(20):
        (tmp_path / f"{n}.toml").write_text(f'extends = ["{n + 1}.toml", "{n + 1}.toml"]\n')
    (tmp_path / "20.toml").write_text("[training]\nsteps = 7\n")
    with pytest.raises(ConfigError) as caught:
        load(["--job.config_file", str(tmp_path / "0.toml")])
    assert "at most 8 files in a chain" in str(caught.value)
