"""OPT in the form of Hugging Face: names. config.json: hf_config.py."""

from torchtitan.models.classic.hf import headed_form, is_other_head
from torchtitan.models.hf.family import HuggingFace
from torchtitan.models.hf.names import Form, with_biases
from torchtitan.models.opt import OPTArgs
from torchtitan.models.opt.hf_config import CONFIG
from torchtitan.models.opt.model import OPT

PARTS = with_biases(
    {
        "attention_norm": "self_attn_layer_norm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.out_proj",
        "ffn_norm": "final_layer_norm",
        "feed_forward.w1": "fc1",
        "feed_forward.w2": "fc2",
    }
)
ENDS = {
    "tok_embeddings.weight": "model.decoder.embed_tokens.weight",
    "entrance.project.weight": "model.decoder.project_in.weight",
    "entrance.positions.weight": "model.decoder.embed_positions.weight",
    **with_biases({"norm.norm": "model.decoder.final_layer_norm"}),
    "norm.project.weight": "model.decoder.project_out.weight",
}


def form(args: OPTArgs) -> Form:
    return headed_form(args, PARTS, ENDS, layers="model.decoder.layers.", base="model.")


HF = HuggingFace(build=OPT, form=form, config=CONFIG, ignored=is_other_head)
