"""Llama 2, 3, 3.1 and 3.2: arguments, published sizes, and conversion from and to config.json (LlamaConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import CLASS_KEYS, ConfigConverter, Family, read_num_classes, task_fields
from torchtitan.models.hf.config import (
    check_supported,
    decoder_config,
    decoder_sizes,
    read_biases,
    read_number,
    rotary_config,
    scaling_from_hf,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.sizes import (
    GatedDecoderSizes,
    RopeScaling,
    check_even,
    check_grouped_heads,
    check_positive,
    untie_classes,
)


@dataclass(frozen=True)
class LlamaArgs(GatedDecoderSizes):
    """Arguments of Llama models."""

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None  # None: as many as n_heads
    vocab_size: int = 32000
    multiple_of: int = 256  # the feed-forward width is rounded up to a multiple of this
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False  # the output head is the embedding matrix
    max_seq_len: int = 4096  # context length of the family's training; the model does not depend on it
    head_width: int | None = None  # of queries, keys and values; None: dim / n_heads
    attention_bias: bool = False  # of all four matrices
    mlp_bias: bool = False
    n_classes: int = 0  # 0: the head predicts words

    may_be_zero: ClassVar = ("n_classes",)

    def __post_init__(self) -> None:
        check_positive(self, "dim", "n_layers", "n_heads", "vocab_size", "multiple_of", "max_seq_len", "head_dim")
        check_even(self, "head_width")
        if self.head_width is None and (self.dim % self.n_heads or self.head_dim % 2):
            raise JobError(
                f"dim = {self.dim} with n_heads = {self.n_heads}: dim must be a multiple of n_heads, and dim / n_heads "
                f"even (rotary embeddings turn pairs). Change either"
            )
        check_grouped_heads(self)
        untie_classes(self)

    @property
    def num_kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads if self.head_width is None else self.head_width

    @property
    def ffn_dim(self) -> int:
        """Width of the feed-forward: 8/3 of dim, scaled and rounded up.

        SwiGLU has three matrices instead of an MLP's two, so it gets 2/3 of the usual 4 dim.
        """
        width = int(2 * 4 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return -(-width // self.multiple_of) * self.multiple_of


def width_options(dim: int, ffn_dim: int) -> dict[str, Any]:
    """Return the sizes that give exactly this feed-forward width: a width of at most `ffn_dim` is rounded up to it."""
    plain_width = int(2 * 4 * dim / 3)
    return {
        "multiple_of": ffn_dim,
        "ffn_dim_multiplier": None if plain_width <= ffn_dim else ffn_dim / plain_width,
    }


def relora_sizes(dim: int, ffn_dim: int, heads: int, layers: int, vocab_size: int = 32000, **sizes: Any) -> LlamaArgs:
    """Return a preset of ReLoRA and GaLore."""
    shape = dict(dim=dim, n_layers=layers, n_heads=heads, vocab_size=vocab_size, **width_options(dim, ffn_dim))
    return LlamaArgs(**shape, norm_eps=1e-6, **{"max_seq_len": 1024} | sizes)


RELORA = {
    "9m": relora_sizes(128, 352, 4, 4),
    "20m": relora_sizes(256, 688, 4, 4),
    "35m": relora_sizes(384, 1024, 8, 6),
    "40m": relora_sizes(416, 1024, 8, 8),
    "60m": relora_sizes(512, 1376, 8, 8),
    "71m": relora_sizes(512, 1368, 8, 12),
    "100m": relora_sizes(640, 1708, 10, 12),
    "130m": relora_sizes(768, 2048, 12, 12),
    "250m": relora_sizes(768, 2560, 16, 24),
    "250m_50k": relora_sizes(768, 2560, 16, 24, vocab_size=50257),
    "350m": relora_sizes(1024, 2736, 16, 24),
    "1b": relora_sizes(2048, 5461, 32, 24),
    "3b": relora_sizes(2560, 6848, 32, 32),
    "7b": relora_sizes(4096, 11008, 32, 32, max_seq_len=2048),
}

LLAMA2 = {
    "debugmodel": LlamaArgs(dim=256, n_layers=6, n_heads=16, vocab_size=2048),
    "7B": LlamaArgs(dim=4096, n_layers=32, n_heads=32),
    "13B": LlamaArgs(dim=5120, n_layers=40, n_heads=40),
    "70B": LlamaArgs(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096),
    **RELORA,
}


def _llama3(**sizes: object) -> LlamaArgs:
    return LlamaArgs(**{"vocab_size": 128256, "rope_theta": 500000.0, "max_seq_len": 8192} | sizes)


def _llama31(**sizes: object) -> LlamaArgs:
    return _llama3(**{"max_seq_len": 131072, "rope_scaling": RopeScaling()} | sizes)


def _llama32(**sizes: object) -> LlamaArgs:
    return _llama31(rope_scaling=RopeScaling(factor=32.0), tied_embeddings=True, **sizes)


_DEBUG = dict(dim=256, n_layers=6, n_heads=16, vocab_size=2048)
_8B = dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024)
_70B = dict(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096)
_405B = dict(dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim_multiplier=1.2, multiple_of=4096)

LLAMA3 = {
    "debugmodel": _llama3(**_DEBUG),
    "8B": _llama3(**_8B),
    "70B": _llama3(**_70B),
    "405B": _llama31(**_405B),  # published with 3.1 only; under this name too, as users of PyTorch's torchtitan know it
}
LLAMA31 = {
    "debugmodel": _llama31(**_DEBUG, n_kv_heads=8),
    "8B": _llama31(**_8B),
    "70B": _llama31(**_70B),
    "405B": _llama31(**_405B),
}
LLAMA32 = {
    "debugmodel": _llama32(**_DEBUG, n_kv_heads=8),
    "1B": _llama32(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5),
    "3B": _llama32(dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim_multiplier=1.0),
}


def _to_hf(args: LlamaArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' LlamaConfig."""
    llama_fields = {
        **task_fields("Llama", args),
        "model_type": "llama",
        "intermediate_size": args.ffn_dim,
        "head_dim": args.head_dim,
        "mlp_bias": args.mlp_bias,
    }
    return decoder_config(args, dtype) | rotary_config(args) | llama_fields


def _from_hf(config: Mapping[str, Any]) -> LlamaArgs:
    sizes = decoder_sizes(config, 2048, "intermediate_size")
    dim, heads, ffn_dim = sizes["dim"], sizes["n_heads"], config["intermediate_size"]
    check_supported(config, {"hidden_act": "silu"})
    plain_width = dim // heads
    head_width = read_number(config, "head_dim", plain_width, null=plain_width)
    return LlamaArgs(
        **sizes,
        n_kv_heads=read_number(config, "num_key_value_heads", heads, null=heads),
        **width_options(dim, ffn_dim),
        rope_scaling=scaling_from_hf(config),
        head_width=head_width if head_width * heads != dim else None,
        **read_biases(config),
        n_classes=read_num_classes(config),
    )


COMPARED = ("dim", "n_layers", "n_heads", "num_kv_heads", "ffn_dim", "vocab_size", "norm_eps", "rope_theta")
COMPARED += ("rope_scaling", "tied_embeddings", "head_dim", "attention_bias", "mlp_bias")
KEYS = config_keys(DECODER_KEYS | {"mlp_bias", "head_dim"} | CLASS_KEYS)
CONFIG = ConfigConverter(model_types=("llama",), to_hf=_to_hf, from_hf=_from_hf, compared=COMPARED, keys=KEYS)


# the first reads a Hugging Face folder without a job
LLAMAS = {
    name: Family(sizes=sizes, config=CONFIG, spec="torchtitan.models.llama.model:SPEC", publisher="meta-llama")
    for name, sizes in (("llama3", LLAMA3), ("llama2", LLAMA2), ("llama3.1", LLAMA31), ("llama3.2", LLAMA32))
}
