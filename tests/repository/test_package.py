"""Other parts of the package: shipped jobs and tokenizer, `torchtitan init`, shell completion, the schema."""

import json

import pytest

from torchtitan import cli
from torchtitan.commands.presets import init
from torchtitan.config.manager import load
from torchtitan.config.options import ConfigError, options
from torchtitan.core.files import shipped_jobs
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.launch import launch
from torchtitan.rules import check


@pytest.fixture(autouse=True)
def outside_of_repository(tmp_path, monkeypatch):
    """Run in a folder outside of the repository."""
    monkeypatch.chdir(tmp_path)


def test_shipped_jobs_are_found_by_name():
    assert {"debug_model", "deepseek_debug", "llama3_8b"} <= set(shipped_jobs())
    for name in ("debug_model", "deepseek_debug", "qwen3_moe_debug"):  # the last two build on the first
        assert check(load([name]), 1, "cpu") == []
        assert load([name]) == load(["--job.config_file", name])


def test_a_file_of_the_same_name_goes_first(tmp_path):
    (tmp_path / "debug_model").write_text("[training]\nsteps = 7\n")
    assert load(["--job.config_file=debug_model"]).training.steps == 7


def test_a_job_file_may_be_given_in_several_ways(tmp_path):
    (tmp_path / "job.toml").write_text("[training]\nsteps = 7\n")
    for arguments in (
        ["job.toml"],
        ["--config", "job.toml"],
        ["--config_file=job.toml"],
        ["--job.config-file", "job.toml"],
    ):
        assert load(arguments).training.steps == 7
    assert load(["job.toml", "--training.steps", "9"]).training.steps == 9
    with pytest.raises(ConfigError, match="jobs are .toml files, or names of `torchtitan list jobs`"):
        load(["job"])
    with pytest.raises(ConfigError, match='given "debug_modl" .no such file.*did you mean debug_model'):
        load(["--job.config_file", "debug_modl"])


def test_the_debug_tokenizer_is_part_of_the_package():
    tokenizer = build_tokenizer("debug")
    assert tokenizer.vocab_size == 2048 and tokenizer.decode(tokenizer.encode("def f(x):")) == "def f(x):"


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_job_the_error_suggests_commands(ranks, capsys, monkeypatch):
    monkeypatch.setattr("torchtitan.launch.load_job", lambda *arguments: pytest.fail("ten thousand steps would begin"))
    assert launch(ranks, []) == 2
    errors = capsys.readouterr().err
    assert "torchtitan train debug_model" in errors and "torchtitan init my_job.toml" in errors


# A first job


def test_init_writes_a_job_that_runs(tmp_path, capsys):
    assert cli.main(["init", "mine.toml"]) == 0
    assert "torchtitan train mine.toml" in capsys.readouterr().out
    content = (tmp_path / "mine.toml").read_text()
    assert len(content.splitlines()) <= 32 and all(len(line) <= 120 for line in content.splitlines())
    config = load(["mine.toml"])
    assert check(config, 1, "cpu") == [] and config.job.dump_folder == "./outputs/mine"
    assert init([]) == 0 and (tmp_path / "job.toml").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["there.toml"], "there.toml: exists; give another name"),
        (["a", "b"], "torchtitan init: one argument too many: b"),
        (["--force"], "torchtitan init: no option --force"),
        (["no/folder/job.toml"], "cannot be written (No such file or directory)"),
    ],
)
def test_init_refuses(arguments, message, tmp_path, capsys):
    (tmp_path / "there.toml").write_text("mine")
    assert cli.main(["init", *arguments]) == 2 and message in capsys.readouterr().err
    assert (tmp_path / "there.toml").read_text() == "mine"


# Shells and editors


def test_the_schema_has_every_option(capsys):
    assert cli.main(["check", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    for key in options():
        if key in ("job.config_file",):
            continue
        node = schema
        for part in key.split("."):
            node = schema["definitions"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
            node = node["properties"][part]
        assert node.get("description") or "$ref" in node, key
    assert "extends" in schema["properties"] and "$defs" not in json.dumps(schema)


def test_list_names_what_is_shipped(capsys):
    assert cli.main(["list", "jobs", "tokenizers"]) == 0
    output = capsys.readouterr().out
    assert "\n  debug_model\n" in output and "\n  debug\n" in output
