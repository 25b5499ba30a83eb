"""Tests of jobs for PyTorch's torchtitan: every option exists, moved or has a reason, and translations keep the
meaning.
"""

import dataclasses

import pytest
import tomli

from tests.support import old_dialects
from tests.support.jobs import ROOT, train
from tests.support.old_dialects import V0_2_2, flatten, option_names
from torchtitan.commands import check as command
from torchtitan.config.changes import renamed
from torchtitan.config.manager import ConfigError, load
from torchtitan.config.options import options, sections
from torchtitan.core.errors import JobError
from torchtitan.job import ResolvedJob
from torchtitan.models.deepseek import YarnScaling
from torchtitan.models.sizes import RopeScaling
from torchtitan.plugins.dialects import renames
from torchtitan.plugins.dialects import upgrade as translation
from torchtitan.rules import Facts, check
from torchtitan.rules.loading import fewest_ranks

OLD = sorted((ROOT / "tests/fixtures/old_tomls").glob("*.toml"))


TOKENIZERS = ("tests/assets/tokenizer", "assets/hf/Llama-3.1-8B", "a", "b")
TIKTOKENS = ("torchtitan/datasets/tokenizer/tokenizer.model", "torchtitan/datasets/tokenizer/original/tokenizer.model")
TIKTOKENS += ("test/assets/test_tiktoken.model",)


@pytest.fixture(autouse=True)
def a_place(tmp_path, monkeypatch):
    """Create the files that jobs found in the repository of PyTorch's torchtitan, so that translations can start."""
    monkeypatch.chdir(tmp_path)
    for names, asset in ((TOKENIZERS, "tokenizer.json"), (TIKTOKENS, "tiktoken.model")):
        for name in names:
            path = tmp_path / name / asset if asset == "tokenizer.json" else tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(ROOT / "tests/assets/tokenizer" / asset)
            (path.parent / "model.safetensors").touch()
    for folder in ("tests/assets/c4_test", "torchtitan/datasets/c4_mini"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "data.json").write_text('{"text": "a document"}\n' * 64)


def run_check(capsys, *argv: str) -> tuple[int, str, str]:
    """Run `torchtitan check`; return its exit code, output and errors."""
    code = command.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_every_old_option_exists_moved_or_has_a_reason():
    eras = ("JULY_2024", "BETWEEN", "V0_1_0", "AUGUST_2025", "EXPERIMENTS", "UNSET_IN_V0_2_2")
    old = {*(key for era in eras for key in option_names(getattr(old_dialects, era))), *flatten(tomli.loads(V0_2_2))}
    assert len(old) > 250
    for key in old:
        assert (key in options()) != (renamed(key) is not None), key


def test_renames_point_to_options_and_shadow_none():
    for old, moved in renames.MOVED.items():
        assert moved.to in options() and old not in options() and old not in renames.GONE, old
    for old, removed in renames.GONE.items():
        assert old not in options() and removed.reason, old
    for key in [*renames.VALUES, *(key for defaults in translation.DEFAULTS.values() for key in defaults)]:
        assert key in options(), key
    assert not {"experimental", "quantize", "float8"} & sections()


def upgrade(capsys, tmp_path, content: str) -> tuple[int, str, list[str]]:
    """Translate a job by `check --upgrade`; return exit code, output and lines of errors."""
    (tmp_path / "old.toml").write_text(content)
    code, out, err = run_check(capsys, "old.toml", "--upgrade")
    return code, out, err.splitlines()


def test_defaults_of_v0_2_2_keep_their_meaning(capsys, tmp_path):
    code, out, err = upgrade(capsys, tmp_path, V0_2_2)
    assert (code, err) == (0, [])
    (tmp_path / "new.toml").write_text(out)
    config = load(["--job.config_file=new.toml"])
    old, new = flatten(tomli.loads(V0_2_2)), flatten(tomli.loads(out))
    assert (
        old.pop("model.name") == "llama3" and new.pop("model.name") == "llama3.1"
    )  # see test_models_keep_their_meaning
    for key, value in old.items():
        assert key not in options() or new.get(key, "left out") in (value, "left out"), key
    added = {"model.tokenizer_path", "training.shuffle", "training.dataset_path", "model.overrides.n_kv_heads"}
    added |= {"lr_scheduler.convention"}  # the learning rate, see test_upgraded_schedules.py
    assert set(new) - set(old) == added
    assert config.model.tokenizer_path == old["model.hf_assets_path"] and not config.training.shuffle


def test_an_empty_job_of_v0_2_2_gets_the_defaults_of_that_version(capsys, tmp_path):
    """A default of the old version is written out where ours differs."""
    expected_differences = {"checkpoint.enable", "validation.enable", "validation.steps", "model.name"}
    expected_differences |= {"optimizer.implementation"}  # unset, it is the optimizer's first: fused, as it was
    expected_differences |= {"training.dataloader.pin_memory"}  # now on where it helps; it changes no result
    expected_differences |= {
        "parallelism.pipeline_parallel_expert_parallel_overlap"
    }  # hides time and changes no result either
    _, out, _ = upgrade(capsys, tmp_path, "[checkpoint]\nenable = true\n[validation]\nenable = true\nsteps = 7\n")
    (tmp_path / "new.toml").write_text(out)
    resolved = flatten(dataclasses.asdict(load(["--job.config_file=new.toml"])))
    for key, value in flatten(tomli.loads(V0_2_2)).items():
        if key in options() and key not in expected_differences:
            assert resolved[key] == value or (value == "" and resolved[key] is None), key


MAY_2024 = """
[profiling]
run_profiler = true
profile_every_x_iter = 7
[training]
steps = 10
sequence_parallel_degree = 2
fp8_linear = ""
checkpoint_interval = 50
checkpoint_interval_type = "steps"
checkpoint_folder = ""
[checkpoint]
folder = ""
"""


def test_names_from_before_the_first_release_are_translated(capsys, tmp_path):
    _, out, _ = upgrade(capsys, tmp_path, MAY_2024)
    assert "PyTorch's torchtitan of July 2024" in out
    (tmp_path / "new.toml").write_text(out)
    config = load(["--job.config_file=new.toml"])
    assert (config.profiling.enable_profiling, config.profiling.profile_freq) == (True, 7)
    assert (config.parallelism.tensor_parallel_degree, config.training.float8) == (2, "none")
    assert config.checkpoint.interval == 50 and not config.checkpoint.enable
    assert "left out, changed nothing: training.checkpoint_interval_type" in out


@pytest.mark.parametrize(
    ("old", "reason"),
    [
        ("[training]\ncheckpoint_folder = 'saves'", "set checkpoint.enable = true, and the folder there"),
        ("[training]\ncheckpoint_interval_type = 'seconds'", "checkpoint.interval counts steps"),
        ("[training]\nfp8_linear = 'delayed'", 'only dynamic scales are here: write "tensorwise"'),
        ("[training]\nenable_selective_ac = false", 'write "selective" for true; for false, "full"'),
        (
            "[training]\nsequence_parallel_degree = 2\ntensor_parallel_degree = 4",
            "another value, 2: keep one of the two",
        ),
        ("[checkpoint]\nenable_checkpoint = true\nfolder = ''", "an empty one was the run's own"),
        ("[training]\nwarmup_pct = 0.2", "give the number of steps: this share of training.steps"),
        ("[experimental]\ntorch_spmd = true", "collectives are not derived from types of tensors"),
    ],
)
def test_values_from_before_the_first_release_are_refused_with_a_remedy(old, reason, capsys, tmp_path):
    code, out, err = upgrade(capsys, tmp_path, old)
    assert (code, out) == (2, "") and reason in err[0]


def test_a_line_with_a_module_is_refused_with_the_shipped_job_as_remedy():
    with pytest.raises(ConfigError) as caught:
        load(["--module", "llama3", "--config", "llama3_8b", "--training.steps", "100"])
    (fault,) = caught.value.faults
    assert fault.key == "module" and "a job alone, of those that `torchtitan presets ls` lists" in str(fault)


@pytest.mark.parametrize("file", OLD, ids=lambda file: file.name)
def test_old_files_are_refused_and_translated(file, capsys, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(["--job.config_file", str(file)])
    old = [key for key in flatten(tomli.loads(file.read_text())) if renamed(key)]
    assert [key for key in (fault.key for fault in caught.value.faults) if key in old] == old
    assert run_check(capsys, str(file))[0] == 2

    code, out, err = run_check(capsys, str(file), "--upgrade")
    assert (code, err) == (0, "")
    (tmp_path / "new.toml").write_text(out)
    config = load(["--job.config_file=new.toml"])
    options = flatten(tomli.loads(file.read_text()))
    assert config.training.local_batch_size == options.get(
        "training.batch_size", options.get("training.local_batch_size")
    )
    # in July 2024 the warmup was one step longer than the option said, see test_upgraded_schedules.py
    warmup = options.get("lr_scheduler.warmup_steps", options.get("training.warmup_steps", 0) + 1)
    assert config.lr_scheduler.warmup_steps == warmup
    assert config.lr_scheduler.min_lr_factor == 0.0 and not config.training.shuffle
    for key in old:
        assert f"moved: {key} -> " in out or f"left out, changed nothing: {key} (" in out


def test_values_that_became_the_default_are_left_out(capsys, tmp_path):
    old = (
        "[parallelism]\npipeline_parallel_schedule = '_PipelineScheduleRuntime'\npipeline_parallel_schedule_csv = ''\n"
    )
    code, out, err = upgrade(capsys, tmp_path, old)
    assert (code, err) == (0, []) and "parallelism" not in tomli.loads(out)
    for name in ("pipeline_parallel_schedule", "pipeline_parallel_schedule_csv"):
        assert f"# left out, because it is the default now: parallelism.{name}\n" in out


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
        (  # options that depend on one that is left out are left out with it
            "[checkpoint]\nlast_save_model_only = true\nexport_dtype = 'bfloat16'\nlast_save_in_hf = true",
            ["checkpoint.last_save_model_only", "checkpoint.export_dtype", "checkpoint.last_save_in_hf"],
        ),
        ("[metrics]\nrank_0_only = false", ["metrics.save_for_all_ranks"]),
        ("[checkpoint]\ninitial_load_in_hf = true", ["checkpoint.initial_load_in_hf"]),  # checkpoints are off
        ("[checkpoint]\ninitial_load_path = 'there'", ["checkpoint.initial_load_path"]),
    ],
)
def test_options_without_effect_in_an_old_job_are_left_out(old, left_out, capsys, tmp_path):
    """They would be faults in a job of today."""
    code, out, err = upgrade(capsys, tmp_path, old)
    assert (code, err) == (0, [])
    assert not set(left_out) & set(flatten(tomli.loads(out)))
    for key in left_out:
        assert out.count(f"# left out, changed nothing: {key} (allowed: ") == 1
    (tmp_path / "new.toml").write_text(out)
    config = load(["--job.config_file=new.toml"])
    faults = {fault.key for fault in check(config, fewest_ranks(config.parallelism), "cpu")}
    assert faults <= {"training.dataset_path", "model.tokenizer_path"}  # these files do not exist here


def test_a_default_without_effect_ends_the_search(capsys, tmp_path, monkeypatch):
    """A rule that faults an option at its default leaves nothing to remove; the search must end."""
    calls = iter(range(3))

    def at_its_default(facts):
        next(calls)  # StopIteration, which a generator makes a RuntimeError, if it is asked again and again
        yield facts.fault("training.steps", "another", "")

    monkeypatch.setattr(translation, "WITHOUT_EFFECT", [at_its_default])
    code, out, err = upgrade(capsys, tmp_path, "[job]\ndescription = 'x'")
    assert (code, err) == (0, []) and "training.steps" not in out


def test_overlap_of_an_old_job_is_kept_where_it_had_an_effect(capsys, tmp_path):
    degrees = "pipeline_parallel_degree = 2\nexpert_parallel_degree = 2\npipeline_parallel_schedule = 'DualPipeV'\n"
    _, out, _ = upgrade(capsys, tmp_path, f"[parallelism]\n{degrees}{OVERLAP} = true")
    assert tomli.loads(out)["parallelism"][OVERLAP] is True


def test_a_job_of_july_2024_gets_the_defaults_of_that_time(capsys, tmp_path):
    (file,) = [file for file in OLD if file.name == "july2024_debug_model.toml"]
    _, out, _ = run_check(capsys, str(file), "--upgrade")
    assert f"# Translated from {file}, read as a job for PyTorch's torchtitan of July 2024.\n" in out
    new = flatten(tomli.loads(out))
    assert new["optimizer.implementation"] == "foreach" and new["model.overrides.n_layers"] == 8
    assert new["training.dataset"] == "c4_test" and new["metrics.disable_color_printing"] is False
    assert "checkpoint.keep_latest_k" not in new  # checkpoints are off
    _, out, _ = upgrade(capsys, tmp_path, "[training]\nwarmup_steps = 3\n[checkpoint]\nenable_checkpoint = true\n")
    new = flatten(tomli.loads(out))
    assert new["checkpoint.keep_latest_k"] == 0 and new["job.dump_folder"] == "./torchtitan/outputs"
    assert new["lr_scheduler.warmup_steps"] == 4 and new["lr_scheduler.total_steps"] == 10001


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
        ("[model]\nname = 'llama'\n[training]\nwarmup_steps = 2", {"model.name": "llama3"}),
        (
            "[experimental]\npipeline_parallel_schedule = 'gpipe'\npipeline_parallel_degree = 2",
            {"parallelism.pipeline_parallel_schedule": "GPipe"},
        ),
        ("[experimental]\npipeline_parallel_split_points = []", {}),
        ("[training]\nseed = 3\n[lr_scheduler]\nlr_min = 0.1", {"debug.seed": 3, "lr_scheduler.min_lr_factor": 0.1}),
        (
            "[model]\nhf_assets_path = 'a'\n[checkpoint]\nenable = true\ninitial_load_in_hf = true",
            {"checkpoint.initial_load_path": "a", "model.tokenizer_path": "a", "checkpoint.last_save_model_only": True},
        ),
        *(  # weights were beside the tokenizer
            (
                f"{model}[checkpoint]\n{enable} = true\ninitial_load_in_hf = true\n{other_options}",
                {"checkpoint.initial_load_in_hf": True, "checkpoint.initial_load_path": path},
            )
            for model, enable, other_options, path in (
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
    assert new.items() <= flatten(tomli.loads(out)).items()
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
            "[model]\nconverters = ['float8']\n[float8]\nrecipe_name = 'rowwise_with_gw_hp'",
            'float8.recipe_name: given "rowwise_with_gw_hp"; has no translation: training.float8 is one of tensorwise, '
            "rowwise",
        ),
        (
            "[float8]\nenable_float8_linear = true\nscaling_type_input = 'delayed'",
            'float8.scaling_type_input: given "delayed"; has no translation: scales follow from the numbers of each '
            "product",
        ),
        (
            "[model]\nconverters = ['quantize.linear.float8']\n[quantize.linear.float8]\n"
            "filter_fqns = ['auto_filter_small_kn']",
            'quantize.linear.float8.filter_fqns: given ["auto_filter_small_kn"]; has no translation: list the linears '
            "to leave out, in training.float8_exclude",
        ),
        (
            "[model]\nconverters = ['float8']\n[float8]\nmoe_fqns_prototype = ['experts']",
            'float8.moe_fqns_prototype: given ["experts"]; has no translation: stacks of experts stay in '
            "training.mixed_precision_param",
        ),
        (
            "[model]\nconverters = ['float8', 'mx']",
            'model.converters: given ["mx"]; has no translation: training.float8 takes the place of float8; mx is not '
            "in this version",
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
            "the number of batches, or validation.samples",
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
def test_options_without_a_translation_are_faults(old, expected, capsys, tmp_path):
    code, out, err = upgrade(capsys, tmp_path, old)
    assert (code, out, len(err), err[-1]) == (2, "", 2, "1 fault")
    assert err[0].startswith(f"old.toml: {expected}")


@pytest.mark.parametrize("steps", [1, 10, 200, 201])
def test_a_warmup_longer_than_the_job_is_shortened(steps, capsys, tmp_path):
    """The factor there was (step + 1) / warmup with warmup = min(200, steps); nothing decayed before it ended."""
    code, out, err = upgrade(capsys, tmp_path, f"[training]\nsteps = {steps}\nlocal_batch_size = 1")
    assert (code, err) == (0, [])
    (tmp_path / "new.toml").write_text(out)
    schedule = Facts(ResolvedJob(load(["--job.config_file=new.toml"]))).learning_rate
    warmup = min(200, steps)
    assert [schedule.multiplier(s) for s in range(warmup)] == pytest.approx([(s + 1) / warmup for s in range(warmup)])


# The meaning of models


ROUTED = {"expert_bias": True, "bias_rate": 0.001, "aux_loss_weight": 0.0, "norm_eps": 1e-5}
SCALED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
OLDER = "[checkpoint]\nenable_checkpoint = false\n"
FLAT = "[metrics]\nrank_0_only = true\n"
MEANINGS = [
    # options of the job, name and flavor, sizes that the model has, whether documents are masked
    ("", "llama3", "debugmodel", {"rope_scaling": SCALED, "num_kv_heads": 16, "n_layers": 6}, False),
    ("", "llama3", "8B", {"rope_scaling": SCALED, "rope_theta": 5e5, "n_kv_heads": 8}, False),
    ("", "llama3", "70B", {"rope_scaling": SCALED}, False),
    ("", "llama3", "405B", {"rope_scaling": SCALED}, False),
    ("", "llama3", "8B_flex", {"rope_scaling": SCALED, "dim": 4096}, True),
    ("", "llama3", "debugmodel_flex_attn", {"num_kv_heads": 16}, True),
    ("", "llama3", "debugmodel_varlen_attn", {"num_kv_heads": 16}, True),
    ("", "simple_fsdp.llama3", "8B", {"rope_scaling": SCALED}, False),
    (OLDER, "llama3", "8B", {"rope_scaling": None}, False),
    (OLDER, "llama3", "405B", {"rope_scaling": None, "ffn_dim_multiplier": 1.2}, False),
    (OLDER + "[model]\nattn_mask_type = 'block_causal'\nuse_flex_attn = true\n", "llama3", "8B", {}, True),
    (OLDER + "[model]\nattn_mask_type = 'causal'\nuse_flex_attn = false\n", "llama3", "8B", {}, False),
    (FLAT, "llama3", "8B", {"rope_scaling": None}, False),
    (FLAT, "llama3", "405B", {"rope_scaling": None}, False),
    (FLAT, "llama2", "26B", {"dim": 5120, "n_layers": 80, "n_heads": 40, "rope_theta": 1e4}, False),
    (
        "",
        "deepseek_v3",
        "debugmodel",
        ROUTED
        | {"kv_lora_rank": 512, "n_heads": 16, "qk_head_dim": 192, "v_head_dim": 128, "score": "softmax"}
        | {"normalize_top_k": False, "rope_scaling": None},
        False,
    ),
    ("", "deepseek_v3", "debugmodel_flex_attn", ROUTED, True),
    ("", "deepseek_v3", "16B", ROUTED | {"n_layers": 27, "score": "softmax", "rope_scaling": None}, True),
    (
        "[training]\nseq_len = 8192\n",
        "deepseek_v3",
        "16B",
        {"rope_scaling": YarnScaling(mscale=0.7, mscale_all_dim=0.7)},
        True,
    ),
    (
        "[training]\nseq_len = 8192\n",
        "deepseek_v3",
        "236B",
        ROUTED | {"group_score": "top2", "rope_scaling": YarnScaling()},
        True,
    ),
    ("", "deepseek_v3", "671B", ROUTED | {"score": "sigmoid", "group_score": "top2", "rope_scaling": None}, True),
    (OLDER, "deepseek_v3", "671B", ROUTED, True),
    ("", "qwen3", "30B-A3B", {"aux_loss_weight": 0.0, "expert_bias": False, "rope_theta": 1e6}, False),
    ("", "qwen3", "235B-A22B", {"aux_loss_weight": 0.0, "rope_theta": 5e6}, False),
    ("", "qwen3", "8B", {"ffn_dim": 12288, "tied_embeddings": False, "rope_theta": 1e6}, False),
    ("", "qwen3", "debugmodel_flex", {"n_layers": 8, "head_dim": 128, "ffn_dim": 3072, "vocab_size": 2048}, True),
    ("", "qwen3", "debugmodel_moe", {"n_experts": 64, "top_k": 8, "expert_dim": 768, "head_dim": 128}, False),
]


@pytest.mark.parametrize(("options", "name", "flavor", "sizes", "masked"), MEANINGS)
def test_models_keep_their_meaning(options, name, flavor, sizes, masked, capsys, tmp_path):
    """Compare rotary scaling, masks, routers and sizes of debug models with PyTorch's torchtitan."""
    model = f"name = '{name}'\nflavor = '{flavor}'\n"
    old = options.replace("[model]\n", f"[model]\n{model}") if "[model]" in options else f"{options}[model]\n{model}"
    _, out, _ = upgrade(capsys, tmp_path, old)
    (tmp_path / "new.toml").write_text(out)
    config = load(["--job.config_file=new.toml"])
    args = Facts(ResolvedJob(config)).model.args
    assert {size: getattr(args, size) for size in sizes} == sizes
    assert config.training.document_mask == masked
    unchanged = (
        flavor == config.model.flavor and name == config.model.name and not config.model.overrides and not masked
    )
    assert unchanged or "meant it: " in out or "moved: model.attn_mask_type" in out  # nothing changes in silence


@pytest.mark.parametrize(
    ("name", "flavor", "reason"),
    [
        (
            "llama4",
            "17bx16e",
            'its sizes are not translated; write a job with model.name = "llama4" and flavor scout or maverick',
        ),
        (
            "gpt_oss",
            "20b",
            'its sizes are not translated; write a job with model.name = "gpt_oss" and flavor 20B or 120B',
        ),
        ("flux", "flux-dev", "models of images (flux, vlm) are not in this version"),
    ],
)
def test_models_without_an_implementation_are_refused(name, flavor, reason, capsys, tmp_path):
    code, out, err = upgrade(capsys, tmp_path, f"[model]\nname = '{name}'\nflavor = '{flavor}'")
    assert (code, out) == (2, "") and err == [
        f'old.toml: model.name: given "{name}"; has no translation: {reason}',
        "1 fault",
    ]


@pytest.mark.parametrize("name", ["deepseek_v3", "llama3_ft"])
def test_an_unknown_family_gets_no_wrong_suggestion(name, capsys):
    code, _, err = run_check(capsys, f"--model.name={name}")
    assert code == 2 and "did you mean" not in err
    assert " is not in this version" in err or "; here it is " in err


SINCE = "parallelism.pipeline_parallel_expert_parallel_overlap"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("pipeline_parallel_schedule = 'DualPipeV'", True),
        ("pipeline_parallel_schedule = 'DualPipeV'\n" + SINCE.split(".")[1] + " = false", False),
        ("pipeline_parallel_schedule = 'Interleaved1F1B'", None),
        ("pipeline_parallel_schedule = 'Interleaved1F1B'\n" + SINCE.split(".")[1] + " = true", None),
    ],
)
def test_overlap_is_translated_to_its_old_default(options, expected, capsys, tmp_path):
    model = "[model]\nname = 'deepseek_v3'\nflavor = '16B'\n"
    degrees = "[parallelism]\npipeline_parallel_degree = 2\nexpert_parallel_degree = 2\n"
    _, out, _ = upgrade(capsys, tmp_path, f"{model}{degrees}{options}")
    assert flatten(tomli.loads(out)).get(SINCE) is expected


ROUTED = "[model]\nname = 'deepseek_v3'\nflavor = '16B'\nconverters = ['float8']\n[float8]\n"


@pytest.mark.parametrize(
    ("old", "recipe", "exclude", "same_head"),
    [
        ("[training]\nwarmup_steps = 2\nenable_float8_linear = true", "tensorwise", [], True),
        ("[training]\nwarmup_steps = 2\nenable_float8_linear = false", "none", [], True),
        ("[float8]\nenable_float8_linear = true\nscaling_type_input = 'dynamic'", "tensorwise", [], False),
        ("[float8]\nrecipe_name = 'rowwise'\nfilter_fqns = ['attention.wk']", "none", [], True),
        ("[model]\nconverters = 'float8'\n[float8]\nfilter_fqns = 'output'", "tensorwise", [], True),
        ("[model]\nconverters = 'float8'\n[float8]\nemulate = true\nfilter_fqns = ['output']", "tensorwise", [], True),
        (
            "[model]\nconverters = ['quantize.linear.float8']\n[quantize.linear.float8]\nrecipe_name = 'rowwise'\n"
            "enable_fsdp_float8_all_gather = false\nfilter_fqns = ['attention.wk', 'output']",
            "rowwise",
            ["*attention.wk*"],
            True,
        ),
        (ROUTED + "filter_fqns = ['output', 'router.gate']", "tensorwise", [], True),
        (ROUTED + "filter_fqns = ['output', 'router.gate', 'wo']", "tensorwise", ["*wo*"], True),
        ("[float8]\nenable_float8_linear = true\nfilter_fqns = ['router.gate']", "tensorwise", [], False),
    ],
)
def test_float8_keeps_its_meaning(old, recipe, exclude, same_head, capsys, tmp_path):
    code, out, err = upgrade(capsys, tmp_path, old)
    assert (code, err) == (0, [])
    (tmp_path / "new.toml").write_text(out)
    training = load(["--job.config_file=new.toml"]).training
    assert (training.float8, training.float8_exclude) == (recipe, exclude)
    assert ("the head multiplied in float8 too" in out) is not same_head
    assert ("left out, changed nothing: *router.gate* in training.float8_exclude (no linear" in out) == (
        "router" in old
    )


# Eras, and messages about a translation


OLDEST = [  # options from before the first release, each of which tells the era
    ("training", "checkpoint_interval = 5"),
    ("training", "checkpoint_interval_type = 'steps'"),
    ("training", "checkpoint_folder = ''"),
    ("training", "enable_fp8_linear = false"),
    ("training", "sequence_parallel_degree = 2"),
    ("profiling", "profile_every_x_iter = 5"),
    ("global", "dump_folder = 'x'"),
]


@pytest.mark.parametrize(
    ("old", "era"),
    [
        ("[training]\nwarmup_steps = 2", "July 2024"),
        ("[metrics]\nrank_0_only = true", "July 2024"),
        ("[checkpoint]\nlast_save_model_weights_only = true", "v0.1.0 to August 2025"),
        ("[float8]\nmoe_fqns = []", "v0.1.0 to August 2025"),
        ("[training]\ncompile = false\n[parallelism]\ntensor_parallel_degree = 1", "v0.1.0 to August 2025"),
        ("[training]\nseed = 1\ndebug_moe_force_load_balance = false", "v0.2.2"),
        ("[quantize.linear.float8]\nemulate = false", "v0.2.2"),
        ("[job]\ndescription = 'x'", "v0.2.2"),
        *((f"[{section}]\n{option}", "July 2024") for section, option in OLDEST),
        ("[training]\nshuffle = false", "today"),
    ],
)
def test_the_era_is_recognized_by_the_options(old, era, capsys, tmp_path):
    _, out, _ = upgrade(capsys, tmp_path, old)
    assert out.startswith(f"# Translated from old.toml, read as a job for PyTorch's torchtitan of {era}.\n")


def test_the_era_can_be_named(capsys, tmp_path):
    (tmp_path / "old.toml").write_text("[job]\ndescription = 'x'")
    for name, era in (("july-2024", "July 2024"), ("v0.1", "v0.1.0 to August 2025"), ("v0.2", "v0.2.2")):
        code, out, _ = run_check(capsys, "old.toml", "--upgrade", "--from", name)
        assert code == 0 and f"torchtitan of {era}." in out
        assert (flatten(tomli.loads(out)).get("model.name") == "llama3.1") == (name == "v0.2")
    for arguments, message in (
        (["--upgrade", "--from", "v9"], "--from: given 'v9'; allowed: july-2024, v0.1, v0.2"),
        (["--from=v0.1"], "--from: allowed with --upgrade only"),
    ):
        with pytest.raises(JobError, match=message):
            command.main(["old.toml", *arguments])
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("old", "fault"),
    [
        ("[model]\nflavor = '9B'", "model.flavor"),
        ("[model]\nname = 'mine'", "model.name"),
        ("[model]\nhf_assets_path = 'nowhere'", "model.tokenizer_path"),
        ("[training]\ndataset = 'mine'", "training.dataset"),
        (
            "[parallelism]\npipeline_parallel_schedule = 'DualPipe'\npipeline_parallel_degree = 2",
            "pipeline_parallel_schedule",
        ),
        ("[training]\nlocal_batch_size = 3\nglobal_batch_size = 4", "training.global_batch_size"),
    ],
)
def test_upgrade_reports_a_translation_that_cannot_start(old, fault, capsys, tmp_path):
    """--upgrade reports the faults that check finds in the translation."""
    code, out, err = upgrade(capsys, tmp_path, old)
    assert code == 2 and err[0] == "translated, but the job cannot start without changes:"
    (tmp_path / "new.toml").write_text(out)
    code, _, checked = run_check(capsys, "new.toml")
    assert code == 2 and fault in checked
    assert checked.replace("new.toml", "the translation of old.toml") == "\n".join(err[1:]) + "\n"


def test_comments_are_kept(capsys, tmp_path):
    old = (
        "# my job\n# since July\n\n[job]  # the job\ndescription = 'x'\n\n# about the model\n[model]\n"
        "hf_assets_path = 'a'  # ours\n# converters = ['float8']\n\n"
        "[training]\n# four fit\nlocal_batch_size = 4 # no more\n"
        "[quantize.linear.float8]\nemulate = false # not on CPU\n[debug]\nseed = 3\n# the end\n"
    )
    code, out, _ = upgrade(capsys, tmp_path, old)
    body = out.split("\n\n", 1)[1]
    assert out.startswith("# my job\n# since July\n# Translated from old.toml") and out.endswith("\n# the end\n")
    assert "# not on CPU  [quantize.linear.float8.emulate]" in out.split("\n\n")[0]
    assert "[job]  # the job\ndescription" in body and "\n\n# about the model\n[model]\n" in body
    assert 'tokenizer_path = "a"  # ours\n' in body and "# four fit\nlocal_batch_size = 4  # no more\n" in body
    assert "# converters = ['float8']\n[training]\n" in body
    (tmp_path / "new.toml").write_text(out)
    assert load(["--job.config_file=new.toml"]).training.local_batch_size == 4


@pytest.mark.parametrize(
    "old",
    [
        FLAT,
        OLDER,
        "[training]\nsteps = 10\n",
        "[model]\nflavor = 'debugmodel_flex_attn'\n",
        "[model]\nname = 'deepseek_v3'\n",
        "[model]\nname = 'qwen3'\nflavor = 'debugmodel_moe'\n",
    ],
)
def test_translated_debug_jobs_train(old, capsys, tmp_path):
    code, out, err = upgrade(capsys, tmp_path, old)
    assert (code, err) == (0, [])
    (tmp_path / "new.toml").write_text(out.replace("n_layers = 8\n", "n_layers = 1\n"))  # each layer has 64 experts
    small = [
        "--training.steps=2",
        "--lr_scheduler.warmup_steps=1",
        "--training.seq_len=64",
        "--training.local_batch_size=2",
        "--metrics.log_freq=1",
    ]
    rows, _ = train(["--job.config_file=new.toml", *small, "--model.tokenizer_path=bytes", "--job.dump_folder=out"])
    assert [row["step"] for row in rows] == [1, 2] and all(0 < row["loss"] < 12 for row in rows)
