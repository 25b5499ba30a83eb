"""What decoder models share: embedding, blocks, norm and head, and all that treats them alike in every family.

A family gives the blocks and the rotary positions. Blocks stand in a dictionary, and the embedding, the final norm and
the head may be None, so that a pipeline can cut the model and names stay what they are.

Letters of the shapes: B samples, S tokens, D = args.dim, V vocabulary.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from torchtitan.initialization import Constant, Init, Normal
from torchtitan.models.layers import AttentionKernel, RMSNorm, SwiGLU, autocast_dtype


class DecoderArgs(Protocol):
    dim: int
    n_layers: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float
    tied_embeddings: bool


class Block(nn.Module):
    def __init__(self, args: DecoderArgs, attention: nn.Module):
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = SwiGLU(args.dim, args.ffn_dim)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, mask: object) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """`loss`, a callable (hidden, head, labels) -> scalar, is attached by whoever trains.

    `block` makes a layer of its number and the kernel; it has to keep the kernel in `attention.kernel`.
    """

    def __init__(
        self,
        args: DecoderArgs,
        rotary: nn.Module,
        block: Callable[[int, AttentionKernel], nn.Module],
        attention_backend: str = "auto",
    ):
        super().__init__()
        self.args = args
        self.loss = None
        self.rotary = rotary
        self.kernel = AttentionKernel(attention_backend)  # one for all blocks; it has no state
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): block(i, self.kernel) for i in range(args.n_layers)})
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.tie_weights()

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """tokens [B, S] (hidden states [B, S, D] where the embedding is cut off) -> logits [B, S, V] (hidden states
        where the head is). With labels [B, S]: the sum of the tokens' losses, a scalar.

        positions [B, S] default to 0..S-1. With document_ids [B, S], tokens see only their own document.
        """
        x = tokens if self.tok_embeddings is None else self.embed(tokens)  # [B, S, D]
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]  # [1, S]
        rotation = self.rotary(positions)
        mask = self.kernel.prepare(document_ids)
        for layer, block in self.layers.items():
            if int(layer) < self.args.n_layers:
                x = block(x, rotation, mask)
        if self.norm is not None:
            x = self.norm(x)
        if labels is not None:
            assert self.loss is not None and self.output is not None, "labels need a loss and the output head"
            loss, extra = self.loss(x, self.output, labels), None
            if self.training:
                extra = self.extra_loss(x, tokens, labels, document_ids, rotation, mask)
            return loss if extra is None else loss + (extra - extra.detach())
        return x if self.output is None else self.output(x)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, S] -> [B, S, D]"""
        x = self.tok_embeddings(tokens)
        dtype = autocast_dtype(x.device.type)  # which leaves embeddings in float32, unlike FSDP's mixed precision
        return x if dtype is None else x.to(dtype)

    def extra_loss(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        document_ids: torch.Tensor | None,
        rotation: torch.Tensor,
        mask: object,
    ) -> torch.Tensor | None:
        """What a family adds to the gradient, and not to the value, of the sum of losses in training: a scalar of the
        hidden states x [B, S, D] that the head reads, or None. Its layers stand in `layers` behind the model's own.
        """
        return None

    def take_extra_losses(self) -> dict[str, torch.Tensor]:
        """What a family logs of its extra_loss: sums over the tokens since the last call, by their names in metrics."""
        return {}

    def set_attention_backend(self, backend: str) -> None:
        self.set_attention_kernel(AttentionKernel(backend))

    def set_attention_kernel(self, kernel: nn.Module) -> None:
        """Give all blocks another kernel, with AttentionKernel's two methods."""
        self.kernel = kernel
        for block in self.layers.values():
            block.attention.kernel = kernel

    def tie_weights(self) -> None:
        if self.args.tied_embeddings and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def _apply(self, fn: object, recurse: bool = True) -> "Decoder":
        """to_empty() and to() may make a new parameter for each name; tied ones have to become one again."""
        super()._apply(fn, recurse)
        self.tie_weights()
        return self

    def init_rule(self, name: str) -> Init:
        """torchtitan's recipe for Llama 3: truncated normals, narrower with depth for what feeds the residual stream.

        A tied matrix starts as a head does: embeddings of standard deviation 1 would make logits of sqrt(D).
        """
        if "norm" in name:
            return Constant(1.0)
        if name.startswith("output.") or (name.startswith("tok_embeddings.") and self.args.tied_embeddings):
            return Normal(self.args.dim**-0.5)
        if name.startswith("tok_embeddings."):
            return Normal(1.0)
        _, layer, *_, matrix = name.removesuffix(".weight").split(".")
        return Normal(0.02 / (2 * (int(layer) + 1)) ** 0.5 if matrix in ("wo", "w2", "w3") else 0.02)
