"""Mistral in the form of Hugging Face: names and order of rows, as a Llama's. config.json: hf_config.py."""

from torchtitan.models.hf.family import HuggingFace
from torchtitan.models.hf.names import ATTENTION, FEED_FORWARD, TURNED, Form
from torchtitan.models.mistral import MistralArgs
from torchtitan.models.mistral.hf_config import CONFIG
from torchtitan.models.mistral.model import Mistral


def form(args: MistralArgs) -> Form:
    return Form(parts=ATTENTION | FEED_FORWARD, turned=TURNED, head_dim=args.head_dim, tied=args.tied_embeddings)


HF = HuggingFace(build=Mistral, form=form, config=CONFIG)
