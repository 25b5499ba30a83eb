"""Qwen 3 with experts as a family of models. No torch here."""

from torchtitan.models.family import Family
from torchtitan.models.qwen3_moe import QWEN3_MOE
from torchtitan.models.qwen3_moe.hf_config import CONFIG

FAMILY = Family(sizes=QWEN3_MOE, config=CONFIG, spec="torchtitan.models.qwen3_moe.spec:SPEC", home="Qwen")
