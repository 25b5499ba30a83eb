"""Qwen 3 without experts as a family of models. No torch here."""

from torchtitan.models.family import Family
from torchtitan.models.qwen3 import QWEN3
from torchtitan.models.qwen3.hf_config import CONFIG

FAMILY = Family(sizes=QWEN3, config=CONFIG, spec="torchtitan.models.qwen3.spec:SPEC", home="Qwen")
