"""GPT-2 as a plain torch model: it knows nothing of meshes, process groups or the job.

Notable: learned positions; norms before attention and feed-forward, with means and biases; a feed-forward of tanh's
GELU; the head is the embedding's matrix, or makes classes, without a bias.

GPT-2 in the form of Hugging Face: names, and how matrices lie. config.json: hf_config.py.

Its linears are "Conv1D" there, which keep their matrices as [in, out], and queries, keys and values are one of them.
Folders of the model without a head, as OpenAI's were published, leave out what all names begin with.

GPT-2 as the trainer builds it.
"""

from functools import partial

import torch.nn.functional as F
from torch import nn

from torchtitan.models.decoder import Entrance
from torchtitan.models.flops import flops_per_token
from torchtitan.models.gpt2 import GPT2Args
from torchtitan.models.gpt2.hf_config import CONFIG
from torchtitan.models.hf.names import Form, with_biases
from torchtitan.models.learned_positions.model import PLAN, Classic, block_of, headed_form, is_other_head, norm_of
from torchtitan.models.spec import HuggingFace, ModelSpec


class GPT2(Classic):
    narrows = True

    def __init__(self, args: GPT2Args, attention_backend: str = "auto"):
        super().__init__(
            args,
            None,
            partial(block_of, args, partial(F.gelu, approximate="tanh"), "pre"),
            attention_backend,
            entrance=Entrance(args.dim, args.max_seq_len, dropout=args.dropout),
            norm=norm_of(args),
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


def form(args: GPT2Args) -> Form:
    return headed_form(args, PARTS, ENDS, layers="transformer.h.", base="transformer.", transposed=TRANSPOSED)


def _is_ignored(name: str, args: GPT2Args) -> bool:
    """Masks of attention, which old folders hold; another head."""
    return name.endswith((".attn.bias", ".attn.masked_bias")) or is_other_head(name, args)


HF = HuggingFace(build=GPT2, form=form, config=CONFIG, ignored=_is_ignored)


SPEC = ModelSpec(build=GPT2, plan=PLAN, hf=HF, flops_per_token=flops_per_token)
