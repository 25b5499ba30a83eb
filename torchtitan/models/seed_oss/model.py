"""Seed-OSS: the model and its spec."""

from torchtitan.models.gated import GatedDecoder, gated_spec
from torchtitan.models.seed_oss import CONFIG


class SeedOss(GatedDecoder):
    """A Llama with biases of queries, keys and values, and with dropout of residuals and attention probabilities."""


SPEC = gated_spec(SeedOss, CONFIG)
HF = SPEC.hf
