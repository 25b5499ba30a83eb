"""Qwen 3 with experts as the trainer builds it."""

from torchtitan.models.flops import flops_per_token
from torchtitan.models.moe import balance
from torchtitan.models.qwen3_moe.hf import HF
from torchtitan.models.qwen3_moe.model import Qwen3MoE
from torchtitan.models.qwen3_moe.plan import PLAN
from torchtitan.models.spec import ModelSpec

SPEC = ModelSpec(build=Qwen3MoE, plan=PLAN, hf=HF, flops_per_token=flops_per_token, balance=balance)
