"""Jobs of torchtitan's TOML era: every option has a place or a reason, and a translation keeps the meaning."""

import dataclasses
from pathlib import Path

import pytest
import tomli

from tests.old_dialects import BETWEEN, JULY_2024, UNSET_IN_V0_2_2, V0_2_2, leaves, listed
from torchtitan import check as command
from torchtitan import renames
from torchtitan.config_manager import ConfigError, load
from torchtitan.options import options, sections
from torchtitan.rules import check

OLD = sorted((Path(__file__).parent / "fixtures/old_tomls").glob("*.toml"))


@pytest.fixture(autouse=True)
def anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = command.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_every_option_of_the_old_dialects_is_at_home_moved_or_explained():
    old = [*listed(JULY_2024), *listed(BETWEEN), *leaves(tomli.loads(V0_2_2)), *listed(UNSET_IN_V0_2_2)]
    assert len(old) > 200
    for key in old:
        assert (key in options()) != (renames.renamed(key) is not None), key


def test_the_table_of_renames_points_to_options_and_hides_none():
    for old, moved in renames.MOVED.items():
        assert moved.to in options() and old not in options() and old not in renames.GONE, old
    for old, gone in renames.GONE.items():
        assert old not in options() and gone.why, old
    for key in [*renames.VALUES, *(key for defaults in renames.DEFAULTS.values() for key in defaults)]:
        assert key in options(), key
    assert not {"experimental", "quantize", "float8"} & sections()


def upgrade(capsys, tmp_path, content: str) -> tuple[int, str, list[str]]:
    (tmp_path / "old.toml").write_text(content)
    code, out, err = run(capsys, "old.toml", "--upgrade")
    return code, out, err.splitlines()


def test_all_defaults_of_v0_2_2_translate_to_the_same_meaning(capsys, tmp_path):
    code, out, err = upgrade(capsys, tmp_path, V0_2_2)
    assert (code, err) == (0, [])
    (tmp_path / "new.toml").write_text(out)
    config = load(["--job.config_file=new.toml"])
    old, new = leaves(tomli.loads(V0_2_2)), leaves(tomli.loads(out))
    for key, value in old.items():
        assert key not in options() or new.get(key, "left out") in (value, "left out"), key
    assert set(new) - set(old) == {"model.tokenizer_path", "training.shuffle"}
    assert config.model.tokenizer_path == old["model.hf_assets_path"] and not config.training.shuffle


def test_an_empty_job_of_v0_2_2_means_its_defaults(capsys, tmp_path):
    """What the old project would have filled in comes out, wherever ours would fill in something else."""
    given = {"checkpoint.enable", "validation.enable", "validation.steps"}
    given |= {"training.dataloader.pin_memory"}  # now on where it helps; what is computed stays the same
    given |= {"parallelism.pipeline_parallel_expert_parallel_overlap"}  # hides time and changes no result either
    _, out, _ = upgrade(capsys, tmp_path, "[checkpoint]\nenable = true\n[validation]\nenable = true\nsteps = 7\n")
    (tmp_path / "new.toml").write_text(out)
    resolved = leaves(dataclasses.asdict(load(["--job.config_file=new.toml"])))
    for key, value in leaves(tomli.loads(V0_2_2)).items():
        if key in options() and key not in given:
            assert resolved[key] == value or (value == "" and resolved[key] is None), key


@pytest.mark.parametrize("file", OLD, ids=lambda file: file.name)
def test_old_files_are_named_faults_and_translate(file, capsys, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(["--job.config_file", str(file)])
    old = [key for key in leaves(tomli.loads(file.read_text())) if renames.renamed(key)]
    assert [key for key in (fault.key for fault in caught.value.faults) if key in old] == old
    assert run(capsys, str(file))[0] == 2

    code, out, err = run(capsys, str(file), "--upgrade")
    assert (code, err) == (0, "")
    (tmp_path / "new.toml").write_text(out)
    config = load(["--job.config_file=new.toml"])
    given = leaves(tomli.loads(file.read_text()))
    assert config.training.local_batch_size == given.get("training.batch_size", given.get("training.local_batch_size"))
    assert config.lr_scheduler.warmup_steps == given.get(
        "training.warmup_steps", given.get("lr_scheduler.warmup_steps")
    )
    assert config.lr_scheduler.min_lr_factor == 0.0 and not config.training.shuffle
    for key in old:
        assert f"moved: {key} -> " in out or f"left out, changed nothing: {key} (" in out


def test_what_became_the_default_is_left_out(capsys, tmp_path):
    old = (
        "[parallelism]\npipeline_parallel_schedule = '_PipelineScheduleRuntime'\npipeline_parallel_schedule_csv = ''\n"
    )
    code, out, err = upgrade(capsys, tmp_path, old)
    assert (code, err) == (0, []) and "parallelism" not in tomli.loads(out)
    for name in ("pipeline_parallel_schedule", "pipeline_parallel_schedule_csv"):
        assert f"# left out, as it is the default now: parallelism.{name}\n" in out


OVERLAP = "pipeline_parallel_expert_parallel_overlap"


@pytest.mark.parametrize(
    ("old", "left_out"),
    [
        (f"[parallelism]\n{OVERLAP} = true", [f"parallelism.{OVERLAP}"]),
        (f"[parallelism]\npipeline_parallel_degree = 2\n{OVERLAP} = true", [f"parallelism.{OVERLAP}"]),
        (
            f"[model]\nname = 'deepseek'\n[parallelism]\nexpert_parallel_degree = 2\n{OVERLAP} = true",
            [f"parallelism.{OVERLAP}"],
        ),
        ("[training]\nenable_loss_parallel = false", ["parallelism.disable_loss_parallel"]),
        ("[experimental]\npipeline_parallel_schedule = 'gpipe'", ["parallelism.pipeline_parallel_schedule"]),
        ("[checkpoint]\nlast_save_model_only = true", ["checkpoint.last_save_model_only"]),
        (  # what hangs on an option that is left out is left out with it
            "[checkpoint]\nlast_save_model_only = true\nexport_dtype = 'bfloat16'\nlast_save_in_hf = true",
            ["checkpoint.last_save_model_only", "checkpoint.export_dtype", "checkpoint.last_save_in_hf"],
        ),
        ("[metrics]\nrank_0_only = false", ["metrics.save_for_all_ranks"]),
        ("[checkpoint]\ninitial_load_in_hf = true", ["checkpoint.initial_load_in_hf"]),  # checkpoints are off
    ],
)
def test_what_did_nothing_in_an_old_job_is_left_out(old, left_out, capsys, tmp_path):
    """It would be a fault here."""
    code, out, err = upgrade(capsys, tmp_path, old)
    assert (code, err) == (0, [])
    assert not set(left_out) & set(leaves(tomli.loads(out)))
    for key in left_out:
        assert out.count(f"# left out, changed nothing: {key} (allowed: ") == 1
    (tmp_path / "new.toml").write_text(out)
    config = load(["--job.config_file=new.toml"])
    faults = {fault.key for fault in check(config, command.fewest_ranks(config), "cpu")}
    assert faults <= {"training.dataset_path", "model.tokenizer_path"}  # which are elsewhere


def test_a_default_that_does_nothing_is_left_alone(capsys, tmp_path, monkeypatch):
    """There is nothing to leave out, however often it is asked."""
    asked = iter(range(3))

    def at_its_default(facts):
        next(asked)  # StopIteration, which a generator makes a RuntimeError, if it is asked again and again
        yield facts.fault("training.steps", "another", "")

    monkeypatch.setattr(command, "WITHOUT_EFFECT", [at_its_default])
    code, out, err = upgrade(capsys, tmp_path, "")
    assert (code, err) == (0, []) and "training.steps" not in out


def test_overlap_of_an_old_job_stays_where_it_did_something(capsys, tmp_path):
    degrees = "pipeline_parallel_degree = 2\nexpert_parallel_degree = 2\npipeline_parallel_schedule = 'DualPipeV'\n"
    _, out, _ = upgrade(capsys, tmp_path, f"[parallelism]\n{degrees}{OVERLAP} = true")
    assert tomli.loads(out)["parallelism"][OVERLAP] is True


def test_july_2024_means_its_own_defaults(capsys, tmp_path):
    (file,) = [file for file in OLD if file.name == "july2024_debug_model.toml"]
    _, out, _ = run(capsys, str(file), "--upgrade")
    assert out.splitlines()[0].endswith("read as a job for torchtitan of July 2024.")
    new = leaves(tomli.loads(out))
    assert new["optimizer.implementation"] == "foreach" and new["model.overrides.n_layers"] == 8
    assert new["training.dataset"] == "c4_test" and new["metrics.disable_color_printing"] is False
    assert "checkpoint.keep_latest_k" not in new  # checkpoints are off
    _, out, _ = upgrade(capsys, tmp_path, "[training]\nwarmup_steps = 3\n[checkpoint]\nenable_checkpoint = true\n")
    new = leaves(tomli.loads(out))
    assert new["checkpoint.keep_latest_k"] == 0 and new["job.dump_folder"] == "./torchtitan/outputs"
    assert new["lr_scheduler.warmup_steps"] == 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[training]\ndata_parallel_degree = 4", {"parallelism.data_parallel_shard_degree": 4}),
        (
            "[training]\ndata_parallel_degree = 4\ndata_parallel_type = 'ddp'",
            {"parallelism.data_parallel_shard_degree": 1, "parallelism.data_parallel_replicate_degree": 4},
        ),
        (
            "[training]\nenable_loss_parallel = false\ntensor_parallel_degree = 2",
            {"parallelism.disable_loss_parallel": True},
        ),
        ("[metrics]\nrank_0_only = false\nenable_tensorboard = true", {"metrics.save_for_all_ranks": True}),
        ("[metrics]\nenable_color_printing = true", {"metrics.disable_color_printing": False}),
        ("[optimizer]\nfused = true", {"optimizer.implementation": "fused"}),
        ("[model]\nname = 'llama'", {"model.name": "llama3"}),
        (
            "[experimental]\npipeline_parallel_schedule = 'gpipe'\npipeline_parallel_degree = 2",
            {"parallelism.pipeline_parallel_schedule": "GPipe"},
        ),
        ("[experimental]\npipeline_parallel_split_points = []", {}),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'PipelineScheduleMulti'\n"
            "pipeline_parallel_schedule_csv = 'a'",
            {"parallelism.pipeline_parallel_schedule_csv": "a"},
        ),
        ("[training]\nseed = 3\n[lr_scheduler]\nlr_min = 0.1", {"debug.seed": 3, "lr_scheduler.min_lr_factor": 0.1}),
        (
            "[model]\nhf_assets_path = 'a'\n[checkpoint]\nenable = true\ninitial_load_in_hf = true",
            {"checkpoint.initial_load_path": "a", "model.tokenizer_path": "a", "checkpoint.last_save_model_only": True},
        ),
        *(  # weights were beside the tokenizer
            (
                f"{model}[checkpoint]\n{enable} = true\ninitial_load_in_hf = true\n{rest}",
                {"checkpoint.initial_load_in_hf": True, "checkpoint.initial_load_path": path},
            )
            for model, enable, rest, path in (
                ("", "enable", "", "./tests/assets/tokenizer"),
                ("", "enable", "initial_load_path = ''", "./tests/assets/tokenizer"),
                ("", "enable", "initial_load_path = 'b'", "b"),
                ("", "enable", "initial_load_in_hf_quantized = true", "./tests/assets/tokenizer"),
                ("[model]\ntokenizer_path = 'a'\n", "enable_checkpoint", "", "a"),
                ("[model]\nhf_assets_path = 'a'\ntokenizer_path = 'b'\n", "enable", "", "b"),
                ("[model]\nhf_assets_path = 'a'\n", "enable_checkpoint", "", "a"),
            )
        ),
        ("[model]\nhf_assets_path = 'a'\ntokenizer_path = 'b'", {"model.tokenizer_path": "b"}),
        ("[validation]\nenable = false\nsteps = -1", {}),
    ],
)
def test_translations(old, new, capsys, tmp_path):
    code, out, err = upgrade(capsys, tmp_path, old)
    assert (code, err) == (0, [])
    assert new.items() <= leaves(tomli.loads(out)).items()
    (tmp_path / "new.toml").write_text(out)
    load(["--job.config_file=new.toml"])
    assert upgrade(capsys, tmp_path, out)[1].split("\n\n", 1)[1] == out.split("\n\n", 1)[1]  # once is enough


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        (
            "[model]\nnorm_type = 'layernorm'",
            'model.norm_type: given "layernorm"; has no translation: norms are RMSNorm',
        ),
        (
            "[training]\nenable_float8_linear = true",
            "training.enable_float8_linear: given true; has no translation: training in float8 is not in this version",
        ),
        (
            "[parallelism]\nexpert_tensor_parallel_degree = 2",
            "parallelism.expert_tensor_parallel_degree: given 2; has no translation: tensor parallel leaves experts "
            "whole",
        ),
        (
            "[parallelism]\nexpert_parallel_comm_backend = 'deepep'",
            'parallelism.expert_parallel_comm_backend: given "deepep"; has no translation: tokens travel by '
            "torch's own all-to-all",
        ),
        (
            "[debug]\nmoe_force_load_balance = true",
            "debug.moe_force_load_balance: given true; has no translation: tokens go to the experts that the router "
            "chooses",
        ),
        (
            "[training]\ndata_parallel_type = 'ddp'",
            'training.data_parallel_type: given "ddp"; has no translation: it replicated over all ranks: give '
            "data_parallel_degree as their number",
        ),
        (
            "[training]\ndata_parallel_type = 'zero'",
            'training.data_parallel_type: given "zero"; has no translation: known are "fsdp" and "ddp"',
        ),
        (
            "[experimental]\npipeline_parallel_split_points = ['layers.2']",
            'experimental.pipeline_parallel_split_points: given ["layers.2"]; has no translation: '
            "parallelism.module_fqns_per_model_part: list the module names of each stage there, e.g. "
            '[["tok_embeddings", "layers.0"], ...]',
        ),
        (
            "[validation]\nenable = true",
            "validation.steps: given nothing; has no translation: -1, the default then, was to the data's end; give "
            "the number of batches",
        ),
        # wrong then and now
        (
            "[training]\nbatch_size = 0",
            "training.local_batch_size: given 0; allowed: a whole number >= 1; help: Samples",
        ),
        (
            "[training]\nenable_loss_parallel = 'yes'",
            'parallelism.disable_loss_parallel: given "yes"; allowed: true or',
        ),
        ("[optimizer]\nfused = 'yes'", 'optimizer.implementation: given "yes"; allowed: one of "for-loop", "foreach"'),
        ("[training]\nfoo = 1", "training.foo: given 1; allowed: a known option"),
    ],
)
def test_what_cannot_be_translated(old, expected, capsys, tmp_path):
    code, out, err = upgrade(capsys, tmp_path, old)
    assert (code, out, len(err), err[-1]) == (2, "", 2, "1 fault")
    assert err[0].startswith(f"old.toml: {expected}")
