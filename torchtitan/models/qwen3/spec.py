"""Qwen 3 without experts as the trainer builds it."""

from torchtitan.models.flops import flops_per_token
from torchtitan.models.qwen3.hf import HF
from torchtitan.models.qwen3.model import Qwen3
from torchtitan.models.qwen3.plan import PLAN
from torchtitan.models.spec import ModelSpec

SPEC = ModelSpec(build=Qwen3, plan=PLAN, hf=HF, flops_per_token=flops_per_token)
