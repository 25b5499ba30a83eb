"""OPT as a family of models. No torch here."""

from torchtitan.models.family import Family
from torchtitan.models.opt import OPT
from torchtitan.models.opt.hf_config import CONFIG

FAMILY = Family(sizes=OPT, config=CONFIG, spec="torchtitan.models.opt.spec:SPEC", home="facebook")
