"""GPT-NeoX, Pythia and RedPajama: arguments, published sizes, conversion from and to config.json (GPTNeoXConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.core.files import agreed_value
from torchtitan.models.family import NOT_IN_FORWARD, ConfigConverter, Family
from torchtitan.models.gpt2 import GELU
from torchtitan.models.hf.config import read_flag, read_number
from torchtitan.models.hf.config_keys import config_keys
from torchtitan.models.layer_norms import KEYS, LayerNormArgs, layer_norm_config, layer_norm_sizes
from torchtitan.models.sizes import DEBUG, Activation, NormOrder, check_probabilities


@dataclass(frozen=True, kw_only=True)
class GPTNeoXArgs(LayerNormArgs):
    vocab_size: int = 50304
    max_seq_len: int = 2048
    rotary_dim: int = 32
    attention_bias: bool = True
    side_by_side: bool = True  # attention and feed-forward read the block's input, after a norm each
    approximate_gelu: bool = False  # by tanh
    residual_dropout: float = 0.0  # of the embeddings and the outputs of attention and feed-forward
    attention_dropout: float = 0.0  # of attention probabilities

    mlp_bias: ClassVar = True
    gate: ClassVar = False
    may_be_zero: ClassVar = ("residual_dropout", "attention_dropout")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probabilities(self, *DROPOUTS)

    @property
    def norm_order(self) -> NormOrder:
        return "parallel" if self.side_by_side else "pre"

    @property
    def activation(self) -> Activation:
        return "gelu_tanh" if self.approximate_gelu else "gelu"

    @property
    def embedding_dropout(self) -> float:
        return self.residual_dropout


def _sizes(dim: int, layers: int, heads: int, rotary_dim: int, **sizes: Any) -> GPTNeoXArgs:
    widths: dict[str, Any] = dict(dim=dim, n_heads=heads, n_kv_heads=heads, head_dim=dim // heads, ffn_dim=4 * dim)
    return GPTNeoXArgs(**widths, n_layers=layers, rotary_dim=rotary_dim, **sizes)


DROPOUTS = {"residual_dropout": "hidden_dropout", "attention_dropout": "attention_dropout"}
FLAGS = {"attention_bias": "attention_bias", "side_by_side": "use_parallel_residual"}
"""Names of sizes here and in config.json."""
GPT_NEOX = {
    "debugmodel": GPTNeoXArgs(**DEBUG | dict(n_kv_heads=8), rotary_dim=8),
    "pythia-1.4B": _sizes(2048, 24, 16, 32),
    "pythia-6.9B": _sizes(4096, 32, 32, 32, vocab_size=50432),
    "pythia-12B": _sizes(5120, 36, 40, 32, vocab_size=50688),
    "20B": _sizes(6144, 44, 64, 24, vocab_size=50432, approximate_gelu=True),
    "redpajama-3B": _sizes(2560, 32, 32, 80, vocab_size=50432, side_by_side=False),
}


def _to_hf(args: GPTNeoXArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' GPTNeoXConfig. Raises JobError for what it does not support."""
    if args.n_kv_heads != args.n_heads:
        raise JobError(f"n_kv_heads = {args.n_kv_heads}: transformers' GPT-NeoX only has n_heads = {args.n_heads}")
    fields = layer_norm_config(args, dtype, "GPTNeoX")
    del fields["num_key_value_heads"]
    names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    return {names.get(key, key): value for key, value in fields.items()} | {
        "model_type": "gpt_neox",
        "hidden_act": GELU[0] if args.approximate_gelu else "gelu",
        **{key: getattr(args, name) for name, key in (FLAGS | DROPOUTS).items()},
    }


APPROXIMATE = (*GELU, "gelu_fast")
"""Names of the same function."""
RENAMED = {"rotary_emb_base": ("rope_theta", 10000.0), "rotary_pct": ("partial_rotary_factor", 0.25)}
"""Keys that other families have under another name, and transformers' values where a config.json leaves them out."""


def _from_hf(config: Mapping[str, Any]) -> GPTNeoXArgs:
    activation, plain = config.get("hidden_act", "gelu"), dict(config)
    if activation not in ("gelu", *APPROXIMATE):
        raise JobError(f"hidden_act = {activation!r}, but this model only has 'gelu' and {', '.join(APPROXIMATE)}")
    tables = (config.get(name) for name in ("rope_parameters", "rope_scaling"))
    table_keys = {key for table in tables if isinstance(table, Mapping) for key in table}
    for name, (key, default) in RENAMED.items():
        if name in config or (key in config and key not in table_keys):  # transformers reads `name` alone
            values = {f"{name} or its default": read_number(config, name, default), key: config.get(key)}
            plain[key] = agreed_value(key, values, "remove the wrong one")
    return GPTNeoXArgs(
        **layer_norm_sizes(plain, 2048, 0.25),
        approximate_gelu=activation != "gelu",
        **{name: read_flag(config, key, True) for name, key in FLAGS.items()},
        **{name: read_number(config, key, 0.0) for name, key in DROPOUTS.items()},
    )


USED = KEYS - {"num_key_value_heads"} | {*RENAMED, *FLAGS.values(), *DROPOUTS.values()}
CONFIG = ConfigConverter(
    model_types=("gpt_neox",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    not_compared=(*NOT_IN_FORWARD, *DROPOUTS),
    tied_tensors=(("embed_in.weight", "embed_out.weight"),),
    keys=config_keys(
        USED,
        harmless=("custom_pipelines",),
        defaults={"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},  # of the first 20B; not read
    ),
)


FAMILY = Family(sizes=GPT_NEOX, config=CONFIG, spec="torchtitan.models.gpt_neox.model:SPEC", publisher="EleutherAI")
