"""The flags of ReLoRA's torchrun_main.py, as of July 2023 with their defaults, and their optimizers as a job's.

GaLore's script has the same name and some more flags. A file of flags is read as flags.
"""

from dataclasses import replace
from typing import Any

from torchtitan.core import yaml_file
from torchtitan.lr_schedules import CYCLICAL, JAGGED
from torchtitan.plugins.importers.translation import FLOAT16, CommandLine, Script, Setting

OPTIMIZERS = {"adam": "Adam", "adam_zero": "Adam", "sgd": "SGD", "adafactor": "Adafactor", "adam8bit": "AdamW8bit"}
GALORE_MOMENTS = {
    "galore_adamw": "adamw",
    "galore_adafactor": "adafactor",
    "galore_adamw8bit": "adamw_8bit",
    "galore_adamw8bit_per_layer": "adamw_8bit",
}
"""Optimizers of GaLore's script that project gradients -> options.inner of a job's GaLore."""
OPTIMIZERS |= dict.fromkeys(GALORE_MOMENTS, "GaLore")
GALORE_ONLY = OPTIMIZERS.keys() - {"adam", "adam_zero"}
"""Optimizers that only GaLore's script has."""
PROJECTION_FLAGS = ("rank", "update_proj_gap", "galore_scale", "proj_type", "proj_quant")
WITH_BETA1 = ("sgd", "adafactor", "galore_adafactor")
"""Optimizers of GaLore's script that read its --beta1."""
GALORE_TORCH: tuple[float, dict[str, str]] = 1e-6, {"formula": "galore_torch"}
"""Default eps and formula of AdamW in GaLore's library, which scripts keep, as eps and options of a job."""
SCHEDULES = {"cosine": CYCLICAL, "linear": "linear", "cosine_restarts": JAGGED}
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}
PRUNING = "use --optimizer_magnitude_pruning 0.9, as later versions of the script do, to keep a part of the state"

FLAGS: dict[str, Setting] = {
    "dataset_path": Setting("text"),
    "dataset": Setting("text", "c4,en"),  # of the first versions, as are the next two
    "streaming_dataset": Setting("bool", True),
    "use_hf_model": Setting("bool", False, note="there is one Llama here, which computes what transformers' does"),
    "tokenizer": Setting("text", "t5-base"),
    "model_config": Setting("text"),
    "model_name_or_path": Setting("text"),
    "model_revision": Setting("text"),
    "batch_size": Setting("int", least=1, required=True),
    "total_batch_size": Setting("int", least=1),
    "gradient_accumulation": Setting("int", least=1),
    "max_length": Setting("int", 256, to="training.seq_len", least=1),
    "lr": Setting("float", 1e-4, to="optimizer.lr"),
    "weight_decay": Setting("float", 0.0, to="optimizer.weight_decay"),
    "adam_beta1": Setting("float", 0.9),
    "adam_beta2": Setting("float", 0.999),
    "clip_grad_norm": Setting("float", 1.0),
    "optimizer": Setting("text", "adam", "optimizer.name", OPTIMIZERS, reason="other optimizers are not supported"),
    "rank": Setting("int", 128),
    "update_proj_gap": Setting("int", 50),
    "galore_scale": Setting("float", 1.0),
    "proj_type": Setting("text", "std", choices=("std", "reverse_std", "left", "right", "full")),
    "proj_quant": Setting("bool", False),
    "grad_clipping": Setting("float", 0.0),
    "beta1": Setting("float", 0.0),
    "activation_checkpointing": Setting(
        "bool", False, "activation_checkpoint.mode", choices={True: "full", False: "none"}
    ),
    "single_gpu": Setting("bool", False, note="one rank, as the command line starts it"),
    "name": Setting("text", note="the script ignored it; --save_dir names the run's folder"),
    "scheduler": Setting("text", "cosine", "lr_scheduler.decay_type", choices=SCHEDULES),
    "warmup_steps": Setting("int", 1000, to="lr_scheduler.warmup_steps"),
    "restart_warmup_steps": Setting("int"),
    "min_lr_ratio": Setting("float", 0.1),
    "adjust_step": Setting("int", 0),
    "cycle_length": Setting("int"),
    "use_peft": Setting("bool", False),
    "lora_r": Setting("int", 128),
    "lora_alpha": Setting("float", 32.0),
    "relora": Setting("int"),
    "train_scaling": Setting("bool", False),
    "force_keep_original": Setting("bool", False),
    "reset_optimizer_on_relora": Setting("bool", True),
    "optimizer_random_pruning": Setting("float", 0.0),
    "optimizer_magnitude_pruning": Setting("float", 0.0),
    "svd_optimizer_on_relora": Setting("int", 0, reason=PRUNING),  # of the first versions, as is the next one
    "keep_first_opt_rows": Setting("int", 0, reason=PRUNING),
    "continue_from": Setting("text"),
    "warmed_up_model": Setting("text"),
    "continue_from_peft": Setting("text"),
    "resume_from": Setting("text"),
    "restore_optimizer": Setting("bool", False),
    "load_optimizer_state_on_resume": Setting("bool", True),
    "num_training_steps": Setting("int", 10_000, least=1),
    "max_train_tokens": Setting("text"),
    "eval_every": Setting("int", 1_000, to="validation.freq"),
    "save_every": Setting("int", 10_000, to="checkpoint.interval"),
    "save_dir": Setting("text"),
    "dtype": Setting("text", "bf16", "training.dtype training.mixed_precision_param", DTYPES, reason=FLOAT16),
    "distributed_type": Setting("text", "ddp", choices=("ddp", "fsdp")),
    "workers": Setting("int", 8, to="training.dataloader.num_workers"),
    "seed": Setting("int", 0, to="debug.seed"),
    "tags": Setting("text"),
    "comment": Setting("text", to="job.description"),
    "train_ln": Setting("bool", True, choices=(True,), reason="the norms are always trained"),
    "keep_checkpoints": Setting("int", 0),
    "autoresume": Setting("bool", False, note="a job that is started again always resumes from its newest checkpoint"),
    "skip_batches": Setting("text", reason="updates cannot be skipped; training.on_bad_data skips damaged data"),
    "profile": Setting("bool", to="profiling.enable_profiling", choices={True: True, False: None}),
    "quantize": Setting("text", choices=("4bit", "8bit")),
    "use_double_quant": Setting("bool", True),
    "wandb_watch": Setting("bool", False, reason="gradients of single parameters are not logged"),
    "megatron_dataset_config": Setting(
        "text", reason="Megatron's index is not supported; give --dataset_path, or make shards with torchtitan prepare"
    ),
    "training_config": Setting("text"),
}


def translate_optimizer(script: Script) -> None:
    """Translate the optimizer of a script with these flags."""
    options, values, name = script.options, script.values, script.options["optimizer"]
    max_norm = options["grad_clipping" if "grad_clipping" in options or name in GALORE_ONLY else "clip_grad_norm"]
    values |= {"training.max_norm": max_norm, "optimizer.beta1": options["adam_beta1"]}
    values["optimizer.beta2"] = options["adam_beta2"]
    if name == "adam_zero":
        if options["distributed_type"] == "fsdp":
            script.refuse("optimizer", "adam_zero", "adam with --distributed_type fsdp", "which shards its state")
        script.note("adam_zero: FSDP shards the optimizer's state, and parameters and gradients with it")
    if name == "adam8bit" and options["weight_decay"]:
        script.note("adam8bit: weight decay is decoupled here; the script adds it to the gradient")
    optimizer_options = _projection(script, name) if name in GALORE_MOMENTS else {}
    if name in WITH_BETA1:  # these have no second moment as Adam has
        del values["optimizer.beta1"], values["optimizer.beta2"]
        if name == "galore_adafactor":
            values["optimizer.beta1"] = options["beta1"]
        elif options["beta1"]:
            optimizer_options["momentum" if name == "sgd" else "beta1"] = options["beta1"]
    if optimizer_options:
        values["optimizer.options"] = optimizer_options
    if name.endswith("per_layer"):
        values["optimizer.early_step_in_backward"] = True
        _step_per_layer(script)
    flags_read = PROJECTION_FLAGS * (name in GALORE_MOMENTS) + ("beta1",) * (name in WITH_BETA1)
    if ignored := [flag for flag in (*PROJECTION_FLAGS, "beta1") if flag in options and flag not in flags_read]:
        script.note(f"no effect with --optimizer {name}: --{', --'.join(ignored)}")


def _projection(script: Script, name: str) -> dict[str, Any]:
    """Return optimizer.options of an optimizer that projects gradients."""
    options = script.options
    projection = {"rank": options["rank"], "update_gap": options["update_proj_gap"], "scale": options["galore_scale"]}
    projection |= {"side": options["proj_type"], "inner": GALORE_MOMENTS[name]}
    if name == "galore_adamw":
        script.values["optimizer.eps"], formula = GALORE_TORCH
        projection |= formula
    script.note("gradients of attention and feed-forward are projected; other parameters use the same moments directly")
    if options["proj_quant"]:
        reason = "bases are not quantized; of Q-GaLore, options.adaptive_gap is supported"
        script.refuse("proj_quant", True, "nothing", reason)
    return projection


def _step_per_layer(script: Script) -> None:
    """Translate per-layer optimizer steps, which free a gradient as soon as its weights are updated."""
    options, batch = script.options, script.values.get("training.global_batch_size")
    if options["grad_clipping"]:
        script.values["training.max_norm"] = 0.0
        script.note(f"--grad_clipping {options['grad_clipping']} clips nothing, as in the script: gradients are freed")
    ranks = script.line.ranks or 1
    if batch is not None and options["batch_size"] * ranks < batch:
        allowed = f"one forward pass: {options['batch_size']} x {ranks} ranks"
        remedy = "the script stepped in each pass; use --optimizer galore_adamw8bit, or a larger --batch_size"
        script.refuse("total_batch_size", batch, allowed, remedy)


def with_file(line: CommandLine) -> CommandLine:
    """Return the line with the flags of its --training_config, a YAML table, before its own.

    Raises JobError if the file cannot be read.
    """
    path = next((value for name, value in reversed(line.flags) if name == "training_config" and value), None)
    if path is None:
        return line
    file_flags = {name: value for name, value in yaml_file.read(path).items() if value is not None}
    line_flags = [flag for flag in line.flags if flag[0] != "training_config"]
    return replace(line, flags=[*((name, str(value)) for name, value in file_flags.items()), *line_flags])
