"""`torchtitan check`: a table of jobs that cannot work and what is said of each, and the translation of old jobs."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from torchtitan import check as command
from torchtitan import renames
from torchtitan.check import OPTIMIZER_NAMES, RULES, UNSUPPORTED, check, fewest_ranks
from torchtitan.config_manager import ConfigError, load
from torchtitan.options import options, sections
from torchtitan.rules import BACKENDS, Facts

REPOSITORY = Path(__file__).parent.parent
OLD = sorted((REPOSITORY / "tests/fixtures/old_tomls").glob("*.toml"))
TOKENIZER = REPOSITORY / "tests/assets/tokenizer/tiktoken.model"


@pytest.fixture(autouse=True)
def anywhere(tmp_path, monkeypatch):
    """Jobs are checked from an empty folder: a fault must not make one, nor need one."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "outputs").exists()


def lines(*words: str, ranks: int = 1, device: str = "cpu") -> list[str]:
    faults = check(load([f"--model.tokenizer_path={TOKENIZER}", *words]), ranks, device)
    return [str(fault).removeprefix("the job: ") for fault in faults]


def test_the_default_job_is_fine_on_any_number_of_ranks():
    for ranks in (1, 2, 3, 8):
        assert lines(ranks=ranks) == []


@pytest.mark.parametrize("kind", ["tiktoken.model", "sentencepiece.model", "tokenizer.json"])
def test_shipped_tokenizers_fit_the_debug_model(kind):
    config = load([f"--model.tokenizer_path={TOKENIZER.parent / kind}"])
    assert check(config, 1, "cpu") == []


# Jobs -> faults. {0} stands for an empty folder.

NAMES = [
    (
        ["--model.name=lama3"],
        'model.name: given "lama3"; allowed: one of "llama2", "llama3", "llama3.1", "llama3.2"; did you mean "llama3"?',
    ),
    (
        ["--model.flavor=70b"],
        'model.flavor: given "70b"; allowed: one of "debugmodel", "8B", "70B", "405B"; did you mean "70B"?',
    ),
    (
        ["--optimizer.name=adamw"],
        'optimizer.name: given "adamw"; allowed: one of "Adam", "AdamW"; did you mean "AdamW"?',
    ),
    (
        ["--compile.enable", "--compile.backend=inducter"],
        'compile.backend: given "inducter"; allowed: one of "inductor", "eager", "aot_eager", "cudagraphs"; '
        'did you mean "inductor"?',
    ),
]
MODEL = [
    (
        ["--model.overrides={n_layer = 3}"],
        "model.overrides: given n_layer; allowed: sizes of llama3: dim, n_layers, n_heads, n_kv_heads, vocab_size, "
        "multiple_of, ffn_dim_multiplier, norm_eps, rope_theta, tied_embeddings, max_seq_len; did you mean n_layers?",
    ),
    (
        ["--model.overrides={n_layers = 1.5}"],
        "model.overrides: given n_layers = 1.5; allowed: n_layers = a whole number",
    ),
    (
        ["--model.overrides={dim = true}"],
        "model.overrides: given dim = true; allowed: dim = a whole number",
    ),
]
TRAINING = [
    (
        ["--training.global_batch_size=12", "--training.local_batch_size=4"],
        "training.global_batch_size: given 12; allowed: a multiple of local_batch_size 4 x 2 data-parallel ranks = 8; "
        "write 8 or 16",
    ),
    (
        ["--training.global_batch_size=4", "--training.local_batch_size=4"],
        "training.global_batch_size: given 4; allowed: a multiple of local_batch_size 4 x 2 data-parallel ranks = 8; "
        "write 8 or fewer samples a rank",
    ),
    (
        ["--training.global_batch_size=0"],
        "training.global_batch_size: given 0; allowed: at least 1, or -1 for one forward pass a step; write -1",
    ),
    (
        ["--lr_scheduler.decay_ratio=0.5", "--lr_scheduler.decay_type=constant"],
        'lr_scheduler.decay_ratio: given 0.5; allowed: unset with decay_type = "constant"; drop one of the two',
    ),
    (
        ["--lr_scheduler.num_cycles=2"],
        'lr_scheduler.num_cycles: given 2; allowed: 1, except with decay_type = "cosine_restarts"; drop it',
    ),
    (
        ["--optimizer.early_step_in_backward"],
        "training.max_norm: given 1.0; allowed: 0 with optimizer.early_step_in_backward; clipping needs all gradients "
        "at once, and here each is gone before the next is there",
    ),
    (
        ["--optimizer.early_step_in_backward", "--training.max_norm=0", "--training.global_batch_size=32"],
        "training.global_batch_size: given 32; allowed: -1 or 16 with optimizer.early_step_in_backward; accumulation "
        "keeps gradients from one forward pass to the next",
    ),
    (
        ["--training.dtype=bfloat16", "--training.mixed_precision_param=float32"],
        'training.mixed_precision_param: given "float32"; allowed: "bfloat16" with training.dtype = "bfloat16"; '
        "computing in float32 adds nothing to weights kept in bfloat16",
    ),
    (
        ["--activation_checkpoint.mode=memory_budget"],
        'activation_checkpoint.mode: given "memory_budget"; allowed: with a compiled model only, as the compiler keeps '
        'to the budget; set compile.enable = true with "model" in compile.components, or another mode',
    ),
    (
        ["--activation_checkpoint.mode=memory_budget", "--compile.enable", "--compile.components=loss"],
        'activation_checkpoint.mode: given "memory_budget"; allowed: with a compiled model only, as the compiler keeps '
        'to the budget; set compile.enable = true with "model" in compile.components, or another mode',
    ),
    (
        ["--compile.enable", "--compile.components="],
        'compile.components: given []; allowed: "model", "loss" or both; or set compile.enable = false',
    ),
    (
        ["--compile.enable", "--compile.scope=model"],
        'compile.scope: given "model"; allowed: "block" where parameters are sharded (here over 2 ranks); write '
        '"block", or parallelism.data_parallel_shard_degree = 1 with replicas',
    ),
]
INPUT_AND_OUTPUT = [
    (
        ["--training.dataloader.prefetch_factor=2"],
        "training.dataloader.prefetch_factor: given 2; allowed: unset without workers; set "
        "training.dataloader.num_workers, or leave it out",
    ),
    (
        ["--training.dataloader.persistent_workers"],
        "training.dataloader.persistent_workers: given true; allowed: false without workers; set "
        "training.dataloader.num_workers, or leave it out",
    ),
    (
        ["--training.dataloader.pin_memory"],
        "training.dataloader.pin_memory: given true; allowed: false without a GPU; it speeds copies to one",
    ),
    (
        ["--checkpoint.async_mode=async_with_pinned_mem"],
        'checkpoint.async_mode: given "async_with_pinned_mem"; allowed: "async" or "disabled" without a GPU; '
        'write "async"',
    ),
    (
        ["--profiling.enable_memory_snapshot"],
        "profiling.enable_memory_snapshot: given true; allowed: false without a GPU; it records CUDA's allocator",
    ),
    (
        ["--model.attention_backend=flex"],
        'model.attention_backend: given "flex"; allowed: "auto" or "sdpa" without a GPU; flex has no backward on a CPU',
    ),
    (
        ["--checkpoint.keep_latest_k=1"],
        "checkpoint.keep_latest_k: given 1; allowed: 0 (all) or at least 2; the only checkpoint would be deleted for "
        "one that nobody has read yet",
    ),
    (
        ["--checkpoint.load_step=5"],
        "checkpoint.load_step: given 5; allowed: nothing with checkpoint.enable = false; set checkpoint.enable = true",
    ),
    (
        ["--checkpoint.initial_load_path=x"],
        'checkpoint.initial_load_path: given "x"; allowed: nothing with checkpoint.enable = false; '
        "set checkpoint.enable = true",
    ),
    (
        ["--checkpoint.load_only"],
        "checkpoint.load_only: given true; allowed: nothing with checkpoint.enable = false; "
        "set checkpoint.enable = true",
    ),
    (
        ["--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.last_save_model_only"],
        "checkpoint.last_save_model_only: given true; allowed: false with checkpoint.load_only, which never saves; "
        "drop one of the two",
    ),
    (
        ["--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.enable_first_step_checkpoint"],
        "checkpoint.enable_first_step_checkpoint: given true; allowed: false with checkpoint.load_only, which never "
        "saves; drop one of the two",
    ),
    (
        ["--checkpoint.last_save_in_hf"],
        "checkpoint.last_save_in_hf: given true; allowed: true only with last_save_model_only; set both",
    ),
    (
        ["--checkpoint.initial_load_in_hf"],
        "checkpoint.initial_load_in_hf: given true; allowed: true only with initial_load_path; set the path",
    ),
    (
        [
            "--checkpoint.enable",
            "--checkpoint.initial_load_in_hf",
            "--checkpoint.initial_load_path={0}",
            "--checkpoint.no-initial_load_model_only",
        ],
        "checkpoint.initial_load_model_only: given false; allowed: true with initial_load_in_hf; safetensors of "
        "Hugging Face hold no optimizer state",
        'checkpoint.initial_load_path: given "{0}"; allowed: a folder with *.safetensors; there are none',
    ),
    (
        ["--checkpoint.enable", "--checkpoint.initial_load_path={0}/no"],
        'checkpoint.initial_load_path: given "{0}/no"; allowed: a checkpoint; {0}/no: no complete checkpoint (no such '
        "folder); give a step-* folder, a folder that holds some, or an export",
    ),
    *(
        (
            [f"--{key}={folder}"],
            f'{key}: given "{folder}"; allowed: a folder inside job.dump_folder; give its name alone',
        )
        for key, folder in (
            ("checkpoint.folder", ""),
            ("metrics.save_tb_folder", "/tb"),
            ("profiling.save_traces_folder", "../traces"),
            ("profiling.save_memory_snapshot_folder", "a/../../b"),
        )
    ),
    (["--job.dump_folder="], 'job.dump_folder: given ""; allowed: a folder; write "./outputs"'),
    (
        ["--job.dump_folder=/dev/null/x"],
        'job.dump_folder: given "/dev/null/x"; allowed: a folder; /dev/null is a file; name another folder',
    ),
    (
        ["--profiling.enable_profiling", "--profiling.profile_freq=3"],
        "profiling.profile_freq: given 3; allowed: at least profiler_warmup 3 + profiler_active 1 = 4; write 4 or more",
    ),
    (
        ["--debug.deterministic_warn_only"],
        "debug.deterministic_warn_only: given true; allowed: false without debug.deterministic; set both or neither",
    ),
    (
        ["--metrics.save_for_all_ranks"],
        "metrics.save_for_all_ranks: given true; allowed: false without enable_tensorboard; set both or neither",
    ),
]


@pytest.mark.parametrize(
    "case", [*NAMES, *MODEL, *TRAINING, *INPUT_AND_OUTPUT], ids=lambda case: " ".join(case[0])[:60]
)
def test_bad_jobs(case, tmp_path):
    words, *expected = case
    words = [word.replace("{0}", str(tmp_path)) for word in words]
    assert lines(*words, ranks=2) == [line.replace("{0}", str(tmp_path)) for line in expected]


@pytest.mark.parametrize(
    "words",
    [
        ["--training.global_batch_size=64"],
        ["--lr_scheduler.total_steps=5", "--training.steps=10"],  # the rate stays at its floor
        ["--training.steps=1"],
        ["--lr_scheduler.warmup_steps=2", "--training.steps=10", "--lr_scheduler.decay_ratio=0.8"],
        ["--optimizer.early_step_in_backward", "--training.max_norm=0"],
        ["--training.dtype=bfloat16"],
        ["--activation_checkpoint.mode=memory_budget", "--compile.enable"],
        ["--compile.enable", "--compile.scope=model", "--parallelism.data_parallel_shard_degree=1"]
        + ["--parallelism.data_parallel_replicate_degree=2"],
        ["--checkpoint.enable", "--checkpoint.keep_latest_k=0", "--checkpoint.load_step=5"],
        ["--model.overrides={n_kv_heads=4, norm_eps=1e-6, tied_embeddings=true, rope_theta=10000}"],
        ["--compile.backend=mine"],  # compile is off
        ["--validation.dataset=mine"],  # validation is off
        ["--validation.enable"],
    ],
    ids=" ".join,
)
def test_good_jobs(words):
    assert lines(*words, ranks=2) == []


def test_schedules_that_do_not_fit():
    """The schedule itself says why."""
    (line,) = lines("--lr_scheduler.warmup_steps=10", "--training.steps=10")
    assert line.startswith("lr_scheduler.warmup_steps: given 10; allowed: ")
    assert "10 steps" in line and "training.steps" in line
    (line,) = lines("--lr_scheduler.warmup_steps=3", "--training.steps=10", "--lr_scheduler.decay_ratio=0.8")
    assert line.startswith("lr_scheduler.decay_ratio: given 0.8; allowed: ") and "3" in line and "8" in line


@pytest.mark.parametrize("sizes", ["{n_kv_heads = 3}", "{n_heads = 3}", "{n_layers = 0}"])
def test_sizes_that_do_not_fit_together(sizes):
    (line,) = lines(f"--model.overrides={sizes}")
    assert line.startswith(f"model.overrides: given {sizes}; allowed: sizes that fit together: ")
    assert sizes.strip("{}") in line


def test_several_wrong_sizes_are_all_named():
    assert len(lines("--model.overrides={n_layer = 1, dim = 1.5, n_heads = 3, foo = 1}")) == 3


def test_gpu_options_are_fine_on_a_gpu():
    words = ["--training.dataloader.pin_memory", "--checkpoint.async_mode=async_with_pinned_mem"]
    words += ["--profiling.enable_memory_snapshot", "--model.attention_backend=flex"]
    assert lines(*words, device="cuda") == []


def test_offload_does_not_go_with_the_whole_model_compiled():
    (line,) = lines("--compile.enable", "--compile.scope=model", "--training.enable_cpu_offload")
    assert line == 'compile.scope: given "model"; allowed: "block" with training.enable_cpu_offload; write "block"'


# Ranks


@pytest.mark.parametrize(
    ("shard", "replicate", "ranks", "expected"),
    [
        (2, 1, 2, None),
        (-1, 2, 4, None),
        (2, 2, 4, None),
        (
            4,
            1,
            2,
            "given data_parallel_shard 4 = 4; allowed: degrees whose product is the number of ranks, 2; "
            "start 4 ranks, or write -1 to shard over those that are left",
        ),
        (
            2,
            3,
            4,
            "given data_parallel_shard 2 x data_parallel_replicate 3 = 6; allowed: degrees whose product is the number "
            "of ranks, 4; start 6 ranks, or write -1 to shard over those that are left",
        ),
        (
            -1,
            3,
            4,
            "given 4 ranks; allowed: ranks that can be divided by data_parallel_replicate 3 = 3; start a multiple of 3 "
            "ranks, or lower a degree",
        ),
        (0, 1, 1, "given 0; allowed: at least 1, or -1 for the ranks that are left; write -1"),
    ],
)
def test_degrees_and_ranks(shard, replicate, ranks, expected):
    words = [f"--parallelism.data_parallel_shard_degree={shard}"]
    words += [f"--parallelism.data_parallel_replicate_degree={replicate}"]
    found = lines(*words, ranks=ranks)
    assert found == ([f"parallelism.data_parallel_shard_degree: {expected}"] if expected else [])


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_is_not_in_this_version_is_refused(key):
    word = f"--{key}" if UNSUPPORTED[key] is False else f"--{key}=2"
    expected = "it is not in this version; data parallel is (shard, replicate, both)"
    assert [line for line in lines(word, ranks=2) if line.endswith(expected)]
    assert not [line for line in lines(f"--{key}={str(UNSUPPORTED[key]).lower()}", ranks=2)]


def test_fewest_ranks():
    words = ["--parallelism.data_parallel_replicate_degree=3", "--parallelism.data_parallel_shard_degree"]
    assert fewest_ranks(load([*words, "-1"])) == 3
    assert fewest_ranks(load([*words, "4"])) == 12


# Files


def test_a_tokenizer_that_is_not_there():
    (fault,) = check(load(["--model.tokenizer_path=no.model"]), 1, "cpu")
    assert (fault.file, fault.key, fault.given) == ("the job", "model.tokenizer_path", '"no.model"')
    assert "No such file" in fault.remedy and "huggingface.co" not in fault.remedy
    (fault,) = check(load(["--model.tokenizer_path=no.model", "--model.flavor=8B"]), 1, "cpu")
    assert "huggingface.co/meta-llama" in fault.remedy


def test_a_vocabulary_larger_than_the_model():
    (line,) = lines("--model.overrides={vocab_size = 100}")
    assert line == (
        f'model.tokenizer_path: given "{TOKENIZER}" with 2048 tokens; allowed: at most the 100 tokens of model '
        "debugmodel; use its tokenizer, or set model.overrides = {vocab_size = 2048}"
    )


@pytest.mark.parametrize("dataset", ["text", "tokens", "c4_test", "huggingface"])
def test_datasets_that_need_a_path(dataset):
    (line,) = lines(f"--training.dataset={dataset}")
    assert line.startswith(f'training.dataset_path: given nothing; allowed: data for dataset "{dataset}"; ')


def test_data_that_cannot_be_used(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "tokens").mkdir()
    words = ["--validation.enable", "--validation.dataset=tokens", f"--validation.dataset_path={tmp_path}/tokens"]
    words += ["--training.dataset=text", f"--training.dataset_path={tmp_path}/empty.txt"]
    training, validation = lines(*words)
    assert "empty" in training and training.startswith("training.dataset_path: ")
    assert "header.json" in validation and validation.startswith("validation.dataset_path: ")


def test_an_unknown_dataset_has_one_fault():
    (line,) = lines("--training.dataset=c4_tst")
    assert line.startswith('training.dataset: given "c4_tst"; allowed: one of "python_stdlib"')
    assert line.endswith('did you mean "c4_test"?')


def test_a_run_with_checkpoints_of_its_own_needs_the_first_one_no_more(tmp_path, monkeypatch):
    words = ["--checkpoint.enable", "--checkpoint.initial_load_path=gone"]
    assert len(lines(*words)) == 1
    monkeypatch.setattr("torchtitan.rules.newest_complete", lambda root: (root / "step-00000001", []))
    assert lines(*words) == []


def test_safetensors_to_start_from(tmp_path):
    (tmp_path / "model.safetensors").touch()
    assert (
        lines("--checkpoint.enable", "--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={tmp_path}")
        == []
    )


def test_a_dump_folder_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (line,) = [line for line in lines() if line.startswith("job.dump_folder")]
    assert "a folder that can be written to" in line


# All together


def test_all_rules_report_at_once_and_are_listed():
    words = ["--model.name=x", "--training.global_batch_size=0", "--checkpoint.keep_latest_k=1", "--optimizer.name=y"]
    words += ["--lr_scheduler.num_cycles=3", "--training.dataset=z", "--job.dump_folder="]
    assert len(lines(*words)) == 7
    assert len(RULES) == len(set(RULES))


def test_faults_name_the_files_of_the_job(tmp_path):
    (tmp_path / "job.toml").write_text("[checkpoint]\nkeep_latest_k = 1\n")
    (fault, _) = check(load(["--job.config_file=job.toml"]), 1, "cpu")[::-1]
    assert fault.file == "job.toml"


def test_names_are_those_of_the_registries():
    from torch._dynamo import list_backends

    from torchtitan.models import SIZES
    from torchtitan.models.registry import MODELS
    from torchtitan.optimizers import OPTIMIZERS

    assert tuple(OPTIMIZERS) == OPTIMIZER_NAMES
    assert list(MODELS) == list(SIZES)
    assert set(BACKENDS) <= set(list_backends(exclude_tags=()))


# The command


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = command.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_ok_with_a_summary(capsys):
    words = [f"--model.tokenizer_path={TOKENIZER}", "--training.seq_len=256", "--training.steps=100"]
    words += ["--parallelism.data_parallel_replicate_degree=2", "--training.global_batch_size=64"]
    code, out, err = run(capsys, "--world-size=4", "--device", "cpu", *words)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "the default job: OK",
        "  model     llama3 debugmodel, 6,163,712 parameters",
        "  ranks     4 ranks (cpu): 2 shards (FSDP) x 2 replicas",
        "  state     0.05 GiB a rank (parameters, gradients, two moments in float32)",
        "  data      python_stdlib, 64 samples of 256 tokens a step, in 2 forward passes",
        "  tokens    16,384 a step, 1,638,400 in 100 steps",
        "  schedule  peak 0.0008, warmup 10, linear decay 90 to floor 8e-05; total 100 steps",
    ]


def test_without_a_world_size_the_fewest_ranks_are_taken(capsys):
    word = "--parallelism.data_parallel_replicate_degree=2"
    code, out, _ = run(capsys, f"--model.tokenizer_path={TOKENIZER}", word)
    assert code == 0 and "ranks     2 ranks" in out and "in one forward pass\n" in out


def test_each_job_is_checked_by_itself(capsys, tmp_path):
    (tmp_path / "a.toml").write_text(f'[model]\ntokenizer_path = "{TOKENIZER}"\n')
    (tmp_path / "b.toml").write_text("[training]\nstps = 1\nseq_len = 0\n")
    code, out, err = run(capsys, "a.toml", "b.toml", "--training.steps", "7")
    assert code == 2 and out.startswith("a.toml: OK") and "7 steps" in out
    assert [line.split(";")[0] for line in err.splitlines()] == [
        "b.toml: training.stps: given 1",
        "b.toml: training.seq_len: given 0",
        "2 faults",
    ]


def test_print_config(capsys):
    code, out, _ = run(capsys, f"--model.tokenizer_path={TOKENIZER}", "--job.print_config")
    assert code == 0 and tomli.loads(out[out.index("[job]") :])["model"]["tokenizer_path"] == str(TOKENIZER)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--world-size", "0"], '--world-size: given "0"; allowed: a whole number >= 1\n1 fault\n'),
        (["--world-size=two"], '--world-size: given "two"; allowed: a whole number >= 1\n1 fault\n'),
        (["--world-size"], '--world-size: given ""; allowed: a whole number >= 1\n1 fault\n'),
        (["--device=tpu"], '--device: given "tpu"; allowed: "cpu" or "cuda"\n1 fault\n'),
        (["a.toml", "b.toml", "--upgrade"], "--upgrade takes one job\n1 fault\n"),
    ],
)
def test_wrong_flags(argv, expected, capsys):
    assert run(capsys, *argv) == (2, "", expected)


def test_usage(capsys):
    assert run(capsys) == (2, command.USAGE + "\n", "")
    assert run(capsys, "--help") == (0, command.USAGE + "\n", "")
    code, out, _ = run(capsys, "--help-config")
    assert code == 0 and all(f"--{key}  (" in out for key in options())


def test_neither_checking_nor_loading_needs_torch():
    program = "import sys, torchtitan.check, torchtitan.cli; assert torchtitan.check.main(sys.argv[1:]) == 0; "
    program += "assert 'torch' not in sys.modules"
    argv = [f"--model.tokenizer_path={TOKENIZER}", "--validation.enable", "--world-size=2"]
    subprocess.run([sys.executable, "-c", program, *argv], check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)


# Jobs of older dialects. The tables are those of the projects' own definitions, options with their defaults.

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
    _, out, _ = upgrade(capsys, tmp_path, "[checkpoint]\nenable = true\n[validation]\nenable = true\nsteps = 7\n")
    (tmp_path / "new.toml").write_text(out)
    resolved = leaves(dataclasses.asdict(load(["--job.config_file=new.toml"])))
    for key, value in leaves(tomli.loads(V0_2_2)).items():
        if key in options() and key not in ("checkpoint.enable", "validation.enable", "validation.steps"):
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


def test_july_2024_means_its_own_defaults(capsys, tmp_path):
    file = REPOSITORY / "tests/fixtures/old_tomls/july2024_debug_model.toml"
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


def test_facts_are_worked_out_once():
    facts = Facts(load([f"--model.tokenizer_path={TOKENIZER}"]), 1, "cpu")
    assert facts.tokenizer is facts.tokenizer
