"""DeepSeek V2 and V3 as a plain torch model: it knows nothing of meshes, process groups or the job.

Notable: latent attention, whose keys and values are unfolded from a few hundred numbers a token; only some features of
queries and keys are turned by position, and those of the key are the same for all heads; YaRN's stretched wavelengths;
the first layers dense, the others with experts; multi-token prediction (multi_token.py).

Letters of the shapes: B samples, S tokens, D = args.dim, H heads.
"""

import torch
from torch import nn

from torchtitan.models.buffers import ZeroedBuffers, add_once
from torchtitan.models.decoder import Block, Decoder, of_layer
from torchtitan.models.deepseek import DeepseekArgs
from torchtitan.models.deepseek.multi_token import MultiTokenBlock, labels_of_depth
from torchtitan.models.layers import AttentionKernel, Rotary, Shared, attended, rotate
from torchtitan.models.moe.layer import MoEBlock
from torchtitan.models.norms import RMSNorm
from torchtitan.models.rope import frequencies, yarn, yarn_magnitude

LATENT_NORM_EPS = 1e-6  # in all published models, whatever their other norms have


class YarnRotary(Rotary):
    """`scaling` is a YarnScaling."""

    @property
    def magnitude(self) -> float:
        scaling = self.scaling
        if scaling is None:
            return 1.0
        return yarn_magnitude(scaling.factor, scaling.mscale) / yarn_magnitude(scaling.factor, scaling.mscale_all_dim)

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """As Rotary's: [head_dim / 2]"""
        plain = frequencies(self.head_dim, self.theta, None, device)
        return plain if self.scaling is None else yarn(plain, self.theta, self.scaling)


class LatentAttention(nn.Module):
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
        self.kernel = kernel

    def forward(self, x: torch.Tensor, shared: Shared) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]"""
        latent_q = x if self.wq_a is None else self.q_norm(self.wq_a(x))
        if self.score_scale != 1:
            latent_q = latent_q * self.score_scale  # a few times narrower here than the queries of all heads
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
        return self.wo(attended(self.kernel, q, k, v, shared))  # [B, S, D]


class Deepseek(ZeroedBuffers, Decoder):
    """Buffer, if there are depths: `mtp_loss` [], the mean of their losses, summed over the tokens since it was last
    taken; float64, as a step has many tokens.
    """

    def __init__(self, args: DeepseekArgs, attention_backend: str = "auto"):
        def block(layer: int, kernel: AttentionKernel) -> nn.Module:
            kind = Block if layer < args.n_dense_layers else MoEBlock
            return kind(args, LatentAttention(args, kernel))

        rotary = YarnRotary(args.qk_rope_head_dim, args.rope_theta, args.rope_scaling)
        super().__init__(args, rotary, block, attention_backend)
        mtp_loss = torch.zeros((), dtype=torch.float64) if args.n_mtp_layers else None
        self.register_buffer("mtp_loss", mtp_loss, persistent=False)
        for layer in range(args.n_layers, args.n_layers + args.n_mtp_layers):
            self.layers[str(layer)] = MultiTokenBlock(args, LatentAttention(args, self.kernel))

    def extra_loss(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor,
        document_ids: torch.Tensor | None,
        shared: Shared,
    ) -> torch.Tensor | None:
        """mtp_loss_weight times the mean over the depths of the sums of their losses. Divided by the number of valid
        main labels, like the main loss: the report divides every depth's sum by the length of the sequence.
        """
        depths = self.args.n_mtp_layers
        if not depths:
            return None
        losses = []
        for depth in range(1, depths + 1):
            layer = self.args.n_layers + depth - 1
            block = self.layers[str(layer)]
            # what comes around from the sample's head meets no label
            x = block(x, self.embed(tokens.roll(-depth, 1)), of_layer(shared, layer))
            targets = {"labels": labels_of_depth(shared.targets["labels"], document_ids, depth)}
            losses.append(self.loss_of(x, targets, shared))
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
