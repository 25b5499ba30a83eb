"""Multi-token prediction: small models behind the main one, of which the k-th, its depth, predicts k tokens further.

After DeepSeek V3's report (arXiv:2412.19437, section 2.2), as its weights are published. With h_0 the hidden state that
the main head reads, so after the final norm, and t_i the token at position i, depth k = 1, 2, ... computes

    h_k[i] = norm_k(block_k(eh_proj_k [enorm_k(embedding(t_[i + k])), hnorm_k(h_[k - 1][i])]))

and the shared head makes of h_k[i] the logits of t_[i + k + 1]. The report writes the two halves in the other order;
weights are published for this one, which is also what inference engines compute. All depths are handed on what their
head reads, as the first is; the published model, with its one depth, leaves that open.

Letters of the shapes: B samples, S tokens, D width.
"""

import torch
from torch import nn

from torchtitan.models.layers import Shared
from torchtitan.models.moe import MoEDecoderArgs
from torchtitan.models.moe.layer import MoEBlock
from torchtitan.models.norms import RMSNorm
from torchtitan.parallelisms.steps import Notes, running

IGNORED = -100
"""A label that torch's cross-entropy leaves out unless told otherwise."""


class MultiTokenBlock(MoEBlock):
    """One depth, without the embedding and the head, which are the main model's."""

    in_training_only = True  # so that no block which evaluation runs has FSDP gather this one ahead

    def __init__(self, args: MoEDecoderArgs, attention: nn.Module):
        super().__init__(args, attention)
        self.enorm = RMSNorm(args.dim, args.norm_eps)
        self.hnorm = RMSNorm(args.dim, args.norm_eps)
        self.eh_proj = nn.Linear(2 * args.dim, args.dim, bias=False)
        self.norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: torch.Tensor, ahead: torch.Tensor, shared: Shared) -> torch.Tensor:
        """x [B, S, D] of the depth before, and the embeddings of the tokens ahead [B, S, D] -> [B, S, D]."""
        joined = torch.cat((self.enorm(ahead), self.hnorm(x)), dim=-1)
        with running(Notes(shared)):
            joined = self.eh_proj(joined)
        return self.norm(super().forward(joined, shared))


def labels_of_depth(labels: torch.Tensor, document_ids: torch.Tensor | None, depth: int) -> torch.Tensor:
    """labels [B, S] of the main model -> those of a depth: `depth` positions further, none behind a sample's or, with
    document_ids [B, S], a document's end.
    """
    reaches = torch.arange(labels.shape[1], device=labels.device) < labels.shape[1] - depth  # [S]
    if document_ids is not None:
        reaches = reaches & (document_ids == document_ids.roll(-depth, 1))
    return labels.roll(-depth, 1).where(reaches, IGNORED)
