"""Decoders with grouped attention and experts: the model, its parallel plan, and its names elsewhere.

They are gated decoders (models/gated.py) with experts in place of the feed-forwards of some or all layers. A family is
a subclass of ExpertDecoder and an `expert_spec`. In the Hugging Face format experts, stacked here, are stored one by
one and transposed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from torchtitan.models.decoder import ResidualBlock
from torchtitan.models.family import ConfigConverter
from torchtitan.models.flops import flops_per_token
from torchtitan.models.gated import PLAN as GATED_PLAN
from torchtitan.models.gated import GatedDecoder, norm_of, tensor_map
from torchtitan.models.hf.names import EXPERTS, ROUTER, is_after_layers
from torchtitan.models.moe import router
from torchtitan.models.moe.layer import MoEBlock
from torchtitan.models.sizes import STACK
from torchtitan.models.spec import HuggingFace, ModelSpec
from torchtitan.parallelisms.plan import ParallelPlan


class ExpertDecoder(GatedDecoder):
    """A decoder with sizes of the kind GroupedMoEArgs."""

    @staticmethod
    def build_block(args: Any, layer: int, attention: nn.Module) -> ResidualBlock:
        if STACK in args.block_linears(layer):
            return MoEBlock(args, attention, partial(norm_of(args), args.dim, args.norm_eps), args.norm_order)
        return GatedDecoder.build_block(args, layer, attention)


ROUTED = ("moe.router.gate", "moe.experts", "moe.shared_experts.w*", "moe.shared_gate")
# replicated: expert parallel shards the experts, and shared experts are narrow
PLAN = replace(
    GATED_PLAN,
    sequence=(*GATED_PLAN.sequence, *ROUTED),
    experts="moe.experts",
    # norms of queries and keys; all layers dense, or none; no shared experts
    optional=(*GATED_PLAN.optional, "feed_forward", "feed_forward.w[13]", "feed_forward.w2", *ROUTED),
)


def expert_spec(
    build: Callable[..., ExpertDecoder],
    config: ConfigConverter,
    experts: Mapping[str, str] = ROUTER | EXPERTS,
    interleaved: frozenset[str] = frozenset(),
    plan: ParallelPlan = PLAN,
) -> ModelSpec:
    """Return the spec of a family of decoders with experts.

    `experts`: names in layers with experts, of which `interleaved` ones are joined (TensorMap).
    """
    names = partial(tensor_map, family_names=experts, interleaved=interleaved)
    hf = HuggingFace(build=build, tensor_map=names, config=config, is_ignored=is_after_layers)
    return ModelSpec(build=build, plan=plan, hf=hf, flops_per_token=flops_per_token, balance=router)
