"""The Llamas as the trainer builds them."""

from torchtitan.models.flops import flops_per_token
from torchtitan.models.llama.hf import HF
from torchtitan.models.llama.model import Llama
from torchtitan.models.llama.plan import PLAN
from torchtitan.models.spec import ModelSpec

SPEC = ModelSpec(build=Llama, plan=PLAN, hf=HF, flops_per_token=flops_per_token)
