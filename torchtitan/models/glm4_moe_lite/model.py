"""GLM 4.7 Flash: DeepSeek's model with another config.json."""

from dataclasses import replace

from torchtitan.models.deepseek.model import SPEC as DEEPSEEK
from torchtitan.models.glm4_moe_lite import CONFIG

SPEC = replace(DEEPSEEK, hf=replace(DEEPSEEK.hf, config=CONFIG))
HF = SPEC.hf
