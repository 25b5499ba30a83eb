"""Nemotron-H and Nemotron 3: the model, its parallel plan, and its names in the Hugging Face format."""

from dataclasses import replace
from typing import Any

from torch import nn

from torchtitan.models.flops import hybrid_flops_per_token
from torchtitan.models.gated import feed_forward_of, norm_of
from torchtitan.models.hf.names import ROUTER_BIAS, TensorMap
from torchtitan.models.mamba2.decoder import MixerDecoder, mixer_map, mixer_plan
from torchtitan.models.moe import router
from torchtitan.models.moe.decoder import PLAN as EXPERT_PLAN
from torchtitan.models.moe.layer import MoE
from torchtitan.models.nemotron_h import CONFIG
from torchtitan.models.nemotron_h.layer import SoloBlock
from torchtitan.models.spec import HuggingFace, ModelSpec


class NemotronH(MixerDecoder):
    """A decoder whose layers are each attention, a mixer of Mamba 2, a feed-forward or experts (arXiv:2504.03624).

    transformers runs on over the documents of a packed sequence, without its kernels.
    """

    @staticmethod
    def build_attention(args: Any, layer: int, kernel: Any) -> nn.Module | None:
        return MixerDecoder.build_attention(args, layer, kernel) if args.letter(layer) in "*M" else None

    @staticmethod
    def build_block(args: Any, layer: int, attention: nn.Module | None) -> SoloBlock:
        norm = norm_of(args)(args.dim, args.norm_eps)
        if attention is not None:
            return SoloBlock(norm, attention=attention)
        if args.letter(layer) == "E":
            return SoloBlock(norm, moe=MoE(args))
        return SoloBlock(norm, feed_forward=feed_forward_of(args, args.mlp_bias))


NAMES = {
    "norm.weight": "norm.weight",
    **{f"attention.w{part}.weight": f"mixer.{part}_proj.weight" for part in "qkvo"},
    "feed_forward.w1.weight": "mixer.up_proj.weight",
    "feed_forward.w2.weight": "mixer.down_proj.weight",
    "moe.router.gate.weight": "mixer.gate.weight",
    ROUTER_BIAS: "mixer.gate.e_score_correction_bias",
    "moe.experts.w1": "mixer.experts.*.up_proj.weight",
    "moe.experts.w2": "mixer.experts.*.down_proj.weight",
    "moe.shared_experts.w1.weight": "mixer.shared_experts.up_proj.weight",
    "moe.shared_experts.w2.weight": "mixer.shared_experts.down_proj.weight",
}
ENDS = {"tok_embeddings.weight": "backbone.embeddings.weight", "norm.weight": "backbone.norm_f.weight"}


def solo_map(args: Any) -> TensorMap:
    return mixer_map(args, NAMES, ENDS, "mixer", layers="backbone.layers.", in_memory={"backbone.": "model."})


def is_of_other_depths(name: str, args: Any) -> bool:
    """Return True for tensors of multi-token prediction, which transformers does not read either."""
    return name.startswith("mtp.")


PLAN = mixer_plan(EXPERT_PLAN)
NORMS = ("attention_norm", "ffn_norm")
PLAN = replace(
    PLAN,
    sequence=("norm", *(name for name in PLAN.sequence if name not in NORMS)),
    optional=(*PLAN.optional, "attention"),
)
HF = HuggingFace(build=NemotronH, tensor_map=solo_map, config=CONFIG, is_ignored=is_of_other_depths)
SPEC = ModelSpec(build=NemotronH, plan=PLAN, hf=HF, flops_per_token=hybrid_flops_per_token, balance=router)
