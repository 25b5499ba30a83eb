"""GPT-2: the model, and its names and layouts in the Hugging Face format.

Features: learned positions; pre-norm with means and biases; a feed-forward with tanh GELU; the head is tied to the
embedding, or classifies without a bias.

transformers uses "Conv1D" layers, which store matrices as [in, out] and join queries, keys and values. Folders of the
model without a head, as OpenAI published it, omit the prefix of all names.
"""

from functools import partial

import torch.nn.functional as F
from torch import nn

from torchtitan.models.decoder import AttentionKind, InputEmbedding
from torchtitan.models.flops import flops_per_token
from torchtitan.models.gpt2 import CONFIG, GPT2Args
from torchtitan.models.hf.names import TensorMap, is_other_head, with_biases
from torchtitan.models.learned_positions.model import (
    PLAN,
    LearnedPositionDecoder,
    make_block,
    make_norm,
    make_tensor_map,
)
from torchtitan.models.spec import HuggingFace, ModelSpec


class GPT2(LearnedPositionDecoder):
    scales_residual_init = True

    def __init__(self, args: GPT2Args, attention_backend: str = "auto"):
        super().__init__(
            args,
            AttentionKind(),
            partial(make_block, args, partial(F.gelu, approximate="tanh"), "pre"),
            attention_backend,
            entrance=InputEmbedding(args.dim, args.max_seq_len, dropout=args.dropout),
            norm=make_norm(args),
            head=nn.Linear(args.dim, args.outputs, bias=False),
            attention_dropout=args.attention_dropout,
        )


PARTS = with_biases(
    {
        "attention_norm": "ln_1",
        "attention.wq": "attn.c_attn",
        "attention.wk": "attn.c_attn",
        "attention.wv": "attn.c_attn",
        "attention.wo": "attn.c_proj",
        "ffn_norm": "ln_2",
        "feed_forward.w1": "mlp.c_fc",
        "feed_forward.w2": "mlp.c_proj",
    }
)
ENDS = {
    "tok_embeddings.weight": "transformer.wte.weight",
    "entrance.positions.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}
TRANSPOSED = frozenset(name for name in PARTS if name.endswith(".weight") and "norm" not in name)


def tensor_map(args: GPT2Args) -> TensorMap:
    return make_tensor_map(
        args, PARTS, ENDS, layers="transformer.h.", optional_prefix="transformer.", transposed=TRANSPOSED
    )


def _is_ignored(name: str, args: GPT2Args) -> bool:
    """Return True for attention masks, which old folders hold, and for another head."""
    return name.endswith((".attn.bias", ".attn.masked_bias")) or is_other_head(name, args)


HF = HuggingFace(build=GPT2, tensor_map=tensor_map, config=CONFIG, is_ignored=_is_ignored)


SPEC = ModelSpec(build=GPT2, plan=PLAN, hf=HF, flops_per_token=flops_per_token)
