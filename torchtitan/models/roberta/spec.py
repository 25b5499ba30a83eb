"""RoBERTa as the trainer builds it."""

from torchtitan.models.classic.plan import PLAN
from torchtitan.models.flops import bidirectional_flops_per_token
from torchtitan.models.roberta.hf import HF
from torchtitan.models.roberta.model import Roberta
from torchtitan.models.spec import ModelSpec

SPEC = ModelSpec(build=Roberta, plan=PLAN, hf=HF, flops_per_token=bidirectional_flops_per_token)
