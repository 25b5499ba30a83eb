"""The flags of torchrun_main.py of ReLoRA, with their defaults of July 2023, and those that GaLore's script of the same
name has beside them. relora.py looks at each in one place. A file of them is read as flags.
"""

from dataclasses import replace

from torchtitan.importers import yaml_file
from torchtitan.importers.command_line import CommandLine
from torchtitan.importers.flags import Flag
from torchtitan.importers.relora_optimizer import PLAIN, PROJECTING

FLAGS: dict[str, Flag] = {
    "dataset_path": Flag(str),
    "dataset": Flag(str, "c4,en"),  # which the first versions had instead, with the next two
    "streaming_dataset": Flag(bool, True),
    "use_hf_model": Flag(bool, False),
    "tokenizer": Flag(str, "t5-base"),
    "model_config": Flag(str),
    "model_name_or_path": Flag(str),
    "model_revision": Flag(str),
    "batch_size": Flag(int),
    "total_batch_size": Flag(int),
    "gradient_accumulation": Flag(int),
    "max_length": Flag(int, 256),
    "lr": Flag(float, 1e-4),
    "weight_decay": Flag(float, 0.0),
    "adam_beta1": Flag(float, 0.9),
    "adam_beta2": Flag(float, 0.999),
    "clip_grad_norm": Flag(float, 1.0),
    "optimizer": Flag(str, "adam", ("adam", "adam_zero", "shampoo", *PLAIN, *PROJECTING)),
    "rank": Flag(int, 128),
    "update_proj_gap": Flag(int, 50),
    "galore_scale": Flag(float, 1.0),
    "proj_type": Flag(str, "std", ("std", "reverse_std", "left", "right", "full")),
    "proj_quant": Flag(bool, False),
    "grad_clipping": Flag(float, 0.0),
    "beta1": Flag(float, 0.0),
    "activation_checkpointing": Flag(bool, False),
    "single_gpu": Flag(bool, False),
    "name": Flag(str),
    "scheduler": Flag(str, "cosine", ("cosine", "linear", "cosine_restarts")),
    "warmup_steps": Flag(int, 1000),
    "restart_warmup_steps": Flag(int),
    "min_lr_ratio": Flag(float, 0.1),
    "adjust_step": Flag(int, 0),
    "cycle_length": Flag(int),
    "use_peft": Flag(bool, False),
    "lora_r": Flag(int, 128),
    "lora_alpha": Flag(float, 32.0),
    "relora": Flag(int),
    "train_scaling": Flag(bool, False),
    "force_keep_original": Flag(bool, False),
    "reset_optimizer_on_relora": Flag(bool, True),
    "optimizer_random_pruning": Flag(float, 0.0),
    "optimizer_magnitude_pruning": Flag(float, 0.0),
    "svd_optimizer_on_relora": Flag(int, 0),  # which the first versions had instead, and the next one
    "keep_first_opt_rows": Flag(int, 0),
    "continue_from": Flag(str),
    "warmed_up_model": Flag(str),
    "continue_from_peft": Flag(str),
    "resume_from": Flag(str),
    "restore_optimizer": Flag(bool, False),
    "load_optimizer_state_on_resume": Flag(bool, True),
    "num_training_steps": Flag(int, 10_000),
    "max_train_tokens": Flag(str),
    "eval_every": Flag(int, 1_000),
    "save_every": Flag(int, 10_000),
    "save_dir": Flag(str),
    "dtype": Flag(str, None, ("bf16", "bfloat16", "fp32", "float32", "fp16", "float16")),
    "distributed_type": Flag(str, "ddp", ("ddp", "fsdp")),
    "workers": Flag(int, 8),
    "seed": Flag(int, 0),
    "tags": Flag(str),
    "comment": Flag(str),
    "train_ln": Flag(bool, True),
    "keep_checkpoints": Flag(int),
    "autoresume": Flag(bool, False),
    "skip_batches": Flag(str),
    "profile": Flag(bool, False),
    "quantize": Flag(str, None, ("4bit", "8bit")),
    "use_double_quant": Flag(bool, True),
    "wandb_watch": Flag(bool, False),
    "megatron_dataset_config": Flag(str),
    "training_config": Flag(str),
}


def with_file(line: CommandLine) -> CommandLine:
    """The line with the flags of its --training_config, a table of YAML, ahead of its own. JobError."""
    path = next((value for name, value in reversed(line.flags) if name == "training_config" and value), None)
    if path is None:
        return line
    found = {name: value for name, value in yaml_file.read(path).items() if value is not None}
    own = [flag for flag in line.flags if flag[0] != "training_config"]
    return replace(line, flags=[*((name, str(value)) for name, value in found.items()), *own])
