"""Llama weights and sizes in the form of Hugging Face: names and order of rows. config.json: hf_config.py.

The one numerical difference: we turn neighbouring pairs of a head's features (Meta's order), transformers turns feature
i with i + head_dim / 2, so the rows of wq and wk come in another order. Everything else is a renaming.
"""

from torchtitan.models.hf.family import HuggingFace
from torchtitan.models.hf.names import ATTENTION, FEED_FORWARD, TURNED, Form
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.llama.hf_config import CONFIG
from torchtitan.models.llama.model import Llama


def form(args: LlamaArgs) -> Form:
    return Form(parts=ATTENTION | FEED_FORWARD, turned=TURNED, head_dim=args.head_dim, tied=args.tied_embeddings)


HF = HuggingFace(build=Llama, form=form, config=CONFIG)
