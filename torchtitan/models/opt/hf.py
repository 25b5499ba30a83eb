"""OPT in the form of Hugging Face: names. config.json: hf_config.py."""

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
    return Form(
        parts=PARTS,
        ends=ENDS | {"output.weight": "score.weight" if args.n_classes else "lm_head.weight"},
        layers="model.decoder.layers.",
        base="model.",
        tied=args.tied_embeddings,
        head=frozenset({"output.weight"}) if args.n_classes else frozenset(),
    )


def _is_ignored(name: str, args: OPTArgs) -> bool:
    """The words of a model that is to tell classes apart."""
    return name == "lm_head.weight" and args.n_classes > 0


HF = HuggingFace(build=OPT, form=form, config=CONFIG, ignored=_is_ignored)
