"""MiniMax M2: the model and its spec."""

from dataclasses import replace

from torchtitan.models.gated import QK_NORM
from torchtitan.models.hf.names import ROUTER_BIAS
from torchtitan.models.minimax_m2 import CONFIG
from torchtitan.models.mixtral.model import NAMES
from torchtitan.models.moe.decoder import PLAN, ExpertDecoder, expert_spec


class MiniMaxM2(ExpertDecoder):
    """A Mixtral routed as DeepSeek V3, with norms of all heads' queries and keys at once."""


BIAS = {ROUTER_BIAS: "block_sparse_moe.e_score_correction_bias"}
SPEC = expert_spec(MiniMaxM2, CONFIG, NAMES | BIAS, plan=replace(PLAN, replicated=(), split_norms=(QK_NORM,)))
HF = SPEC.hf
