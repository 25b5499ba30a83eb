"""Granite 4: the model, its parallel plan, and its names in the Hugging Face format."""

from typing import Any

from torchtitan.models.flops import hybrid_flops_per_token
from torchtitan.models.granite4 import CONFIG
from torchtitan.models.hf.names import TensorMap
from torchtitan.models.mamba2.decoder import MixerDecoder, mixer_map, mixer_plan
from torchtitan.models.moe import router
from torchtitan.models.moe.decoder import PLAN, ExpertDecoder
from torchtitan.models.spec import HuggingFace, ModelSpec


class Granite4(MixerDecoder, ExpertDecoder):
    """A Granite with mixers of Mamba 2 in place of most layers' attention, and experts beside a feed-forward.

    transformers runs on over the documents of a packed sequence, without its kernels.
    """


DENSE = {
    "feed_forward.w1.weight": "shared_mlp.input_linear.weight",
    "feed_forward.w3.weight": "shared_mlp.input_linear.weight",
    "feed_forward.w2.weight": "shared_mlp.output_linear.weight",
}
ROUTED = {name.replace("feed_forward", "moe.shared_experts"): hf_name for name, hf_name in DENSE.items()}
STACKS = {
    "moe.experts.w1": "block_sparse_moe.input_linear.weight",
    "moe.experts.w3": "block_sparse_moe.input_linear.weight",
    "moe.experts.w2": "block_sparse_moe.output_linear.weight",
}
ROUTER = {"moe.router.gate.weight": "block_sparse_moe.router.layer.weight"}


def granite_map(args: Any) -> TensorMap:
    names = ROUTED | STACKS | ROUTER if hasattr(args, "n_experts") else DENSE
    return mixer_map(args, names, {}, stacks=frozenset(STACKS))


HF = HuggingFace(build=Granite4, tensor_map=granite_map, config=CONFIG)
SPEC = ModelSpec(build=Granite4, plan=mixer_plan(PLAN), hf=HF, flops_per_token=hybrid_flops_per_token, balance=router)
