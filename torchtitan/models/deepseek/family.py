"""DeepSeek as a family of models. No torch here."""

from torchtitan.models.deepseek import DEEPSEEK
from torchtitan.models.deepseek.hf_config import CONFIG
from torchtitan.models.family import Family

FAMILY = Family(sizes=DEEPSEEK, config=CONFIG, spec="torchtitan.models.deepseek.spec:SPEC", home="deepseek-ai")
