"""OPT as the trainer builds it."""

from torchtitan.models.classic.plan import PLAN
from torchtitan.models.flops import flops_per_token
from torchtitan.models.opt.hf import HF
from torchtitan.models.opt.model import OPT
from torchtitan.models.spec import ModelSpec

SPEC = ModelSpec(build=OPT, plan=PLAN, hf=HF, flops_per_token=flops_per_token)
