"""The model of a job that starts from a folder of Hugging Face, for readers of trainers that build on transformers."""

import os.path
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.models import SIZES, family_for_model_type, family_in
from torchtitan.models.hf.config import CONFIG, read_json
from torchtitan.models.hf.wrappers import text_part
from torchtitan.plugins.importers.axolotl import guess_model_type
from torchtitan.plugins.importers.translation import BALANCE, ROUTER_LOSS, JobDraft, from_folder, router_loss

DROPOUT = ("dropout", "attention_dropout", "residual_dropout")
"""Sizes of models with dropout."""
WITH_ROUTER_LOSS = ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe")
"""Families for which transformers has a loss that balances the experts."""
UNKNOWN = "bfloat16"
"""Type of the weights of a folder that is not on this machine."""


def config_of(folder: str | None) -> dict[str, Any]:
    """Return the config.json of a folder; empty if it is not on this machine."""
    path = Path(folder or "", CONFIG)
    return text_part(read_json(path)) if path.is_file() else {}


def weight_type(folder: str | None) -> str:
    """Return the type of a folder's weights, as its config.json says."""
    config = config_of(folder)
    return str(config.get("dtype", config.get("torch_dtype", "float32" if config else UNKNOWN)))


def asks_for_router_loss(folder: str | None) -> bool:
    """Return True if a folder's config.json turns on the loss that balances experts."""
    return config_of(folder).get(ROUTER_LOSS) is True


def add_model(
    folder: str, draft: JobDraft, router: str, weight: float | None, has_router_loss: bool, is_without_dropout: bool
) -> None:
    """Add the model in `folder` to a draft, with its weights and tokenizer.

    `router`: the option that sets the weight of the loss that balances experts, and `weight` its value.
    `has_router_loss`: True if the program adds that loss, with the weight of config.json, unless the option is set.
    `is_without_dropout`: True if the program turns dropout off.
    """
    try:
        is_local = os.path.isfile(Path(folder, CONFIG))
        family = family_in(Path(folder)) if is_local else family_for_model_type(guess_model_type(folder))
    except JobError as error:
        is_local, family = True, None
        draft.notes.append(str(error))
    if family is None:
        draft.refuse("model_name_or_path", folder, f"a model of {', '.join(SIZES)}", "no other family is here")
        return
    draft.values |= from_folder(family, folder) | {"model.tokenizer_path": folder}
    if not is_local:
        draft.notes.append(f"download {folder} to a folder of that name here; its family is a guess from its name")
    sizes = next(iter(SIZES[family].values()))
    overrides: dict[str, Any] = {name: 0.0 for name in DROPOUT if is_without_dropout and hasattr(sizes, name)}
    if weight and family not in WITH_ROUTER_LOSS:
        allowed = "nothing for a model without experts" if not hasattr(sizes, BALANCE) else f"nothing for {family}"
        draft.refuse(router, weight, allowed, "transformers has no loss for it that balances experts")
    elif family in WITH_ROUTER_LOSS and (weight or (weight is None and has_router_loss)):
        draft.notes.append("experts are balanced within each sequence here, and over a batch by transformers")
        overrides |= router_loss(family, folder, weight, draft)
    elif hasattr(sizes, BALANCE):
        draft.notes.append(f"without {router} no loss balances the experts: model.overrides turns it off")
        overrides |= {BALANCE: 0.0, "bias_rate": 0.0}
    if overrides:
        draft.values["model.overrides"] = overrides
