"""DeepSeek V2, V3 and Kimi K2: arguments, their limits on a job, published sizes, conversion from and to config.json.

No torch here, so `torchtitan check` stays quick. The version of a config.json follows from the routing: softmax is V2,
sigmoid with an expert bias V3.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError, LimitError
from torchtitan.models.family import NOT_IN_FORWARD, ConfigConverter, Family
from torchtitan.models.hf.config import (
    check_numbers,
    check_supported,
    decoder_config,
    read_number,
    rope_config,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.moe import ROUTER, DenseFirstArgs
from torchtitan.models.sizes import NORMS, Names, Sizes, check_even, check_not_negative, check_positive


def multi_token_limits(depths: int, overrides: Mapping[str, Any], *, tp: int, cp: int, pp: int) -> Iterator[LimitError]:
    """Yield the limits that multi-token prediction with `depths` depths sets: only data and expert parallel support it.

    `overrides` are the sizes that the job sets.
    """
    axes = {
        "tensor": (tp, "whose last norm and head are not split"),
        "context": (cp, "which needs tokens of other ranks"),
        "pipeline": (pp, "which needs the embedding in the last stage"),
    }
    for axis, (degree, reason) in axes.items():
        if depths and degree > 1:
            allowed = f"1 with multi-token prediction (n_mtp_layers = {depths} in model.overrides), {reason}"
            remedy = "write 1, or leave n_mtp_layers out"
            yield LimitError(f"parallelism.{axis}_parallel_degree", degree, allowed, remedy)
    weight = overrides.get("mtp_loss_weight")
    if weight is not None and not depths:
        allowed = "mtp_loss_weight with n_mtp_layers of at least 1, whose loss it weighs"
        remedy = "set n_mtp_layers too, or leave it out"
        yield LimitError("model.overrides", f"mtp_loss_weight = {weight}", allowed, remedy)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's scaling of rotary wavelengths (arXiv:2309.00071), with DeepSeek's two factors.

    Features that turn less than beta_slow times within original_max_seq_len tokens become `factor` times slower, those
    that turn more than beta_fast times stay, and those between are blended. Longer contexts flatten attention, so
    scores are multiplied by (0.1 mscale_all_dim ln factor + 1)^2, and rotated features by (0.1 mscale ln factor + 1) /
    (0.1 mscale_all_dim ln factor + 1).
    """

    factor: float = 40.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_seq_len: int = 4096
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DeepseekArgs(DenseFirstArgs):
    """Arguments of DeepSeek models, with experts from layer `n_dense_layers` on.

    Keys and values of a token are computed from kv_lora_rank numbers. The rotated part of a key, qk_rope_head_dim
    features, is shared by all heads. After the layers, n_mtp_layers depths of multi-token prediction learn to predict
    further tokens (model.py), in training only.
    """

    q_lora_rank: int = 0  # 0: queries are not compressed
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_theta: float = 10000.0
    rope_scaling: YarnScaling | None = YarnScaling()
    max_seq_len: int = 163840
    n_mtp_layers: int = 0
    mtp_loss_weight: float = 0.3  # of the mean of the depths' losses, added to the main loss
    may_be_zero: ClassVar = (*DenseFirstArgs.may_be_zero, "q_lora_rank", "n_mtp_layers", "mtp_loss_weight")
    query_growth = 0.0  # after each `query_period` positions queries grow by this times ln(1 + number of periods)
    query_period = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        check_not_negative(self, "n_mtp_layers", "mtp_loss_weight")
        if self.q_lora_rank < 0:
            raise JobError(f"q_lora_rank = {self.q_lora_rank}: must be 0 (queries are not compressed) or more")
        check_even(self, "qk_rope_head_dim")
        if self.v_head_dim > self.qk_head_dim:
            raise JobError(
                f"v_head_dim = {self.v_head_dim}: must be at most qk_nope_head_dim + qk_rope_head_dim = "
                f"{self.qk_head_dim}, as attention kernels take values as wide as keys, or narrower"
            )

    def limits(self, overrides: Mapping[str, Any], *, tp: int, cp: int, pp: int) -> Iterator[LimitError]:
        """Yield the limits on a job's parallel degrees and on the sizes that the job sets."""
        return multi_token_limits(self.n_mtp_layers, overrides, tp=tp, cp=cp, pp=pp)

    @property
    def expert_layers(self) -> int:
        return super().expert_layers + self.n_mtp_layers

    @property
    def num_kv_heads(self) -> int:
        return self.n_heads

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def _attention_matrices(self) -> int:
        queries = self.n_heads * self.qk_head_dim
        query = self.q_lora_rank * (self.dim + queries) if self.q_lora_rank else self.dim * queries
        latent = self.dim * (self.kv_lora_rank + self.qk_rope_head_dim)
        unfold = self.kv_lora_rank * self.n_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + latent + unfold + self.n_heads * self.v_head_dim * self.dim

    def block_linears(self, layer: int) -> Sizes:
        queries, unfolded = self.n_heads * self.qk_head_dim, self.n_heads * (self.qk_nope_head_dim + self.v_head_dim)
        sizes = {"attention.wq": (queries, self.q_lora_rank or self.dim)}
        if self.q_lora_rank:
            sizes["attention.wq_a"] = (self.q_lora_rank, self.dim)
        sizes["attention.wkv_a"] = (self.kv_lora_rank + self.qk_rope_head_dim, self.dim)
        sizes["attention.wkv_b"] = (unfolded, self.kv_lora_rank)
        sizes["attention.wo"] = (self.dim, self.n_heads * self.v_head_dim)
        if layer >= self.n_layers:  # a depth of multi-token prediction
            sizes["eh_proj"] = (self.dim, 2 * self.dim)
        return sizes | self.ffn_linears(layer)

    def block_others(self, layer: int) -> Names:
        compressed = ("attention.q_norm.weight",) if self.q_lora_rank else ()
        routed = (ROUTER,) if layer >= self.n_dense_layers else ()
        depth = ("enorm.weight", "hnorm.weight", "norm.weight") if layer >= self.n_layers else ()
        return (*NORMS, "attention.kv_norm.weight", *compressed, *routed, *depth)

    def _matrices(self, moe: int) -> int:
        attention = (self.n_layers + self.n_mtp_layers) * self._attention_matrices
        joined = self.n_mtp_layers * 2 * self.dim**2
        return attention + self._ffn_matrices(moe) + joined + self.dim * self.vocab_size

    @property
    def num_matmul_parameters(self) -> int:
        """Number of weights that a token is multiplied with. The head counts once more for each depth."""
        return super().num_matmul_parameters + self.n_mtp_layers * self.dim * self.vocab_size

    @property
    def _norm_parameters(self) -> int:
        of_layers = (self.n_layers + self.n_mtp_layers) * (2 * self.dim + self.q_lora_rank + self.kv_lora_rank)
        return of_layers + (3 * self.n_mtp_layers + 1) * self.dim


def _v2(**sizes: object) -> DeepseekArgs:
    shared = {"vocab_size": 102400, "top_k": 6, "n_shared_experts": 2}
    return DeepseekArgs(**shared, rope_scaling=YarnScaling(mscale=0.707, mscale_all_dim=0.707), **sizes)


def _v3(**sizes: object) -> DeepseekArgs:
    return DeepseekArgs(score="sigmoid", normalize_top_k=True, expert_bias=True, **sizes)


DEEPSEEK = {
    # The proportions of V2-Lite's attention, routed as V3. With the attention of the debug model of PyTorch's
    # torchtitan, eight times as wide as the model, AdamW pushes all tokens in one direction within ten steps and no
    # router tells them apart.
    "debugmodel": _v3(
        dim=256,
        n_layers=6,
        n_heads=8,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        vocab_size=2048,
        ffn_dim=1024,
        expert_dim=256,
        n_experts=8,
        top_k=3,
        n_shared_experts=2,
        bias_rate=0.01,  # ten times V3's: the 60 steps of deepseek_debug.toml must suffice
        max_seq_len=16384,
    ),
    # V2-Lite
    "16B": _v2(
        dim=2048,
        n_layers=27,
        n_heads=16,
        ffn_dim=10944,
        expert_dim=1408,
        n_experts=64,
        aux_loss_weight=0.001,
    ),
    # V2
    "236B": _v2(
        dim=5120,
        n_layers=60,
        n_heads=128,
        ffn_dim=12288,
        q_lora_rank=1536,
        expert_dim=1536,
        n_experts=160,
        n_groups=8,
        top_groups=3,
        route_scale=16.0,
        aux_loss_weight=0.003,
    ),
    # V3
    "671B": _v3(
        dim=7168,
        n_layers=61,
        n_dense_layers=3,
        n_heads=128,
        vocab_size=129280,
        ffn_dim=18432,
        q_lora_rank=1536,
        expert_dim=2048,
        n_experts=256,
        top_k=8,
        n_shared_experts=1,
        route_scale=2.5,
        n_groups=8,
        top_groups=4,
        group_score="top2",
        aux_loss_weight=0.0001,
    ),
    "Kimi-K2": _v3(
        dim=7168,
        n_layers=61,
        n_heads=64,
        vocab_size=163840,
        ffn_dim=18432,
        q_lora_rank=1536,
        expert_dim=2048,
        n_experts=384,
        top_k=8,
        n_shared_experts=1,
        route_scale=2.827,
        aux_loss_weight=0.001,
        rope_theta=50000.0,
        rope_scaling=YarnScaling(factor=32.0, beta_fast=1.0),
        max_seq_len=131072,
    ),
}


V2 = {"score": "softmax", "normalize_top_k": False, "expert_bias": False, "group_score": "max"}
V3 = {"score": "sigmoid", "expert_bias": True, "group_score": "top2"}


def _to_hf(args: DeepseekArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' DeepseekV2Config or DeepseekV3Config.

    Raises JobError for routing that neither supports.
    """
    version = 3 if args.score == "sigmoid" else 2
    supported = (V3 if version == 3 else V2) | {"score_before_experts": False}
    if args.n_groups == 1:
        del supported["group_score"]
    for name, value in supported.items():
        if getattr(args, name) != value:
            setting = f"{name} = {getattr(args, name)!r} with score = {args.score!r}"
            raise JobError(f"{setting}: transformers' DeepSeek V{version} only has {value!r}")
    if args.n_shared_experts == 0:
        raise JobError("n_shared_experts = 0: transformers' DeepSeek models have at least 1")
    routing = {
        2: {"scoring_func": "softmax", "topk_method": "greedy" if args.n_groups == 1 else "group_limited_greedy"},
        3: {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
    }
    return decoder_config(args, dtype) | {
        "architectures": [f"DeepseekV{version}ForCausalLM"],
        "model_type": f"deepseek_v{version}",
        "intermediate_size": args.ffn_dim,
        "first_k_dense_replace": args.n_dense_layers,
        "moe_layer_freq": 1,
        "q_lora_rank": args.q_lora_rank or None,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "v_head_dim": args.v_head_dim,
        "moe_intermediate_size": args.expert_dim,
        "n_routed_experts": args.n_experts,
        "n_shared_experts": args.n_shared_experts,
        "num_experts_per_tok": args.top_k,
        "n_group": args.n_groups,
        "topk_group": args.top_groups,
        "norm_topk_prob": args.normalize_top_k,
        "routed_scaling_factor": args.route_scale,
        "aux_loss_alpha": args.aux_loss_weight,
        "seq_aux": True,
        "num_nextn_predict_layers": args.n_mtp_layers,
        "rope_scaling": _scaling_to_hf(args.rope_scaling),
        **routing[version],
    }


GROUPS = ("n_group", "topk_group")
ABSENT: dict[int, dict[str, Any]] = {
    2: {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0}
    | {"max_position_embeddings": 2048},
    3: {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
    | {"max_position_embeddings": 4096},
}
"""By version, transformers' values of keys that a config leaves out."""


def _from_hf(config: Mapping[str, Any]) -> DeepseekArgs:
    version = 2 if config["model_type"] == "deepseek_v2" else 3
    numbers = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    numbers += ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size")
    numbers += ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
    check_numbers(config, numbers)
    only = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1}
    only |= {"num_key_value_heads": config["num_attention_heads"]}
    only |= {"norm_topk_prob": False, "scoring_func": "softmax"} if version == 2 else {}
    only |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"} if version == 3 else {}
    check_supported(config, only, nullable=("norm_topk_prob", "scoring_func", *("topk_method",) * (version == 3)))
    if version == 2 and config.get("topk_method", "greedy") not in ("greedy", "group_limited_greedy"):
        raise JobError(f"topk_method = {config['topk_method']!r}; allowed: 'greedy' and 'group_limited_greedy'")
    if version == 2 and config.get("topk_method") == "group_limited_greedy":
        check_numbers(config, GROUPS)
    if version == 3 and config.get("rope_interleave", True) is not True:  # for transformers null means false
        raise JobError(f"rope_interleave = {config['rope_interleave']!r}, but this model only has True")
    defaults = ABSENT[version]
    n_groups, top_groups = (read_number(config, name, defaults[name], null=1) or 1 for name in GROUPS)
    if version == 2 and config.get("topk_method", "greedy") == "greedy" or config.get("n_group", n_groups) is None:
        n_groups, top_groups = 1, 1
    routing = {**(V3 if version == 3 else V2), "normalize_top_k": version == 3 and config.get("norm_topk_prob", True)}
    if n_groups == 1:
        del routing["group_score"]
    return DeepseekArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_dense_layers=min(
            read_number(config, "first_k_dense_replace", defaults["first_k_dense_replace"]), config["num_hidden_layers"]
        ),
        n_heads=config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        ffn_dim=config["intermediate_size"],
        q_lora_rank=read_number(config, "q_lora_rank", 1536, null=0),
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        expert_dim=config["moe_intermediate_size"],
        n_experts=config["n_routed_experts"],
        n_shared_experts=config["n_shared_experts"],
        top_k=config["num_experts_per_tok"],
        n_groups=n_groups,
        top_groups=top_groups,
        route_scale=read_number(config, "routed_scaling_factor", defaults["routed_scaling_factor"]),
        aux_loss_weight=read_number(config, "aux_loss_alpha", 0.0),
        norm_eps=read_number(config, "rms_norm_eps", 1e-6),
        rope_theta=rope_config(config)["rope_theta"],
        rope_scaling=_scaling_from_hf(config),
        tied_embeddings=config.get("tie_word_embeddings", False),
        max_seq_len=read_number(config, "max_position_embeddings", defaults["max_position_embeddings"]),
        n_mtp_layers=read_number(config, "num_nextn_predict_layers", 0, null=0),
        **routing,
    )


def _scaling_to_hf(scaling: YarnScaling | None) -> dict[str, Any] | None:
    return scaling and {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": scaling.factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "original_max_position_embeddings": scaling.original_max_seq_len,
        "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim,
    }


def _scaling_from_hf(config: Mapping[str, Any]) -> YarnScaling | None:
    rope = rope_config(config)
    if rope["rope_type"] == "default":
        return None
    keys = ("factor", "original_max_position_embeddings")
    if rope["rope_type"] != "yarn" or any(not rope.get(key) for key in keys):
        raise JobError(f"rotary scaling {dict(rope)}; allowed are none and type yarn with {', '.join(keys)}")
    check_supported(rope, {"attention_factor": None, "truncate": True, "partial_rotary_factor": 1.0})
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if all_dim and not mscale:
        raise JobError(f"rotary scaling {dict(rope)}; with mscale_all_dim the model needs mscale")
    return YarnScaling(
        factor=float(rope["factor"]),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        original_max_seq_len=rope["original_max_position_embeddings"],
        # transformers multiplies turned features by mscale's factor as if it were 1, unless both are given
        mscale=float(mscale) if all_dim else 1.0,
        mscale_all_dim=float(all_dim or 0),
    )


def _fit_to_tensors(args: DeepseekArgs, names: Mapping[str, str]) -> DeepseekArgs:
    """Drop depths of multi-token prediction with missing tensors: transformers writes their number, not the depths."""
    depths = [
        depth for depth in range(args.n_mtp_layers) if f"model.layers.{args.n_layers + depth}.enorm.weight" in names
    ]
    return dataclasses.replace(args, n_mtp_layers=len(depths))


USED = ("mlp_bias", "moe_layer_freq", "norm_topk_prob", "scoring_func", "topk_method", "rope_interleave", "n_group")
USED += ("topk_group", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
USED += ("v_head_dim", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
USED += ("routed_scaling_factor", "aux_loss_alpha", "num_nextn_predict_layers")
CONFIG = ConfigConverter(
    model_types=("deepseek_v2", "deepseek_v3", "kimi_k2"),  # the last is V3's model with other sizes
    to_hf=_to_hf,
    from_hf=_from_hf,
    not_compared=(*NOT_IN_FORWARD, "n_mtp_layers", "mtp_loss_weight"),
    fit_to_tensors=_fit_to_tensors,
    # the last three follow from other keys or from how the model was trained
    keys=config_keys(DECODER_KEYS | {*USED}, harmless=("ep_size", "seq_aux", "head_dim", "qk_head_dim")),
    aliases={
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
)


FAMILY = Family(sizes=DEEPSEEK, config=CONFIG, spec="torchtitan.models.deepseek.model:SPEC", publisher="deepseek-ai")
