"""Bytes of the parameters, optimizer state and gradients of a rank, from the sizes of the model and the rank's layout.

Imports no torch.
"""

from dataclasses import dataclass
from functools import cached_property

from torchtitan.models.sizes import STACK, split_side
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.optimizers.spec import SHARED
from torchtitan.planner.rank_layout import RankLayout


@dataclass(frozen=True)
class RankWeights(RankLayout):
    """Bytes of a rank's parameters and of what has their sizes."""

    # Parameters

    def _local_weights(self, layer: int) -> tuple[float, float]:
        """Return this tensor- and expert-parallel rank's weights of a layer: dense, experts."""
        if layer not in self._weights_of_kind:
            self._weights_of_kind[layer] = self._count_weights(layer)
        return self._weights_of_kind[layer]

    @cached_property
    def _weights_of_kind(self) -> dict[int, tuple[float, float]]:
        return {}

    def _count_weights(self, layer: int) -> tuple[float, float]:
        dense = experts = 0.0
        for name, (outputs, inputs) in self.args.block_linears(layer).items():
            if name == STACK:
                experts += 3 * outputs * inputs * self.args.n_experts / self.ep
            else:
                dense += outputs * inputs / (1 if split_side(name) is None else self.tp)
        return dense + sum(map(self._size, self.args.block_others(layer))), experts

    def _size(self, name: str) -> int:
        """Return the size of a parameter that is no matrix of a linear layer, about."""
        if "router" in name:
            return self.args.dim * self.args.n_experts
        latent = {"attention.kv_norm.weight": "kv_lora_rank"}.get(name)
        if "attention.q_norm" in name:
            latent = "q_lora_rank" if getattr(self.args, "q_lora_rank", 0) else "head_dim"
        return getattr(self.args, latent) if latent else self.args.dim

    @cached_property
    def embedding_weights(self) -> float:
        return self.args.vocab_size * self.args.dim / self.tp

    @cached_property
    def _all_weights(self) -> tuple[float, float]:
        dense = experts = 0.0
        for layer, count in self.kinds.items():
            of_layer = self._local_weights(layer)
            dense, experts = dense + count * of_layer[0], experts + count * of_layer[1]
        tied_here = self.args.tied_embeddings and not self.in_pipeline
        ends = self.has_embedding + (self.has_head and not tied_here)
        return dense + ends * self.embedding_weights, experts

    @cached_property
    def expert_shards(self) -> float:
        return self.dp_shard * self.cp * (self.tp if self.ep > 1 else 1) / self.ep

    @cached_property
    def shard(self) -> float:
        """Number of the weights that this rank stores."""
        dense, experts = self._all_weights
        return dense / self.shards + experts / self.expert_shards

    @property
    def parameters(self) -> float:
        return self.shard * self.stored_bytes

    @property
    def gradients(self) -> float:
        return self.shard * self.stored_bytes

    @cached_property
    def optimizer(self) -> float:
        spec, options = OPTIMIZERS[self.config.optimizer.name], self.config.optimizer
        shared = {key: getattr(options, key) for key in SHARED}
        resolved = spec.arguments(shared, options.options)
        moments = spec.state(resolved)
        if moments is not None:
            return moments * self.parameters
        if spec.state_size is None:
            return 0.0
        size = spec.state_size(resolved, "layers.0.feed_forward.w1.weight", (self.args.dim, self.args.dim))
        share = self.shard / self.args.dim**2
        return share * (size.values * self.stored_bytes + size.bytes) + share * self.shards * size.everywhere

    # Gathered parameters

    @cached_property
    def block_weights(self) -> float:
        """Weights of this rank's largest layer that FSDP gathers, of the experts only where they are sharded."""
        return max((self._gathered_weights(layer) for layer in self.kinds), default=0.0)

    def _gathered_weights(self, layer: int) -> float:
        dense, experts = self._local_weights(layer)
        return dense + experts * (self.ep == 1 or self.expert_shards > 1)

    def _resident_experts(self, layer: int) -> float:
        """Return the bytes of experts in the compute type that stay until backward, as no other rank has a shard."""
        copied = self.ep > 1 and self.expert_shards == 1 and self.compute != self.stored_bytes and not self.in_pipeline
        return self.compute * self._local_weights(layer)[1] * copied

    @property
    def block_gathered(self) -> float:
        return self.compute * self.block_weights if self.fully_sharded else 0.0

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
        """Bytes of all parameters of this rank in the compute type."""
        return self.compute * sum(self._all_weights) if self.compute != self.stored_bytes or self.shards > 1 else 0.0

    # Gradients before their reduction

    @property
    def unsharded_gradients(self) -> float:
        """Bytes of a pipeline rank's summed gradients before they are reduced, in the type of the reduction."""
        return sum(self._all_weights) * self._summed_bytes

    @property
    def _summed_bytes(self) -> int:
        """Bytes of a value of a pipeline rank's summed gradients."""
        return self.reduced_bytes if self.fully_sharded else self.stored_bytes

    @property
    def head_unsharded(self) -> float:
        """Bytes of the head's gradient on a pipeline rank before it is reduced."""
        return self.embedding_weights * self.has_head * self._summed_bytes

    @property
    def _copies_gradients(self) -> bool:
        """True if FSDP copies a unit's gradients to a buffer in the type of the reduction, for shards or replicas."""
        replicas = self.config.parallelism.data_parallel_replicate_degree
        return self.fully_sharded and self.shards * replicas > 1

    @cached_property
    def block_reduced(self) -> float:
        """Bytes of a block's gradients in the buffer of their reduction, with experts that no other rank has."""
        weights = max((sum(self._local_weights(layer)) for layer in self.kinds), default=0.0)
        return self.reduced_bytes * weights * self._copies_gradients

    @cached_property
    def block_gradients(self) -> float:
        """Bytes of a block's reduced gradients."""
        return self.stored_bytes * max((self._shard_of_layer(layer) for layer in self.kinds), default=0.0)

    def _shard_of_layer(self, layer: int) -> float:
        dense, experts = self._local_weights(layer)
        return dense / self.shards + experts / self.expert_shards

    def replica_sums(self, gradients: float) -> float:
        """Return the bytes of the sums over replicas, in the type of the reduction, of so many bytes of gradients.

        FSDP keeps each unit's until the end of backward. In the type of the parameters they are the gradients.
        """
        keeps = self.config.parallelism.data_parallel_replicate_degree > 1 and self.reduced_bytes != self.stored_bytes
        return self.reduced_bytes / self.stored_bytes * gradients * (keeps and self._copies_gradients)

    @cached_property
    def block_reducing(self) -> float:
        """Bytes of a block's gradients before and after their reduction, and in the type of the parameters."""
        copies = self.reduced_bytes + self.stored_bytes * (self.stored_bytes != self.reduced_bytes)
        return self.block_reduced + copies * self.block_gradients / self.stored_bytes * self._copies_gradients

    @property
    def head_reduced(self) -> float:
        return self.block_reduced if self.tied else self.reduced_bytes * self.embedding_weights * self._copies_gradients

    @property
    def embedding_reduced(self) -> float:
        """Bytes of the embedding's gradient while it is reduced, in the last moment of backward."""
        return self.embedding_weights * (self.reduced_bytes if self._copies_gradients else self.compute)

    @property
    def head_gradients(self) -> float:
        return 0.0 if self.tied else self.stored_bytes * self.embedding_weights / self.shards

    @property
    def accumulates(self) -> bool:
        """True if a step has several forward passes."""
        training, replicas = self.config.training, self.config.parallelism.data_parallel_replicate_degree
        return training.global_batch_size > training.local_batch_size * replicas * self.dp_shard

    @property
    def pipeline_tail(self) -> float:
        """Bytes that the reduction of a pipeline rank's first unit adds, after its gathered parameters are freed."""
        weights = self.embedding_weights if self.has_embedding else self.block_weights
        return (self.reduced_bytes - self.compute) * weights * self._copies_gradients
