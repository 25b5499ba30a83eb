"""`torchtitan presets`: list presets, print one, copy one for a user's model and data."""

import pytest
import tomli

from tests.support.presets import write_model, write_records
from torchtitan import cli
from torchtitan.config import manager
from torchtitan.core.files import shipped_jobs
from torchtitan.rules import check


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def presets(*arguments):
    return cli.main(["presets", *map(str, arguments)])


def test_presets_are_listed_and_found_by_words_of_their_first_comment(capsys):
    assert presets("ls") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_jobs())
    (qlora,) = [line for line in lines if line.startswith("sft_qlora ")]
    assert "  1 GPU of 24 GB  " in qlora and qlora.endswith("beside its own weights in 4 bits")
    assert presets("ls", "LORA", "pairs") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["dpo_lora", "orpo_lora"]
    assert presets("ls", "nothing", "such") == 2
    assert "no preset mentions nothing and such; available: convergence_debug, debug_model, " in capsys.readouterr().err


def test_cat_prints_a_preset_unchanged(capsys):
    assert presets("cat", "sft_lora") == 0
    assert capsys.readouterr().out == shipped_jobs()["sft_lora"].read_text()


def test_a_copy_names_the_users_model_and_records_and_is_valid(workdir, capsys):
    model, records = write_model(workdir / 'my "model'), write_records(workdir / "my rows")
    assert presets("cp", "sft_full", "mine.toml", "--model", model, "--data", records["sft"]) == 0
    assert "wrote mine.toml; its first comment" in capsys.readouterr().out
    config = manager.load(["--job.config_file", "mine.toml"])
    assert check(config, 8, "cuda") == []
    assert config.model.hf_folder == config.model.tokenizer_path == config.checkpoint.initial_load_path == str(model)
    assert (config.training.dataset_path, config.job.dump_folder) == (str(records["sft"]), "./outputs/mine")
    text, preset = (workdir / "mine.toml").read_text(), shipped_jobs()["sft_full"].read_text()
    assert len(text.splitlines()) == len(preset.splitlines()) and text.split("\n\n")[0] == preset.split("\n\n")[0]


def test_the_family_of_a_copy_is_that_of_the_model_folder(workdir, capsys):
    for model_type, family in (("mistral", "mistral"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("llama", "llama3")):
        (workdir / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
        assert presets("cp", "sft_qlora", f"{model_type}.toml", "--model", workdir) == 0
        assert tomli.loads((workdir / f"{model_type}.toml").read_text())["model"]["name"] == family
    (workdir / "config.json").write_text('{"model_type": "mamba"}')
    assert presets("cp", "sft_qlora", "no.toml", "--model", workdir) == 2
    assert "an unsupported model family; allowed: one of llama3, " in capsys.readouterr().err
    (workdir / "config.json").write_text("{")
    assert presets("cp", "sft_qlora", "no.toml", "--model", workdir) == 2
    assert "config.json cannot be read as JSON" in capsys.readouterr().err
    (workdir / "empty").mkdir()
    for folder in ("none", "empty", "config.json"):
        assert presets("cp", "sft_qlora", "no.toml", "--model", folder) == 2
        message = (
            f"--model: given {folder}; allowed: a folder with a config.json, as Hugging Face's models are; give the"
        )
        assert message in capsys.readouterr().err
    assert not (workdir / "no.toml").exists()


@pytest.mark.parametrize("name", shipped_jobs())
def test_every_copy_has_the_options_of_its_preset(name, workdir):
    """This includes presets that extend another file, which the copy cannot refer to."""
    assert presets("cp", name) == 0
    files = f"{name}.toml", str(shipped_jobs()[name])
    copied, shipped = (manager.load(["--job.config_file", file]) for file in files)
    copied.job.config_file, copied.job.dump_folder = shipped.job.config_file, shipped.job.dump_folder
    assert copied == shipped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cp", "qlora"], "qlora: not a preset; allowed: convergence_debug, debug_model, "),
        (["cat", "sft_qlor"], "did you mean sft_qlora?"),
        (["cat"], "torchtitan presets cat: given 0 arguments; allowed: a name"),
        (["cp", "sft_lora", "a", "b"], "torchtitan presets cp: given 3 arguments; allowed: a name"),
        (["cp", "debug_model", "a.toml", "--data=x"], "--data: the preset debug_model has no place for it"),
        (["cat", "sft_lora", "--model=x"], "--model, --data: only allowed with torchtitan presets cp"),
        (["cp", "sft_lora", "there.toml"], "there.toml: exists; give another name, or remove it"),
        (["cp", "sft_lora", "none/a.toml"], "none/a.toml: cannot be written (No such file or directory)"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_refused_arguments(arguments, message, workdir, capsys):
    (workdir / "there.toml").write_text("mine")
    assert presets(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in workdir.iterdir()] == ["there.toml"] and (
        workdir / "there.toml"
    ).read_text() == "mine"


def test_usage(capsys):
    assert presets("--help") == 0
    assert "cp NAME [FILE] copies it" in " ".join(capsys.readouterr().out.split())
    for arguments in ([], ["copy", "sft_lora"], ["ls", "--modl", "x"]):
        assert presets(*arguments) == 2
        assert "torchtitan presets: " in capsys.readouterr().err


def test_init_is_a_command_and_an_action_of_presets(workdir, capsys):
    assert cli.main(["init", "a.toml"]) == cli.main(["presets", "init", "b.toml"]) == 0
    assert (workdir / "a.toml").read_text().replace("a.toml", "b.toml").replace("outputs/a", "outputs/b") == (
        workdir / "b.toml"
    ).read_text()
    assert cli.main(["presets", "init"]) == 0 and (workdir / "job.toml").exists()
    assert cli.main(["presets", "init", "--model=m", "c.toml"]) == 2
