"""Mistral without experts as the trainer builds it."""

from torchtitan.models.flops import flops_per_token
from torchtitan.models.mistral.hf import HF
from torchtitan.models.mistral.model import Mistral
from torchtitan.models.mistral.plan import PLAN
from torchtitan.models.spec import ModelSpec

SPEC = ModelSpec(build=Mistral, plan=PLAN, hf=HF, flops_per_token=flops_per_token)
