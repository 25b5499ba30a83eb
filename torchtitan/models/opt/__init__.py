"""OPT: arguments, published sizes, and conversion from and to config.json (OPTConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family, label_fields, read_num_classes
from torchtitan.models.hf.config import check_numbers, check_supported, read_flag, read_number
from torchtitan.models.hf.config_keys import config_keys
from torchtitan.models.learned_positions import (
    NOT_COMPARED,
    LearnedPositionArgs,
    shared_dropout,
)
from torchtitan.models.sizes import HEAD, Names, Sizes, check_not_negative


@dataclass(frozen=True, kw_only=True)
class OPTArgs(LearnedPositionArgs):
    vocab_size: int = 50272
    max_seq_len: int = 2048
    order: Literal["pre", "post"] = "pre"  # norms before attention and feed-forward, or after the residual sums
    embed_dim: int = 0  # width of the embedding of words, projected to the model's and back; 0: the same
    may_be_zero: ClassVar = (*LearnedPositionArgs.may_be_zero, "embed_dim")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "embed_dim")

    @property
    def word_dim(self) -> int:
        return self.embed_dim or self.dim

    @property
    def projects(self) -> bool:
        return self.word_dim != self.dim

    @property
    def end_others(self) -> Names:
        norm = ("norm.norm.weight", "norm.norm.bias") if self.order == "pre" else ()
        return ("tok_embeddings.weight", "entrance.positions.weight", *norm)

    @property
    def head_linears(self) -> Sizes:
        """Linear layers of the head, and the projections after the embedding and before the head."""
        into, back = (self.dim, self.word_dim), (self.word_dim, self.dim)
        projects = {"entrance.project": into, "norm.project": back} if self.projects else {}
        return projects | {HEAD: (self.outputs, self.word_dim)}

    @property
    def _other_parameters(self) -> int:
        return (UNUSED + self.max_seq_len) * self.dim + 2 * self.dim * (self.order == "pre")


UNUSED = 2
"""Number of unused rows before the first position's embedding."""


def _sizes(width: int, layers: int, heads: int, **sizes: int) -> OPTArgs:
    return OPTArgs(dim=width, n_layers=layers, n_heads=heads, ffn_dim=4 * width, **sizes)


OPT = {
    "debugmodel": _sizes(256, 6, 8, vocab_size=2048),
    "125M": _sizes(768, 12, 12),
    "350M": OPTArgs(dim=1024, n_layers=24, n_heads=16, ffn_dim=4096, order="post", embed_dim=512),
    "1.3B": _sizes(2048, 24, 32),
    "2.7B": _sizes(2560, 32, 32),
    "6.7B": _sizes(4096, 32, 32),
}


def _to_hf(args: OPTArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' OPTConfig. Raises JobError for what OPTConfig does not support."""
    if args.norm_eps != 1e-5:
        raise JobError(f"norm_eps = {args.norm_eps}: transformers' OPT only has 1e-05")
    return {
        "architectures": ["OPTForSequenceClassification" if args.n_classes else "OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_seq_len,
        "hidden_size": args.dim,
        "word_embed_proj_dim": args.word_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "ffn_dim": args.ffn_dim,
        "activation_function": "relu",
        "do_layer_norm_before": args.order == "pre",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "dropout": args.dropout,
        "attention_dropout": args.attention_dropout,
        "layerdrop": 0.0,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **label_fields(args),
    }


def _from_hf(config: Mapping[str, Any]) -> OPTArgs:
    numbers = ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "vocab_size")
    check_numbers(config, (*numbers, "max_position_embeddings"))
    check_supported(config, {"activation_function": "relu", "enable_bias": True, "layer_norm_elementwise_affine": True})
    check_supported(config, {"_remove_final_layer_norm": False, "layerdrop": 0.0, "tie_word_embeddings": True})
    width = config["hidden_size"]
    embed_width = read_number(config, "word_embed_proj_dim", width, null=width)
    check_numbers({"word_embed_proj_dim": embed_width}, ("word_embed_proj_dim",))
    return OPTArgs(
        dim=width,
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        ffn_dim=config["ffn_dim"],
        vocab_size=config["vocab_size"],
        max_seq_len=config["max_position_embeddings"],
        order="pre" if read_flag(config, "do_layer_norm_before", True) else "post",
        embed_dim=0 if embed_width == width else embed_width,
        dropout=shared_dropout(config, {"dropout": 0.1}),
        attention_dropout=read_number(config, "attention_dropout", 0.0),
        n_classes=read_num_classes(config),
    )


USED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "vocab_size", "max_position_embeddings")
USED += ("activation_function", "enable_bias", "layer_norm_elementwise_affine", "_remove_final_layer_norm", "layerdrop")
USED += ("tie_word_embeddings", "word_embed_proj_dim", "do_layer_norm_before", "dropout")
USED += ("architectures", "id2label", "num_labels")
CONFIG = ConfigConverter(
    model_types=("opt",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    not_compared=NOT_COMPARED,
    tied_tensors=(("decoder.embed_tokens.weight", "lm_head.weight"),),
    keys=config_keys(USED, harmless=("activation_dropout",)),
)


FAMILY = Family(sizes=OPT, config=CONFIG, spec="torchtitan.models.opt.model:SPEC", publisher="facebook")
