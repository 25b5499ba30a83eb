"""DeepSeek V2 and V3: the model with multi-token prediction, its parallel plan, and its Hugging Face names.

Features: latent attention, with keys and values computed from a few hundred numbers per token; only some features of
queries and keys are rotated, and the rotated part of the key is shared by all heads; YaRN scaling; the first layers are
dense, the others have experts.

Multi-token prediction adds small models after the main one (DeepSeek V3, arXiv:2412.19437, section 2.2, in the variant
of the published weights). The k-th, called depth k, predicts k tokens further than the main model. Let h_0 be the input
of the main head, after the final norm, and t_i the token at position i. Depth k = 1, 2, ... computes

    h_k[i] = norm_k(block_k(eh_proj_k [enorm_k(embedding(t_[i + k])), hnorm_k(h_[k - 1][i])]))

and the shared head maps h_k[i] to logits of t_[i + k + 1]. The report concatenates the two halves in the other order;
the published weights and inference engines use this one. Each depth receives the head's input of the previous one; the
published model, with one depth, leaves this open.

Hugging Face folders: features of heads are in the same order as here; experts, stacked here, are stored one by one and
transposed. The published V3 is in 8 bits, which are read (hf/load.py) but not written. Depths follow the last layer,
each with copies of the embedding and the head, which are written but not read. A folder may hold more depths than the
job.

Letters of the shapes: B samples, S tokens, D = args.dim, H heads.
"""

import torch
from torch import nn

from torchtitan.models.attention import AttentionKernel, SharedInputs, growth_of_queries, run_attention
from torchtitan.models.decoder import AttentionKind, Block, Decoder
from torchtitan.models.deepseek import CONFIG, DeepseekArgs
from torchtitan.models.flops import latent_flops_per_token
from torchtitan.models.hf.names import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    TensorMap,
    is_after_layers,
)
from torchtitan.models.layers import RMSNorm, Rotary, ZeroedBuffers, add_once, frequencies, rotate, yarn, yarn_magnitude
from torchtitan.models.moe import MoEDecoderArgs, router
from torchtitan.models.moe.layer import MoEBlock
from torchtitan.models.spec import HuggingFace, ModelSpec
from torchtitan.parallelisms.plan import ParallelPlan
from torchtitan.parallelisms.steps import Notes, running

IGNORED = -100
"""The label that torch's cross-entropy ignores by default."""


class MultiTokenBlock(MoEBlock):
    """One depth of multi-token prediction. It uses the main model's embedding and head."""

    in_training_only = True  # so that FSDP does not prefetch it in evaluation

    def __init__(self, args: MoEDecoderArgs, attention: nn.Module):
        super().__init__(args, attention)
        self.enorm = RMSNorm(args.dim, args.norm_eps)
        self.hnorm = RMSNorm(args.dim, args.norm_eps)
        self.eh_proj = nn.Linear(2 * args.dim, args.dim, bias=False)
        self.norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: torch.Tensor, next_embeddings: torch.Tensor, shared: SharedInputs) -> torch.Tensor:
        """x [B, S, D] of the previous depth, and the embeddings [B, S, D] of the tokens to come -> [B, S, D]."""
        joined = torch.cat((self.enorm(next_embeddings), self.hnorm(x)), dim=-1)
        with running(Notes(shared)):
            joined = self.eh_proj(joined)
        return self.norm(super().forward(joined, shared))


def labels_of_depth(labels: torch.Tensor, document_ids: torch.Tensor | None, depth: int) -> torch.Tensor:
    """Shift the main model's labels [B, S] by `depth` positions.

    Labels beyond the end of the sample, or with document_ids [B, S] of the document, are IGNORED.
    """
    reaches = torch.arange(labels.shape[1], device=labels.device) < labels.shape[1] - depth  # [S]
    if document_ids is not None:
        reaches = reaches & (document_ids == document_ids.roll(-depth, 1))
    return labels.roll(-depth, 1).where(reaches, IGNORED)


LATENT_NORM_EPS = 1e-6  # in all published models, independent of their other norms


class YarnRotary(Rotary):
    """Rotary positions with a YarnScaling, or None."""

    @property
    def magnitude(self) -> float:
        scaling = self.scaling
        if scaling is None:
            return 1.0
        return yarn_magnitude(scaling.factor, scaling.mscale) / yarn_magnitude(scaling.factor, scaling.mscale_all_dim)

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """Return the radians per position, [head_dim / 2]."""
        plain = frequencies(self.head_dim, self.theta, None, device)
        return plain if self.scaling is None else yarn(plain, self.theta, self.scaling)


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv:2405.04434): keys and values come from a compressed vector per token."""

    def __init__(self, args: DeepseekArgs, kernel: AttentionKernel):
        super().__init__()
        self.rope_dim, self.v_dim, self.kv_rank = args.qk_rope_head_dim, args.v_head_dim, args.kv_lora_rank
        self.nope_dim = args.qk_nope_head_dim
        queries = args.n_heads * args.qk_head_dim
        self.wq_a = self.q_norm = None
        if args.q_lora_rank:
            self.wq_a = nn.Linear(args.dim, args.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(args.q_lora_rank, LATENT_NORM_EPS)
        self.wq = nn.Linear(args.q_lora_rank or args.dim, queries, bias=False)
        self.wkv_a = nn.Linear(args.dim, args.kv_lora_rank + args.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(args.kv_lora_rank, LATENT_NORM_EPS)
        self.wkv_b = nn.Linear(args.kv_lora_rank, args.n_heads * (args.qk_nope_head_dim + args.v_head_dim), bias=False)
        self.wo = nn.Linear(args.n_heads * args.v_head_dim, args.dim, bias=False)
        scaling = args.rope_scaling
        self.score_scale = 1.0 if scaling is None else yarn_magnitude(scaling.factor, scaling.mscale_all_dim) ** 2
        self.growth = (args.query_growth, args.query_period)
        self.kernel = kernel

    def forward(self, x: torch.Tensor, shared: SharedInputs) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]"""
        latent_q = x if self.wq_a is None else self.q_norm(self.wq_a(x))
        # cheaper here, because it is narrower than the queries
        if self.score_scale != 1:
            latent_q = latent_q * self.score_scale
        if self.growth[0]:
            latent_q = latent_q * growth_of_queries(shared.positions, *self.growth)[..., None].to(latent_q.dtype)
        q = self.wq(latent_q)
        # -1 and not the number of heads: under tensor parallelism a rank has only some of them
        q = q.unflatten(-1, (-1, self.nope_dim + self.rope_dim))  # [B, S, H, nope + rope]
        q_plain, q_turned = q.split((self.nope_dim, self.rope_dim), dim=-1)
        latent, k_turned = self.wkv_a(x).split((self.kv_rank, self.rope_dim), dim=-1)
        k_turned = rotate(k_turned.unsqueeze(-2), shared.rotation)  # [B, S, 1, rope]
        kv = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (-1, self.nope_dim + self.v_dim))
        k_plain, v = kv.split((self.nope_dim, self.v_dim), dim=-1)  # [B, S, H, nope], [B, S, H, v]
        q = torch.cat((q_plain, rotate(q_turned, shared.rotation)), dim=-1)
        k = torch.cat((k_plain, k_turned.expand(-1, -1, k_plain.shape[-2], -1)), dim=-1)
        return self.wo(run_attention(self.kernel, q, k, v, shared))  # [B, S, D]


class Deepseek(ZeroedBuffers, Decoder):
    """DeepSeek V2 or V3.

    Buffer, with multi-token prediction: `mtp_loss` [], the mean over the depths of their losses, summed over tokens
    since the last call of take_extra_losses. It is float64 because a step has many tokens.
    """

    def __init__(self, args: DeepseekArgs, attention_backend: str = "auto"):
        def block(layer: int, kernel: AttentionKernel) -> nn.Module:
            kind = Block if layer < args.n_dense_layers else MoEBlock
            return kind(args, LatentAttention(args, kernel))

        rotary = YarnRotary(args.qk_rope_head_dim, args.rope_theta, args.rope_scaling)
        super().__init__(args, AttentionKind(rotary), block, attention_backend)
        mtp_loss = torch.zeros((), dtype=torch.float64) if args.n_mtp_layers else None
        self.register_buffer("mtp_loss", mtp_loss, persistent=False)
        for layer in range(args.n_layers, args.n_layers + args.n_mtp_layers):
            self.layers[str(layer)] = MultiTokenBlock(args, LatentAttention(args, self.kernels[0]))

    def extra_loss(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor,
        document_ids: torch.Tensor | None,
        shared: SharedInputs,
    ) -> torch.Tensor | None:
        """Return mtp_loss_weight times the mean over the depths of their summed losses, a scalar.

        x [B, S, D] is the head's input. Like the main loss, the result is later divided by the number of valid main
        labels. The report divides every depth's sum by the length of the sequence.
        """
        depths = self.args.n_mtp_layers
        if not depths:
            return None
        losses = []
        for depth in range(1, depths + 1):
            layer = self.args.n_layers + depth - 1
            block = self.layers[str(layer)]
            # tokens that roll wraps around have no label
            x = block(x, self.embed(tokens.roll(-depth, 1)), self.shared_for_layer(shared, layer))
            targets = {"labels": labels_of_depth(shared.targets["labels"], document_ids, depth)}
            losses.append(self.compute_loss(x, targets, shared))
        mean = torch.stack(losses).mean()
        add_once(self.mtp_loss, mean.detach())
        return self.args.mtp_loss_weight * mean

    @torch.no_grad()
    def take_extra_losses(self) -> dict[str, torch.Tensor]:
        if self.mtp_loss is None:
            return {}
        total = self.mtp_loss.clone()
        self.mtp_loss.zero_()
        return {"mtp_loss": total}


PLAN = ParallelPlan(
    blocks="layers.*",
    embedding="tok_embeddings",
    head=("norm", "output"),
    gathered=("attention", "feed_forward"),
    column=("attention.wq", "attention.wkv_b", "feed_forward.w[13]"),
    row=("attention.wo", "feed_forward.w2"),
    replicated=("attention.w*_a", "attention.*_norm"),  # the compressed vectors serve all heads
    # replicated: expert parallel shards the experts, and shared experts are narrow
    sequence=("attention_norm", "ffn_norm", "moe.router.gate", "moe.experts", "moe.shared_experts.w*"),
    experts="moe.experts",
    # all layers dense, or none; no shared experts
    optional=("feed_forward", "feed_forward.w[13]", "feed_forward.w2", "moe.router.gate", "moe.experts")
    + ("moe.shared_experts.w*",),
)


NOT_LATENT = ("attention.wk.weight", "attention.wv.weight")
PARTS = {name: hf_name for name, hf_name in ATTENTION.items() if name not in NOT_LATENT} | {
    "attention.wq_a.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
    **FEED_FORWARD,
    **ROUTER,
    ROUTER_BIAS: "mlp.gate.e_score_correction_bias",
    **SHARED_EXPERTS,
    **EXPERTS,
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}


def tensor_map(args: DeepseekArgs) -> TensorMap:
    compressed = {"attention.wq.weight": "self_attn.q_b_proj.weight"} if args.q_lora_rank else {}
    return TensorMap(
        layer_names=PARTS | compressed,
        n_experts=args.n_experts,
        float32=frozenset({ROUTER_BIAS}),
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


HF = HuggingFace(build=Deepseek, tensor_map=tensor_map, config=CONFIG, is_ignored=is_after_layers)


SPEC = ModelSpec(build=Deepseek, plan=PLAN, hf=HF, flops_per_token=latent_flops_per_token, balance=router)
