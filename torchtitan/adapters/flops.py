"""Floating-point operations of a model that is trained in part, in the convention of models/flops.py.

A weight that is trained costs 6 for each token that meets it, one that is frozen 4: its gradient is a matrix product
that nobody makes. A and B are trained weights. (Below the first matrix that is trained nothing runs backward, which
saves a little more and is not counted; nor is what unpacks a packed matrix, or measures the rows of DoRA.)
"""

from collections.abc import Iterable

from torch import nn

from torchtitan.models.flops import FlopsPerToken
from torchtitan.models.linears import HEAD
from torchtitan.models.moe.experts import Experts


def weights_met(model: nn.Module, names: Iterable[str]) -> float:
    """How many weights of these parameters, by their first names in the whole plain model, a token is multiplied with:
    of stacks of experts those that it goes to, the head once more for each depth of multi-token prediction.
    """
    return sum(_met(model, *name.rpartition(".")[::2]) for name in names)


def _met(model: nn.Module, path: str, own: str) -> float:
    module = model.get_submodule(path)
    parameter, args = getattr(module, own), getattr(model, "args", None)
    if isinstance(module, Experts):
        return parameter.numel() * args.top_k / args.n_experts
    head = getattr(model, HEAD, None)
    heads = 1 + getattr(args, "n_mtp_layers", 0)
    if isinstance(module, nn.Embedding):
        return parameter.numel() * heads if parameter is getattr(head, own, None) else 0.0
    return parameter.numel() * (heads if module is head else 1) if parameter.dim() > 1 else 0.0


def in_part(plain: FlopsPerToken, weights: int, trained: float, added: float, left_out: float) -> FlopsPerToken:
    """Of a model whose `plain` operations are those of training all its `weights`, as met by a token, of which
    `trained` are and `left_out` are not there, beside as many as are `added`.
    """
    change = 6 * added - 2 * (weights - trained) - 4 * left_out
    return FlopsPerToken(full=plain.full + change, causal=plain.causal + change)
