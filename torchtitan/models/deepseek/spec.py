"""DeepSeek as the trainer builds it."""

from torchtitan.models.deepseek.hf import HF
from torchtitan.models.deepseek.model import Deepseek
from torchtitan.models.deepseek.plan import PLAN
from torchtitan.models.flops import latent_flops_per_token
from torchtitan.models.moe import balance
from torchtitan.models.spec import ModelSpec

SPEC = ModelSpec(build=Deepseek, plan=PLAN, hf=HF, flops_per_token=latent_flops_per_token, balance=balance)
