"""Tests of the rules on trackers, the profiler, checkpoints and folders, and on options without effect."""

import pytest

from tests.support import judged
from tests.support.judged import lines, name
from torchtitan.config.manager import load
from torchtitan.job import ResolvedJob
from torchtitan.rules import WITHOUT_EFFECT, Facts, check

anywhere = judged.anywhere
# Jobs -> faults. {0} is replaced by an empty folder.
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
        "profiling.enable_memory_snapshot: given true; allowed: false without a GPU; leave it out: it records CUDA's "
        "allocator",
    ),
    (
        ["--model.attention_backend=flex"],
        'model.attention_backend: given "flex"; allowed: "auto" or "sdpa" without a GPU; flex has no backward on a CPU',
    ),
    (
        ["--model.attention_backend=fa3"],
        'model.attention_backend: given "fa3"; allowed: "auto" or "sdpa" without a GPU; FlashAttention 3 is for Hopper '
        "GPUs",
    ),
    (
        ["--checkpoint.enable", "--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]
        + ["--model.name=deepseek", "--model.overrides={n_shared_experts = 0}"],
        "checkpoint.last_save_in_hf: given true; allowed: false with this model; n_shared_experts = 0: transformers' "
        "DeepSeek models have at least 1",
    ),
    (
        ["--checkpoint.keep_latest_k=1"],
        "checkpoint.keep_latest_k: given 1; allowed: 0 (all) or at least 2; the only checkpoint would be deleted "
        "before the new one has been verified",
    ),
    (
        ["--checkpoint.load_step=5"],
        "checkpoint.load_step: given 5; allowed: nothing with checkpoint.enable = false; set checkpoint.enable = true, "
        "or leave it out",
    ),
    (
        ["--checkpoint.initial_load_path=x"],
        'checkpoint.initial_load_path: given "x"; allowed: a path with weights; x: no such file or folder; give a '
        "checkpoint, a "
        "folder of them, an export, a folder of Hugging Face or a .safetensors file",
    ),
    (
        ["--checkpoint.load_only"],
        "checkpoint.load_only: given true; allowed: nothing with checkpoint.enable = false; "
        "set checkpoint.enable = true, or leave it out",
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
        ["--checkpoint.enable", "--checkpoint.initial_load_in_hf"],
        "checkpoint.initial_load_in_hf: given true; allowed: true only with initial_load_path; set the path",
    ),
    (
        ["--checkpoint.initial_load_in_hf"],
        "checkpoint.initial_load_in_hf: given true; allowed: nothing with checkpoint.enable = false; "
        "set checkpoint.enable = true, or leave it out",
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
        'checkpoint.initial_load_path: given "{0}"; allowed: a path with weights; {0}: no weights in it; give a '
        "checkpoint, a "
        "folder of them, an export, a folder of Hugging Face or a .safetensors file",
    ),
    (
        ["--checkpoint.enable", "--checkpoint.initial_load_path={0}/no"],
        'checkpoint.initial_load_path: given "{0}/no"; allowed: a path with weights; {0}/no: no such file or folder; '
        "give a "
        "checkpoint, a folder of them, an export, a folder of Hugging Face or a .safetensors file",
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
    *(
        (
            [f"--job.dump_folder={{0}}/{folder}"],
            f'job.dump_folder: given "{{0}}/{folder}"; allowed: a folder by its name; {part} is not expanded here, '
            "only a ~ of a known user at the beginning is; name another folder",
        )
        for folder, part in (
            ("$SCRATCH/run", "$SCRATCH"),
            ("run-${USER}", "run-${USER}"),
            ("$(date +%F)/run", "$(date +%F)"),
            ("~nobody9/run", "~nobody9"),
        )
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


@pytest.mark.parametrize("case", INPUT_AND_OUTPUT, ids=name)
def test_bad_jobs(case, tmp_path):
    arguments, *expected = case
    arguments = [argument.replace("{0}", str(tmp_path)) for argument in arguments]
    assert lines(*arguments, ranks=2) == [line.replace("{0}", str(tmp_path)) for line in expected]


def test_gpu_options_are_fine_on_a_gpu():
    arguments = ["--training.dataloader.pin_memory", "--checkpoint.async_mode=async_with_pinned_mem"]
    arguments += ["--profiling.enable_memory_snapshot", "--model.attention_backend=flex"]
    assert lines(*arguments, device="cuda") == []


def test_settings_of_disabled_sections_are_accepted():
    arguments = ["--checkpoint.folder=a", "--checkpoint.interval=5", "--checkpoint.interval_type=seconds"]
    arguments += ["--checkpoint.keep_latest_k=3", "--checkpoint.async_mode=async", "--metrics.save_tb_folder=b"]
    arguments += ["--compile.backend=eager", "--compile.components=loss", "--profiling.save_traces_folder=c"]
    arguments += ["--profiling.profile_freq=1", "--validation.freq=3", "--activation_checkpoint.memory_budget=0.2"]
    assert lines(*arguments) == []


def test_initial_weights_may_be_gone_once_the_run_has_checkpoints(tmp_path, monkeypatch):
    arguments = ["--checkpoint.enable", "--checkpoint.initial_load_path=gone"]
    assert len(lines(*arguments)) == 1
    monkeypatch.setattr("torchtitan.rules.checkpoint.newest_complete", lambda root: (root / "step-00000001", []))
    assert lines(*arguments) == []


def test_initial_weights_are_not_an_option_without_effect():
    job = load(["--checkpoint.enable", "--checkpoint.initial_load_in_hf"])
    assert [fault for rule in WITHOUT_EFFECT for fault in rule(Facts(ResolvedJob(job)))] == []


def test_initial_safetensors_are_accepted(tmp_path):
    (tmp_path / "model.safetensors").touch()
    assert (
        lines("--checkpoint.enable", "--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={tmp_path}")
        == []
    )


def test_a_folder_that_is_there_may_have_any_name(tmp_path):
    (tmp_path / "$HOME").mkdir()
    assert lines(f"--job.dump_folder={tmp_path}/$HOME/costs $ 5") == []


def test_a_read_only_dump_folder_is_refused(monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (line,) = [line for line in lines() if line.startswith("job.dump_folder")]
    assert "a folder that can be written to" in line


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    job = load(["--metrics.enable_wandb", "--model.tokenizer_path=bytes"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (fault,) = check(job, 1, "cpu")
    assert fault.key == "metrics.enable_wandb" and "torchtitan-toml[wandb]" in fault.remedy
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert not check(job, 1, "cpu")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--checkpoint.folder=model"],
        ["--metrics.save_tb_folder=./metrics.jsonl"],
        ["--parallelism.disable_loss_parallel"],
        ["--parallelism.context_parallel_rotate_method=ring"],
        ["--parallelism.pipeline_parallel_schedule_csv=/nope.csv"],
        ["--checkpoint.exclude_from_loading=rng"],
        ["--checkpoint.last_save_model_only"],
        ["--checkpoint.export_dtype=bfloat16"],
        ["--parallelism.fsdp_prefetch=2"],
        ["--parallelism.fsdp_reshard_after_forward=never"],
        ["--parallelism.fsdp_reshard_after_forward=2"],
        ["--compile.enable", "--compile.scope=model", "--compile.components=loss"],
    ],
)
def test_options_without_effect_or_with_harm_are_refused(arguments):
    (fault,) = check(load([*arguments, "--model.tokenizer_path=bytes"]), 1, "cpu")
    assert arguments[-1].split("=")[0] == f"--{fault.key}"
