"""What decoder models share: embedding, blocks, norm and head, and all that treats them alike in every family.

A family gives the blocks and the rotary positions. Blocks stand in a dictionary, and the embedding, the final norm and
the head may be None, so that a pipeline can cut the model and names stay what they are. What a block computes is said
once, in its steps (parallelisms/steps.py).

Letters of the shapes: B samples, S tokens, D = args.dim, V vocabulary.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, Protocol

import torch
from torch import nn

from torchtitan.core.initialization import Constant, Init, Normal
from torchtitan.models.attention import AttentionKernel, Shared
from torchtitan.models.dropout import Dropout, DroppingKernel, EmbeddingNoise, layer_keys
from torchtitan.models.layers import RMSNorm, SwiGLU, autocast_dtype
from torchtitan.parallelisms.context.kernel import Tokens, counted
from torchtitan.parallelisms.steps import Chain, Notes, Segment, Stepwise

LANES = ("lanes", "begins", "filled")
"""Of a batch, [B] each, for a model with a memory: the numbers of its rows' lanes, needed where batches of several
groups take turns; whether a document begins with the row; how many of its tokens are there."""


class DecoderArgs(Protocol):
    dim: int
    n_layers: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float
    tied_embeddings: bool


class Residual(Stepwise):
    """What blocks have whatever their feed-forward is: attention, norms, dropout, and the stream that it all adds to.

    `norm` makes a norm, RMSNorm unless said. `order`: norms stand before attention and feed-forward ("pre"), or
    behind the sum with what they add ("post", as in arXiv:1706.03762). `dropout`: of what they add.
    """

    def __init__(
        self,
        args: DecoderArgs,
        attention: nn.Module,
        norm: Callable[[], nn.Module] | None = None,
        order: Literal["pre", "post"] = "pre",
        dropout: float = 0.0,
    ):
        super().__init__()
        norm = norm or partial(RMSNorm, args.dim, args.norm_eps)
        self.attention_norm = norm()
        self.attention = attention
        self.ffn_norm = norm()
        self.order = order
        self.attention_dropout = Dropout(dropout, 0) if dropout else None
        self.ffn_dropout = Dropout(dropout, 1) if dropout else None

    def attend(self, notes: Notes, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]"""
        y = self.attention(x if self.order == "post" else self.attention_norm(x), notes.shared)
        h = x + self._dropped(y, self.attention_dropout, notes)
        return self.attention_norm(h) if self.order == "post" else h

    def to_feed(self, h: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D], what the feed-forward reads"""
        return h if self.order == "post" else self.ffn_norm(h)

    def fed(self, h: torch.Tensor, y: torch.Tensor, notes: Notes) -> torch.Tensor:
        """h, and y that the feed-forward makes, both [B, S, D] -> [B, S, D]"""
        out = h + self._dropped(y, self.ffn_dropout, notes)
        return self.ffn_norm(out) if self.order == "post" else out

    def _dropped(self, y: torch.Tensor, dropout: Dropout | None, notes: Notes) -> torch.Tensor:
        return y if dropout is None else dropout(y, notes.shared.keys)


class Block(Residual):
    """A transformer block. `feed_forward`: SwiGLU unless said."""

    def __init__(
        self,
        args: DecoderArgs,
        attention: nn.Module,
        feed_forward: nn.Module | None = None,
        norm: Callable[[], nn.Module] | None = None,
        order: Literal["pre", "post"] = "pre",
        dropout: float = 0.0,
    ):
        super().__init__(args, attention, norm, order, dropout)
        self.feed_forward = feed_forward or SwiGLU(args.dim, args.ffn_dim)

    def steps(self) -> tuple[Segment, ...]:
        return Segment("attention", self.attend, ("x",), ("h",)), Segment("feed_forward", self.feed, ("h",), ("out",))

    def feed(self, notes: Notes, h: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]"""
        return self.fed(h, self.feed_forward(self.to_feed(h)), notes)


class Entrance(nn.Module):
    """What is done with the embeddings of words before the first block: learned positions are added, `num_positions`
    of them, behind `first` that are not used, then perhaps a norm and dropout. `project`: of embeddings that are not as
    wide as the model. `num_types`: a model has that many kinds
    of tokens, and all are of the first. It is cut off with the embedding.
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


class Decoder(nn.Module):
    """`loss`, an objective (hidden, head, batch) -> scalar, is attached by whoever trains.

    `block` makes a layer of its number and the kernel; it has to keep the kernel in `attention.kernel`. `rotary` None:
    positions are learned (`entrance`), or there are none. causal=False: tokens see their whole document. `window`: how
    many tokens one sees, itself among them; 0 for all before it. `attention_dropout`: of the probabilities of
    attention. `norm`: the last one, RMSNorm unless said; nn.Identity() where the last block ends with one. `head`:
    makes logits of what it gives; unless said, of all words and without bias.
    """

    def __init__(
        self,
        args: DecoderArgs,
        rotary: nn.Module | None,
        block: Callable[[int, AttentionKernel], nn.Module],
        attention_backend: str = "auto",
        *,
        causal: bool = True,
        window: int = 0,
        word_dim: int | None = None,
        entrance: nn.Module | None = None,
        norm: nn.Module | None = None,
        head: nn.Module | None = None,
        attention_dropout: float = 0.0,
    ):
        super().__init__()
        self.args = args
        self.loss = None
        self.rotary = rotary
        kernel = partial(DroppingKernel, attention_dropout) if attention_dropout else AttentionKernel
        self.kernel = kernel(attention_backend, causal, window)  # one for all blocks; it has no state
        self.tok_embeddings = nn.Embedding(args.vocab_size, word_dim or args.dim)
        self.noise: nn.Module | None = None  # on embeddings, see dropout.py; it is cut off with them
        self.entrance = entrance
        self.layers = nn.ModuleDict({str(i): block(i, self.kernel) for i in range(args.n_layers)})
        self.memory: nn.Module | None = None  # an adapter's, see there; what blocks read beside the sequence
        self.norm = norm or RMSNorm(args.dim, args.norm_eps)
        self.output = head or nn.Linear(args.dim, args.vocab_size, bias=False)
        self.tie_weights()

    @property
    def draws(self) -> bool:
        """Whether training drops or adds something by chance, and so needs the keys of the tokens."""
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
        """tokens [B, S] (hidden states [B, S, D] where the embedding is cut off) -> logits [B, S, V] (hidden states
        where the head is). With what the loss reads (labels [B, S]): the sum of losses, a scalar.

        positions [B or 1, S] default to 0..S-1. With document_ids [B, S], tokens see only their own document. keys
        [B, S]: of the tokens' draws, for a model with dropout or noise in training (dropout.token_keys), and with noise
        lengths [B, S] (noise.record_lengths).
        """
        shared = self.context(tokens, positions, document_ids, keys, lengths)
        x = tokens if self.tok_embeddings is None else self.enter(tokens, shared)  # [B, S, D]
        told = {name: targets.pop(name) for name in LANES if name in targets}
        if self.memory is not None:
            self.memory.begin(tokens, told, targets.get("labels"))
        for layer, block in self.layers.items():
            if int(layer) < self.args.n_layers:
                if self.memory is not None:
                    shared = self.memory.ahead_of(int(layer), block, x, shared, self.kernel)
                x = block(x, of_layer(shared, int(layer)))
        x = self.normed(x)
        shared = shared._replace(targets={name: target for name, target in targets.items() if target is not None})
        out = self.finish(x, shared)
        if not shared.targets or not self.training:
            return out
        extra = self.extra_loss(x, tokens, document_ids, shared)
        return out if extra is None else out + (extra - extra.detach())

    def chains(self) -> list[Chain]:
        """The same for a pipeline that runs a part by its steps. Extra losses have none."""
        chains = [
            Chain(f"layers.{name}", block.steps(), partial(of_layer, layer=int(name)))
            for name, block in self.layers.items()
        ]
        if self.tok_embeddings is not None:
            embed = Segment("embed", lambda notes, tokens: self.enter(tokens, notes.shared), ("x",), ("out",))
            chains.insert(0, Chain("tok_embeddings", (embed._replace(light=True),), recompute=False))
        if self.norm is not None or self.output is not None:
            head = Segment("head", lambda notes, x: self.finish(self.normed(x), notes.shared), ("x",), ("out",))
            chains.append(Chain("head", (head._replace(light=True),), recompute=False))
        return chains

    def context(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        **targets: torch.Tensor,
    ) -> Shared:
        """What all share: of tokens [B, S] or hidden states [B, S, D], and the rest as forward takes it."""
        if positions is None:
            assert self.tok_embeddings is not None, "x may be a share of the tokens, so their positions are given"
            positions = counted(x)
        places = torch.arange(positions.shape[1], device=positions.device)  # [S]
        rotation = None if self.rotary is None else self.rotary(positions)
        mask = self.kernel.prepare(Tokens(places, document_ids))
        return Shared(positions, document_ids, rotation, mask, keys, targets, lengths=lengths)

    def enter(self, tokens: torch.Tensor, shared: Shared) -> torch.Tensor:
        """[B, S] -> [B, S, D], what the first block gets"""
        x, keys = self.embed(tokens), of_layer(shared, -1).keys
        x = x if self.noise is None else self.noise(x, keys, shared.lengths)
        return x if self.entrance is None else self.entrance(x, shared.positions, keys)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, S] -> [B, S, D]"""
        x = self.tok_embeddings(tokens)
        dtype = autocast_dtype(x.device.type)  # which leaves embeddings in float32, unlike FSDP's mixed precision
        return x if dtype is None else x.to(dtype)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D], what the head reads"""
        return x if self.norm is None else self.norm(x)

    def finish(self, x: torch.Tensor, shared: Shared) -> torch.Tensor:
        """x [B, S, D], normed -> logits [B, S, V], or x where the head is cut off. With targets: the sum of losses."""
        if shared.targets:
            return self.loss_of(x, shared.targets, shared)
        return x if self.output is None else self.output(x)

    def loss_of(self, x: torch.Tensor, targets: Mapping[str, torch.Tensor], shared: Shared) -> torch.Tensor:
        """x [B, S, D], what the head reads -> the sum of losses"""
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
        shared: Shared,
    ) -> torch.Tensor | None:
        """What a family adds to the gradient, and not to the value, of the sum of losses in training: a scalar of the
        hidden states x [B, S, D] that the head reads, or None. Its layers stand in `layers` behind the model's own.
        """
        return None

    def take_extra_losses(self) -> dict[str, torch.Tensor]:
        """What a family logs of its extra_loss: sums over the tokens since the last call, by their names in metrics."""
        return {}

    def set_attention_backend(self, backend: str) -> None:
        self.set_attention_kernel(self.kernel.with_backend(backend))

    def set_attention_kernel(self, kernel: nn.Module) -> None:
        """Give all blocks another kernel (see AttentionKernel)."""
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

        A tied matrix starts as a head does: embeddings of standard deviation 1 would make logits of sqrt(D). Biases
        start at zero.
        """
        if name.endswith(".bias"):
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
        return Normal(0.02 / (2 * (int(layer) + 1)) ** 0.5 if matrix in ("wo", "w2", "w3") else 0.02)


def of_layer(shared: Shared, layer: int) -> Shared:
    """What a layer, -1 for what comes before the first, gets of what all share: with its own keys."""
    return shared if shared.keys is None else shared._replace(keys=layer_keys(shared.keys, layer))
