"""RoBERTa as a family of models. No torch here."""

from torchtitan.models.family import Family
from torchtitan.models.roberta import ROBERTA
from torchtitan.models.roberta.hf_config import CONFIG

FAMILY = Family(sizes=ROBERTA, config=CONFIG, spec="torchtitan.models.roberta.spec:SPEC", home="FacebookAI")
