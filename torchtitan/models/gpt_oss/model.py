"""gpt-oss: the model and its spec."""

from torchtitan.models.gpt_oss import CONFIG
from torchtitan.models.moe.decoder import ExpertDecoder, expert_spec


class GptOss(ExpertDecoder):
    """A decoder with attention sinks, windows in alternate layers and experts with biases (arXiv:2508.10925)."""


_GATE_UP = {f"moe.experts.w{i}{kind}": f"mlp.experts.gate_up_proj{kind}" for i in (1, 3) for kind in ("", "_bias")}
NAMES = {
    "moe.router.gate.weight": "mlp.router.weight",
    "moe.router.gate.bias": "mlp.router.bias",
    "moe.experts.w2": "mlp.experts.down_proj",
    "moe.experts.w2_bias": "mlp.experts.down_proj_bias",
    **_GATE_UP,
}
SPEC = expert_spec(GptOss, CONFIG, NAMES, interleaved=frozenset(_GATE_UP))
HF = SPEC.hf
