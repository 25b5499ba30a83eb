"""GPT-2: arguments, published sizes, and conversion from and to config.json (GPT2Config).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family, label_fields, read_num_classes
from torchtitan.models.hf.config import check_numbers, check_supported, read_number
from torchtitan.models.hf.config_keys import config_keys
from torchtitan.models.learned_positions import (
    NOT_COMPARED,
    LearnedPositionArgs,
    shared_dropout,
)
from torchtitan.models.sizes import HEAD, Names, Sizes


@dataclass(frozen=True, kw_only=True)
class GPT2Args(LearnedPositionArgs):
    vocab_size: int = 50257
    max_seq_len: int = 1024

    @property
    def end_others(self) -> Names:
        return ("tok_embeddings.weight", "entrance.positions.weight", "norm.weight", "norm.bias")

    @property
    def head_linears(self) -> Sizes:
        return {HEAD: (self.outputs, self.dim)}

    @property
    def _other_parameters(self) -> int:
        return self.max_seq_len * self.dim + 2 * self.dim


def _sizes(width: int, layers: int, heads: int, **sizes: int) -> GPT2Args:
    return GPT2Args(dim=width, n_layers=layers, n_heads=heads, ffn_dim=4 * width, **sizes)


GPT2 = {
    "debugmodel": _sizes(256, 6, 8, vocab_size=2048, max_seq_len=2048),
    "124M": _sizes(768, 12, 12),
    "355M": _sizes(1024, 24, 16),
    "774M": _sizes(1280, 36, 20),
    "1558M": _sizes(1600, 48, 25),
}


GELU = ("gelu_new", "gelu_pytorch_tanh")
"""Two names of the same function."""


def _to_hf(args: GPT2Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' GPT2Config."""
    return {
        "architectures": ["GPT2ForSequenceClassification" if args.n_classes else "GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": args.vocab_size,
        "n_positions": args.max_seq_len,
        "n_ctx": args.max_seq_len,
        "n_embd": args.dim,
        "n_layer": args.n_layers,
        "n_head": args.n_heads,
        "n_inner": args.ffn_dim,
        "activation_function": GELU[0],
        "layer_norm_epsilon": args.norm_eps,
        "resid_pdrop": args.dropout,
        "embd_pdrop": args.dropout,
        "attn_pdrop": args.attention_dropout,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **label_fields(args),
    }


def _from_hf(config: Mapping[str, Any]) -> GPT2Args:
    check_numbers(config, ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"))
    check_supported(config, {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False})
    check_supported(config, {"add_cross_attention": False, "tie_word_embeddings": True})
    if config.get("activation_function", GELU[0]) not in GELU:
        raise JobError(f"activation_function = {config['activation_function']!r}, but this model only has {GELU[0]!r}")
    return GPT2Args(
        dim=config["n_embd"],
        n_layers=config["n_layer"],
        n_heads=config["n_head"],
        ffn_dim=read_number(config, "n_inner", 4 * config["n_embd"], null=4 * config["n_embd"]),
        vocab_size=config["vocab_size"],
        max_seq_len=config["n_positions"],
        norm_eps=read_number(config, "layer_norm_epsilon", 1e-5),
        dropout=shared_dropout(config, {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
        attention_dropout=read_number(config, "attn_pdrop", 0.1),
        n_classes=read_num_classes(config),
    )


USED = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function")
USED += ("layer_norm_epsilon", "resid_pdrop", "embd_pdrop", "attn_pdrop", "tie_word_embeddings", "scale_attn_weights")
USED += ("scale_attn_by_inverse_layer_idx", "add_cross_attention", "architectures", "id2label", "num_labels")
SUMMARY = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout")
"""Keys of a model with two heads, which is not supported."""
CONFIG = ConfigConverter(
    model_types=("gpt2",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    not_compared=NOT_COMPARED,
    packed_methods=(),  # bitsandbytes packs the transposes of its matrices, which a square one does not show
    tied_tensors=(("wte.weight", "lm_head.weight"),),
    keys=config_keys(USED, harmless=(*SUMMARY, "n_ctx", "reorder_and_upcast_attn", "predict_special_tokens")),
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)


FAMILY = Family(sizes=GPT2, config=CONFIG, spec="torchtitan.models.gpt2.model:SPEC", publisher="openai-community")
