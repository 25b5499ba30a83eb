"""RoBERTa in the form of Hugging Face: names. config.json: hf_config.py."""

from torchtitan.models.hf.family import HuggingFace
from torchtitan.models.hf.names import Form, with_biases
from torchtitan.models.roberta import RobertaArgs
from torchtitan.models.roberta.hf_config import CONFIG
from torchtitan.models.roberta.model import Roberta

PARTS = with_biases(
    {
        "attention.wq": "attention.self.query",
        "attention.wk": "attention.self.key",
        "attention.wv": "attention.self.value",
        "attention.wo": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "feed_forward.w1": "intermediate.dense",
        "feed_forward.w2": "output.dense",
        "ffn_norm": "output.LayerNorm",
    }
)
EMBEDDINGS = {
    "tok_embeddings.weight": "roberta.embeddings.word_embeddings.weight",
    "entrance.positions.weight": "roberta.embeddings.position_embeddings.weight",
    "entrance.types.weight": "roberta.embeddings.token_type_embeddings.weight",
    **with_biases({"entrance.norm": "roberta.embeddings.LayerNorm"}),
}
WORDS = with_biases({"norm.dense": "lm_head.dense", "norm.norm": "lm_head.layer_norm"})
WORDS |= {"output.bias": "lm_head.bias"}
CLASSES = with_biases({"norm.dense": "classifier.dense", "output": "classifier.out_proj"})
COPY = {"output.weight": "lm_head.decoder.weight"}


def form(args: RobertaArgs) -> Form:
    head = CLASSES if args.n_classes else WORDS
    return Form(
        parts=PARTS,
        ends=EMBEDDINGS | COPY | head,
        layers="roberta.encoder.layer.",
        base="roberta.",
        head=frozenset(head),
        tied=args.tied_embeddings,
    )


def _is_ignored(name: str, args: RobertaArgs) -> bool:
    """What is not used, or a copy; the words of a model that is to tell classes apart."""
    other = args.n_classes > 0 and name.startswith("lm_head.")
    copy = name in ("lm_head.decoder.weight", "lm_head.decoder.bias")
    return copy or other or "pooler." in name or name.endswith("embeddings.position_ids")


HF = HuggingFace(build=Roberta, form=form, config=CONFIG, ignored=_is_ignored)
