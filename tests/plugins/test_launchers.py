"""Launchers of imported scripts: options of accelerate launch, torchrun and deepspeed are mapped, noted or refused."""

import re

import pytest
import yaml

from torchtitan.config.options import ConfigError
from torchtitan.core.errors import JobError
from torchtitan.plugins.importers import launchers, parse, split
from torchtitan.plugins.importers.command import translate
from torchtitan.plugins.importers.launchers import OPTIONS

FILE = {"base_model": "llama", "datasets": [{"path": "a.jsonl"}], "learning_rate": 1e-4, "max_steps": 10}
ADAPTER = {"adapter": "lora", "lora_target_linear": True, "lora_r": 8, "lora_alpha": 16}
VALUES = {"int": "2", "float": "1.0", "text": "x", "bool": ""}


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    return tmp_path


def job(launch, **options):
    """Import an Axolotl file with this launch command; return the job and its head comment."""
    with open("job.yml", "w") as file:
        yaml.safe_dump(FILE | ADAPTER | options, file)
    text, config, _ = translate(parse(split([f"{launch} train.py job.yml"])), None)
    return config, " ".join(re.findall("^# (.*)", text, re.MULTILINE))


def import_error(launch, **options):
    with pytest.raises(ConfigError) as error:
        job(launch, **options)
    return str(error.value)


def test_mixed_precision_applies_unless_the_file_sets_it():
    """As in TrainingArguments of transformers, bf16 of the file overrides the launcher's."""
    config, head = job("accelerate launch --num_processes 2 --mixed_precision bf16", bf16=False)
    assert config.training.mixed_precision_param == "bfloat16" and config.training.dtype == "float32"
    assert "accelerate launch --mixed_precision bf16" in head
    assert job("accelerate launch --mixed_precision bf16", bf16=False)[0].training.mixed_precision_param == "bfloat16"
    for quiet in ("accelerate launch", "accelerate launch --mixed_precision no", "torchrun"):
        config, head = job(quiet, bf16=False)
        assert config.training.mixed_precision_param == "float32" and "mixed_precision" not in head
    config, head = job("accelerate launch --mixed_precision=fp16", bf16=True)
    assert config.training.mixed_precision_param == "bfloat16" and "bf16 of the file takes precedence" in head
    assert "float16 overflows" in import_error("accelerate launch --mixed-precision fp16", bf16=False)
    assert "mixed_precision" in import_error("accelerate launch --mixed_precision fp8", bf16=False)


def test_all_options_of_the_launchers_are_known():
    parsers = {}
    launch = pytest.importorskip("accelerate.commands.launch")
    parsers["accelerate"] = launch.launch_command_parser()
    parsers["torchrun"] = pytest.importorskip("torch.distributed.run").get_args_parser()
    for name, parser in parsers.items():
        for action in parser._actions:
            for option in {flag.lstrip("-").replace("-", "_") for flag in action.option_strings} - {"h", "help"}:
                assert option in OPTIONS[name], f"{name} {option}"
                takes_value = action.nargs != 0
                assert launchers.takes_value(name, option) == takes_value, f"{name} {option}"


ALLOWED = {"mixed_precision": "no", "zero_stage": "2", "dynamo_mode": "default", "dynamo_backend": "no"}
ALLOWED |= {"fsdp_sharding_strategy": "FULL_SHARD", "offload_optimizer_device": "none", "offload_param_device": "none"}
ALLOWED |= {"deepspeed_config_file": "z3.json", "gradient_accumulation_steps": "1", "num_gpus": "2"}
ALLOWED |= {"parallelism_config_sp_size": "1", "parallelism_config_cp_comm_strategy": "allgather"}


@pytest.mark.parametrize("launcher, name", [(launcher, name) for launcher in OPTIONS for name in OPTIONS[launcher]])
def test_every_option_is_mapped_noted_or_refused(launcher, name, workdir):
    """Default values of mapped options change nothing."""
    (workdir / "accelerate.yaml").write_text("num_processes: 2")
    fate, dashes = OPTIONS[launcher][name], "-" if len(name) == 1 else "--"
    value = {"config_file": "accelerate.yaml"}.get(name, ALLOWED.get(name, VALUES[fate.kind]))
    command = {"accelerate": "accelerate launch", "torchrun": "torchrun --nnodes 1"}.get(launcher, launcher)
    line = f"{command} {dashes}{name} {value}"
    if fate.reason:
        assert fate.reason in import_error(line) and name in import_error(line)
        return
    plain, _ = job(command)
    config, head = job(line)
    if fate.note:
        assert f"--{name}" in head and (config == plain)
    elif fate.to and not name.startswith("parallelism"):
        assert config != plain


SHARDED = "accelerate launch --num_processes 2"
REGATHERED = "parallelism.fsdp_reshard_after_forward"
REPLICATED = "parallelism.data_parallel_replicate_degree"
MAPPED = [
    ("accelerate launch --dynamo_backend inductor", "compile.enable", True),
    ("accelerate launch --dynamo_backend AOT_EAGER", "compile.backend", "aot_eager"),
    ("accelerate launch --max_restarts 5", "job.max_restarts", 5),
    ("accelerate launch --use_deepspeed --offload_param_device cpu", "training.enable_cpu_offload", True),
    ("accelerate launch --use_fsdp --fsdp_offload_params true", "training.enable_cpu_offload", True),
    ("accelerate launch --use_fsdp --fsdp_activation_checkpointing True", "activation_checkpoint.mode", "full"),
    (SHARDED, REPLICATED, 2),
    ("accelerate launch --num_processes 2 --use_deepspeed", REGATHERED, "never"),
    (f"{SHARDED} --use_deepspeed --zero_stage 3", REGATHERED, "always"),
    (f"{SHARDED} --use_deepspeed --zero_stage 0", REPLICATED, 2),
    (f"{SHARDED} --deepspeed_config_file z3.json", REGATHERED, "always"),
    (f"{SHARDED} --use_fsdp", REGATHERED, "always"),
    (f"{SHARDED} --use_fsdp --fsdp_sharding_strategy 2", REGATHERED, "never"),
    (f"{SHARDED} --use_fsdp --fsdp_reshard_after_forward false", REGATHERED, "never"),
    (f"{SHARDED} --use_parallelism_config --parallelism_config_tp_size 2", "parallelism.tensor_parallel_degree", 2),
    ("deepspeed --num_gpus 4", "training.global_batch_size", 4),
    ("deepspeed --num_nodes 2 --num_gpus 4", "training.global_batch_size", 8),
    ("python -m torch.distributed.run --nproc-per-node 3", "training.global_batch_size", 3),
    ("python -m accelerate.commands.launch --num_processes 3", "training.global_batch_size", 3),
    ("accelerate-launch --num_processes=3", "training.global_batch_size", 3),
    ("CUDA_VISIBLE_DEVICES=0 nohup torchrun --standalone --nproc_per_node 3", "training.global_batch_size", 3),
]


@pytest.mark.parametrize("launch, option, value", MAPPED)
def test_mapped_options(launch, option, value):
    section, name = option.split(".")
    assert getattr(getattr(job(launch)[0], section), name) == value


REFUSED = [
    ("accelerate launch --mixed_precisoin bf16", "mixed_precisoin", "mixed_precision"),
    ("accelerate launch --zero_stage 4", "zero_stage", "0, 1, 2 or 3"),
    ("accelerate launch --gradient_clipping 0.5", "gradient_clipping", "1, as the job has it"),
    ("accelerate launch --num_processes 2 --gradient_accumulation_steps 4", "gradient_accumulation_steps", "1, as"),
    ("accelerate launch --offload_param_device nvme", "offload_param_device", "offloading to disks is not supported"),
    ("accelerate launch --dynamo_backend onnxrt", "dynamo_backend", "inductor"),
    ("accelerate launch --dynamo_mode max-autotune", "dynamo_mode", "default"),
    ("accelerate launch --use_fsdp --fsdp_sharding_strategy HYBRID_SHARD", "fsdp_sharding_strategy", "FULL_SHARD"),
    ("accelerate launch --fsdp_activation_checkpointing_offload true", "activation_checkpointing_offload", "false"),
    ("accelerate launch --parallelism_config_sp_size 2 --use_parallelism_config", "sp_size", "context_parallel_degree"),
    ("accelerate launch --max_restarts many", "max_restarts", "a whole number"),
    ("torchrun --nproc_per_nod 2", "nproc_per_nod", "nproc_per_node"),
    ("deepspeed --autotuning run", "autotuning", "torchtitan bench"),
]


@pytest.mark.parametrize("launch, name, message", REFUSED)
def test_refused_options(launch, name, message):
    text = import_error(launch)
    assert name in text and message in text


def test_a_file_of_accelerate_config(workdir):
    """Its options are treated like command line options, which override them; unknown ones are refused."""
    settings = {"compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "DEEPSPEED"}
    settings |= {"deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "none", "zero3_init_flag": True}}
    settings |= {"downcast_bf16": "no", "main_training_function": "main", "mixed_precision": "bf16", "num_machines": 1}
    settings |= {"machine_rank": 0, "num_processes": 4, "same_network": True, "tpu_env": [], "use_cpu": False}
    (workdir / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    config, head = job("accelerate launch --config_file accelerate.yaml")
    assert config.training.mixed_precision_param == "bfloat16" and config.training.global_batch_size == 4
    assert config.parallelism.fsdp_reshard_after_forward == "always" and "--zero3_init_flag" in head
    config, _ = job(
        "accelerate launch --config_file accelerate.yaml --num_processes 2 --mixed_precision no", bf16=False
    )
    assert config.training.mixed_precision_param == "float32" and config.training.global_batch_size == 2
    (workdir / "accelerate.yaml").write_text(yaml.safe_dump(settings | {"nothing": 1}))
    assert "nothing" in import_error("accelerate launch --config_file accelerate.yaml")
    (workdir / "accelerate.yaml").write_text(yaml.safe_dump(settings | {"distributed_type": ["DEEPSPEED"]}))
    assert job("accelerate launch --config_file accelerate.yaml")[0].training.mixed_precision_param == "bfloat16"
    with pytest.raises(JobError, match="nowhere.yaml"):
        job("accelerate launch --config_file nowhere.yaml")


def test_the_default_file_of_accelerate_is_named(workdir, monkeypatch):
    assert "default_config.yaml" not in job("accelerate launch")[1]
    (workdir / ".cache/huggingface/accelerate").mkdir(parents=True)
    (workdir / ".cache/huggingface/accelerate/default_config.yaml").write_text("mixed_precision: bf16")
    monkeypatch.setenv("HOME", str(workdir))
    assert "default_config.yaml is not read; name it by --config_file" in job("accelerate launch")[1]
    assert "default_config.yaml" not in job("torchrun")[1]


def test_a_script_without_an_accelerator():
    """ReLoRA's script creates no Accelerator, so settings of accelerate have no effect."""
    script = "torchrun_main.py --model_config configs/llama_250m.json --batch_size 24 --total_batch_size 48"
    with pytest.raises(ConfigError, match="mixed_precision: .*its own flags set precision") as error:
        translate(
            parse(split([f"accelerate launch --num_processes 2 --mixed_precision bf16 --use_fsdp {script}"])), None
        )
    assert "use_fsdp" in str(error.value)
    text, *_ = translate(parse(split([f"accelerate launch --num_processes 2 --main_process_port 1 {script}"])), None)
    assert "--main_process_port" in text


def test_words_before_a_launcher_are_noted():
    _, head = job("srun --nodes 2 torchrun --nproc_per_node 2")
    assert "not read, before the launcher: srun --nodes 2" in head
    _, head = job("python3 -u")
    assert "not read" not in head
