"""GPT-2 as the trainer builds it."""

from torchtitan.models.classic.plan import PLAN
from torchtitan.models.flops import flops_per_token
from torchtitan.models.gpt2.hf import HF
from torchtitan.models.gpt2.model import GPT2
from torchtitan.models.spec import ModelSpec

SPEC = ModelSpec(build=GPT2, plan=PLAN, hf=HF, flops_per_token=flops_per_token)
