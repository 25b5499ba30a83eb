"""SmolLM 3: the model and its spec."""

from torchtitan.models.gated import GatedDecoder, gated_spec
from torchtitan.models.smollm3 import CONFIG


class SmolLM3(GatedDecoder):
    """A Llama without rotary positions in every fourth layer (arXiv:2501.18795)."""


SPEC = gated_spec(SmolLM3, CONFIG)
HF = SPEC.hf
