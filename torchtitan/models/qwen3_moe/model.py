"""Qwen 3 with experts: the model, its parallel plan, and its names in the Hugging Face format.

Features: grouped key/value heads, with norms of queries and keys; a head width that is independent of the model's
width; experts in all layers, none shared. Differences from transformers beyond names: the order of a head's features,
so the rows of wq and wk and the weights of their norms are in another order; and experts, stacked here, stored one by
one and transposed there.
"""

from torchtitan.models.attention import GroupedQueryAttention
from torchtitan.models.decoder import AttentionKind, Decoder
from torchtitan.models.flops import flops_per_token
from torchtitan.models.hf.names import ATTENTION, EXPERTS, QK_NORMS, REORDERED, TensorMap
from torchtitan.models.layers import RMSNorm, Rotary
from torchtitan.models.moe import router
from torchtitan.models.moe.layer import MoEBlock
from torchtitan.models.qwen3_moe import CONFIG, Qwen3MoEArgs
from torchtitan.models.spec import HuggingFace, ModelSpec
from torchtitan.parallelisms.plan import ParallelPlan


class Qwen3MoE(Decoder):
    def __init__(self, args: Qwen3MoEArgs, attention_backend: str = "auto"):
        super().__init__(
            args,
            AttentionKind(Rotary(args.head_dim, args.rope_theta, args.rope_scaling)),
            lambda layer, kernel: MoEBlock(args, GroupedQueryAttention(args, kernel, qk_norm=RMSNorm)),
            attention_backend,
        )


PLAN = ParallelPlan(
    blocks="layers.*",
    embedding="tok_embeddings",
    head=("norm", "output"),
    gathered=("attention",),
    column=("attention.w[qkv]",),
    row=("attention.wo",),
    replicated=("attention.[qk]_norm",),  # each rank norms its own heads
    # replicated: expert parallel shards the experts, and shared experts are narrow
    sequence=("attention_norm", "ffn_norm", "moe.router.gate", "moe.experts", "moe.shared_experts.w*"),
    experts="moe.experts",
    optional=("moe.shared_experts.w*",),  # the published sizes have none
)


PARTS = ATTENTION | QK_NORMS | {"moe.router.gate.weight": "mlp.gate.weight", **EXPERTS}


def tensor_map(args: Qwen3MoEArgs) -> TensorMap:
    return TensorMap(
        layer_names=PARTS,
        n_experts=args.n_experts,
        reordered=REORDERED.union(QK_NORMS),
        head_dim=args.head_dim,
        tied=args.tied_embeddings,
    )


HF = HuggingFace(build=Qwen3MoE, tensor_map=tensor_map, config=CONFIG)


SPEC = ModelSpec(build=Qwen3MoE, plan=PLAN, hf=HF, flops_per_token=flops_per_token, balance=router)
