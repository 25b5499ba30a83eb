"""Conversion of OPT arguments from and to config.json (transformers' OPTConfig), and the family. No torch."""

from collections.abc import Mapping
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigForm, Family
from torchtitan.models.hf.config import check_numbers, check_only, number_of
from torchtitan.models.learned_positions import NOT_COMPARED, classes_of, labels_of, one_dropout
from torchtitan.models.opt import OPT, OPTArgs


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
        **labels_of(args),
    }


def _from_hf(config: Mapping[str, Any]) -> OPTArgs:
    numbers = ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "vocab_size")
    check_numbers(config, (*numbers, "max_position_embeddings"))
    check_only(config, {"activation_function": "relu", "enable_bias": True, "layer_norm_elementwise_affine": True})
    check_only(config, {"_remove_final_layer_norm": False, "layerdrop": 0.0, "tie_word_embeddings": True})
    width = config["hidden_size"]
    embed_width = number_of(config, "word_embed_proj_dim", width, null=width)
    return OPTArgs(
        dim=width,
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        ffn_dim=config["ffn_dim"],
        vocab_size=config["vocab_size"],
        max_seq_len=config["max_position_embeddings"],
        order="pre" if config.get("do_layer_norm_before", True) else "post",
        embed_dim=0 if embed_width == width else embed_width,
        dropout=one_dropout(config, {"dropout": 0.1}),
        attention_dropout=number_of(config, "attention_dropout", 0.0),
        n_classes=classes_of(config),
    )


CONFIG = ConfigForm(model_types=("opt",), to_hf=_to_hf, from_hf=_from_hf, not_compared=NOT_COMPARED)


FAMILY = Family(sizes=OPT, config=CONFIG, spec="torchtitan.models.opt.model:SPEC", home="facebook")
