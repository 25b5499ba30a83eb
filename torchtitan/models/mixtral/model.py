"""Mixtral: the model and its spec."""

from torchtitan.models.mixtral import CONFIG
from torchtitan.models.moe.decoder import ExpertDecoder, expert_spec


class Mixtral(ExpertDecoder):
    """A Mistral with experts in all layers, none shared (arXiv:2401.04088)."""


NAMES = {"moe.router.gate.weight": "block_sparse_moe.gate.weight"}
NAMES |= {f"moe.experts.{matrix}": f"block_sparse_moe.experts.*.{matrix}.weight" for matrix in ("w1", "w2", "w3")}
SPEC = expert_spec(Mixtral, CONFIG, NAMES)
HF = SPEC.hf
