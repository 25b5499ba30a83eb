"""Qwen 3 without experts in the form of Hugging Face: names and order of rows. config.json: hf_config.py.

The one numerical difference: the order of a head's features, so that the rows of wq and wk and the weights of their
norms come in another order. Everything else is a renaming.
"""

from torchtitan.models.hf.family import HuggingFace
from torchtitan.models.hf.names import ATTENTION, FEED_FORWARD, QK_NORMS, TURNED, Form
from torchtitan.models.qwen3 import Qwen3Args
from torchtitan.models.qwen3.hf_config import CONFIG
from torchtitan.models.qwen3.model import Qwen3


def form(args: Qwen3Args) -> Form:
    parts = ATTENTION | QK_NORMS | FEED_FORWARD
    return Form(parts=parts, turned=TURNED.union(QK_NORMS), head_dim=args.head_dim, tied=args.tied_embeddings)


HF = HuggingFace(build=Qwen3, form=form, config=CONFIG)
