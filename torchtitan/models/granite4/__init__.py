"""Granite 4: arguments, published sizes, and conversion from and to config.json (GraniteMoeHybridConfig).

Most layers have a mixer of Mamba 2 in place of attention; sizes with experts and without. No torch here, so
`torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.granite import FACTORS, GraniteFactors
from torchtitan.models.hf.config import (
    check_supported,
    decoder_config,
    decoder_sizes,
    read_flag,
    read_number,
    rotary_config,
    scaling_from_hf,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import FULL, read_pattern
from torchtitan.models.mamba2 import KEYS as MIXER_KEYS
from torchtitan.models.mamba2 import Mamba2Args, mixer_config, mixer_sizes
from torchtitan.models.moe import PLAIN_SOFTMAX, GroupedMoEArgs, check_exported, number_of_shared_experts
from torchtitan.models.sizes import DEBUG, GatedArgs, LayerPattern, Rope


@dataclass(frozen=True, kw_only=True)
class HybridArgs(GraniteFactors, Mamba2Args, LayerPattern):
    """Sizes of Granite 4. Layers with an "M" in `layer_pattern` have a mixer in place of attention."""

    vocab_size: int = 100352
    max_seq_len: int = 131072
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    attention_bias: bool = False
    rotary: bool = False  # attention has rotary positions, else none
    layer_pattern: str = "MMMMM*MMMM"
    ssm_state_dim: int = 128
    ssm_norm: ClassVar = True
    norm_before_gate: ClassVar = False

    def rope(self, layer: int) -> Rope | None:
        return super().rope(layer) if self.rotary else None


@dataclass(frozen=True, kw_only=True)
class Granite4Args(HybridArgs, GatedArgs):
    """Sizes of Granite 4 without experts."""


@dataclass(frozen=True, kw_only=True)
class Granite4MoEArgs(HybridArgs, GroupedMoEArgs):
    """Sizes of Granite 4 with experts in all layers, and a feed-forward beside them."""

    n_shared_experts: int = 2  # as one feed-forward
    normalize_top_k: bool = True
    mean_aux_loss: ClassVar = True


_micro: dict[str, Any] = dict(n_layers=40, ffn_dim=8192, head_dim=64, attention_multiplier=0.015625)
_micro |= dict(n_kv_heads=8, tied_embeddings=True)
_experts: dict[str, Any] = dict(n_layers=40, tied_embeddings=True)
_debug = {name: size for name, size in DEBUG.items() if name != "ffn_dim"}
GRANITE4 = {
    "debugmodel": Granite4MoEArgs(
        **_debug | dict(expert_dim=128, n_experts=8, top_k=2, layer_pattern="MM*", attention_multiplier=0.03125),
        **dict(ssm_heads=8, ssm_head_dim=32, ssm_state_dim=32),
    ),
    "micro": Granite4Args(
        **_micro, dim=2560, n_heads=40, logits_divisor=10.0, layer_pattern="*", rotary=True, rope_theta=10000000.0
    ),
    "h-micro": Granite4Args(**_micro, dim=2048, n_heads=32, logits_divisor=8.0, ssm_heads=64),
    "h-tiny": Granite4MoEArgs(
        **_experts | dict(dim=1536, n_heads=12, n_kv_heads=4, expert_dim=512, n_experts=64, top_k=6),
        **dict(ssm_heads=48, logits_divisor=6.0),
    ),
    "h-small": Granite4MoEArgs(
        **_experts | dict(dim=4096, n_heads=32, n_kv_heads=8, expert_dim=768, n_experts=72, top_k=10, ssm_heads=128)
    ),
}
KINDS = {"M": "linear_attention", "*": FULL}
"""Letters of `layer_pattern`, and transformers' names of these layers."""
EXPERT_KEYS = {
    "n_experts": ("num_local_experts", 8),
    "top_k": ("num_experts_per_tok", 2),
    "aux_loss_weight": ("router_aux_loss_coef", 0.001),
}
"""Numbers, and transformers' values where a config.json leaves them out."""
POSITIONS = {None: False, "nope": False, "rope": True}


def _to_hf(args: Granite4Args | Granite4MoEArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' GraniteMoeHybridConfig. Raises JobError for sizes that it does not have."""
    if isinstance(args, Granite4MoEArgs):
        check_exported(args, {**PLAIN_SOFTMAX, "normalize_top_k": True}, "Granite 4", shares=True)
        widths = {"intermediate_size": args.expert_dim}
        widths |= {"shared_intermediate_size": args.n_shared_experts * args.expert_dim}
        widths |= {key: getattr(args, name) for name, (key, _) in EXPERT_KEYS.items()}
    else:
        widths = dict.fromkeys(("intermediate_size", "shared_intermediate_size"), args.ffn_dim)
        widths |= dict.fromkeys(("num_local_experts", "num_experts_per_tok"), 0)
    fields = decoder_config(args, dtype) | rotary_config(args) | _mixers_to_hf(args) | widths
    return fields | {
        **{key: getattr(args, name) for name, key in FACTORS.items()},
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "head_dim": args.head_dim,
        "layer_types": [KINDS[letter] for letter in args.letters],
        "position_embedding_type": "rope" if args.rotary else None,
    }


def _mixers_to_hf(args: HybridArgs) -> dict[str, Any]:
    """Return the fields of the mixers. transformers judges them without any mixer too."""
    if not args.n_state_layers:
        return {"mamba_n_heads": 1, "mamba_d_head": "auto"}
    expansion, remainder = divmod(args.ssm_heads * args.ssm_head_dim, args.dim)
    if remainder:
        raise JobError(
            f"ssm_heads = {args.ssm_heads} of ssm_head_dim = {args.ssm_head_dim}: mixers of transformers' Granite 4 "
            f"are as wide as the model or a multiple of it, here of dim = {args.dim}"
        )
    return mixer_config(args) | {"mamba_expand": expansion}


def _from_hf(config: Mapping[str, Any]) -> Granite4Args | Granite4MoEArgs:
    check_supported(config, {"hidden_act": "silu"})
    positions = config.get("position_embedding_type")
    if not isinstance(positions, str | None) or positions not in POSITIONS:
        raise JobError(f"position_embedding_type = {positions!r}; allowed: 'rope', or 'nope' or null for none")
    sizes = decoder_sizes(config, 2048)
    dim, heads = sizes["dim"], sizes["n_heads"]
    pattern = read_pattern(config, sizes["n_layers"], KINDS)
    if "M" in pattern:
        sizes |= mixer_sizes(config, read_number(config, "mamba_expand", 2) * dim, "mamba_expand x hidden_size")
        sizes["ssm_out_bias"] = sizes["ssm_bias"]
    sizes |= {name: read_number(config, key, 1.0) for name, key in FACTORS.items()}
    sizes |= {
        "rope_scaling": scaling_from_hf(config),
        "n_kv_heads": read_number(config, "num_key_value_heads", heads, null=heads),
        "head_dim": read_number(config, "head_dim", dim // heads),
        "attention_bias": read_flag(config, "attention_bias", False),
        "rotary": POSITIONS[positions],
        "layer_pattern": pattern,
    }
    width = read_number(config, "shared_intermediate_size", 1024)
    if read_number(config, "num_local_experts", 8) == 0:
        return Granite4Args(**sizes, ffn_dim=width)
    sizes |= {name: read_number(config, key, default) for name, (key, default) in EXPERT_KEYS.items()}
    size = read_number(config, "intermediate_size", 11008)
    shared = number_of_shared_experts("shared_intermediate_size", width, "intermediate_size", size)
    return Granite4MoEArgs(**sizes, expert_dim=size, n_shared_experts=shared)


USED = {"head_dim", "shared_intermediate_size", "position_embedding_type", "layer_types", *FACTORS.values()}
KEYS = config_keys(
    DECODER_KEYS | USED | MIXER_KEYS | {key for key, _ in EXPERT_KEYS.values()},
    harmless=("mamba_chunk_size", "init_method"),
    defaults={"normalization_function": "rmsnorm"},
)
CONFIG = ConfigConverter(
    model_types=("granitemoehybrid",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    keys=KEYS,
    aliases={"layers_block_type": "layer_types"},
)


FAMILY = Family(sizes=GRANITE4, config=CONFIG, spec="torchtitan.models.granite4.model:SPEC", publisher="ibm-granite")
