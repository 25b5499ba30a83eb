"""Model families and their sizes. No torch here; `registry.py` has what builds them."""

from torchtitan.models.llama import LLAMA2, LLAMA3, LLAMA31, LLAMA32, LlamaArgs

SIZES: dict[str, dict[str, LlamaArgs]] = {
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "llama3.1": LLAMA31,
    "llama3.2": LLAMA32,
}
