"""The optimizers of ReLoRA's torchrun_main.py and of GaLore's script of the same name, as a job's.

The flags of torchrun_main.py of ReLoRA, with their defaults of July 2023, and those that GaLore's script of the same
name has beside them. relora.py looks at each in one place. A file of them is read as flags.
"""

from dataclasses import replace
from typing import Any

from torchtitan.importers import yaml_file
from torchtitan.importers.command_line import CommandLine
from torchtitan.importers.script import Flag, Script

PLAIN = {"sgd": "SGD", "adafactor": "Adafactor", "adam8bit": "AdamW8bit"}
PROJECTING = {
    "galore_adamw": "adamw",
    "galore_adafactor": "adafactor",
    "galore_adamw8bit": "adamw_8bit",
    "galore_adamw8bit_per_layer": "adamw_8bit",
}
"""Names of optimizers in GaLore's script: the optimizers that they are here, and the moments of what is projected."""
OF_PROJECTIONS = ("rank", "update_proj_gap", "galore_scale", "proj_type", "proj_quant")
BY_BETA1 = ("sgd", "adafactor", "galore_adafactor")
"""Optimizers of GaLore's script that look at its --beta1."""
OF_THE_LIBRARY: tuple[float, dict[str, str]] = 1e-6, {"formula": "galore_torch"}
"""Default eps and formula of the AdamW of GaLore's library, which scripts leave as they are: eps and options here."""


def read_optimizer(script: Script) -> None:
    flags, values, name = script.given, script.values, script.given["optimizer"]
    names = {"lr": "lr", "weight_decay": "weight_decay", "adam_beta1": "beta1", "adam_beta2": "beta2"}
    values |= {f"optimizer.{our_name}": flags[their_name] for their_name, our_name in names.items()}
    clipped = flags["grad_clipping" if "grad_clipping" in flags else "clip_grad_norm"]
    values |= {"training.max_norm": clipped, "optimizer.name": "Adam"}
    if name == "shampoo":
        script.refuse("optimizer", "shampoo", "adam", "there is no such optimizer here")
    elif name == "adam_zero":
        if flags["distributed_type"] == "fsdp":
            script.refuse("optimizer", "adam_zero", "adam with --distributed_type fsdp", "which shards its state")
        script.note("adam_zero: the optimizer's state is sharded by FSDP, which shards all else too")
    elif name in (*PLAIN, *PROJECTING):
        _of_galore(script, name)
    looked_at = OF_PROJECTIONS * (name in PROJECTING) + ("beta1",) * (name in BY_BETA1)
    if idle := [flag for flag in (*OF_PROJECTIONS, "beta1") if flag in flags and flag not in looked_at]:
        script.note(f"no effect with --optimizer {name}: --{', --'.join(idle)}")


def _of_galore(script: Script, name: str) -> None:
    """Translate the optimizers that GaLore's script has in addition to ReLoRA's."""
    flags, values = script.given, script.values
    values |= {"optimizer.name": PLAIN.get(name, "GaLore"), "training.max_norm": flags["grad_clipping"]}
    options: dict[str, Any] = {}
    if name == "adam8bit" and flags["weight_decay"]:
        script.note("adam8bit: weight decay is added to the gradient there, and takes from the weight itself here")
    if name in PROJECTING:
        options = {"rank": flags["rank"], "update_gap": flags["update_proj_gap"], "scale": flags["galore_scale"]}
        options |= {"side": flags["proj_type"], "inner": PROJECTING[name]}
        if name == "galore_adamw":
            values["optimizer.eps"], formula = OF_THE_LIBRARY
            options |= formula
        script.note("attention and feed-forward are projected, all else steps by the same moments as it is")
        if flags["proj_quant"]:
            reason = "bases are kept as the parameters are; options.adaptive_gap is what else of Q-GaLore is here"
            script.refuse("proj_quant", True, "nothing", reason)
    if name in BY_BETA1:  # these have no second moment as Adam has
        del values["optimizer.beta1"], values["optimizer.beta2"]
        if name == "galore_adafactor":
            values["optimizer.beta1"] = flags["beta1"]
        elif flags["beta1"]:
            options["momentum" if name == "sgd" else "beta1"] = flags["beta1"]
    if options:
        values["optimizer.options"] = options
    if name.endswith("per_layer"):
        values["optimizer.early_step_in_backward"] = True
        _per_layer(script)


def _per_layer(script: Script) -> None:
    """Translate a step per layer, in which a gradient is freed as soon as its weights are updated."""
    flags, batch = script.given, script.values.get("training.global_batch_size")
    if flags["grad_clipping"]:
        script.values["training.max_norm"] = 0.0
        script.note(f"--grad_clipping {flags['grad_clipping']} clips nothing, as there: gradients are gone by then")
    ranks = script.line.ranks or 1
    if batch is not None and flags["batch_size"] * ranks < batch:
        allowed = f"one pass: {flags['batch_size']} x {ranks} ranks"
        remedy = "the script stepped in each pass; write --optimizer galore_adamw8bit, or a larger --batch_size"
        script.refuse("total_batch_size", batch, allowed, remedy)


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
    """Return the line with the flags of its --training_config, a YAML table, before its own.

    Raises JobError if the file cannot be read.
    """
    path = next((value for name, value in reversed(line.flags) if name == "training_config" and value), None)
    if path is None:
        return line
    file_flags = {name: value for name, value in yaml_file.read(path).items() if value is not None}
    line_flags = [flag for flag in line.flags if flag[0] != "training_config"]
    return replace(line, flags=[*((name, str(value)) for name, value in file_flags.items()), *line_flags])
