"""Llama 2, 3, 3.1 and 3.2 as a plain torch model: it knows nothing of meshes, process groups or the job.

Notable: grouped key/value heads; rotary positions in float32; a gated feed-forward; norms before, not after; no biases;
weights of the head and the embedding may be one. Blocks stand in a dictionary, and the embedding, the final norm and
the head may be None, so that a pipeline can cut the model and names stay what they are.

Letters of the shapes: B samples, S tokens, D = args.dim, H query heads, K key/value heads, E = head_dim, V vocabulary.
"""

import torch
from torch import nn

from torchtitan.initialization import Constant, Init, Normal
from torchtitan.models.layers import AttentionKernel, Rotary, SwiGLU, rotate
from torchtitan.models.llama import LlamaArgs


class Attention(nn.Module):
    def __init__(self, args: LlamaArgs, kernel: AttentionKernel):
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.kernel = kernel

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, mask: object) -> torch.Tensor:
        # -1 and not the number of heads: under tensor parallelism a rank has only some of them
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # [B, S, H, E]
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))  # [B, S, K, E]
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))  # [B, S, K, E]
        q, k = rotate(q, rotation), rotate(k, rotation)
        y = self.kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)  # [B, H, S, E]
        return self.wo(y.transpose(1, 2).flatten(-2))  # [B, S, D]


class Block(nn.Module):
    def __init__(self, args: LlamaArgs, kernel: AttentionKernel):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(args, kernel)
        self.ffn_norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = SwiGLU(args.dim, args.ffn_dim)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, mask: object) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """`loss`, a callable (hidden, head, labels) -> scalar, is attached by whoever trains."""

    def __init__(self, args: LlamaArgs, attention_backend: str = "auto"):
        super().__init__()
        self.args = args
        self.loss = None
        self.rotary = Rotary(args.head_dim, args.rope_theta, args.rope_scaling)
        self.kernel = AttentionKernel(attention_backend)  # one for all blocks; it has no state
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): Block(args, self.kernel) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, args.norm_eps)
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
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)  # [B, S, D]
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]  # [1, S]
        rotation = self.rotary(positions)
        mask = self.kernel.prepare(document_ids)
        for block in self.layers.values():
            x = block(x, rotation, mask)
        if self.norm is not None:
            x = self.norm(x)
        if labels is not None:
            assert self.loss is not None and self.output is not None, "labels need a loss and the output head"
            return self.loss(x, self.output, labels)
        return x if self.output is None else self.output(x)

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

    def _apply(self, fn: object, recurse: bool = True) -> "Llama":
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
        layer, matrix = int(name.split(".")[1]), name.split(".")[-2]
        return Normal(0.02 / (2 * (layer + 1)) ** 0.5 if matrix in ("wo", "w2", "w3") else 0.02)
