"""DeepSeek V2 and V3 in the form of Hugging Face: names, config.json, safetensors shards.

Which of the two follows from the routing: softmax is V2, sigmoid with an expert bias V3. Features of heads come in the
same order there; experts, stacked here, stand one by one and transposed. The published V3 is in 8 bits, which are read
(hf_blocks.py) but not written. Depths of multi-token prediction stand behind the last layer, each with copies of the
embedding and the head, which are written and not read. A folder may hold more depths than the job has.
"""

from torchtitan.models.deepseek import DeepseekArgs
from torchtitan.models.deepseek.hf_config import CONFIG
from torchtitan.models.deepseek.model import Deepseek
from torchtitan.models.hf.family import HuggingFace
from torchtitan.models.hf.names import ATTENTION, EXPERTS, FEED_FORWARD, Form

BIAS = "moe.router.expert_bias"
NOT_LATENT = ("attention.wk.weight", "attention.wv.weight")
PARTS = {name: theirs for name, theirs in ATTENTION.items() if name not in NOT_LATENT} | {
    "attention.wq_a.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
    **FEED_FORWARD,
    "moe.router.gate.weight": "mlp.gate.weight",
    BIAS: "mlp.gate.e_score_correction_bias",
    "moe.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "moe.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "moe.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    **EXPERTS,
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}


def form(args: DeepseekArgs) -> Form:
    compressed = {"attention.wq.weight": "self_attn.q_b_proj.weight"} if args.q_lora_rank else {}
    return Form(
        parts=PARTS | compressed,
        n_experts=args.n_experts,
        float32=frozenset({BIAS}),
        tied=args.tied_embeddings,
        copies=_copies(args),
    )


def _copies(args: DeepseekArgs) -> dict[str, tuple[str, ...]]:
    depths = [f"model.layers.{args.n_layers + depth}" for depth in range(args.n_mtp_layers)]
    embeddings = tuple(f"{depth}.embed_tokens.weight" for depth in depths)
    heads = tuple(f"{depth}.shared_head.head.weight" for depth in depths)
    if args.tied_embeddings:
        return {"tok_embeddings.weight": embeddings + heads}
    return {"tok_embeddings.weight": embeddings, "output.weight": heads}


def _is_ignored(name: str, args: DeepseekArgs) -> bool:
    """Of multi-token prediction, behind the last layer: depths that the job does not have, and copies."""
    parts = name.split(".")
    return parts[:2] == ["model", "layers"] and parts[2].isdecimal() and int(parts[2]) >= args.n_layers


HF = HuggingFace(build=Deepseek, form=form, config=CONFIG, ignored=_is_ignored)
