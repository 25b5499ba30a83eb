"""Bytes of the parameters, optimizer state and gradients of a rank, from the sizes of the model and the rank's layout.

Imports no torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple

from torchtitan.models.moe import BIASES
from torchtitan.models.sizes import ALPHAS, HEAD, QK_NORMS, SINKS, STACK, Sizes, split_side
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.optimizers.spec import SHARED, OptimizerSpec, Shape, StateSize
from torchtitan.optimizers.step_sizes import RankShare, StepSize
from torchtitan.parallelisms.degrees import expert_shards, splits_features
from torchtitan.planner.frozen_base import FrozenBytes
from torchtitan.planner.memory.rank_layout import RankLayout, kinds_of_layers


class Unit(NamedTuple):
    """Bytes of an FSDP unit of a block."""

    gathered: float
    reduced: float
    """Its gradients in the buffer of their reduction, which lives until the next reduction."""
    reducing: float
    """All of its gradients, at the peak of their reduction."""
    gradients: float
    """Its gradients after their reduction."""


class OptimizerBytes(NamedTuple):
    """Bytes of the optimizer's state of some parameters, and of a StepSize for all of them."""

    state: float = 0.0
    passing: float = 0.0
    lasting: float = 0.0

    @classmethod
    def total(cls, parts: Sequence["OptimizerBytes"]) -> "OptimizerBytes":
        passing = max((part.passing for part in parts), default=0.0)
        return cls(sum(part.state for part in parts), passing, sum(part.lasting for part in parts))


@cache
def _weights_of_kind(args: Any, layer: int, tp: int, ep: int) -> tuple[float, float]:
    """Return a rank's weights of a layer: dense, experts."""
    dense = experts = 0.0
    linears = args.block_linears(layer)
    for name, (outputs, inputs) in linears.items():
        if name == STACK:
            experts += 3 * outputs * inputs * args.n_experts / ep
        else:
            dense += outputs * inputs / (1 if split_side(name) is None else tp)
    return dense + _other_parameters(args, layer, tp), experts


def _other_parameters(args: Any, layer: int, tp: int) -> float:
    """Return a rank's parameters of a layer that are no matrices of linear layers, about."""
    linears = args.block_linears(layer)
    return sum(size_of_other(args, name, linears, tp) for name in args.block_others(layer))


def is_split(args: Any, name: str) -> bool:
    """Return True if tensor parallel splits a parameter that is no matrix of a linear layer."""
    options = ("qk_norm_over_heads", "qk_norm_by_head")
    of_heads = name in QK_NORMS and any(getattr(args, option, False) for option in options)
    return of_heads or name == SINKS or (name.endswith(".bias") and split_side(name.removesuffix(".bias")) == 0)


def size_of_other(args: Any, name: str, linears: Sizes, tp: int) -> float:
    """Return a rank's part of a parameter that is no matrix of a linear layer, about."""
    module = name.removesuffix(".bias")
    if module in linears:
        return linears[module][0] / (tp if split_side(module) == 0 else 1)
    if name in getattr(args, "norm_widths", ()):
        return args.norm_widths[name]
    if name == SINKS:
        return args.n_heads / tp
    if name in ALPHAS:
        return 1
    if name in BIASES:
        width = {"moe.router.gate.bias": 1, f"{STACK}.w2_bias": args.dim}.get(name, args.expert_dim)
        return args.n_experts * width
    if "router" in name:
        return args.dim * args.n_experts
    latent = {"attention.kv_norm.weight": "kv_lora_rank", "attention.k_norm.weight": "head_dim"}.get(name)
    if "attention.q_norm" in name:
        latent = "q_lora_rank" if getattr(args, "q_lora_rank", 0) else "head_dim"
    return getattr(args, latent) if latent else args.dim


@dataclass(frozen=True)
class RankWeights(RankLayout):
    """Bytes of a rank's parameters, gradients and optimizer state."""

    # Parameters

    @cached_property
    def weights(self) -> dict[int, tuple[float, float]]:
        """This tensor- and expert-parallel rank's trained weights of each of its layers: dense, experts."""
        kinds = kinds_of_layers(self.args)
        of_kind = {kind: self._trained(kind) for kind in {kinds[n] for n in self.layers}}
        return {layer: of_kind[kinds[layer]] for layer in self.layers}

    def _trained(self, layer: int) -> tuple[float, float]:
        if self.base is None:
            return _weights_of_kind(self.args, layer, self.tp, self.layout.ep)
        return self.base.added(self.args.block_linears(layer), self.tp), 0.0

    @cached_property
    def frozen_block(self) -> FrozenBytes:
        """Frozen weights of a layer. All layers of a model with an adapter have the same."""
        if self.base is None:
            return FrozenBytes(0.0, 0.0)
        return self.base.frozen(self.args.block_linears(0), self.tp, _other_parameters(self.args, 0, self.tp))

    @cached_property
    def frozen_end(self) -> FrozenBytes:
        """Frozen weights of the embedding, or of the head."""
        size = self.embedding_weights
        return FrozenBytes(self.base.stored_bytes * size, self.compute * size) if self.base else FrozenBytes(0.0, 0.0)

    @cached_property
    def embedding_weights(self) -> float:
        """Weights of the embedding, or of the head."""
        return self.args.vocab_size * self.args.dim / self.tp

    @property
    def trained_end(self) -> float:
        """Trained weights of the embedding, or of the head."""
        return self.embedding_weights * (self.base is None)

    @property
    def _ends(self) -> int:
        tied_here = self.args.tied_embeddings and not self.in_pipeline
        return self.has_embedding + (self.has_head and not tied_here)

    @cached_property
    def _all_weights(self) -> tuple[float, float]:
        dense = experts = 0.0
        for layer, count in self.kinds.items():
            dense, experts = dense + count * self.weights[layer][0], experts + count * self.weights[layer][1]
        return dense + self._ends * self.trained_end, experts

    @property
    def all_weights(self) -> float:
        """Number of the trained weights that this rank stores or, sharded, gathers."""
        return sum(self._all_weights)

    def weights_of_stage(self, stage: list[int]) -> float:
        """Return the number of weights of a pipeline stage with layers of these numbers."""
        ends = (0 in stage) + (self.args.n_layers - 1 in stage)
        return sum(sum(self.weights[layer]) for layer in stage) + ends * self.embedding_weights

    @cached_property
    def expert_shards(self) -> float:
        return expert_shards(self.layout.shards, self.cp, self.tp, self.layout.ep)

    @cached_property
    def shard(self) -> float:
        """Number of the trained weights that this rank stores."""
        return self._sharded(self._all_weights)

    def _sharded(self, weights: tuple[float, float]) -> float:
        """Return how many of these dense weights and experts this rank stores."""
        return weights[0] / self.shards + weights[1] / self.expert_shards

    @property
    def parameters(self) -> float:
        frozen = len(self.layers) * self.frozen_block.stored + self._ends * self.frozen_end.stored
        return self.gradients + frozen / self.shards

    @property
    def gradients(self) -> float:
        return self.shard * self.stored_bytes

    # Optimizer

    @cached_property
    def optimizer(self) -> float:
        """Bytes of the optimizer's state."""
        moments = self._optimizer.state(self._optimizer_options)
        return self._optimizer_steps.state if moments is None else moments * self.gradients

    @property
    def optimizer_work(self) -> float:
        """Bytes that the optimizer's step allocates and frees, at their peak."""
        if self._optimizer.step_size is None or self._optimizer_options.get("fused"):
            return 0.0
        return self._optimizer_steps.passing + self._optimizer_steps.lasting

    @property
    def _optimizer(self) -> OptimizerSpec:
        return OPTIMIZERS[self.job.config.optimizer.name]

    @cached_property
    def _optimizer_options(self) -> dict[str, Any]:
        """The optimizer's options, those of its groups and the flags of its implementation."""
        options, spec = self.job.config.optimizer, self._optimizer
        resolved = spec.arguments({key: getattr(options, key) for key in SHARED}, options.options)
        default, *_ = spec.implementations
        flags = spec.implementations[options.implementation or default]
        return resolved | flags | {"weight_decay": options.weight_decay}

    @cached_property
    def _optimizer_steps(self) -> "OptimizerBytes":
        """Bytes of the step of all parameters. The stages of a pipeline rank step one after the other."""
        of_kind = {self._representative(layer): self._stepped(self._parameters(layer)) for layer in self.kinds}
        by_stage = []
        for stage in self.stages:
            parts = [of_kind[self._representative(layer)] for layer in stage]
            ends = (0 in stage) + (self.args.n_layers - 1 in stage and not self.tied)
            by_stage.append(OptimizerBytes.total([*parts, *[self._stepped_end] * ends]))
        work = max(by_stage, key=lambda step: step.passing + step.lasting)
        return work._replace(state=sum(step.state for step in by_stage))

    @cached_property
    def _stepped_end(self) -> "OptimizerBytes":
        """Bytes of the step of the embedding, or of the head."""
        if not self.trained_end:
            return OptimizerBytes()
        shape, share = (self.args.vocab_size, self.args.dim), 1 / (self.tp * self.shards)
        return self._stepped([(f"{HEAD}.weight", shape, share)])

    def _stepped(self, parameters: Iterable[tuple[str, Shape, float]]) -> "OptimizerBytes":
        spec, options, steps = self._optimizer, self._optimizer_options, []
        sharding = (self.layout.replicas, self.shards) if self.fully_sharded else ()
        axes = sum(degree > 1 for degree in (*sharding, self.tp))
        for name, shape, share in parameters:
            size = StateSize() if spec.state_size is None else spec.state_size(options, name, shape)
            state = share * (size.values * self.stored_bytes + size.bytes) + size.everywhere * self.stored_bytes
            of_rank = RankShare(share * prod(shape), self.stored_bytes, axes)
            work = StepSize() if spec.step_size is None else spec.step_size(options, name, shape, of_rank)
            steps.append(OptimizerBytes(state, work.passing, work.lasting))
        return OptimizerBytes.total(steps)

    def _parameters(self, layer: int) -> Iterator[tuple[str, Shape, float]]:
        """Yield the name, the full shape and this rank's share of each trained parameter of a layer."""
        linears, block = self.args.block_linears(layer), f"layers.{layer}."
        adapted = {} if self.base is None else self.base.adapted(linears)
        for name, (outputs, inputs) in linears.items():
            by_side = {side: 1 / self.shards / (self.tp if side == split_side(name) else 1) for side in (0, 1)}
            if self.base is not None and name in adapted:
                yield f"{block}{name}.lora_A", (self.base.options.rank, inputs), by_side[1]
                yield f"{block}{name}.lora_B", (outputs, self.base.options.rank), by_side[0]
            elif self.base is None and name == STACK:
                share = 1 / (self.layout.ep * self.expert_shards)
                yield from ((f"{block}{name}.w{i}", (self.args.n_experts, inputs, outputs), share) for i in (1, 2, 3))
            elif self.base is None:
                yield f"{block}{name}.weight", (outputs, inputs), min(by_side.values())
        for name in self.args.block_others(layer) if self.base is None else ():
            yield block + name, (round(size_of_other(self.args, name, linears, self.tp)),), 1 / self.shards

    # Gathered parameters

    @cached_property
    def block_weights(self) -> float:
        """Weights of this rank's largest layer that FSDP gathers, of the experts only where they are sharded."""
        weights = [self.weights[layer] for layer in self.kinds]
        return max(dense + experts * (not self._owns_experts) for dense, experts in weights)

    @property
    def _owns_experts(self) -> bool:
        """True if no other rank has this one's experts."""
        return self.layout.ep > 1 and self.expert_shards * self.layout.replicas == 1

    def _left_weights(self, layer: int) -> float:
        """Return the bytes of a layer's weights between forward and backward, without a pipeline.

        These are a second shard, from which backward gathers it, and experts in the compute type that no other rank
        has.
        """
        dense, experts = self.weights[layer]
        in_block = self.compute * (dense + experts * (self.layout.ep == 1)) + self.frozen_block.gathered
        second = in_block / self.second_shards if self.second_shards else 0.0
        return second + self.compute * experts * (self._owns_experts and self.fully_sharded)

    @property
    def block_gathered(self) -> float:
        return self.compute * self.block_weights + self.frozen_block.gathered if self.fully_sharded else 0.0

    @property
    def embedding_gathered(self) -> float:
        return self.compute * self.embedding_weights * self.has_embedding if self.fully_sharded else 0.0

    @property
    def head_gathered(self) -> float:
        return self.compute * self.embedding_weights if self.fully_sharded and not self.tied else 0.0

    @property
    def tied(self) -> bool:
        return self.args.tied_embeddings and not self.in_pipeline

    @cached_property
    def all_gathered(self) -> float:
        """Bytes of copies of all parameters in the compute type, which FSDP makes on one rank too.

        Autocast copies the parameters of matrix products.
        """
        copied = self.all_weights if self.fully_sharded else self.all_weights - self.trained_end * (not self.tied)
        trained = self.compute * copied * (self.fully_sharded or self.compute != self.stored_bytes)
        frozen = len(self.layers) * self.frozen_block.gathered + self._ends * self.frozen_end.gathered
        return trained + frozen * self.fully_sharded

    # Gradients before their reduction

    @property
    def summed_bytes(self) -> int:
        """Bytes of a value of the gradients that a pipeline rank sums before their reduction.

        Without FSDP these are the gradients of earlier batches.
        """
        return self.reduced_bytes if self.fully_sharded else self.stored_bytes * (not self.accumulates)

    @property
    def head_computed(self) -> float:
        """Bytes of the head's gradient of a microbatch, which FSDP adds to the sum at the end of its backward."""
        return self.compute * self.trained_end * self.has_head

    @cached_property
    def block_reduced(self) -> float:
        """Bytes of the gradients of the largest block in the buffer of their reduction."""
        weights = max(sum(self.weights[layer]) for layer in self.kinds)
        return self.reduced_bytes * weights * self.fully_sharded

    def gradients_after(self, number: int) -> float:
        """Return the bytes of the reduced gradients of the head and the layers after this one, without a pipeline."""
        later = sum(self._sharded(self.weights[layer]) for layer in self.layers[number + 1 :])
        return self.embedding_gradients * (not self.tied) + self.stored_bytes * later

    @property
    def _keeps_sums(self) -> bool:
        """True if sums over replicas are in the type of the reduction, and the gradients in another one."""
        return self.layout.replicas > 1 and self.reduced_bytes != self.stored_bytes and self.fully_sharded

    def replica_sums(self, gradients: float) -> float:
        """Return the bytes of sums over replicas after `gradients` bytes have been reduced.

        FSDP keeps each unit's until the end of backward. Where gradients are accumulated it keeps the sums of earlier
        batches, of all units, in place of gradients.
        """
        summed = self.gradients if self.accumulates else gradients
        return self.reduced_bytes / self.stored_bytes * summed * self._keeps_sums

    @property
    def earlier_gradients(self) -> float:
        """Bytes of the gradients of earlier batches of the step."""
        return self.gradients * (self.accumulates and not self._keeps_sums)

    def _reducing(self, weights: float, shards: float, last: float, computed: int | None = None) -> float:
        """Return the bytes of the gradients of `weights` parameters at the peak of their reduction.

        FSDP copies them to one buffer in the type of the reduction. Then it frees them, except the gradient of the
        `last` matrix, which a loop variable keeps (`unsharded_grad` of foreach_reduce in torch/distributed/fsdp), and
        creates the sums of a shard and, in another type, its gradients. Where there is one shard but replicas, the sums
        are copied from a divided buffer. `computed`: bytes of a value before the reduction, by default of a computed
        one.
        """
        computed = self.compute if computed is None else computed
        divided = self.reduced_bytes * (shards == 1 and self.layout.replicas > 1)
        shard = self.reduced_bytes + max(divided, self.stored_bytes * (self.stored_bytes != self.reduced_bytes))
        after = computed * last * (shards > 1) + shard * weights / shards
        return (self.reduced_bytes * weights + max(computed * weights, after)) * self.fully_sharded

    @cached_property
    def block_units(self) -> list[Unit]:
        """The FSDP units of the largest block, in the order of their reduction: its experts and the rest."""
        layer = max(self.kinds, key=lambda kind: sum(self.weights[kind]))
        dense, experts = self.weights[layer]
        name, (outputs, inputs) = list(self.args.block_linears(layer).items())[-1]
        last = outputs * inputs / (1 if split_side(name) is None else self.tp)
        copied = self.compute * experts * self._splits_experts
        if self.layout.ep > 1:
            last = 0.0 if name == STACK else last
            unit = self._unit(experts, self.expert_shards, experts / 3)
            return [unit._replace(reducing=unit.reducing + copied), self._unit(dense, self.shards, last)]
        unit = self._unit(dense + experts, self.shards, experts / 3 if name == STACK else last)
        return [unit._replace(reducing=unit.reducing + copied)]

    @property
    def _splits_experts(self) -> bool:
        """True if experts are sharded along features. Their gradients are copied into another order to be reduced."""
        experts = getattr(self.args, "n_experts", 0)
        if self.layout.ep > 1:
            return experts // self.layout.ep % self.expert_shards > 0
        return splits_features(experts, round(self.shards)) and not self.second_shards

    def _unit(self, weights: float, shards: float, last: float) -> Unit:
        return Unit(
            gathered=(self.compute * weights + self.frozen_block.gathered) * self.fully_sharded,
            reduced=self.reduced_bytes * weights * self.fully_sharded,
            reducing=self._reducing(weights, shards, last),
            gradients=self.stored_bytes * weights / shards,
        )

    @property
    def head_reduced(self) -> float:
        """Bytes of the buffer of the head's reduction. A tied head is reduced with the embedding."""
        return 0.0 if self.tied else self.reduced_bytes * self.trained_end * self.fully_sharded

    @property
    def end_reducing(self) -> float:
        """Bytes of the gradient of the head, or of the embedding, at the peak of its reduction."""
        return self._reducing(self.trained_end, self.shards, self.trained_end)

    @property
    def embedding_gradients(self) -> float:
        return self.stored_bytes * self.trained_end / self.shards

    @property
    def accumulates(self) -> bool:
        """True if a step has several forward passes."""
        training = self.layout.training
        return training.global_batch_size > training.local_batch_size * self.layout.replicas * self.layout.shards

    @property
    def pipeline_tail(self) -> float:
        """Bytes that the reduction of a pipeline rank's first unit adds.

        The copy that is reduced, after its gathered parameters are freed, or the sum of a block's experts over
        tensor-parallel ranks before. The unit of the embedding or the head has no other matrix.
        """
        ends = self.has_embedding or self.has_head
        weights = self.embedding_weights if ends else self.block_weights
        reducing = self._reducing(weights, self.shards, weights * ends, self.reduced_bytes)
        sums = self.reduced_bytes * max(map(self.experts_summed, self.kinds))
        return max(sums, reducing - (self.reduced_bytes + self.compute) * weights) * self.fully_sharded

    def experts_summed(self, layer: int) -> float:
        """Return the weights of two copies of the last matrix of experts, while tensor-parallel ranks add its gradient.

        Only experts that each of these ranks has with all others are added.
        """
        return 2 / 3 * self.weights[layer][1] * (self.layout.ep == 1 and self.tp > 1)
