"""Decoder models: embedding, blocks, norm and head, and everything that is the same in all families.

A family provides the blocks and the kinds of their attention. Blocks are kept in a dictionary, and the embedding, the
final norm and the head may be None, so that a pipeline can split the model and parameter names do not change. A block
defines its computation once, as steps (parallelisms/steps.py).

Letters of the shapes: B samples, S tokens, D = args.dim, V vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from torchtitan.core.random_draws import Constant, Init, Normal
from torchtitan.models.attention import AttentionKernel, CappedKernel, SharedInputs
from torchtitan.models.dropout import Dropout, DropoutKernel, EmbeddingNoise, layer_keys
from torchtitan.models.layers import Float8Linear, RMSNorm, SwiGLU, autocast_dtype
from torchtitan.models.sizes import NormOrder
from torchtitan.parallelisms.plan import ParallelPlan
from torchtitan.parallelisms.sequence_layout import Tokens, default_positions
from torchtitan.parallelisms.steps import Notes, Segment, StepChain, Stepwise

MEMORY_INPUTS = ("lanes", "begins", "filled")
"""Batch tensors [B] for a model with a memory: the number of each row's lane, needed if batches of several groups
alternate; True if a document begins with the row; the number of its tokens that are filled."""


class DecoderMemory(Protocol):
    """A module that acts between the blocks of a decoder, which an adapter may set as its `memory`.

    What it collects in a forward takes effect with `commit`, so that all blocks of a batch see the same state.
    """

    context: int
    """Maximum number of tokens of a sequence that it reads in segments."""
    rows_share_state: bool
    """True if a row of a batch reads what other rows have stored."""
    cache_size: dict[bool, int]
    """Entries kept, by `training`."""

    def begin(
        self, tokens: torch.Tensor, lane_tensors: Mapping[str, torch.Tensor], labels: torch.Tensor | None
    ) -> None:
        """Begin a forward of tokens [B, S] (hidden states in later pipeline stages) with its labels [B, S], if any.

        `lane_tensors`: those of MEMORY_INPUTS that the batch has.
        """
        ...

    def before_block(
        self, layer: int, block: nn.Module, x: torch.Tensor, shared: SharedInputs, kernel: nn.Module
    ) -> SharedInputs:
        """Run before a block gets its input x [B, S, D], or a rank's shard of it. Returns the block's `shared`."""
        ...

    def commit(self) -> None:
        """Store what the forwards since the last commit have collected."""
        ...

    def clear(self) -> None:
        """Forget everything stored and collected."""
        ...

    def reader(self, model: "Decoder", seq_len: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what reads growing sequences [1, S] in segments of `seq_len` tokens, as kv_cache.CachedDecoder."""
        ...

    def end_reading(self) -> None:
        """Prepare for full batches after the use of a `reader`."""
        ...


DECODER_PLAN = ParallelPlan(
    blocks="layers.*",
    embedding="tok_embeddings",
    head=("norm", "output"),
    gathered=("attention", "feed_forward"),
    column=("attention.w[qkv]", "feed_forward.w[13]"),
    row=("attention.wo", "feed_forward.w2"),
    sequence=("attention_norm", "ffn_norm"),
)
"""Parallel plan of decoders with grouped attention and a gated feed-forward, such as Llama."""


NARROWER = ("wo", "w2", "w3", "delta_out", "ssm_out", "short_out")
"""Last parts of the names of matrices with initial values that are smaller in deeper layers."""


class DecoderArgs(Protocol):
    dim: int
    n_layers: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float
    tied_embeddings: bool


class ResidualBlock(Stepwise):
    """The parts of a block that do not depend on its feed-forward: attention, norms, dropout and residual connections.

    `norm` makes a norm, by default RMSNorm. `order`: where they are (models/sizes.py). `dropout`: probability for the
    outputs of attention and feed-forward. Both are multiplied by `residual_multiplier`.
    """

    residual_multiplier = 1.0

    def __init__(
        self,
        args: DecoderArgs,
        attention: nn.Module,
        norm: Callable[[], nn.Module] | None = None,
        order: NormOrder = "pre",
        dropout: float = 0.0,
    ):
        super().__init__()
        norm = norm or partial(RMSNorm, args.dim, args.norm_eps)
        self.attention_norm = norm()
        self.attention = attention
        self.ffn_norm = None if order == "shared" else norm()
        self.attention_post_norm, self.ffn_post_norm = (norm(), norm()) if order == "sandwich" else (None, None)
        self.order = order
        self.attention_dropout = Dropout(dropout, 0) if dropout else None
        self.ffn_dropout = Dropout(dropout, 1) if dropout else None

    def attention_residual(self, notes: Notes, x: torch.Tensor) -> torch.Tensor:
        """Apply attention with its norm, dropout and residual connection: [B, S, D] -> [B, S, D]."""
        y = self.attention(self.attention_norm(x) if self.norms_inputs else x, notes.shared)
        norm = self.attention_norm if self.order == "output" else self.attention_post_norm
        h = x + self._addend(y, norm, self.attention_dropout, notes)
        return self.attention_norm(h) if self.order == "post" else h

    def ffn_input(self, h: torch.Tensor) -> torch.Tensor:
        """Return the input of the feed-forward: [B, S, D] -> [B, S, D]."""
        return self.ffn_norm(h) if self.norms_inputs else h

    def ffn_residual(self, h: torch.Tensor, y: torch.Tensor, notes: Notes) -> torch.Tensor:
        """Add the feed-forward's output y to the residual stream h, with dropout and norm; all [B, S, D]."""
        norm = self.ffn_norm if self.order == "output" else self.ffn_post_norm
        out = h + self._addend(y, norm, self.ffn_dropout, notes)
        return self.ffn_norm(out) if self.order == "post" else out

    def both_residuals(self, feed_forward: nn.Module, notes: Notes, x: torch.Tensor) -> torch.Tensor:
        """Apply attention and feed-forward to the same input, and add both to it: [B, S, D] -> [B, S, D]."""
        n = self.attention_norm(x)
        h = x + self._addend(self.attention(n, notes.shared), None, self.attention_dropout, notes)
        y = feed_forward(n if self.ffn_norm is None else self.ffn_norm(x))
        return h + self._addend(y, None, self.ffn_dropout, notes)

    @property
    def norms_inputs(self) -> bool:
        return self.order in ("pre", "sandwich")

    def _addend(self, y: torch.Tensor, norm: nn.Module | None, dropout: Dropout | None, notes: Notes) -> torch.Tensor:
        y = y if norm is None else norm(y)
        y = y if dropout is None else dropout(y, notes.shared.keys)
        return y if self.residual_multiplier == 1 else y * self.residual_multiplier


class Block(ResidualBlock):
    """A transformer block. `feed_forward` defaults to SwiGLU."""

    def __init__(
        self,
        args: DecoderArgs,
        attention: nn.Module,
        feed_forward: nn.Module | None = None,
        norm: Callable[[], nn.Module] | None = None,
        order: NormOrder = "pre",
        dropout: float = 0.0,
    ):
        super().__init__(args, attention, norm, order, dropout)
        self.feed_forward = feed_forward or SwiGLU(args.dim, args.ffn_dim)

    def steps(self) -> tuple[Segment, ...]:
        if self.order in ("shared", "parallel"):
            return (Segment("block", partial(self.both_residuals, self.feed_forward), ("x",), ("out",)),)
        return (
            Segment("attention", self.attention_residual, ("x",), ("h",)),
            Segment("feed_forward", self.feed_forward_step, ("h",), ("out",)),
        )

    def feed_forward_step(self, notes: Notes, h: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]"""
        return self.ffn_residual(h, self.feed_forward(self.ffn_input(h)), notes)


class InputEmbedding(nn.Module):
    """Learned positions added to the embeddings, and optionally a projection, token types, a norm and dropout.

    `num_positions` positions are learned; the `first` rows of their embedding before them are unused. `project` maps
    embeddings to the model's width if theirs differs. `num_types`: rows of the token type embedding; every token gets
    type 0. A pipeline keeps this module on the stage that has the embedding.
    """

    def __init__(
        self,
        dim: int,
        num_positions: int,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
        *,
        first: int = 0,
        num_types: int = 0,
        project: nn.Module | None = None,
    ):
        super().__init__()
        self.first = first
        self.project = project
        self.positions = nn.Embedding(first + num_positions, dim)
        self.types = nn.Embedding(num_types, dim) if num_types else None
        self.norm = norm
        self.dropout = Dropout(dropout) if dropout else None

    def forward(self, x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
        """x [B, S, D], positions [B or 1, S] -> [B, S, D]"""
        x = x if self.project is None else self.project(x)
        x = x + self.positions(positions + self.first).to(x.dtype)
        x = x if self.types is None else x + self.types(torch.zeros_like(positions)).to(x.dtype)
        x = x if self.norm is None else self.norm(x)
        return x if self.dropout is None else self.dropout(x, keys)


class EmbeddingDropout(nn.Module):
    """Dropout of the embeddings, in the place of an InputEmbedding."""

    def __init__(self, p: float):
        super().__init__()
        self.dropout = Dropout(p)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
        """x [B, S, D] -> [B, S, D]"""
        return self.dropout(x, keys)


class AttentionKind(nn.Module):
    """The properties of attention that layers share: masks and rotations are prepared once for all layers of a kind.

    `rotary` is None if positions are learned or there are none. `window`: number of tokens that a token attends to,
    including itself; 0 for all before it. `kernel`: that of layers with another one (models/linear_attention.py).
    """

    def __init__(self, rotary: nn.Module | None = None, window: int = 0, kernel: Callable[[], nn.Module] | None = None):
        super().__init__()
        self.rotary, self.window, self.kernel = rotary, window, kernel


class Decoder(nn.Module):
    """A decoder model. The trainer attaches `loss`, an objective (hidden, head, batch) -> scalar.

    `attention`: the kind of all layers, or a list with the kind of each layer, where equal layers share an
    object. `block(layer, kernel)` makes a layer, which must keep the kernel in `attention.kernel`, where
    `attention` is None if tokens exchange nothing in it. causal=False: tokens
    attend to their full document. `attention_dropout`: dropout probability of attention probabilities. `score_cap`: the
    cap of a CappedKernel; 0 for none. `norm`: the final norm, by default RMSNorm; nn.Identity() if the last block ends
    with a norm. `head`: computes logits from the output of `norm`; by default a linear layer over the vocabulary
    without bias.
    """

    def __init__(
        self,
        args: DecoderArgs,
        attention: AttentionKind | Sequence[AttentionKind],
        block: Callable[[int, AttentionKernel], nn.Module],
        attention_backend: str = "auto",
        *,
        causal: bool = True,
        word_dim: int | None = None,
        entrance: nn.Module | None = None,
        norm: nn.Module | None = None,
        head: nn.Module | None = None,
        attention_dropout: float = 0.0,
        score_cap: float = 0.0,
    ):
        super().__init__()
        self.args = args
        self.loss = None
        kinds = [attention] * args.n_layers if isinstance(attention, AttentionKind) else attention
        assert len(kinds) == args.n_layers, "each layer has a kind of attention"
        self.kinds = nn.ModuleList(dict.fromkeys(kinds))
        self.kind_of_layer = [list(self.kinds).index(kind) for kind in kinds]
        kernel: Callable[..., AttentionKernel] = partial(CappedKernel, score_cap) if score_cap else AttentionKernel
        kernel = partial(DropoutKernel, attention_dropout) if attention_dropout else kernel
        # one for all blocks of a kind; it has no state
        self.kernels = nn.ModuleList(
            kind.kernel().with_backend(attention_backend)
            if kind.kernel
            else kernel(attention_backend, causal, kind.window)
            for kind in self.kinds
        )
        self.tok_embeddings = nn.Embedding(args.vocab_size, word_dim or args.dim)
        self.noise: nn.Module | None = None  # on embeddings, see dropout.py; on the same pipeline stage as they are
        self.entrance = entrance
        self.layers = nn.ModuleDict({str(i): block(i, self.kernels[kind]) for i, kind in enumerate(self.kind_of_layer)})
        self.memory: DecoderMemory | None = None  # set by an adapter
        self.norm = norm or RMSNorm(args.dim, args.norm_eps)
        self.output = head or nn.Linear(args.dim, args.vocab_size, bias=False)
        self.tie_weights()

    @property
    def needs_keys(self) -> bool:
        """True if training uses dropout or noise, and so needs the tokens' random keys."""
        drawing = (EmbeddingNoise, Dropout)
        return any(isinstance(module, drawing) and getattr(module, "p", 1) > 0 for module in self.modules())

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        **targets: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return logits [B, S, V] of tokens [B, S], or the summed loss, a scalar, with its targets (labels [B, S]).

        Without the embedding, tokens are hidden states [B, S, D]; without the head, hidden states are returned.
        positions [B or 1, S] default to 0..S-1. With document_ids [B, S], tokens attend only to their own document. A
        model with dropout or noise needs `keys` [B, S] in training (dropout.token_keys), and one with noise `lengths`
        [B, S] too (dropout.record_lengths).
        """
        shared = self.context(tokens, positions, document_ids, keys, lengths)
        x = tokens if self.tok_embeddings is None else self.input_states(tokens, shared)  # [B, S, D]
        memory_inputs = {name: targets.pop(name) for name in MEMORY_INPUTS if name in targets}
        if self.memory is not None:
            self.memory.begin(tokens, memory_inputs, targets.get("labels"))
        for layer, block in self.layers.items():
            if int(layer) < self.args.n_layers:
                if self.memory is not None:
                    shared = self.memory.before_block(
                        int(layer), block, x, shared, self.kernels[self.kind_index(int(layer))]
                    )
                x = block(x, self.shared_for_layer(shared, int(layer)))
        x = self.apply_norm(x)
        shared = shared._replace(targets={name: target for name, target in targets.items() if target is not None})
        out = self.compute_output(x, shared)
        if not shared.targets or not self.training:
            return out
        extra = self.extra_loss(x, tokens, document_ids, shared)
        return out if extra is None else out + (extra - extra.detach())

    @property
    def may_join_documents(self) -> bool:
        """True if only attention within documents connects tokens, and only labels have a loss: then a document is
        computed in the same way wherever it is in a batch. A subclass with another `forward` has to repeat this.
        """
        plain = all(type(kernel) is AttentionKernel for kernel in self.kernels)
        common_scales = any(isinstance(module, Float8Linear) for module in self.modules())  # of all tokens
        of_labels = self.memory is None and type(self).extra_loss is Decoder.extra_loss
        return plain and of_labels and not common_scales

    def chains(self) -> list[StepChain]:
        """Return the computation as chains of steps, for a pipeline schedule that runs a stage by steps.

        Extra losses have no steps.
        """
        chains = [
            StepChain(f"layers.{name}", block.steps(), partial(self.shared_for_layer, layer=int(name)))
            for name, block in self.layers.items()
        ]
        if self.tok_embeddings is not None:
            embed = Segment("embed", lambda notes, tokens: self.input_states(tokens, notes.shared), ("x",), ("out",))
            chains.insert(0, StepChain("tok_embeddings", (embed._replace(light=True),), recompute=False))
        if self.norm is not None or self.output is not None:

            def apply_head(notes: Notes, x: torch.Tensor) -> torch.Tensor:
                return self.compute_output(self.apply_norm(x), notes.shared)

            head = Segment("head", apply_head, ("x",), ("out",))
            chains.append(StepChain("head", (head._replace(light=True),), recompute=False))
        return chains

    def context(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        **targets: torch.Tensor,
    ) -> SharedInputs:
        """Return the inputs that all blocks share, for tokens [B, S] or hidden states [B, S, D] x; see forward.

        Rotations and masks are prepared for the kinds of the model's layers; a pipeline part may lack some.
        """
        if positions is None:
            assert self.tok_embeddings is not None, "x may be a share of the tokens, so their positions are given"
            positions = default_positions(x)
        tokens = Tokens(torch.arange(positions.shape[1], device=positions.device), document_ids)
        by_kind = {}
        for kind in sorted({self.kind_index(int(layer)) for layer in self.layers}):
            rotary = self.kinds[kind].rotary
            by_kind[kind] = None if rotary is None else rotary(positions), self.kernels[kind].prepare(tokens)
        return SharedInputs(positions, document_ids, None, None, keys, targets, lengths=lengths, by_kind=by_kind)

    def kind_index(self, layer: int) -> int:
        """Return the index in `kinds` of a layer's kind. Layers of extra losses share the kind of the last layer."""
        return self.kind_of_layer[min(layer, len(self.kind_of_layer) - 1)]

    def shared_for_layer(self, shared: SharedInputs, layer: int) -> SharedInputs:
        """Return the shared inputs with the rotation, mask and random keys of one layer."""
        rotation, mask = shared.by_kind[self.kind_index(layer)]
        keys = None if shared.keys is None else layer_keys(shared.keys, layer)
        return shared._replace(rotation=rotation, mask=mask, keys=keys, by_kind=None)

    def input_states(self, tokens: torch.Tensor, shared: SharedInputs) -> torch.Tensor:
        """Return the input of the first block: [B, S] -> [B, S, D]."""
        x, keys = self.embed(tokens), None if shared.keys is None else layer_keys(shared.keys, -1)
        x = x if self.noise is None else self.noise(x, keys, shared.lengths)
        return x if self.entrance is None else self.entrance(x, shared.positions, keys)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up the embeddings: [B, S] -> [B, S, D]."""
        x = self.tok_embeddings(tokens)
        dtype = autocast_dtype(x.device.type)  # autocast leaves embeddings in float32, unlike FSDP's mixed precision
        return x if dtype is None else x.to(dtype)

    def apply_norm(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the final norm: [B, S, D] -> [B, S, D], the input of the head."""
        return x if self.norm is None else self.norm(x)

    def compute_output(self, x: torch.Tensor, shared: SharedInputs) -> torch.Tensor:
        """Apply the head to x [B, S, D], if present -> logits [B, S, V]; with targets, the summed loss, a scalar."""
        if shared.targets:
            return self.compute_loss(x, shared.targets, shared)
        return x if self.output is None else self.output(x)

    def compute_loss(self, x: torch.Tensor, targets: Mapping[str, torch.Tensor], shared: SharedInputs) -> torch.Tensor:
        """x [B, S, D], the head's input -> the summed loss, a scalar."""
        assert self.loss is not None and self.output is not None, "targets need a loss and the output head"
        batch = {"positions": shared.positions, **targets}
        return self.loss(
            x, self.output, batch if shared.documents is None else batch | {"document_ids": shared.documents}
        )

    def extra_loss(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor,
        document_ids: torch.Tensor | None,
        shared: SharedInputs,
    ) -> torch.Tensor | None:
        """Return a scalar that adds to the gradient, but not the value, of the training loss; None by default.

        x [B, S, D] is the head's input. Layers that only this loss uses follow the model's own in `layers`.
        """
        return None

    def take_extra_losses(self) -> dict[str, torch.Tensor]:
        """Return and reset the sums of extra losses over tokens, by their names in the metrics; scalars."""
        return {}

    def set_attention_backend(self, backend: str) -> None:
        self.set_attention_kernels(kernel.with_backend(backend) for kernel in self.kernels)

    def set_attention_kernels(self, kernels: Iterable[nn.Module]) -> None:
        """Replace the attention kernel of all blocks of each kind, in the order of `kernels` (see AttentionKernel)."""
        self.kernels = nn.ModuleList(kernels)
        for layer, block in self.layers.items():
            if block.attention is not None:
                block.attention.kernel = self.kernels[self.kind_index(int(layer))]

    def tie_weights(self) -> None:
        if self.args.tied_embeddings and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def _apply(self, fn: object, recurse: bool = True) -> "Decoder":
        """Tie weights again after to_empty() or to(), which may create a separate parameter for each name."""
        super()._apply(fn, recurse)
        self.tie_weights()
        return self

    def init_rule(self, name: str) -> Init:
        """Return the recipe of PyTorch's torchtitan for Llama 3: truncated normals, narrower in deeper layers for wo,
        w2 and w3.

        A tied matrix is initialized as a head: embeddings of standard deviation 1 would make logits of sqrt(D). Biases
        start at zero.
        """
        if name.endswith("bias"):  # of experts too
            return Constant(0.0)
        if "norm" in name:
            return Constant(1.0)
        if name.startswith("output.") or (name.startswith("tok_embeddings.") and self.args.tied_embeddings):
            return Normal(self.args.dim**-0.5)
        if name.startswith("tok_embeddings."):
            return Normal(1.0)
        if not name.startswith("layers."):
            return Normal(0.02)
        _, layer, *_, matrix = name.removesuffix(".weight").split(".")
        return Normal(0.02 / (2 * (int(layer) + 1)) ** 0.5 if matrix in NARROWER else 0.02)
