"""Qwen 3 with experts in the form of Hugging Face: names and order of rows. config.json: hf_config.py.

Two numerical differences: the order of a head's features, so that the rows of wq and wk and the weights of their norms
come in another order; and experts, which stand stacked here and one by one, transposed, there.
"""

from torchtitan.models.hf.family import HuggingFace
from torchtitan.models.hf.names import ATTENTION, EXPERTS, QK_NORMS, TURNED, Form
from torchtitan.models.qwen3_moe import Qwen3MoEArgs
from torchtitan.models.qwen3_moe.hf_config import CONFIG
from torchtitan.models.qwen3_moe.model import Qwen3MoE

PARTS = ATTENTION | QK_NORMS | {"moe.router.gate.weight": "mlp.gate.weight", **EXPERTS}


def form(args: Qwen3MoEArgs) -> Form:
    return Form(
        parts=PARTS,
        n_experts=args.n_experts,
        turned=TURNED.union(QK_NORMS),
        head_dim=args.head_dim,
        tied=args.tied_embeddings,
    )


HF = HuggingFace(build=Qwen3MoE, form=form, config=CONFIG)
