"""OLMo 2 and 3: the model and its spec."""

from dataclasses import replace

from torchtitan.models.gated import OUTPUT_NORMS, PLAN, QK_NORM, GatedDecoder, gated_spec
from torchtitan.models.olmo import CONFIG


class Olmo(GatedDecoder):
    """A Llama with norms of outputs and of all heads' queries and keys at once (arXiv:2501.00656)."""


SPEC = gated_spec(Olmo, CONFIG, OUTPUT_NORMS, replace(PLAN, replicated=(), split_norms=(QK_NORM,)))
HF = SPEC.hf
