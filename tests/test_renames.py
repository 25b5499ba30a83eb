"""Jobs of torchtitan's TOML era: every option has a place or a reason, and a translation keeps the meaning."""

import dataclasses
from pathlib import Path

import pytest
import tomli

from torchtitan import check as command
from torchtitan import renames
from torchtitan.config_manager import ConfigError, load
from torchtitan.options import options, sections

OLD = sorted((Path(__file__).parent / "fixtures/old_tomls").glob("*.toml"))


@pytest.fixture(autouse=True)
def anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = command.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


# The options of the old dialects; of the last one with their defaults.

JULY_2024 = """
[job] config_file dump_folder description use_for_integration_test
[profiling] enable_profiling save_traces_folder profile_freq enable_memory_snapshot save_memory_snapshot_folder
[metrics] log_freq enable_color_printing enable_tensorboard save_tb_folder rank_0_only
[model] name flavor norm_type tokenizer_path
[optimizer] name lr fused
[training] dataset dataset_path batch_size seq_len warmup_steps max_norm steps data_parallel_degree
[training] tensor_parallel_degree enable_loss_parallel data_parallel_type mixed_precision_param mixed_precision_reduce
[training] compile enable_float8_linear enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp
[training] float8_scaling_type_input float8_scaling_type_weight float8_scaling_type_grad_output gc_freq
[experimental] pipeline_parallel_degree pipeline_parallel_split_points pipeline_parallel_schedule
[experimental] pipeline_parallel_split_mode pipeline_parallel_microbatches enable_async_tensor_parallel
[experimental] enable_compiled_autograd
[checkpoint] enable_checkpoint folder interval_type interval model_weights_only export_dtype create_seed_checkpoint
[checkpoint] async_mode keep_latest_k
[activation_checkpoint] mode selective_ac_option
[comm] init_timeout_seconds train_timeout_seconds trace_buf_size
[memory_estimation] enabled disable_fake_mode
"""
BETWEEN = """
[training] seed deterministic
[lr_scheduler] lr_min
[float8] enable_float8_linear force_recompute_fp8_weight_in_bwd
[mx] recipe_name
[parallelism] pipeline_parallel_split_points
[fault_tolerance] sync_steps should_quantize fragment_sync_delay
[experimental] custom_args_module
"""
V0_2_2 = """
[job]
dump_folder = './outputs'
description = 'default job'
print_config = false
custom_config_module = ''
[profiling]
enable_profiling = false
save_traces_folder = 'profile_traces'
profile_freq = 10
profiler_active = 1
profiler_warmup = 3
enable_memory_snapshot = false
save_memory_snapshot_folder = 'memory_snapshot'
[metrics]
log_freq = 10
enable_tensorboard = false
disable_color_printing = false
save_tb_folder = 'tb'
save_for_all_ranks = false
enable_wandb = false
[model]
name = 'llama3'
flavor = 'debugmodel'
hf_assets_path = './tests/assets/tokenizer'
converters = []
print_after_conversion = false
[optimizer]
name = 'AdamW'
lr = 0.0008
beta1 = 0.9
beta2 = 0.95
eps = 1e-08
weight_decay = 0.1
implementation = 'fused'
early_step_in_backward = false
[lr_scheduler]
warmup_steps = 200
decay_type = 'linear'
min_lr_factor = 0.0
[training]
dataset = 'c4_test'
local_batch_size = 8
global_batch_size = -1
seq_len = 2048
max_norm = 1.0
steps = 10000
enable_cpu_offload = false
dtype = 'float32'
mixed_precision_param = 'bfloat16'
mixed_precision_reduce = 'float32'
gc_freq = 50
gc_debug = false
[training.dataloader]
num_workers = 0
persistent_workers = false
pin_memory = false
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = 'default'
tensor_parallel_degree = 1
disable_loss_parallel = false
enable_async_tensor_parallel = false
pipeline_parallel_degree = 1
pipeline_parallel_first_stage_less_layers = 1
pipeline_parallel_last_stage_less_layers = 1
pipeline_parallel_schedule = '1F1B'
pipeline_parallel_schedule_csv = ''
pipeline_parallel_microbatch_size = 1
pipeline_parallel_expert_parallel_overlap = true
context_parallel_degree = 1
context_parallel_load_balancer = 'headtail'
context_parallel_rotate_method = 'allgather'
expert_parallel_degree = 1
expert_tensor_parallel_degree = 1
expert_parallel_comm_backend = 'standard'
[checkpoint]
enable = false
enable_ft_dataloader_checkpoints = true
folder = 'checkpoint'
interval = 500
initial_load_model_only = true
initial_load_in_hf = false
initial_load_in_hf_quantized = false
last_save_model_only = true
last_save_in_hf = false
export_dtype = 'float32'
async_mode = 'disabled'
keep_latest_k = 10
load_step = -1
exclude_from_loading = []
enable_first_step_checkpoint = false
create_seed_checkpoint = false
load_only = false
[activation_checkpoint]
mode = 'selective'
selective_ac_option = '2'
per_op_sac_force_recompute_mm_shapes_by_fqns = ['moe.router.gate']
early_stop = false
memory_budget = 0.5
visualize_memory_budget_pareto = false
preserve_rng_state = true
determinism_check = 'default'
debug = false
[compile]
enable = false
components = ['model', 'loss']
backend = 'inductor'
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = []
emulate = false
[quantize.linear.mx]
mxfp8_dim1_cast_kernel_choice = 'triton'
recipe_name = 'mxfp8_cublas'
filter_fqns = ['output']
[quantize.grouped_mm.float8]
fqns = []
[quantize.grouped_mm.mx]
recipe_name = 'mxfp8'
fqns = []
[comm]
init_timeout_seconds = 300
train_timeout_seconds = 100
trace_buf_size = 20000
save_traces_folder = 'comm_traces'
save_traces_file_prefix = 'rank_'
mode = 'default'
[memory_estimation]
enable = false
disable_fake_mode = false
[fault_tolerance]
enable = false
process_group = 'gloo'
process_group_timeout_ms = 10000
replica_id = 0
group_size = 0
min_replica_size = 1
[experimental]
custom_import = ''
custom_args_module = ''
[validation]
enable = false
dataset = 'c4_validation'
local_batch_size = 8
seq_len = 2048
freq = 10
steps = -1
[validation.dataloader]
num_workers = 0
persistent_workers = false
pin_memory = false
[debug]
deterministic = false
deterministic_warn_only = false
moe_force_load_balance = false
"""
UNSET_IN_V0_2_2 = """
[job] config_file save_config_file
[model] tokenizer_path
[lr_scheduler] total_steps decay_ratio
[training] dataset_path
[training.dataloader] prefetch_factor
[parallelism] module_fqns_per_model_part pipeline_parallel_layers_per_stage
[checkpoint] initial_load_path
[quantize.linear.float8] recipe_name
[fault_tolerance] semi_sync_method
[validation] dataset_path
[validation.dataloader] prefetch_factor
[debug] seed
"""


def listed(text: str) -> list[str]:
    found = []
    for line in text.strip().splitlines():
        section, _, names = line.partition("] ")
        found += [f"{section[1:]}.{name}" for name in names.split()]
    return found


def leaves(table: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in table.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


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
        ("[training]\nenable_loss_parallel = false", {"parallelism.disable_loss_parallel": True}),
        ("[metrics]\nrank_0_only = false", {"metrics.save_for_all_ranks": True}),
        ("[metrics]\nenable_color_printing = true", {"metrics.disable_color_printing": False}),
        ("[optimizer]\nfused = true", {"optimizer.implementation": "fused"}),
        ("[model]\nname = 'llama'", {"model.name": "llama3"}),
        ("[experimental]\npipeline_parallel_schedule = 'gpipe'", {"parallelism.pipeline_parallel_schedule": "GPipe"}),
        ("[experimental]\npipeline_parallel_split_points = []", {}),
        (
            "[parallelism]\npipeline_parallel_schedule = 'PipelineScheduleMulti'\npipeline_parallel_schedule_csv = 'a'",
            {"parallelism.pipeline_parallel_schedule_csv": "a"},
        ),
        ("[training]\nseed = 3\n[lr_scheduler]\nlr_min = 0.1", {"debug.seed": 3, "lr_scheduler.min_lr_factor": 0.1}),
        (
            "[model]\nhf_assets_path = 'a'\n[checkpoint]\nenable = true\ninitial_load_in_hf = true",
            {"checkpoint.initial_load_path": "a", "model.tokenizer_path": "a", "checkpoint.last_save_model_only": True},
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
            "training.enable_float8_linear: given true; has no translation: float8 is not in this version",
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
