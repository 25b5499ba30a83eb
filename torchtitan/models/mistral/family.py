"""Mistral without experts as a family of models. No torch here."""

from torchtitan.models.family import Family
from torchtitan.models.mistral import MISTRAL
from torchtitan.models.mistral.hf_config import CONFIG

FAMILY = Family(sizes=MISTRAL, config=CONFIG, spec="torchtitan.models.mistral.spec:SPEC", home="mistralai")
