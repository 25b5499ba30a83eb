"""StarCoder 2: arguments, published sizes, and conversion from and to config.json (Starcoder2Config).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import NOT_IN_FORWARD, ConfigConverter, Family
from torchtitan.models.gpt2 import GELU
from torchtitan.models.hf.config import gated_config, gated_sizes, read_flag, read_number, read_window
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys, of_family
from torchtitan.models.sizes import DEBUG, GatedArgs, check_probabilities


@dataclass(frozen=True, kw_only=True)
class Starcoder2Args(GatedArgs):
    """Sizes of StarCoder 2. The published folders have dropouts of 0.1."""

    vocab_size: int = 49152
    max_seq_len: int = 16384
    tied_embeddings: bool = True
    bias: bool = True  # of all linear layers but the head
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it
    attention_dropout: float = 0.0  # of attention probabilities
    residual_dropout: float = 0.0  # of the outputs of attention and feed-forward
    embedding_dropout: float = 0.0

    layer_norm: ClassVar = True
    gate: ClassVar = False
    activation: ClassVar = "gelu_tanh"
    may_be_zero: ClassVar = ("sliding_window", "attention_dropout", "residual_dropout", "embedding_dropout")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probabilities(self, *DROPOUTS)

    @property
    def attention_bias(self) -> bool:
        return self.bias

    mlp_bias = attention_bias


DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout")
_WINDOW: dict[str, Any] = dict(sliding_window=4096)
STARCODER2 = {
    "debugmodel": Starcoder2Args(**DEBUG, sliding_window=64),
    "3B": Starcoder2Args(
        dim=3072, n_layers=30, n_heads=24, n_kv_heads=2, ffn_dim=12288, rope_theta=999999.4420358813, **_WINDOW
    ),
    "7B": Starcoder2Args(
        dim=4608, n_layers=32, n_heads=36, n_kv_heads=4, ffn_dim=18432, rope_theta=1000000.0, **_WINDOW
    ),
    "15B": Starcoder2Args(
        dim=6144,
        n_layers=40,
        n_heads=48,
        n_kv_heads=4,
        ffn_dim=24576,
        rope_theta=100000.0,
        tied_embeddings=False,
        **_WINDOW,
    ),
}


def _to_hf(args: Starcoder2Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Starcoder2Config."""
    fields = of_family(gated_config(args, dtype), USED)
    return fields | {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_act": GELU[1],
        "norm_epsilon": args.norm_eps,
        "use_bias": args.bias,
        "sliding_window": args.sliding_window or None,
        **{name: getattr(args, name) for name in DROPOUTS},
    }


def _from_hf(config: Mapping[str, Any]) -> Starcoder2Args:
    if config.get("hidden_act", GELU[1]) not in GELU:
        raise JobError(f"hidden_act = {config['hidden_act']!r}, but this model only has {GELU[1]!r}")
    sizes = gated_sizes(config, 4096, kv_heads=2, head_dim_may_be_null=True)
    return Starcoder2Args(
        **sizes
        | {
            "n_kv_heads": read_number(config, "num_key_value_heads", 2),  # never null
            "norm_eps": read_number(config, "norm_epsilon", 1e-5),
            "tied_embeddings": config.get("tie_word_embeddings", True),
        },
        bias=read_flag(config, "use_bias", True),
        sliding_window=read_window({"sliding_window": None} | config, 0),
        **{name: read_number(config, name, 0.0) for name in DROPOUTS},
    )


USED = DECODER_KEYS - {"rms_norm_eps", "attention_bias"} | {"norm_epsilon", "use_bias", "head_dim", "sliding_window"}
# what the program that trained the published models writes
_TRAINERS = {"layer_norm_epsilon": 1e-5, "mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True}
_TRAINERS |= {"activation_function": "gelu", "attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True}
CONFIG = ConfigConverter(
    model_types=("starcoder2",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    not_compared=(*NOT_IN_FORWARD, *DROPOUTS),
    keys=config_keys(USED | {*DROPOUTS}, defaults=_TRAINERS),
)


FAMILY = Family(sizes=STARCODER2, config=CONFIG, spec="torchtitan.models.starcoder2.model:SPEC", publisher="bigcode")
