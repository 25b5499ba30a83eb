"""GPT-J: arguments, published sizes, and conversion from and to config.json (GPTJConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import NOT_IN_FORWARD, ConfigConverter, Family
from torchtitan.models.gpt2 import GELU
from torchtitan.models.hf.config import check_numbers, check_supported, read_flag, read_number
from torchtitan.models.hf.config_keys import config_keys
from torchtitan.models.layer_norms import LayerNormArgs
from torchtitan.models.sizes import DEBUG, check_probabilities


@dataclass(frozen=True, kw_only=True)
class GPTJArgs(LayerNormArgs):
    vocab_size: int = 50400
    max_seq_len: int = 2048
    residual_dropout: float = 0.0  # of the outputs of attention and feed-forward
    attention_dropout: float = 0.0  # of attention probabilities
    embedding_dropout: float = 0.0

    mlp_bias: ClassVar = True
    head_bias: ClassVar = True
    gate: ClassVar = False
    activation: ClassVar = "gelu_tanh"
    norm_order: ClassVar = "shared"
    rotates_adjacent: ClassVar = True
    may_be_zero: ClassVar = ("residual_dropout", "attention_dropout", "embedding_dropout")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probabilities(self, *DROPOUTS)


SIZE_KEYS = {"dim": "n_embd", "n_layers": "n_layer", "n_heads": "n_head", "vocab_size": "vocab_size"}
"""Sizes that every config.json has."""
DROPOUTS = {"residual_dropout": "resid_pdrop", "attention_dropout": "attn_pdrop", "embedding_dropout": "embd_pdrop"}
ONLY: dict[str, Any] = {"rope_theta": 10000.0, "rope_scaling": None}
GPTJ = {
    "debugmodel": GPTJArgs(**DEBUG | dict(n_kv_heads=8), rotary_dim=16),
    "6B": GPTJArgs(dim=4096, n_layers=28, n_heads=16, n_kv_heads=16, head_dim=256, ffn_dim=16384),
}


def _to_hf(args: GPTJArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' GPTJConfig. Raises JobError for what it does not support."""
    only = ONLY | {"n_kv_heads": args.n_heads, "head_dim": args.dim // args.n_heads}
    for name, supported in only.items():
        if getattr(args, name) != supported:
            raise JobError(f"{name} = {getattr(args, name)!r}: transformers' GPT-J only has {supported!r}")
    return {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "n_positions": args.max_seq_len,
        "n_inner": args.ffn_dim,
        "rotary_dim": args.rotary_dim,
        "activation_function": GELU[0],
        "layer_norm_epsilon": args.norm_eps,
        "tie_word_embeddings": args.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{key: getattr(args, name) for name, key in (SIZE_KEYS | DROPOUTS).items()},
    }


def _from_hf(config: Mapping[str, Any]) -> GPTJArgs:
    check_numbers(config, SIZE_KEYS.values())
    check_supported(config, {"scale_attn_weights": True, "rotary": True})
    if config.get("activation_function", GELU[0]) not in GELU:
        raise JobError(f"activation_function = {config['activation_function']!r}, but this model only has {GELU[0]!r}")
    sizes = {name: config[key] for name, key in SIZE_KEYS.items()}
    width, heads = sizes["dim"], sizes["n_heads"]
    if width % heads:
        raise JobError(f"n_embd = {width} with n_head = {heads}; allowed: a multiple of n_head")
    return GPTJArgs(
        **sizes,
        n_kv_heads=heads,
        head_dim=width // heads,
        ffn_dim=read_number(config, "n_inner", 4 * width, null=4 * width),
        rotary_dim=read_number(config, "rotary_dim", 64),
        max_seq_len=read_number(config, "n_positions", 2048),
        norm_eps=read_number(config, "layer_norm_epsilon", 1e-5),
        tied_embeddings=read_flag(config, "tie_word_embeddings", False),
        **{name: read_number(config, key, 0.0) for name, key in DROPOUTS.items()},
    )


USED = (*SIZE_KEYS.values(), *DROPOUTS.values(), "n_positions", "n_inner", "rotary_dim", "activation_function")
USED += ("layer_norm_epsilon", "tie_word_embeddings", "scale_attn_weights", "rotary")
SUMMARY = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout")
"""Keys of a model with two heads, which has no part here."""
CONFIG = ConfigConverter(
    model_types=("gptj",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    not_compared=(*NOT_IN_FORWARD, *DROPOUTS),
    tied_tensors=(("wte.weight", "lm_head.weight"),),
    keys=config_keys(USED, harmless=SUMMARY),
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)


FAMILY = Family(sizes=GPTJ, config=CONFIG, spec="torchtitan.models.gptj.model:SPEC", publisher="EleutherAI")
