"""A model's folder in the form of Hugging Face, as what a job begins from."""

from pathlib import Path
from typing import Any

from torchtitan.models import FROM_HF, family_of
from torchtitan.models.hf.config import CONFIG, read_json


def family_in(folder: Path) -> str | None:
    """The family of its config.json; None for one that is not here. JobError for a file that cannot be read."""
    return family_of(read_json(folder / CONFIG).get("model_type"))


def from_folder(family: str, folder: str) -> dict[str, Any]:
    """Sizes and weights of the folder."""
    values = {"model.name": family, "model.flavor": FROM_HF, "model.hf_folder": folder}
    return values | {"checkpoint.initial_load_path": folder, "checkpoint.initial_load_in_hf": True}
