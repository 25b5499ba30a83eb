"""The optimizers of ReLoRA's torchrun_main.py and of GaLore's script of the same name, as a job's."""

from typing import Any

from torchtitan.importers.script import Script

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
    given, values, name = script.given, script.values, script.given["optimizer"]
    names = {"lr": "lr", "weight_decay": "weight_decay", "adam_beta1": "beta1", "adam_beta2": "beta2"}
    values |= {f"optimizer.{ours}": given[theirs] for theirs, ours in names.items()}
    clipped = given["grad_clipping" if "grad_clipping" in given else "clip_grad_norm"]
    values |= {"training.max_norm": clipped, "optimizer.name": "Adam"}
    if name == "shampoo":
        script.refuse("optimizer", "shampoo", "adam", "there is no such optimizer here")
    elif name == "adam_zero":
        if given["distributed_type"] == "fsdp":
            script.refuse("optimizer", "adam_zero", "adam with --distributed_type fsdp", "which shards its state")
        script.note("adam_zero: the optimizer's state is sharded by FSDP, which shards all else too")
    elif name in (*PLAIN, *PROJECTING):
        _of_galore(script, name)
    looked_at = OF_PROJECTIONS * (name in PROJECTING) + ("beta1",) * (name in BY_BETA1)
    if idle := [flag for flag in (*OF_PROJECTIONS, "beta1") if flag in given and flag not in looked_at]:
        script.note(f"no effect with --optimizer {name}: --{', --'.join(idle)}")


def _of_galore(script: Script, name: str) -> None:
    """What GaLore's script has beside ReLoRA's."""
    given, values = script.given, script.values
    values |= {"optimizer.name": PLAIN.get(name, "GaLore"), "training.max_norm": given["grad_clipping"]}
    options: dict[str, Any] = {}
    if name == "adam8bit" and given["weight_decay"]:
        script.note("adam8bit: weight decay is added to the gradient there, and takes from the weight itself here")
    if name in PROJECTING:
        options = {"rank": given["rank"], "update_gap": given["update_proj_gap"], "scale": given["galore_scale"]}
        options |= {"side": given["proj_type"], "inner": PROJECTING[name]}
        if name == "galore_adamw":
            values["optimizer.eps"], formula = OF_THE_LIBRARY
            options |= formula
        script.note("attention and feed-forward are projected, all else steps by the same moments as it is")
        if given["proj_quant"]:
            why = "bases are kept as the parameters are; options.adaptive_gap is what else of Q-GaLore is here"
            script.refuse("proj_quant", True, "nothing", why)
    if name in BY_BETA1:  # which have no second moment of Adam's
        del values["optimizer.beta1"], values["optimizer.beta2"]
        if name == "galore_adafactor":
            values["optimizer.beta1"] = given["beta1"]
        elif given["beta1"]:
            options["momentum" if name == "sgd" else "beta1"] = given["beta1"]
    if options:
        values["optimizer.options"] = options
    if name.endswith("per_layer"):
        values["optimizer.early_step_in_backward"] = True
        _per_layer(script)


def _per_layer(script: Script) -> None:
    """Each gradient is gone as soon as its weights have stepped."""
    given, batch = script.given, script.values.get("training.global_batch_size")
    if given["grad_clipping"]:
        script.values["training.max_norm"] = 0.0
        script.note(f"--grad_clipping {given['grad_clipping']} clips nothing, as there: gradients are gone by then")
    ranks = script.line.ranks or 1
    if batch is not None and given["batch_size"] * ranks < batch:
        allowed = f"one pass: {given['batch_size']} x {ranks} ranks"
        remedy = "the script stepped in each pass; write --optimizer galore_adamw8bit, or a larger --batch_size"
        script.refuse("total_batch_size", batch, allowed, remedy)
