"""RoBERTa, also as XLM-RoBERTa and CamemBERT: arguments, published sizes, and conversion from and to config.json.

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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
class RobertaArgs(LearnedPositionArgs):
    """Arguments of RoBERTa."""

    vocab_size: int = 50265
    max_seq_len: int = 512
    pad_id: int = 1  # positions are numbered from pad_id + 1
    n_types: int = 1  # rows of the token type embedding; every token has type 0
    causal: ClassVar = False
    may_be_zero: ClassVar = (*LearnedPositionArgs.may_be_zero, "pad_id")

    @property
    def end_others(self) -> Names:
        entrance = ("positions.weight", "types.weight", "norm.weight", "norm.bias")
        norm = () if self.n_classes else ("norm.norm.weight", "norm.norm.bias")
        return (
            "tok_embeddings.weight",
            *(f"entrance.{name}" for name in entrance),
            "norm.dense.bias",
            *norm,
            "output.bias",
        )

    @property
    def head_linears(self) -> Sizes:
        return {"norm.dense": (self.dim, self.dim), HEAD: (self.outputs, self.dim)}

    @property
    def _other_parameters(self) -> int:
        rows = self.pad_id + 1 + self.max_seq_len + self.n_types
        norms = 2 * self.dim + (0 if self.n_classes else 2 * self.dim)  # of the embeddings, and of a head of words
        return rows * self.dim + norms + self.dim + self.outputs


def _sizes(width: int, layers: int, heads: int, **sizes: int) -> RobertaArgs:
    return RobertaArgs(dim=width, n_layers=layers, n_heads=heads, ffn_dim=4 * width, **sizes)


ROBERTA = {
    "debugmodel": _sizes(256, 6, 8, vocab_size=2048, max_seq_len=2048),
    "125M": _sizes(768, 12, 12),
    "355M": _sizes(1024, 24, 16),
}


def _to_hf(args: RobertaArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' RobertaConfig."""
    return {
        "architectures": ["RobertaForSequenceClassification" if args.n_classes else "RobertaForMaskedLM"],
        "model_type": "roberta",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "intermediate_size": args.ffn_dim,
        "hidden_act": "gelu",
        "max_position_embeddings": args.pad_id + 1 + args.max_seq_len,
        "type_vocab_size": args.n_types,
        "layer_norm_eps": args.norm_eps,
        "hidden_dropout_prob": args.dropout,
        "attention_probs_dropout_prob": args.attention_dropout,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "pad_token_id": args.pad_id,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **label_fields(args),
    }


def _from_hf(config: Mapping[str, Any]) -> RobertaArgs:
    numbers = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    check_numbers(config, (*numbers, "max_position_embeddings"))
    only = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
    check_supported(config, only, nullable=("position_embedding_type",))
    check_supported(config, {"add_cross_attention": False, "tie_word_embeddings": True})
    pad = read_number(config, "pad_token_id", 1)
    return RobertaArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        ffn_dim=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_seq_len=config["max_position_embeddings"] - pad - 1,
        norm_eps=read_number(config, "layer_norm_eps", 1e-12),
        dropout=shared_dropout(config, {"hidden_dropout_prob": 0.1}),
        attention_dropout=read_number(config, "attention_probs_dropout_prob", 0.1),
        n_classes=read_num_classes(config),
        pad_id=pad,
        n_types=read_number(config, "type_vocab_size", 2),
    )


USED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "hidden_act")
USED += ("max_position_embeddings", "position_embedding_type", "is_decoder", "add_cross_attention", "pad_token_id")
USED += ("tie_word_embeddings", "layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob")
USED += ("type_vocab_size", "architectures", "id2label", "num_labels")
CONFIG = ConfigConverter(
    model_types=("roberta", "xlm-roberta", "camembert"),  # equal models with other vocabularies
    to_hf=_to_hf,
    from_hf=_from_hf,
    not_compared=NOT_COMPARED,
    tied_tensors=(
        ("word_embeddings.weight", "lm_head.decoder.weight"),
        ("lm_head.bias", "lm_head.decoder.bias"),
    ),
    keys=config_keys(USED),
    is_causal=False,
)


FAMILY = Family(sizes=ROBERTA, config=CONFIG, spec="torchtitan.models.roberta.model:SPEC", publisher="FacebookAI")
