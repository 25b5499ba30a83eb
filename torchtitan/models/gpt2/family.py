"""GPT-2 as a family of models. No torch here."""

from torchtitan.models.family import Family
from torchtitan.models.gpt2 import GPT2
from torchtitan.models.gpt2.hf_config import CONFIG

FAMILY = Family(sizes=GPT2, config=CONFIG, spec="torchtitan.models.gpt2.spec:SPEC", home="openai-community")
