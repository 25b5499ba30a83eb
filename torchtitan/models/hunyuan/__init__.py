"""Hunyuan without experts: arguments, published sizes, and conversion from and to config.json (HunYuanDenseV1Config).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.core.files import DeclaredKeys, agreed_value
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_flag, read_number
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.sizes import DEBUG, GatedArgs, RopeScaling


@dataclass(frozen=True, kw_only=True)
class HunyuanArgs(GatedArgs):
    vocab_size: int = 120818
    tied_embeddings: bool = True
    attention_bias: bool = False

    qk_norm: ClassVar = True
    qk_norm_rotated: ClassVar = True


ALPHA = RopeScaling(1000.0, kind="ntk")
HUNYUAN = {
    "debugmodel": HunyuanArgs(**DEBUG),
    "0.5B": HunyuanArgs(dim=1024, n_layers=24, n_heads=16, n_kv_heads=8, ffn_dim=3584, rope_scaling=ALPHA),
    "1.8B": HunyuanArgs(dim=2048, n_layers=32, n_heads=16, n_kv_heads=4, ffn_dim=6144, rope_scaling=ALPHA),
    "4B": HunyuanArgs(dim=3072, n_layers=36, n_heads=32, n_kv_heads=8, ffn_dim=8192, rope_scaling=ALPHA),
    "7B": HunyuanArgs(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336, vocab_size=128167, rope_scaling=ALPHA
    ),
}


def _to_hf(args: HunyuanArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' HunYuanDenseV1Config."""
    fields = {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense"}
    if args.rope_scaling and args.rope_scaling.kind == "ntk":
        fields |= {"rope_scaling": {"rope_type": "dynamic", "alpha": args.rope_scaling.factor, "factor": 1.0}}
        fields |= {"rope_theta": args.rope_theta}
    return gated_config(args, dtype) | fields


ALPHA_KEYS = DeclaredKeys(
    used=frozenset(("rope_type", "type", "rope_theta", "alpha")),
    harmless=frozenset(("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")),
)
"""Keys of a table of rotary positions with `alpha`, the factor by which the slowest ones are slower."""


def split_alpha(config: Mapping[str, Any]) -> tuple[dict[str, Any], float | None]:
    """Return a config without the tables of rotary positions that have an alpha, and this alpha."""
    plain, alphas = dict(config), {}
    for name in ("rope_parameters", "rope_scaling"):
        table = config.get(name)
        if not isinstance(table, Mapping) or not table.get("alpha"):
            alphas[name] = None if table in (None, {}) else 0.0
            continue
        ALPHA_KEYS.check(table, name, "remove it, if the model was trained without it")
        kinds = {f"{name}'s {key}": table.get(key) for key in ("rope_type", "type")}
        if agreed_value("the type of rotary positions", kinds, "remove the wrong one") != "dynamic":
            raise JobError(f"{name} = {dict(table)!r}; alpha is only read with the type 'dynamic'; remove it")
        alphas[name] = read_number(table, "alpha", 1.0)
        plain[name] = {key: table[key] for key in ("rope_theta",) if key in table}
    return plain, agreed_value("alpha of rotary positions", alphas, "remove the wrong table")


def _from_hf(config: Mapping[str, Any]) -> HunyuanArgs:
    check_supported(config, {"hidden_act": "silu"})
    if config.get("head_dim") is None:  # transformers 5.23 fails to build the model
        raise JobError(
            "head_dim = None; allowed: a whole number; write the width of a head, as attention_head_dim has it"
        )
    plain, alpha = split_alpha(config)
    sizes = gated_sizes({"rms_norm_eps": 1e-5} | plain, 2048)
    check_supported(config, {"attention_head_dim": sizes["head_dim"]})
    sizes |= {"rope_scaling": RopeScaling(alpha, kind="ntk")} if alpha else {}
    return HunyuanArgs(**sizes, attention_bias=read_flag(config, "attention_bias", False))


_UNUSED = ("eod_token_id", "cla_share_factor", "org_vocab_size", "pad_id", "mask_init_id", "pool_type", "dense_list")
_UNUSED += ("im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id", "anyres_pooling_size")
_DEFAULTS = {"use_qk_norm": True, "use_rotary_pos_emb": True, "norm_type": "rms", "mlp_bias": False}
CONFIG = ConfigConverter(
    model_types=("hunyuan_v1_dense",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    keys=config_keys(DECODER_KEYS | {"head_dim", "attention_head_dim"}, harmless=_UNUSED, defaults=_DEFAULTS),
)


FAMILY = Family(sizes=HUNYUAN, config=CONFIG, spec="torchtitan.models.hunyuan.model:SPEC", publisher="tencent")
