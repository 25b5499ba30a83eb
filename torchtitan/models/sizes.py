"""Model sizes: checks, names and shapes of linear layers and parameters, and fields that families share. No torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchtitan.core.errors import JobError


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary wavelengths, so that a model trained on `original_max_seq_len` tokens reads longer contexts.

    llama3 (Llama 3.1): wavelengths above original_max_seq_len / low_freq_factor become `factor` times longer, those
    below original_max_seq_len / high_freq_factor stay, and those between are blended. linear: all become `factor` times
    longer (arXiv:2306.15595). ntk: a larger rope_theta makes the longest `factor` times longer and leaves the shortest.
    yarn: features that turn less than beta_slow times within original_max_seq_len tokens become `factor` times slower,
    those that turn more than beta_fast times stay, those between are blended, and attention scores are scaled
    (arXiv:2309.00071).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    kind: Literal["llama3", "linear", "ntk", "yarn"] = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # of yarn's rotated features; None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn blends between whole indices of features

    def theta(self, theta: float, head_dim: int) -> float:
        """Return rope_theta, for ntk changed so that the slowest pair of features turns `factor` times slower."""
        return theta * self.factor ** (head_dim / (head_dim - 2)) if self.kind == "ntk" else theta


@dataclass(frozen=True)
class LongRope:
    """Rotary wavelengths that are longer by a factor for each pair of features (arXiv:2402.13753).

    Texts of more than `original_max_seq_len` tokens have the long factors, which are kept for exports only.
    """

    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0  # of rotated features
    original_max_seq_len: int = 4096

    kind: ClassVar = "longrope"


@dataclass(frozen=True)
class PartialRope:
    """Rotary wavelengths of all features of a head, of which the first `rotated` are rotated."""

    rotated: int

    kind: ClassVar = "partial"


Rope = tuple[float, RopeScaling | LongRope | PartialRope | None]
NormOrder = Literal["pre", "post", "output", "sandwich", "shared", "parallel"]
"""Place of a block's norms: before attention and feed-forward, after each residual sum (arXiv:1706.03762), of the
outputs of both alone (arXiv:2501.00656), or before both and of their outputs. In the last two attention and
feed-forward both read the block's input: after one norm, or after one each."""


Activation = Literal["silu", "gelu", "gelu_tanh", "relu_squared", "xielu"]
"""Function of a feed-forward. gelu_tanh: the approximation of gelu by tanh (arXiv:1606.08415); relu_squared: the square
of relu (arXiv:2109.08668); xielu: with two parameters (arXiv:2411.13010)."""


def check_positive(args: Any, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 1:
            raise JobError(f"{name} = {getattr(args, name)}: must be at least 1")


def check_not_negative(args: Any, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 0:
            raise JobError(f"{name} = {getattr(args, name)}: must not be negative")


def check_even(args: Any, name: str) -> None:
    """Raise JobError unless a width that rotary embeddings rotate, if it is set, is even."""
    if (getattr(args, name) or 0) % 2:
        raise JobError(f"{name} = {getattr(args, name)}: must be even, as rotary embeddings turn pairs")


def check_rotary_dim(args: Any) -> None:
    """Raise JobError unless rotary_dim, the width of the part of a head that is rotated, is possible."""
    check_positive(args, "rotary_dim")
    check_even(args, "rotary_dim")
    if args.rotary_dim > args.head_dim:
        raise JobError(f"rotary_dim = {args.rotary_dim}: must be at most head_dim = {args.head_dim}")


def check_probabilities(args: Any, *names: str) -> None:
    """Raise JobError unless these dropout probabilities are in [0, 1)."""
    for name in names:
        if not 0 <= getattr(args, name) < 1:
            raise JobError(f"{name} = {getattr(args, name)}: must be at least 0 and less than 1")


def check_whole_heads(args: Any) -> None:
    """Raise JobError unless n_heads divides the model's width."""
    if args.dim % args.n_heads:
        raise JobError(f"dim = {args.dim} with n_heads = {args.n_heads}: dim must be a multiple of n_heads")


def untie_classes(args: Any) -> None:
    """Untie the head of a family that may have classes, `n_classes`, if it has: its rows are no embeddings."""
    if getattr(args, "n_classes", 0):
        check_positive(args, "n_classes")
        object.__setattr__(args, "tied_embeddings", False)


def check_grouped_heads(args: Any) -> None:
    if args.num_kv_heads < 1 or args.n_heads % args.num_kv_heads:
        raise JobError(
            f"n_kv_heads = {args.n_kv_heads} with n_heads = {args.n_heads}: every key/value head serves the same "
            f"number of query heads, so n_kv_heads must divide n_heads"
        )


HEAD = "output"
Sizes = dict[str, tuple[int, int]]
"""Name -> (outputs, inputs); for a stack of experts, the sizes of its first matrix."""
Names = tuple[str, ...]
NORMS: Names = ("attention_norm.weight", "ffn_norm.weight")
QK_NORMS: Names = ("attention.q_norm.weight", "attention.k_norm.weight")
SINKS = "attention.sinks.weight"
ALPHAS: Names = ("feed_forward.activation.alpha_p", "feed_forward.activation.alpha_n")
POST_NORMS: Names = ("attention_post_norm.weight", "ffn_post_norm.weight")
ENDS: Names = ("tok_embeddings.weight", "norm.weight")
"""Names of parameters, other than linear layers, in a block and outside of the blocks."""
QKV: Names = ("attention.wq", "attention.wk", "attention.wv")
WO: Names = ("attention.wo",)
FEED_FORWARD: Names = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
STACK = "moe.experts"
SPLIT = dict.fromkeys(("wq", "wk", "wv", "wg", "wkv_b", "w1", "w3", "tok_embeddings", HEAD), 0) | {"wo": 1, "w2": 1}
SPLIT |= dict.fromkeys(("delta_qkvz", "delta_ba", *(f"delta_{part}" for part in "qkvzba")), 0) | {"delta_out": 1}
SPLIT |= dict.fromkeys(("ssm_z", "ssm_x", "ssm_dt"), 0) | {"ssm_out": 1}
SPLIT |= dict.fromkeys(("short_b", "short_c", "short_x"), 0) | {"short_out": 1}
"""Last part of a linear layer's name -> dimension that tensor parallel splits (0: outputs, 1: inputs)."""


def linears(args: Any) -> Sizes:
    """Return the sizes of all linear layers of a decoder by name, with the head; empty if the family lists none."""
    if not hasattr(args, "block_linears"):
        return {}
    sizes_by_name: Sizes = {}
    for layer in range(args.n_layers + getattr(args, "n_mtp_layers", 0)):
        sizes_by_name |= {f"layers.{layer}.{name}": sizes for name, sizes in args.block_linears(layer).items()}
    outputs = getattr(args, "outputs", args.vocab_size)
    return sizes_by_name | getattr(args, "head_linears", {HEAD: (outputs, args.dim)})


def split_side(name: str) -> int | None:
    """Return the dimension (0: outputs, 1: inputs) along which tensor parallel splits a linear layer.

    None if it is replicated, as layers inside an MoE are, or if the family uses another name for it.
    """
    *parents, last_part = name.split(".")
    return None if "moe" in parents else SPLIT.get(last_part)


def parameters(args: Any) -> list[str]:
    """Return the names of all parameters of a decoder, with a tied head; empty if the family lists none.

    `block_others` of a layer and `end_others` are the parameters that are not weights of linear layers.
    """
    names: list[str] = []
    if not hasattr(args, "block_others"):
        return names
    matrices = (1, 2, 3) if getattr(args, "gated_experts", True) else (1, 2)
    for name in linears(args):
        names += [f"{name}.w{i}" for i in matrices] if name.endswith(STACK) else [f"{name}.weight"]
    for layer in range(args.n_layers + getattr(args, "n_mtp_layers", 0)):
        names += [f"layers.{layer}.{name}" for name in args.block_others(layer)]
    return [*names, *args.end_others]


def grouped_attention(dim: int, heads: int, kv_heads: int, head_dim: int, gate: bool = False) -> Sizes:
    q, kv = heads * head_dim, kv_heads * head_dim
    sizes = {"attention.wq": (q, dim), "attention.wk": (kv, dim), "attention.wv": (kv, dim), "attention.wo": (dim, q)}
    return sizes | ({"attention.wq": (2 * q, dim)} if gate else {})


def ungated(name: str, dim: int, width: int) -> Sizes:
    """Return the linear layers of a feed-forward without a gate."""
    return {f"{name}.w1": (width, dim), f"{name}.w2": (dim, width)}


def gated(name: str, dim: int, width: int) -> Sizes:
    """Return the linear layers of a gated feed-forward."""
    return {f"{name}.w1": (width, dim), f"{name}.w2": (dim, width), f"{name}.w3": (width, dim)}


class GatedDecoderSizes:
    """Layers and numbers of parameters of a decoder with grouped attention and a gated feed-forward (gated.py).

    They follow from dim, n_layers, n_heads, num_kv_heads, head_dim, ffn_dim, vocab_size and tied_embeddings, which a
    subclass defines, and from the options below, which it may define too: as constants, sizes or properties.
    """

    attention_bias = False  # of all four matrices of attention
    mlp_bias = False
    embedding_multiplier = 1.0  # of the embeddings
    residual_multiplier = 1.0  # of the outputs of attention and feed-forward
    query_scale = 1.0  # of attention scores, in addition to 1 / sqrt(head_dim)
    logits_divisor = 1.0
    score_cap = 0.0  # attention scores s become cap tanh(s / cap); 0: they stay
    logit_cap = 0.0  # the logits too
    query_growth = 0.0  # after each `query_period` positions queries grow by this times ln(1 + number of periods)
    query_period = 1
    attention_gate = False  # heads' outputs times the sigmoid of features that wq has in addition
    gate_matrix = False  # or that a matrix of its own makes, wg
    qk_norm = False  # norms of each head's queries and keys
    qk_norm_over_heads = False  # of all heads' at once
    qk_norm_by_head = False  # with weights for each head, and no biases
    qk_norm_rotated = False  # after rotation
    rotates_adjacent = False  # adjacent features of a head are rotated together in transformers too
    norm_order: NormOrder = "pre"
    zero_centered = False  # norms multiply by 1 + weight
    layer_norm = False  # norms subtract the mean
    norm_bias = True  # of norms that do
    head_bias = False
    gate = True  # of the feed-forward
    activation: Activation = "silu"  # gelu_tanh with or without a gate, silu only with one, the others without
    sliding_window = 0  # number of tokens that a token attends to, with itself; 0: all before it
    sinks = False  # heads have a learned score that joins their softmax
    global_interval = 0  # the last of each so many layers has no window
    window_layers = ""  # the layers with a window, as text (layer_spans); "": all, or as global_interval says

    @property
    def outputs(self) -> int:
        """Outputs of the head: words, or classes in a family that may have some."""
        return getattr(self, "n_classes", 0) or self.vocab_size

    @property
    def biases(self) -> Names:
        """Linear layers of a block with a bias; of a feed-forward all or none."""
        feed_forward = FEED_FORWARD if self.gate else FEED_FORWARD[:2]
        return (*(QKV + WO if self.attention_bias else ()), *(feed_forward if self.mlp_bias else ()))

    def is_global(self, layer: int) -> bool:
        """Return True if a layer has no window."""
        if self.sliding_window and self.window_layers:
            return not _is_listed(layer, self.window_layers)
        return not self.sliding_window or (self.global_interval > 0 and (layer + 1) % self.global_interval == 0)

    def check_windows(self) -> None:
        """Raise JobError for impossible windows."""
        check_not_negative(self, "sliding_window", "global_interval")
        text, layers = self.window_layers, list[int]()
        if re.fullmatch(r"(\d{1,9}(-\d{1,9})?(,(?!$)|$))+", text):
            layers = [layer for layer in range(self.n_layers) if _is_listed(layer, text)]
        if text and text != (spans := layer_spans(layers, self.n_layers)):
            raise JobError(
                f"window_layers = {text!r} with n_layers = {self.n_layers}: must list layers from 0 to "
                f"{self.n_layers - 1} in ascending order, as '0-3,5' does, or be '' for all"
                + (f"; write {spans!r}" if layers else "")
            )

    @property
    def n_global_layers(self) -> int:
        """Number of layers without a window where others have one."""
        return sum(map(self.is_global, range(self.n_layers))) if self.sliding_window else 0

    @property
    def rotary_dim(self) -> int:
        """Number of features at the beginning of a head that rotary positions rotate."""
        return self.head_dim

    def rope_width(self, layer: int) -> int:
        """Return the number of features of a head that a layer's rotary positions have wavelengths for."""
        return self.rotary_dim

    def window_of(self, layer: int) -> int:
        """Return the number of tokens of a layer's window; 0 without one."""
        return 0 if self.is_global(layer) else self.sliding_window

    def rope(self, layer: int) -> Rope | None:
        """Return theta and scaling of a layer's rotary positions; None if it has none."""
        return self.rope_theta, self.rope_scaling

    def has_state(self, layer: int) -> bool:
        """Return True if a layer has a state that passes over the tokens, beside attention or in its place."""
        return False

    def attention_linears(self, layer: int) -> Sizes:
        """Return the linear layers of a layer's attention, or of what it has in its place."""
        sizes = grouped_attention(self.dim, self.n_heads, self.num_kv_heads, self.head_dim, self.attention_gate)
        return sizes | ({"attention.wg": sizes["attention.wq"]} if self.gate_matrix else {})

    def block_linears(self, layer: int) -> Sizes:
        return self.attention_linears(layer) | (gated if self.gate else ungated)("feed_forward", self.dim, self.ffn_dim)

    @property
    def _norms_have_biases(self) -> bool:
        return self.layer_norm and self.norm_bias

    @property
    def norm_widths(self) -> dict[str, int]:
        """Width of each norm of a block, by the names of its weight and its bias."""
        norms = NORMS[:1] if self.norm_order == "shared" else NORMS
        widths = dict.fromkeys(norms + (POST_NORMS if self.norm_order == "sandwich" else ()), self.dim)
        of_all_heads = self.qk_norm_over_heads or self.qk_norm_by_head
        if self.qk_norm and not of_all_heads:
            widths |= dict.fromkeys(QK_NORMS, self.head_dim)
        if self._norms_have_biases:
            widths |= {bias_of(name): width for name, width in widths.items()}
        if self.qk_norm and of_all_heads:
            heads = (self.n_heads, self.num_kv_heads)
            widths |= {name: n * self.head_dim for name, n in zip(QK_NORMS, heads, strict=True)}
        return widths

    def other_sizes(self, layer: int) -> dict[str, int]:
        """Return the number of elements of each parameter of a block that is neither a matrix nor a bias of one."""
        sizes = self.norm_widths | ({SINKS: self.n_heads} if self.sinks else {})
        return sizes | dict.fromkeys(ALPHAS if self.activation == "xielu" else (), 1)

    def biased_linears(self, layer: int) -> Sizes:
        """Return the linear layers of a layer with a bias."""
        return {name: sizes for name, sizes in self.block_linears(layer).items() if name in self.biases}

    def block_others(self, layer: int) -> Names:
        return (*self.other_sizes(layer), *(f"{name}.bias" for name in self.biased_linears(layer)))

    @property
    def end_others(self) -> Names:
        biases = {"norm.bias": self._norms_have_biases, f"{HEAD}.bias": self.head_bias}
        return (*ENDS, *(name for name, is_there in biases.items() if is_there))

    @property
    def num_matmul_parameters(self) -> int:
        """Number of weights that a token is multiplied with: the layers' matrices and the output head (tied or not)."""
        blocks = (self.block_linears(layer).values() for layer in range(self.n_layers))
        return sum(outputs * inputs for block in blocks for outputs, inputs in block) + self.dim * self.outputs

    @property
    def num_block_others(self) -> int:
        """Number of elements of all parameters of the blocks that are no matrices of linear layers or experts."""
        layers = range(self.n_layers)
        biases = sum(outputs for layer in layers for outputs, _ in self.biased_linears(layer).values())
        return biases + sum(sum(self.other_sizes(layer).values()) for layer in layers)

    @property
    def num_parameters(self) -> int:
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.dim
        ends = (1 + self._norms_have_biases) * self.dim + self.head_bias * self.vocab_size
        return self.num_matmul_parameters + self.num_block_others + ends + embedding


def bias_of(name: str) -> str:
    """Return the name of the bias beside a weight."""
    return f"{name.removesuffix('weight')}bias"


def layer_spans(layers: Iterable[int], n_layers: int) -> str:
    """Return ascending layers as text, such as "0-3,5"; empty if they are all of `n_layers`."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and spans[-1][1] == layer - 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    if spans == [[0, n_layers - 1]]:
        return ""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _is_listed(layer: int, spans: str) -> bool:
    """Return True if a text as that of layer_spans lists a layer."""
    ends = (span.split("-") for span in spans.split(","))
    return any(int(first_and_last[0]) <= layer <= int(first_and_last[-1]) for first_and_last in ends)


@dataclass(frozen=True, kw_only=True)
class GatedArgs(GatedDecoderSizes):
    """Arguments of decoders with a gated feed-forward. A family sets its own defaults."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    head_dim: int = 128  # of queries, keys and values; n_heads of them need not add up to dim
    vocab_size: int = 32000
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False  # the output head is the embedding matrix
    max_seq_len: int = 32768  # context length of the family's training; the model does not depend on it

    def __post_init__(self) -> None:
        check_positive(
            self, "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "head_dim", "vocab_size", "max_seq_len"
        )
        self.check_windows()
        check_even(self, "head_dim")
        check_grouped_heads(self)
        untie_classes(self)

    @property
    def num_kv_heads(self) -> int:
        return self.n_kv_heads


def shortest_pattern(letters: str) -> str:
    """Return the shortest text that, repeated and cut off, is `letters`."""
    lengths = range(1, len(letters) + 1)
    return next(letters[:length] for length in lengths if (letters[:length] * len(letters))[: len(letters)] == letters)


@dataclass(frozen=True, kw_only=True)
class LayerPattern(GatedDecoderSizes):
    """Sizes of a decoder with several kinds of layers.

    `layer_pattern` has a letter for each layer, and repeats: "*" for attention, STATE for what takes its place, others
    of `LETTERS` as the family has them. Its shortest form is kept.
    """

    layer_pattern: str = "*"

    STATE: ClassVar[str] = "M"
    LETTERS: ClassVar[str] = "*M"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layer_pattern or set(self.layer_pattern) - set(self.LETTERS):
            raise JobError(
                f"layer_pattern = {self.layer_pattern!r}: must be one or more of the letters {' '.join(self.LETTERS)}, "
                "one for each layer, which repeat"
            )
        object.__setattr__(self, "layer_pattern", shortest_pattern(self.letters))

    @property
    def letters(self) -> str:
        """The letters of all layers."""
        return (self.layer_pattern * self.n_layers)[: self.n_layers]

    def letter(self, layer: int) -> str:
        return self.layer_pattern[layer % len(self.layer_pattern)]

    def has_attention(self, layer: int) -> bool:
        return self.letter(layer) == "*"

    def has_state(self, layer: int) -> bool:
        return self.letter(layer) == self.STATE

    @property
    def n_attention_layers(self) -> int:
        return self.letters.count("*")

    @property
    def n_state_layers(self) -> int:
        return self.letters.count(self.STATE)

    def rope(self, layer: int) -> Rope | None:
        return super().rope(layer) if self.has_attention(layer) else None

    def attention_linears(self, layer: int) -> Sizes:
        return super().attention_linears(layer) if self.has_attention(layer) else {}

    def other_sizes(self, layer: int) -> dict[str, int]:
        of_attention = () if self.has_attention(layer) else QK_NORMS
        return {name: size for name, size in super().other_sizes(layer).items() if name not in of_attention}


DEBUG: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=32, ffn_dim=768, vocab_size=2048)
"""Sizes of a model for trying out."""
