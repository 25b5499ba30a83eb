"""Model families and their sizes. No torch here; `registry.py` has what builds them."""

from torchtitan.models.deepseek import DEEPSEEK, DeepseekArgs
from torchtitan.models.llama import LLAMA2, LLAMA3, LLAMA31, LLAMA32, LlamaArgs
from torchtitan.models.qwen3_moe import QWEN3_MOE, Qwen3MoEArgs

SIZES: dict[str, dict[str, LlamaArgs] | dict[str, DeepseekArgs] | dict[str, Qwen3MoEArgs]] = {
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "llama3.1": LLAMA31,
    "llama3.2": LLAMA32,
    "deepseek": DEEPSEEK,
    "qwen3_moe": QWEN3_MOE,
}
