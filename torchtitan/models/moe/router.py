"""The choice of experts for each token, their weights, and two ways to balance the load.

Either a bias on the scores, used only for the choice and not for the weights, is changed slightly once per optimizer
step against the load counted since the last (`update_biases`). Or an auxiliary loss is small if a sequence distributes
its tokens evenly. The choice of experts has no gradient; the weights, which are scores, do.

The trainer reads the load once per optimizer step. Models without experts give empty results.

    set_sequence_sum(model, total)                   once, if ranks have parts of the same sequences
    set_aux_loss_scale(model, 1 / valid_tokens)      before the step's first forward
    layers, load = take_load(model)                  after the last backward; then sum `load` over the ranks that have
                                                     other tokens for the same layers
    update_biases(model, load)                       before the next step
    metrics(model, load)                             when the step is logged

Tokens are counted in forward, in training, and not again when a forward is recomputed.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.core.random_draws import clean_name
from torchtitan.models.layers import ZeroedBuffers, add_once, autocast_off
from torchtitan.models.moe import MoEArgs


class Gate(nn.Linear):
    """Logits of experts, at least in float32, because rounding could change the choice between close scores."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> logits [..., E], at least float32"""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with autocast_off(x.device.type):
            return F.linear(x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


class Router(ZeroedBuffers):
    """The router of a layer.

    Buffers: `expert_bias` [E], always float32 and saved in checkpoints. Reset each time they are read: `load` [E],
    tokens per expert; `not_finite` [], tokens with non-finite scores; `aux_loss` [], the sum of the auxiliary loss.
    """

    compiled_apart = False  # it may communicate with other ranks

    def __init__(self, args: MoEArgs):
        super().__init__()
        self.args = args
        self.gate = Gate(args.dim, args.n_experts, args.moe_biases)
        self.register_buffer("expert_bias", torch.zeros(args.n_experts) if args.expert_bias else None)
        self.register_buffer("load", torch.zeros(args.n_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("not_finite", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("aux_loss", torch.zeros(()), persistent=False)
        self.aux_scale: torch.Tensor | None = None
        # [B, E] counts of this rank's tokens of some sequences -> counts of all tokens of those sequences
        self.sum_over_sequence: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, S, D] -> the experts of each token, ids [B S, k], and their weights [B S, k], at least float32.

        If `ids` are given, as in a repeated forward, they are used as the choice and nothing is counted.
        """
        scores = self.scores(x)
        flat = scores.flatten(0, 1)
        has_ids = ids is not None
        if ids is None:
            ids = self.choose(flat)
            if self.training:
                self._count(ids, flat)
        weights = self.weigh(flat, ids)
        if self.args.aux_loss_weight and self.training:
            weights = self._with_aux_loss(weights, scores, ids, is_first=not has_ids)
        return ids, weights

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., E], between 0 and 1."""
        logits = self.gate(x)
        return logits.sigmoid() if self.args.score == "sigmoid" else logits.softmax(dim=-1)

    @torch.no_grad()
    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Choose k experts by score plus bias, within the best groups: scores [N, E] -> ids [N, k], unordered."""
        args = self.args
        ranked = scores if self.expert_bias is None else scores + self.expert_bias
        if args.n_groups > 1:
            groups = ranked.unflatten(-1, (args.n_groups, -1))  # [N, groups, E / groups]
            best = groups.amax(-1) if args.group_score == "max" else groups.topk(2).values.sum(-1)
            chosen = best.topk(args.top_groups, sorted=False).indices
            allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
            ranked = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        return ranked.topk(args.top_k, sorted=False).indices

    def weigh(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """scores [N, E], ids [N, k] -> [N, k]."""
        weights = scores.gather(1, ids)
        if self.args.normalize_top_k:
            weights = weights / (weights.sum(-1, keepdim=True) + self.args.weight_eps)
        return weights * self.args.route_scale

    @torch.no_grad()
    def update_bias(self, load: torch.Tensor, rate: float) -> None:
        """Lower the bias of experts with more than the mean of `load` [E] by `rate`, and raise the others' by `rate`.

        The mean of the biases is kept constant: it does not affect the choice and would drift.
        """
        load = load.to(self.expert_bias)
        move = rate * (load.mean() - load).sign()
        self.expert_bias += move - move.mean()

    @torch.no_grad()
    def _count(self, ids: torch.Tensor, scores: torch.Tensor) -> None:
        """Add the experts' tokens, ids [N, k], and non-finite scores [N, E] to the buffers."""
        add_once(self.load, count(ids.flatten(), self.args.n_experts))
        add_once(self.not_finite, (~scores.isfinite().all(-1)).sum())

    def _with_aux_loss(
        self, weights: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, is_first: bool
    ) -> torch.Tensor:
        """Return the weights [N, k] unchanged; in backward they also pass on the gradient of the auxiliary loss.

        For a sequence of T tokens the loss is aux_loss_weight * aux_loss_factor * sum_e f_e P_e, with f_e = E / (k T) *
        tokens of expert e, and P_e the mean share of it in the scores. The sum is 1 if all are even. The trainer
        divides sums over tokens by the global number of tokens, so each sequence's loss is multiplied by T; after the
        division the losses average over tokens. That division applies to the main loss only, after this layer and
        perhaps on another rank, so its factor must be set in advance: `aux_scale`.
        """
        assert self.aux_scale is not None, "call balance.set_aux_loss_scale with what the summed loss is multiplied by"
        args, (batch, length) = self.args, scores.shape[:2]
        shares = scores / scores.sum(-1, keepdim=True) if args.score == "sigmoid" else scores
        with torch.no_grad():
            counts = count(ids.view(batch, length * args.top_k), args.n_experts)
            if self.sum_over_sequence is not None:
                counts = self.sum_over_sequence(counts)
            tokens = counts.sum(-1, keepdim=True) / args.top_k
            often = counts * (args.n_experts / args.top_k) / tokens  # f, [B, E]
        loss = args.aux_loss_weight * args.aux_loss_factor * (often * shares.sum(1)).sum()
        if is_first:
            add_once(self.aux_loss, loss.detach())
        return _Attach.apply(weights, loss, self.aux_scale)


class _Attach(torch.autograd.Function):
    """Return `carrier` unchanged; in backward the scalar `loss` gets the gradient `scale`."""

    @staticmethod
    def forward(ctx, carrier, loss, scale):
        ctx.save_for_backward(scale)
        ctx.dtype = loss.dtype
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx, grad):
        (scale,) = ctx.saved_tensors
        return grad, scale.to(ctx.dtype), None


def count(ids: torch.Tensor, n_experts: int) -> torch.Tensor:
    """Count each expert's occurrences along the last axis of ids [..., n] -> int64 [..., E], without synchronizing."""
    zeros = torch.zeros(*ids.shape[:-1], n_experts, dtype=torch.int64, device=ids.device)
    return zeros.scatter_add_(-1, ids, torch.ones_like(ids))


def routers(model: nn.Module) -> dict[str, Router]:
    """Return layer name -> router, in the model's order."""
    modules = {clean_name(name): module for name, module in model.named_modules() if isinstance(module, Router)}
    return {name.removesuffix(".moe.router"): router for name, router in modules.items()}


def set_aux_loss_scale(model: nn.Module, scale: float) -> None:
    """Set the factor of the summed loss in backward: 1 / global number of valid tokens."""
    for router in routers(model).values():
        if router.aux_scale is None or router.aux_scale.device != router.load.device:
            router.aux_scale = torch.zeros((), device=router.load.device)
        router.aux_scale.fill_(scale)


def set_sequence_sum(model: nn.Module, sum_over_sequence: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Set the function that sums counts [B, E] over the ranks that share a sequence, for the auxiliary loss."""
    for router in routers(model).values():
        router.sum_over_sequence = sum_over_sequence


@torch.no_grad()
def take_load(model: nn.Module) -> tuple[list[str], torch.Tensor]:
    """Return and reset the tokens per expert since the last call, int64 [layers, E], with the layers' names."""
    router_of_layer = routers(model)
    if not router_of_layer:
        return [], torch.zeros(0, 0, dtype=torch.int64)
    load = torch.stack([router.load for router in router_of_layer.values()])
    for router in router_of_layer.values():
        router.load.zero_()
    return list(router_of_layer), load


@torch.no_grad()
def take_aux_loss(model: nn.Module) -> torch.Tensor | None:
    """Return and reset the summed auxiliary loss of all layers and tokens, a scalar; None without one."""
    with_loss = [router for router in routers(model).values() if router.args.aux_loss_weight]
    if not with_loss:
        return None
    total = torch.stack([router.aux_loss for router in with_loss]).sum()
    for router in with_loss:
        router.aux_loss.zero_()
    return total


@torch.no_grad()
def update_biases(model: nn.Module, load: torch.Tensor) -> None:
    """Update the biases by the load of all ranks, [layers, E], at the model's bias_rate."""
    for router, counts in zip(routers(model).values(), load, strict=True):
        if router.expert_bias is not None:
            router.update_bias(counts, router.args.bias_rate)


@torch.no_grad()
def metrics(model: nn.Module, load: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return metrics of the load [layers, E] over all layers with experts, all scalars.

    load_max and load_max_mean: the largest load of an expert relative to the mean (1 is even), in the worst and in the
    average layer. entropy: of the shares, 1 if even. bias_range: the largest difference between two biases of a layer.
    """
    router_of_layer = routers(model)
    if not router_of_layer:
        return {}
    load = load.double()
    shares = load / load.sum(-1, keepdim=True).clamp(min=1)
    peaks = shares.amax(-1) * load.shape[-1]
    # with a single expert, entropy and logarithm are 0, but the load is even
    entropy = -torch.special.xlogy(shares, shares).sum(-1) / math.log(load.shape[-1]) if load.shape[-1] > 1 else shares
    biases = [router.expert_bias for router in router_of_layer.values() if router.expert_bias is not None]
    scalars = {"load_max": peaks.max(), "load_max_mean": peaks.mean(), "entropy": entropy.mean()}
    if biases:
        scalars["bias_range"] = torch.stack([bias.max() - bias.min() for bias in biases]).max()
    return scalars


def not_finite(model: nn.Module) -> list[str]:
    """Return and reset the layers, in order, with non-finite router scores since the last call.

    It synchronizes with the device.
    """
    router_of_layer = routers(model)
    layers = [name for name, router in router_of_layer.items() if router.not_finite.item()]
    for router in router_of_layer.values():
        router.not_finite.zero_()
    return layers
