"""How pairs of answers are learned (task.kind = "dpo", "ipo", "orpo")."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.kinds import STRICT, Place


@dataclass(config=STRICT, kw_only=True)
class Dpo:
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How closely the model keeps to its reference; of orpo the weight of the answers' odds."""
    reference: Place | None = None
    """The model that answers are compared with, whole, of the same family and sizes: a folder of Hugging Face, a
    checkpoint, a run. Unset: the model that the run began from (dpo, ipo)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of pairs that are taken to be the wrong way round (dpo)."""
