"""Bytes of a rank's activations and logits, from the sizes of the model and the rank's layout. Imports no torch."""

import math
import operator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from torchtitan.losses.tasks import auto_chunks
from torchtitan.models.sizes import POST_NORMS, STACK, Sizes, split_side
from torchtitan.planner.frozen_base import FrozenBase
from torchtitan.planner.memory.rank_weights import RankWeights


@dataclass(frozen=True)
class RankSizes(RankWeights):
    """Bytes of a rank's tensors."""

    drops_every_second_product: bool = False
    """Selective recompute by operator repeats wk, wo and w3, where blocks have them."""

    # Activations

    @cached_property
    def block_stored(self) -> float:
        """Bytes that the job's recompute leaves stored of the largest block."""
        return max(map(self._stored, self.kinds))

    @cached_property
    def stored(self) -> float:
        """Bytes stored for all microbatches in flight, between their forward and backward."""
        if not self.in_pipeline:
            return sum(count * self._left_by_layer(layer) for layer, count in self.kinds.items())
        return max(self._stored_in_flight)

    @property
    def stored_at_loss(self) -> float:
        """Bytes stored for all microbatches in flight during a loss of the last stage, which is among them."""
        states = zip(self._stored_in_flight, self.stages_in_flight, strict=True)
        return max(stored for stored, counts in states if counts[-1]) if self.in_pipeline else self.stored

    @cached_property
    def _stored_in_flight(self) -> list[float]:
        """Bytes stored in each of the states with the most microbatches in flight."""
        return self.stored_with(self.stored_of_stages)

    @cached_property
    def stored_of_stages(self) -> list[float]:
        """Bytes stored of each stage of this rank for one microbatch."""
        return [self.stored_of_stage(stage) for stage in self.stages]

    def stored_with(self, stored_of_stages: list[float]) -> list[float]:
        """Return the bytes stored in each of the states with the most microbatches in flight, by those of one."""
        return [sum(map(operator.mul, counts, stored_of_stages)) for counts in self.stages_in_flight]

    @property
    def overcount(self) -> float:
        """Bytes of the first stage's gradients, or of a microbatch that it stores, as both never exist at once.

        Rank 0 of DualPipeV stores up to 2 pp microbatches of the first stage. If there are no more, all its forwards
        precede its first backward.
        """
        if self.schedule.name != "DualPipeV" or self.rank > 0 or self.layout.microbatches > 2 * self.layout.pp:
            return 0.0
        first = self.stages[0]
        return min(self.summed_bytes * self.weights_of_stage(first), self.stored_of_stage(first))

    @property
    def waiting_gradients(self) -> float:
        """Bytes of gradients from which gradients of weights are computed later, in a schedule that splits backward."""
        return self.waiting_weight_gradients * self.most_result_gradients if self.waiting_weight_gradients else 0.0

    @cached_property
    def most_result_gradients(self) -> float:
        """Bytes of the gradients of all results of the largest stage, for one microbatch."""
        return max(sum(map(self._result_gradients, stage)) for stage in self.stages)

    def _result_gradients(self, layer: int) -> float:
        """Return the bytes of the gradients of the results of a layer's matrix products and norms."""
        results = 2.0 * self.hidden
        for name, (outputs, inputs) in self.args.block_linears(layer).items():
            if name == STACK:  # w1 and w3 of each token's experts, and w2
                results += self.compute * self.local_tokens * self.args.top_k * (2 * outputs + inputs)
            else:
                results += self.compute * self.tokens * outputs / (self.tp if split_side(name) == 0 else 1)
        return results

    def stored_of_stage(self, stage: list[int]) -> float:
        """Return the bytes stored of a pipeline stage for one microbatch."""
        return sum(map(self._stored, stage)) + self.hidden + self._rotation

    def stored_before(self, count: int) -> float:
        """Return the bytes that the forward of the first `count` layers of a rank without a pipeline leaves."""
        return sum(map(self._left_by_layer, self.layers[:count]))

    def _left_by_layer(self, layer: int) -> float:
        return self._stored(layer) + self._left_weights(layer)

    @property
    def at_work(self) -> float:
        """Bytes of a block during its backward: stored, recomputed, and experts that stay gathered until its end."""
        experts = max(self.weights[layer][1] for layer in self.kinds) * (self._owns_experts and self.fully_sharded)
        return self.block_stored + self.recomputed + self.compute * experts

    @property
    def block_after_experts(self) -> float:
        """Bytes of a block while its experts' gradients are reduced: before the backward of its attention.

        These are the activations before the experts, and the gradients of the rows that were sent to them.
        """
        layer = max(self.kinds, key=self._activations)
        return self._before_experts(layer) + self.compute * self.local_tokens * self.args.top_k * self.args.dim

    @property
    def _rotation(self) -> float:
        bases = 1 + hasattr(self.args, "local_rope_theta")
        return 4 * bases * self.tokens * getattr(self.args, "qk_rope_head_dim", getattr(self.args, "head_dim", 0))

    def _stored(self, layer: int) -> float:
        """Return the bytes that the job's recompute leaves stored of a layer. Layers that need as much share them."""
        kind = self._representative(layer)
        if kind not in self._stored_of_kind:
            self._stored_of_kind[kind] = self._stored_of(layer)
        return self._stored_of_kind[kind]

    @cached_property
    def _stored_of_kind(self) -> dict[int, float]:
        return {}

    def _stored_of(self, layer: int) -> float:
        recompute = self.job.config.activation_checkpoint
        if recompute.mode in ("none", "memory_budget"):
            return self._activations(layer)
        if recompute.mode == "selective" and recompute.selective_ac_option == "op":
            return self._products(layer)
        assert recompute.mode in ("selective", "full", "full_keep_comm"), recompute.mode
        place = next(stage.index(layer) for stage in self.stages if layer in stage)
        return self.hidden if place % (self.recomputed_period or 1) == 0 else self._activations(layer)

    def _attention(self, layer: int) -> float:
        """Return the bytes of a layer for attention's backward, from its first product to its last one's input."""
        args, b, inside = self.args, self.compute, self.tokens
        heads, kv_heads = args.n_heads / self.tp, args.num_kv_heads / self.tp
        if hasattr(args, "kv_lora_rank"):
            latent = 2 * args.kv_lora_rank + args.qk_rope_head_dim + 2 * (args.q_lora_rank or 0)
            return inside * (b * (latent + heads * self._latent_head) + 4 * heads)
        features = args.head_dim * (2 * heads + 2 * kv_heads)
        if "attention.q_norm.weight" in args.block_others(layer):
            features += (args.head_dim + 4 / b) * (heads + kv_heads)
        if getattr(args, "score_cap", 0):  # kernels of torch make their result in the order of the next product
            features += args.head_dim * heads
        if self.cp > 1:  # the result in another order, and the keys and values of all ranks
            gathered = self.cp - 1 if self.cp_method == "allgather" else 0
            features += args.head_dim * (heads + 2 * kv_heads * gathered)
        return inside * (b * features + 4 * heads)

    @property
    def _latent_head(self) -> float:
        """Features of a head that the backward of latent attention needs: queries, keys, values and the result.

        Values are part of a product, together with part of the keys. With context parallel a copy of each head's keys
        and values that was gathered or exchanged is stored in its place, and the result in another order too.
        """
        keys, values = self.args.qk_head_dim, self.args.v_head_dim
        if self.cp_method == "allgather":
            return keys + self.cp * (keys + values) + 2 * values
        if self.cp_method == "ulysses":  # with values and result padded to the width of the keys
            return 4 * keys + 2 * values
        return 2 * keys + self.args.qk_nope_head_dim + values * (3 if self.cp > 1 else 2)

    def _exchanged_features(self, heads: float, key_heads: float, keys: float, values: float) -> float:
        """Return the features of a token that context parallel adds to what selective recompute by operator stores.

        These are results of collectives, and of attention in another order or to one piece of the sequence after the
        other. Kernels pad values and results to the width of the keys. `keys` and `values`: features of a head.
        """
        if self.cp == 1:
            return 0.0
        both = keys + values
        if self.cp_method == "allgather":  # half of the queries see one piece, the others two
            return heads * (1.5 * keys - values) + key_heads * self.cp * both
        if self.cp_method == "ulysses":
            return heads * 2 * keys + math.lcm(max(1, int(key_heads)), self.cp) * both
        return heads * ((self.cp + 1) / 2 * keys - values) + (self.cp - 1) * key_heads * both

    def _activations(self, layer: int) -> float:
        """Return what autograd stores of a layer without recompute."""
        width, b = self.args.dim, self.compute
        outside = 1 + (POST_NORMS[0] in self.args.block_others(layer))  # pairs of norms
        norms = outside * self.local_tokens * (2 * b * width + 8)
        norms += self.tokens * b * width * self._stores_input(layer, "attention.w[qkv]")
        return norms + self._attention(layer) + self._feed_forward(layer) + self._low_rank(layer)

    def _stores_input(self, layer: int, pattern: str) -> bool:
        """Return whether backward needs the input of the linear layers with these names."""
        if self.base is None:
            return True
        has_dropout = self.base.options.dropout > 0  # the rest of the input is stored instead, for each layer
        names = self.base.adapted(self.args.block_linears(layer))
        return not has_dropout and any(fnmatchcase(name, pattern) for name in names)

    def _low_rank(self, layer: int) -> float:
        """Return the bytes that the adapter's matrices store of a layer: x A^T, and x without what dropout zeroes."""
        if self.base is None:
            return 0.0
        factors = list(self.base.factors(self.args.block_linears(layer), self.tp))
        dropped = sum(inputs for _, _, inputs in factors) * (self.base.options.dropout > 0)
        return self.compute * self.tokens * (self.base.options.rank * len(factors) + dropped)

    def _feed_forward(self, layer: int) -> float:
        args, b = self.args, self.compute
        linears = args.block_linears(layer)
        if STACK not in linears:
            copies = (3 if "feed_forward.w3" in linears else 1) + self._stores_input(layer, "feed_forward.w2")
            entering = args.dim * self._stores_input(layer, "feed_forward.w[13]")
            return b * self.tokens * (entering + copies * linears["feed_forward.w1"][0] / self.tp)
        rows, local = self.local_tokens * args.top_k, self.local_tokens
        copies = 7 if getattr(args, "swiglu_limit", 0) else 4  # clamped ones too
        routed = rows * (b * (args.dim + copies * args.expert_dim) + 4 * args.dim)  # combined in float32
        shared = b * local * (args.dim + 4 * args.n_shared_experts * args.expert_dim) * (args.n_shared_experts > 0)
        return routed + shared + local * (4 * args.dim + 10 * args.n_experts)

    def _products(self, layer: int) -> float:
        """Return what selective recompute by operator stores: results of products, attention and collectives."""
        args, b, inside, outside = self.args, self.compute, self.tokens, self.local_tokens
        heads, kv_heads = args.n_heads / self.tp, args.num_kv_heads / self.tp
        linears = args.block_linears(layer)
        regions = 1 if STACK in linears else 2  # of tensor parallel: experts have none
        stored = outside * b * args.dim + inside * (regions * b * args.dim + 4 * heads)
        if self.tp > 1:
            stored += regions * b * args.dim * (inside + outside)
        if hasattr(args, "kv_lora_rank"):
            latent = args.kv_lora_rank + args.qk_rope_head_dim + (args.q_lora_rank or 0)
            keys, values = args.qk_head_dim, args.v_head_dim
            unfolded = heads * (keys + args.qk_nope_head_dim + 2 * values)
            stored += inside * b * (latent + unfolded + self._exchanged_features(heads, heads, keys, values))
        else:
            width = args.head_dim
            stored += inside * b * width * (2 * heads + 2 * kv_heads)
            stored += inside * b * self._exchanged_features(heads, kv_heads, width, width)
        if STACK in linears:
            exchanged = 2 * args.dim * (self.layout.ep > 1)
            routed = outside * args.top_k * b * (2 * args.expert_dim + args.dim + exchanged)
            shared = b * (args.dim + 2 * args.n_shared_experts * args.expert_dim) * (args.n_shared_experts > 0)
            return stored + routed + outside * (shared + 4 * (args.dim + args.n_experts))  # combined in float32
        if self.base is not None:  # x A^T, and the sum of both products next to the frozen one
            factors = self.base.factors(linears, self.tp)
            stored += inside * b * sum(outputs + self.base.options.rank for _, outputs, _ in factors)
        width = linears["feed_forward.w1"][0] / self.tp
        if self.drops_every_second_product and "attention.wk" in linears and "feed_forward.w3" in linears:
            stored -= inside * b * (args.head_dim * kv_heads + args.dim + width)
        return stored + inside * b * width * (2 if "feed_forward.w3" in linears else 1)

    @cached_property
    def recomputed(self) -> float:
        """Bytes that the backward of a block adds to what its forward has stored, at their peak."""
        layer = max(self.kinds, key=self._activations)
        args, b, linears = self.args, self.compute, self.args.block_linears(layer)
        extra = self._activations(layer) - self.block_stored
        if STACK in linears:
            dense, experts = self.weights[layer]
            attention = self._activations(layer) - self._feed_forward(layer) + self._attention_work
            attention += b * (dense + experts * (self.layout.ep == 1)) + self._fake_quantized_linears(
                layer, "attention"
            )
            summed = b * (
                dense + experts + self.experts_summed(layer) * (not self.in_pipeline)
            )  # a pipeline sums later
            needed = max(self._after_experts(layer), summed, attention, self._exchange)
            combining = 4 * args.dim * self.local_tokens * (args.top_k + 1)  # the experts' weighted sum, in float32
            return max(extra + combining, needed - self.block_stored)
        width = linears["feed_forward.w1"][0] / self.tp
        entering = b * self._at_border(layer) if self.tp > 1 else 0.0
        gated = b * (2 * width * self.tokens + width * args.dim)  # and the gradient of w2
        if self.base is not None:
            gated = b * width * self._frozen_gate(linears, self.base)
        products = sum(self.weights[layer]) * b
        attention = products - self._feed_forward(layer) + self._attention_work
        attention += self._fake_quantized_linears(layer, "attention")
        if rounded := self._fake_quantized_linears(layer, "feed_forward"):
            gated = max(gated, b * width * (self.tokens + args.dim) + rounded)
        needed = max(products + self.hidden, self._exchange)
        return max(extra + max(entering, gated, attention), needed - self.block_stored)

    def _at_border(self, layer: int) -> float:
        """Return the values at the end of a dense feed-forward's region that are in no sum of activations.

        Backward has the gradients of the feed-forward's input by two matrices. But where it repeats the whole block, it
        has gathered the gradient of the result before, and the repeated result exists twice at its sum over ranks: as
        the product, and in the order of the ranks. Its factor and the region's input live too, stored or not, and three
        tensors of this rank's tokens, with that input before it is gathered and with the sum.
        """
        inside = self.args.dim * self.tokens
        recompute = self.job.config.activation_checkpoint
        repeats_operators = recompute.mode == "selective" and recompute.selective_ac_option == "op"
        if recompute.mode in ("none", "memory_budget") or repeats_operators:
            return 2 * inside
        width = self.args.block_linears(layer)["feed_forward.w1"][0] / self.tp
        inputs = inside * (not self._stores_input(layer, "feed_forward.w[13]"))
        outside = 3 * self.args.dim * self.local_tokens
        return 3 * inside + outside + inputs + width * self.tokens * (not self._stores_input(layer, "feed_forward.w2"))

    def _frozen_gate(self, linears: Sizes, base: FrozenBase) -> float:
        """Return the values for each feature that the backward of a frozen feed-forward adds to those stored.

        The gate's backward has the gradients of the product and of its factors, after the product is freed, which
        is stored for an adapter of w2. Packed matrices are unpacked before (w2) or after that.
        """
        adapted = base.adapted(linears)
        has_gate, stores_product = "feed_forward.w3" in linears, "feed_forward.w2" in adapted
        gate = (2 + has_gate - stores_product) * self.tokens
        if not base.is_packed or not any(name.startswith("feed_forward") for name in adapted):
            return gate
        live_features = 1 if stores_product else -has_gate
        return max(gate, self.args.dim + live_features * self.tokens)

    @property
    def forward_work(self) -> float:
        """Bytes of a dense block during its forward that are not stored for backward, about."""
        width = self.args.block_linears(0)["feed_forward.w1"][0] / self.tp
        copies = {"none": 0, "memory_budget": 0, "selective": 1}.get(self.job.config.activation_checkpoint.mode, 3)
        return self.compute * self.tokens * width * copies

    @property
    def _attention_work(self) -> float:
        """Bytes that the backward of attention adds to what its forward has stored, at their peak.

        Context parallel computes region by region and adds gradients up in float32 (ring_attention.py): with gathered
        keys and values for the ones of all ranks, else for the visiting shard, those on their way and the local one. In
        the largest region half of the queries see these keys. Kernels pad values to the width of the keys.
        """
        args, b = self.args, self.compute
        is_latent = hasattr(args, "kv_lora_rank")
        keys, values = (args.qk_head_dim, args.v_head_dim) if is_latent else (args.head_dim, args.head_dim)
        heads, key_heads = args.n_heads / self.tp, (args.n_heads if is_latent else args.num_kv_heads) / self.tp
        if self.cp_method in ("", "ulysses"):
            return 0.0 if is_latent else self.tokens * heads * keys * (3 * b + 16 * (self.cp > 1))
        both, padded = keys + values, keys != values
        reach, shards, sums = 1.0, min(2, self.cp - 1), 4 if self.cp > 2 else 2
        if self.cp_method == "allgather":  # all pieces of the sequence but the last
            reach, shards, sums = self.cp - 0.5, 0, self.cp
        rows = heads * (values + padded * keys + 0.5 * keys)  # results, their gradients, and gradients of queries
        columns = key_heads * (reach * keys * (2 + padded) + shards * both)
        return self.tokens * (4 * (heads * keys + sums * key_heads * both) + b * (rows + columns))

    @property
    def _exchange(self) -> float:
        """Bytes of a block while the forward of its latent attention exchanges heads for tokens.

        Besides the products that made them, queries, keys and values exist apart, as one tensor, and as the one that
        arrives, twice.
        """
        args = self.args
        if self.cp_method != "ulysses" or not hasattr(args, "kv_lora_rank"):
            return 0.0
        products = args.qk_head_dim + args.qk_nope_head_dim + args.v_head_dim
        features = products + 4 * (2 * args.qk_head_dim + args.v_head_dim)
        return self.compute * self.tokens * args.n_heads / self.tp * features + 2 * self.hidden

    def _after_experts(self, layer: int) -> float:
        """Return the bytes of a block when the backward of its experts ends.

        These are the gradients of all their matrices, their input and its gradients by two of them, and the part that
        attention needs.
        """
        args, b = self.args, self.compute
        rows = self.local_tokens * args.top_k
        return self._before_experts(layer) + b * (rows * (3 * args.dim + args.expert_dim) + self.weights[layer][1])

    def _before_experts(self, layer: int) -> float:
        """Return the bytes that the backward of a block needs before its experts."""
        return self._activations(layer) - self._feed_forward(layer) + 4 * self.args.dim * self.local_tokens

    # Quantization-aware training (models/fake_quantized.py)

    def _fake_quantized(self, outputs: float, inputs: float, tokens: float) -> float:
        """Return the bytes that the backward of a linear adds with rounded operands: both, and where numbers can be
        clipped also where they are not and the gradients without those, of the larger operand.
        """
        qat = self.job.config.qat
        if qat.weight_dtype == "none":
            return 0.0
        b, clips = self.compute, qat.weight_dtype == "int8" or (qat.weight_dtype == "int4" and qat.inputs is not None)
        rounded = b * (outputs * inputs + inputs * tokens * (qat.inputs is not None))
        masks = outputs * inputs * clips + inputs * tokens * (qat.inputs == "int8")
        masked = b * max(outputs * inputs * clips, inputs * tokens * (qat.inputs == "int8"))
        return rounded + masks + masked

    def _fake_quantized_linears(self, layer: int, prefix: str) -> float:
        """Return the most bytes of `_fake_quantized` of a layer's linears whose names begin so."""
        sizes = [
            self._fake_quantized(
                outputs / (self.tp if split_side(name) == 0 else 1),
                inputs / (self.tp if split_side(name) == 1 else 1),
                self.tokens,
            )
            for name, (outputs, inputs) in self.args.block_linears(layer).items()
            if name.startswith(prefix) and name != STACK
        ]
        return max(sizes, default=0.0)

    # Loss

    @property
    def head_inputs(self) -> float:
        """Bytes of the last hidden states: before the norm, and after it for the head."""
        return self.hidden + self.compute * self.args.dim * self.tokens

    @cached_property
    def logits_width(self) -> int:
        """Logits of a token on this rank."""
        return self.args.vocab_size // self.layout.vocabulary_shards

    @cached_property
    def loss_chunks(self) -> int:
        return self.layout.training.loss_chunks or auto_chunks(self.tokens, self.logits_width, "cuda")

    @property
    def loss_kept(self) -> float:
        """Bytes that the loss of a microbatch keeps for its backward.

        These are probabilities and the head's input, or the gradients that its chunks have computed.
        """
        hidden = self.compute * self.args.dim * self.tokens
        return hidden + 4 * (self.tokens * self.logits_width if self.loss_chunks == 1 else self.trained_end)

    @property
    def _rounded(self) -> int:
        """Bytes of a value's copy in the type of the computation; none in float32, the type of the loss."""
        return self.compute * (self.compute < 4)

    @property
    def _backward_copies(self) -> int:
        """Copies of the logits in float32 in backward: probabilities, and with a split vocabulary two more."""
        return 3 if self.logits_width < self.args.vocab_size else 1

    @property
    def _cap(self) -> int:
        """Bytes of a logit's tangent, which a cap keeps for its backward."""
        return self.compute * (getattr(self.args, "logit_cap", 0) > 0)

    @property
    def loss_forward(self) -> float:
        """Bytes of logits, probabilities and gradients in the last chunk of the forward.

        Each logit exists in the type of the computation, in float32 and as a probability. In chunks the backward of
        each is part of the forward, after the gradients of those before it. The head's gradient is added by the
        products, but with caps or rounded operands, which hide them, once it exists in float32 too.
        """
        copies = 2 if self.loss_chunks == 1 else max(2, self._backward_copies)
        rows = math.ceil(self.tokens / self.loss_chunks)
        logits = rows * self.logits_width * (copies * 4 + self._rounded + self._cap)
        if self.loss_chunks == 1:
            return logits
        hidden = self.compute * self.args.dim
        forward = logits + hidden * (self.tokens - rows)
        backward = self.compute * self.trained_end + 2 * hidden * self.tokens  # gradients in that type
        rounded = self._fake_quantized(self.logits_width, self.args.dim, rows)
        hides_products = self._cap > 0 or rounded > 0
        backward += max(rounded, 4 * self.trained_end * (self.compute < 4) * hides_products)
        return 4 * self.trained_end + max(forward, backward)

    @property
    def loss_backward(self) -> float:
        """Bytes of a loss during its backward: of the logits, or gradients from its chunks and their scaled copies."""
        if self.loss_chunks > 1:
            return self.loss_kept + self._rounded * (self.trained_end + self.args.dim * self.tokens)
        logits = self.tokens * self.logits_width
        product = logits * self.compute + self.loss_retained * self.in_pipeline + self.compute * self.trained_end
        rounded = self._fake_quantized(self.logits_width, self.args.dim, self.tokens)  # after the logits' backward
        of_logits = logits * (self._backward_copies * 4 + self._rounded + self._cap)
        return max(of_logits, (product + rounded) * (rounded > 0))

    @property
    def loss_retained(self) -> float:
        """Bytes of probabilities of the whole vocabulary that live until the end of a pipeline's backward."""
        return self.loss_kept * (self.loss_chunks == 1 and self._backward_copies == 1)
