"""Qwen 3-Next and Qwen 3.5: the models, their parallel plans, and their names in the Hugging Face format."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from torchtitan.core.random_draws import Constant, Init
from torchtitan.models.attention import AttentionKernel
from torchtitan.models.family import ConfigConverter
from torchtitan.models.flops import delta_flops_per_token
from torchtitan.models.gated import PLAN as GATED_PLAN
from torchtitan.models.gated import GatedDecoder, tensor_map
from torchtitan.models.hf.names import TensorMap
from torchtitan.models.linear_attention import StateKernel, state_init
from torchtitan.models.moe import router
from torchtitan.models.moe.decoder import PLAN as EXPERT_PLAN
from torchtitan.models.moe.decoder import ExpertDecoder
from torchtitan.models.qwen2_moe.model import NAMES as EXPERT_NAMES
from torchtitan.models.qwen3_next import DENSE_CONFIG, MOE_CONFIG, NEXT_CONFIG
from torchtitan.models.qwen3_next.layer import GatedDeltaNet
from torchtitan.models.spec import HuggingFace, ModelSpec
from torchtitan.parallelisms.plan import ParallelPlan


class DeltaNetDecoder(GatedDecoder):
    """A decoder in which some layers have the gated delta rule in place of attention."""

    @staticmethod
    def kernel_of(args: Any, layer: int) -> Callable[[], nn.Module] | None:
        return StateKernel if args.is_delta(layer) else None

    @staticmethod
    def build_attention(args: Any, layer: int, kernel: AttentionKernel) -> nn.Module:
        if args.is_delta(layer):
            return GatedDeltaNet(args, kernel)
        return GatedDecoder.build_attention(args, layer, kernel)

    def init_rule(self, name: str) -> Init:
        if name.endswith("delta_norm.weight"):
            return Constant(1.0)
        return state_init(name, self.args.conv_taps) or super().init_rule(name)


class Qwen3Next(DeltaNetDecoder, ExpertDecoder):
    """A Qwen 3-Next: experts in all layers, and shared ones that a gate weighs."""


class Qwen35MoE(Qwen3Next):
    """The text model of a Qwen 3.5 with experts in all layers, and shared ones that a gate weighs."""


class Qwen35(DeltaNetDecoder):
    """The text model of a Qwen 3.5 without experts."""


JOINT = {
    "attention.delta_qkvz.weight": "linear_attn.in_proj_qkvz.weight",
    "attention.delta_ba.weight": "linear_attn.in_proj_ba.weight",
}
SEPARATE = {
    **{f"attention.delta_{part}.weight": "linear_attn.in_proj_qkv.weight" for part in "qkv"},
    **{f"attention.delta_{part}.weight": f"linear_attn.in_proj_{part}.weight" for part in "zba"},
}
NAMES = {
    **{f"attention.conv_{part}.weight": "linear_attn.conv1d.weight" for part in "qkv"},
    "attention.decay.log_rate": "linear_attn.A_log",
    "attention.decay.step_bias": "linear_attn.dt_bias",
    "attention.delta_norm.weight": "linear_attn.norm.weight",
    "attention.delta_out.weight": "linear_attn.out_proj.weight",
}


def delta_map(args: Any, names: Mapping[str, str]) -> TensorMap:
    """Return the names; `names`: those within a layer beyond a Llama's and `NAMES`."""
    layers = ("conv_", "delta_")
    rows = {f"attention.{kind}{part}.weight": width for kind in layers for part, width in args.delta_widths.items()}
    # a head's gate follows its query, and is not rotated
    heads = {"attention.wq.weight": 2 * args.head_dim}
    return replace(tensor_map(args, NAMES | names), rows=rows, head_rows=heads, _ours={})


COLUMN = ("attention.delta_qkvz", "attention.delta_ba", "attention.delta_[qkvzba]", "attention.conv_[qkv]")
COLUMN += ("attention.decay",)
ROW, NORM = "attention.delta_out", "attention.delta_norm"


def delta_plan(plan: ParallelPlan) -> ParallelPlan:
    """Return the plan of a decoder with the modules of layers with the delta rule, which is parallel by heads."""
    return replace(
        plan,
        column=(*plan.column, *COLUMN),
        row=(*plan.row, ROW),
        replicated=(*plan.replicated, NORM),
        # joint projections or separate ones; layers of one kind only
        optional=(*plan.optional, *COLUMN, ROW, NORM, "attention.w[qkv]", "attention.wo"),
    )


def is_of_other_depths(name: str, args: Any) -> bool:
    """Return True for tensors of multi-token prediction, which transformers does not read either."""
    return name.startswith("mtp.")


def _spec(
    build: Callable[..., DeltaNetDecoder],
    config: ConfigConverter,
    names: Mapping[str, str],
    plan: ParallelPlan,
    balance: Any = None,
) -> ModelSpec:
    hf = HuggingFace(
        build=build, tensor_map=partial(delta_map, names=names), config=config, is_ignored=is_of_other_depths
    )
    return ModelSpec(build=build, plan=delta_plan(plan), hf=hf, flops_per_token=delta_flops_per_token, balance=balance)


NEXT_SPEC = _spec(Qwen3Next, NEXT_CONFIG, JOINT | EXPERT_NAMES, EXPERT_PLAN, router)
DENSE_SPEC = _spec(Qwen35, DENSE_CONFIG, SEPARATE, GATED_PLAN)
MOE_SPEC = _spec(Qwen35MoE, MOE_CONFIG, SEPARATE | EXPERT_NAMES, EXPERT_PLAN, router)
