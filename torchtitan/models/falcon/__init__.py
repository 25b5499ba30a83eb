"""Falcon of 2023 and 2024: arguments, published sizes, and conversion from and to config.json (FalconConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_numbers, check_supported, read_flag, read_number
from torchtitan.models.hf.config_keys import config_keys
from torchtitan.models.layer_norms import KEYS, LayerNormArgs, layer_norm_config, layer_norm_sizes
from torchtitan.models.sizes import DEBUG, NormOrder


@dataclass(frozen=True, kw_only=True)
class FalconArgs(LayerNormArgs):
    """Sizes of Falcon. `norms`: number of norms of a block whose attention and feed-forward are side by side.

    With 0 the feed-forward follows attention, after a norm of its own.
    """

    vocab_size: int = 65024
    max_seq_len: int = 2048
    tied_embeddings: bool = True
    norms: int = 1
    bias: bool = False

    gate: ClassVar = False
    activation: ClassVar = "gelu"
    may_be_zero: ClassVar = ("norms",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norms not in ORDERS:
            raise JobError(f"norms = {self.norms}: must be 1 or 2, or 0 for a feed-forward that follows attention")

    @property
    def norm_order(self) -> NormOrder:
        return ORDERS[self.norms]

    @property
    def attention_bias(self) -> bool:
        return self.bias

    mlp_bias = attention_bias


ORDERS: dict[int, NormOrder] = {0: "pre", 1: "shared", 2: "parallel"}
_7b: dict[str, Any] = dict(dim=4544, n_layers=32, n_heads=71, n_kv_heads=1, head_dim=64, rotary_dim=64, ffn_dim=18176)
FALCON = {
    "debugmodel": FalconArgs(**DEBUG, rotary_dim=32),
    "7B": FalconArgs(**_7b),
    "40B": FalconArgs(**_7b | dict(dim=8192, n_layers=60, n_heads=128, n_kv_heads=8, ffn_dim=32768), norms=2),
}
RENAMED = {"intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads"}
RENAMED |= {"layer_norm_eps": "layer_norm_epsilon", "hidden_act": "activation"}
"""Names of keys in other families, and Falcon's."""


def _to_hf(args: FalconArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' FalconConfig. Raises JobError for what it does not support."""
    if args.rotary_dim != args.head_dim:
        raise JobError(f"rotary_dim = {args.rotary_dim}: transformers' Falcon only has head_dim = {args.head_dim}")
    several = args.n_kv_heads > 1 or args.norms == 2
    if several and not args.norms and args.n_kv_heads < args.n_heads:
        raise JobError(f"n_kv_heads = {args.n_kv_heads} with norms = 0: transformers' Falcon only has 1 or n_heads")
    fields = {RENAMED.get(key, key): value for key, value in layer_norm_config(args, dtype, "Falcon").items()}
    new = several and args.norms > 0
    return {key: value for key, value in fields.items() if key != "partial_rotary_factor"} | {
        "activation": "gelu",
        "alibi": False,
        "bias": args.bias,
        "multi_query": args.n_kv_heads == 1,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": args.norms if new else None,
        "parallel_attn": args.norms > 0,
    }


FLAGS = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False}
"""Flags, and transformers' values where a config.json leaves them out."""


def _from_hf(config: Mapping[str, Any]) -> FalconArgs:
    new, multi_query, side_by_side, bias, _ = (read_flag(config, key, default) for key, default in FLAGS.items())
    dropout = {"hidden_dropout": read_number(config, "hidden_dropout", 0.0)}  # of the sum of two outputs
    check_supported(config | dropout, {"alibi": False, "activation": "gelu", "hidden_dropout": 0.0})
    if new and not side_by_side:
        raise JobError("parallel_attn = False, but this model only has True with new_decoder_architecture")
    norms = read_number(config, "num_ln_in_parallel_attn", 1 + new, null=1 + new)
    if norms not in (1, 2)[: 1 + new]:
        raise JobError(
            f"num_ln_in_parallel_attn = {norms}, but this model only has 1, or 2 with new_decoder_architecture"
        )
    check_numbers(config, ("hidden_size", "num_attention_heads"))
    heads, width = config["num_attention_heads"], 4 * config["hidden_size"]
    kv_heads = read_number(config, "num_kv_heads", heads, null=heads)
    if not new and not multi_query and kv_heads != heads:
        raise JobError(f"num_kv_heads = {kv_heads}, but without new_decoder_architecture this model only has {heads}")
    plain = {"tie_word_embeddings": True} | config
    plain |= {"intermediate_size": read_number(config, "ffn_hidden_size", width, null=width)}
    plain |= {"num_key_value_heads": kv_heads if new or not multi_query else 1}
    sizes = layer_norm_sizes(plain, 2048, 1.0, "layer_norm_epsilon")
    if sizes["rotary_dim"] != sizes["head_dim"]:
        raise JobError("partial_rotary_factor of rotary positions, of which this model only has 1.0; remove it")
    return FalconArgs(**sizes, norms=norms if side_by_side else 0, bias=bias)


USED = {*RENAMED.values(), *FLAGS, "num_ln_in_parallel_attn", "hidden_dropout"}
CONFIG = ConfigConverter(
    model_types=("falcon",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    tied_tensors=(("word_embeddings.weight", "lm_head.weight"),),
    keys=config_keys(
        KEYS - {*RENAMED, "partial_rotary_factor"} | USED,
        defaults={"apply_residual_connection_post_layernorm": False},  # of the model's own code
    ),
)


FAMILY = Family(sizes=FALCON, config=CONFIG, spec="torchtitan.models.falcon.model:SPEC", publisher="tiiuae")
