"""A model family, as FAMILIES holds it and an entry point of group torchtitan.models leads to it. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.models.hf.config import ConfigForm

GROUP = "torchtitan.models"


@dataclass(frozen=True, kw_only=True)
class Family:
    """What `torchtitan check` needs of a family, importable without torch, and where the rest is."""

    sizes: Mapping[str, Any]
    """Flavor -> frozen dataclass of sizes; "debugmodel" among them."""
    config: ConfigForm
    """What it says of config.json."""
    spec: str
    """Its ModelSpec, "module:attribute", which may import torch."""
    home: str = ""
    """Who publishes it on huggingface.co: said to who has no tokenizer yet."""
