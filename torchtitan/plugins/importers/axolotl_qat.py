"""Translate the table `qat` of an Axolotl file (revision of July 2026): quantization-aware training with torchao."""

from typing import Any

from torchtitan.plugins.importers.translation import JobDraft

FLOAT8 = dict.fromkeys(("fp8", "float8", "float8_e4m3fn"), "fp8")
TYPES = {name: name for name in ("int4", "int8", "nvfp4", "mxfp4")} | FLOAT8
PAIRS = {"int4": (None, "int8", "fp8"), "fp8": ("fp8",), "nvfp4": ("nvfp4",), "mxfp4": ("mxfp4", None)}
"""Type of weights -> those of inputs with which Axolotl trains. Weights in mxfp4 always have inputs in it."""
GROUPS = {"nvfp4": 16, "mxfp4": 32}
DEFAULTS: dict[str, Any] = {"activation_dtype": None, "weight_dtype": "int8", "group_size": 32}
DEFAULTS |= {"quantize_embedding": False, "fake_quant_after_n_steps": None}
INT4_NOTES = {
    None: "Axolotl trains on int4 of weights rounded to fp8; here on the int4 of its quantize command",
    "int8": "Axolotl trains on int4 with 16 levels from the smallest to the largest of a group; here on the int4 "
    "of its quantize command, integers around 0",
}


def translate_qat(table: dict[str, Any], draft: JobDraft) -> None:
    """Write the options of the section [qat] into `draft`, with notes and faults."""
    for name in table.keys() - DEFAULTS.keys():
        draft.refuse(f"qat.{name}", table[name], f"one of {', '.join(DEFAULTS)}", "Axolotl has no other")
    settings = DEFAULTS | {name: value for name, value in table.items() if name in DEFAULTS}
    kinds = [settings[name] and TYPES.get(str(settings[name])) for name in ("weight_dtype", "activation_dtype")]
    for name, kind in zip(("weight_dtype", "activation_dtype"), kinds, strict=True):
        if settings[name] is not None and kind is None:
            draft.refuse(f"qat.{name}", settings[name], f"one of {', '.join(TYPES)}", "Axolotl has no other")
            return
    weights, inputs = kinds
    if weights not in PAIRS:
        draft.refuse("qat.weight_dtype", weights, f"one of {', '.join(PAIRS)}", "Axolotl ends with an error")
        return
    if inputs not in PAIRS[weights]:
        allowed = " or ".join(kind or "unset" for kind in PAIRS[weights])
        draft.refuse(
            "qat.activation_dtype", inputs, f"{allowed} with qat.weight_dtype: {weights}", "choose another pair"
        )
        return
    draft.values["qat.weight_dtype"] = weights
    if inputs is not None or weights == "mxfp4":
        draft.values["qat.activation_dtype"] = inputs or weights
    if weights == "int4" and inputs in INT4_NOTES:
        draft.notes.append(f"qat: {INT4_NOTES[inputs]}")
    if weights == "nvfp4":
        draft.notes.append("qat: scales of inputs in nvfp4 follow the largest number of a token, there of a batch")
    draft.notes.append("qat: the exported weights are not rounded, as Axolotl's are not; quantize them with torchao")
    _read_group(settings["group_size"], weights, draft)
    _read_start(settings["fake_quant_after_n_steps"], weights, draft)
    _read_embedding(settings["quantize_embedding"], draft)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_group(size: Any, weights: str, draft: JobDraft) -> None:
    if size is not None and (not _is_int(size) or size < 2):
        draft.refuse("qat.group_size", size, "a whole number, at least 2", "correct it")
    elif weights in GROUPS and size not in (None, GROUPS[weights]):
        reason = f"Axolotl demands it for {weights}, and takes 32 where it is missing"
        draft.refuse("qat.group_size", size, str(GROUPS[weights]), reason)
    elif weights == "int4":
        draft.values["qat.group_size"] = 128 if size is None else size


def _read_start(steps: Any, weights: str, draft: JobDraft) -> None:
    key = "qat.fake_quant_after_n_steps"
    if steps is None:
        return
    if not _is_int(steps) or steps < 1:
        draft.refuse(
            key, steps, "a whole number, at least 1", "Axolotl never rounds with 0: leave it out to begin at once"
        )
    elif weights in GROUPS:
        draft.notes.append(
            f"{key}: no effect in Axolotl with weights in {weights}, which are rounded from the first step"
        )
    else:
        draft.values["qat.after_steps"] = steps


def _read_embedding(rounds: Any, draft: JobDraft) -> None:
    if not isinstance(rounds, bool | None):
        draft.refuse("qat.quantize_embedding", rounds, "true or false", "correct it")
    elif rounds:
        draft.values["qat.quantize_embedding"] = True
