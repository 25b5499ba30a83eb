"""Nemotron-H and Nemotron 3: arguments, published sizes, and conversion from and to config.json (NemotronHConfig).

Each layer is one of attention, a mixer of Mamba 2, a feed-forward or experts. No torch here, so `torchtitan check`
stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.core.files import agreed_value
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, decoder_config, decoder_sizes, read_flag, read_number
from torchtitan.models.hf.config_keys import config_keys
from torchtitan.models.hf.layer_kinds import FULL, read_pattern
from torchtitan.models.mamba2 import Mamba2Args, check_step_limit
from torchtitan.models.moe import GroupedMoEArgs, check_exported, number_of_shared_experts
from torchtitan.models.sizes import DEBUG, GatedArgs, LayerPattern, Rope, Sizes, check_not_negative, ungated


@dataclass(frozen=True, kw_only=True)
class SoloArgs(Mamba2Args, LayerPattern):
    """Sizes of layers of one part each, by the letters of `layer_pattern`: "M" for a mixer, "-" for a feed-forward."""

    head_dim: int = 128
    vocab_size: int = 131072
    norm_eps: float = 1e-5
    max_seq_len: int = 8192
    layer_pattern: str = "M-M-M-M*-"
    mlp_bias: bool = False
    ssm_heads: int = 128
    ssm_state_dim: int = 128
    ssm_groups: int = 8
    min_step: float = 0.001  # of a mixer
    ssm_norm: ClassVar = True
    norm_before_gate: ClassVar = False
    gate: ClassVar = False
    activation: ClassVar = "relu_squared"
    tied_embeddings: ClassVar = False
    rope_theta: ClassVar = 10000.0  # not used, as there are no rotary positions
    rope_scaling: ClassVar = None
    LETTERS: ClassVar = "*M-"

    def rope(self, layer: int) -> Rope | None:
        return None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "min_step")

    @property
    def norm_widths(self) -> dict[str, int]:
        return {"norm.weight": self.dim}

    def block_linears(self, layer: int) -> Sizes:
        if self.letter(layer) == "-":
            return ungated("feed_forward", self.dim, self.ffn_dim)
        return self.attention_linears(layer)


@dataclass(frozen=True, kw_only=True)
class NemotronHArgs(SoloArgs, GatedArgs):
    """Sizes of a Nemotron-H without experts."""


@dataclass(frozen=True, kw_only=True)
class NemotronHMoEArgs(SoloArgs, GroupedMoEArgs):
    """Sizes of a Nemotron 3 with experts, which are routed as DeepSeek V3's, in layers with an "E"."""

    layer_pattern: str = "MEMEM*E"
    n_shared_experts: int = 2  # as one feed-forward
    score: ClassVar = "sigmoid"
    expert_bias: ClassVar = True
    gated_experts: ClassVar = False
    mlp_bias: ClassVar = False
    LETTERS: ClassVar = "*ME"

    @property
    def expert_layers(self) -> int:
        return self.letters.count("E")

    def block_linears(self, layer: int) -> Sizes:
        return self.moe_linears if self.letter(layer) == "E" else self.attention_linears(layer)

    def ffn_linears(self, layer: int) -> Sizes:
        return self.block_linears(layer)


_debug: dict[str, Any] = {name: size for name, size in DEBUG.items() if name != "ffn_dim"}
_debug |= dict(ssm_heads=8, ssm_head_dim=32, ssm_state_dim=32, ssm_groups=2)
NEMOTRON_H = {
    "debugmodel": NemotronHMoEArgs(
        **_debug | dict(expert_dim=128, n_experts=8, top_k=2, route_scale=2.5, normalize_top_k=True),
        layer_pattern="MEM*E",
    ),
    "8B": NemotronHArgs(
        **dict(dim=4096, n_layers=52, n_heads=32, n_kv_heads=8, ffn_dim=21504),
        layer_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
    ),
    "3-Nano-30B-A3B": NemotronHMoEArgs(
        **dict(dim=2688, n_layers=52, n_heads=32, n_kv_heads=2, ssm_heads=64, max_seq_len=262144),
        **dict(expert_dim=1856, n_experts=128, top_k=6, route_scale=2.5, normalize_top_k=True),
        layer_pattern="MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME",
    ),
}
KINDS = {"M": "linear_attention", "*": FULL, "-": "mlp", "E": "moe"}
"""Letters of `layer_pattern`, and transformers' names of these layers."""
NUMBERS = {
    "n_kv_heads": ("num_key_value_heads", 8),
    "head_dim": ("head_dim", 128),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "max_seq_len": ("max_position_embeddings", 4096),
    "ssm_heads": ("mamba_num_heads", 128),
    "ssm_head_dim": ("mamba_head_dim", 64),
    "ssm_state_dim": ("ssm_state_size", 128),
    "ssm_groups": ("n_groups", 8),
    "conv_taps": ("conv_kernel", 4),
    "min_step": ("time_step_min", 0.001),
}
FLAGS = {"ssm_bias": ("use_bias", False), "conv_bias": ("use_conv_bias", True), "mlp_bias": ("mlp_bias", False)}
EXPERT_NUMBERS = {
    "n_experts": ("n_routed_experts", 8),
    "top_k": ("num_experts_per_tok", 2),
    "route_scale": ("routed_scaling_factor", 1.0),
    "n_groups": ("n_group", 1),
    "top_groups": ("topk_group", 1),
    "expert_dim": ("moe_intermediate_size", 7688),
}
"""Names here and in config.json, and transformers' values where it leaves them out."""
NO_FIELDS = ("num_hidden_layers", "rms_norm_eps", "hidden_act", "rope_theta")
SHARED_KEY, PATTERN_KEY = "moe_shared_expert_intermediate_size", "hybrid_override_pattern"
KIND_LISTS = ("layers_block_type", "layer_types")
"""Keys of the list of layers' kinds, of which transformers writes the first or both."""


def _to_hf(args: NemotronHArgs | NemotronHMoEArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' NemotronHConfig. Raises JobError for unsupported routing."""
    names = {name: key for name, (key, _) in (NUMBERS | FLAGS).items()}
    if isinstance(args, NemotronHMoEArgs):
        groups = {"group_score": "top2"} if args.n_groups > 1 else {}
        check_exported(args, {"score_before_experts": False} | groups, "Nemotron-H", shares=True)
        names |= {name: key for name, (key, _) in EXPERT_NUMBERS.items()} | {"normalize_top_k": "norm_topk_prob"}
        width = {SHARED_KEY: args.n_shared_experts * args.expert_dim}
    else:
        width = {"intermediate_size": args.ffn_dim}
    fields = {key: value for key, value in decoder_config(args, dtype).items() if key not in NO_FIELDS}
    return (
        fields
        | width
        | {key: getattr(args, name) for name, key in names.items()}
        | {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "layers_block_type": [KINDS[letter] for letter in args.letters],
        }
    )


def _from_hf(config: Mapping[str, Any]) -> NemotronHArgs | NemotronHMoEArgs:
    check_supported(config, {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "attention_bias": False})
    check_supported(config, {"tie_word_embeddings": False})  # transformers unties them
    check_step_limit(config)
    letters = _read_letters(config)
    sizes = decoder_sizes({**config, "num_hidden_layers": len(letters)}, 4096)
    del sizes["rope_theta"], sizes["tied_embeddings"]
    sizes |= {name: read_number(config, key, default) for name, (key, default) in NUMBERS.items()}
    sizes |= {name: read_flag(config, key, default) for name, (key, default) in FLAGS.items()}
    sizes |= {"ssm_out_bias": sizes["ssm_bias"], "layer_pattern": letters}
    # of the program that trained Nemotron-H; transformers does not read them
    check_supported(config, {"attention_head_dim": sizes["head_dim"], "rms_norm_eps": sizes["norm_eps"]})
    if "E" not in letters:
        return NemotronHArgs(**sizes, ffn_dim=read_number(config, "intermediate_size", 21504))
    if "-" in letters:
        raise JobError(f"layers of the kinds {KINDS['-']} and {KINDS['E']}; allowed: one of the two")
    check_supported(config, {"mlp_bias": False})
    del sizes["mlp_bias"]
    sizes |= {name: read_number(config, key, default) for name, (key, default) in EXPERT_NUMBERS.items()}
    width = read_number(config, SHARED_KEY, 7688)
    shared = number_of_shared_experts(SHARED_KEY, width, "moe_intermediate_size", sizes["expert_dim"])
    groups = {"group_score": "top2"} if sizes["n_groups"] > 1 else {}
    normalizes = read_flag(config, "norm_topk_prob", True)
    return NemotronHMoEArgs(**sizes, **groups, n_shared_experts=shared, normalize_top_k=normalizes)


def _read_letters(config: Mapping[str, Any]) -> str:
    """Return the letters of the layers, of a list or of a pattern, if they agree. Raises JobError for others."""
    pattern, sources = config.get(PATTERN_KEY), {}
    if pattern is not None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - KINDS.keys():
            raise JobError(f"{PATTERN_KEY} = {pattern!r}; allowed: a text of the letters {' '.join(KINDS)}")
        sources[PATTERN_KEY] = pattern
    # transformers reads the second name even if it is null
    lists = [key for key in KIND_LISTS if config.get(key) is not None or (key in config and key == KIND_LISTS[1])]
    for key in lists or KIND_LISTS[: not sources]:
        length = len(config[key]) if isinstance(config.get(key), list) else 0
        sources[key] = read_pattern(config, length, KINDS, key)
    letters = agreed_value("the kinds of layers", sources, "remove the wrong one")
    if config.get("num_hidden_layers", len(letters)) not in (None, len(letters)) or not letters:
        raise JobError(
            f"num_hidden_layers = {config.get('num_hidden_layers')!r}, but {len(letters)} layers have a kind"
        )
    return letters


USED = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings", PATTERN_KEY}
USED |= {"intermediate_size", *KIND_LISTS, "mlp_hidden_act", "mamba_hidden_act", "attention_bias", SHARED_KEY}
USED |= {key for key, _ in (NUMBERS | FLAGS | EXPERT_NUMBERS).values()} | {"norm_topk_prob", "time_step_limit"}
USED |= {"attention_head_dim", "rms_norm_eps"}
# of multi-token prediction, which transformers does not read either; of initial values, computing and older programs
_OTHERS = ("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "keep_mtp")
_OTHERS += ("time_step_max", "time_step_floor", "rescale_prenorm_residual", "residual_in_fp32", "chunk_size", "expand")
_OTHERS += ("mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep", "moe_shared_expert_overlap")
_OTHERS += ("n_shared_experts", "mamba_proj_bias", "rope_theta", "partial_rotary_factor", "norm_eps", "time_step_rank")
KEYS = config_keys(USED, harmless=_OTHERS, defaults={"hidden_dropout": 0.0, "sliding_window": None})
ALIASES = {"num_local_experts": "n_routed_experts"}
ALIASES |= {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min"}
ALIASES |= {"mamba_dt_limit": "time_step_limit", "mamba_conv_bias": "use_conv_bias"}
CONFIG = ConfigConverter(model_types=("nemotron_h",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS, aliases=ALIASES)


FAMILY = Family(sizes=NEMOTRON_H, config=CONFIG, spec="torchtitan.models.nemotron_h.model:SPEC", publisher="nvidia")
