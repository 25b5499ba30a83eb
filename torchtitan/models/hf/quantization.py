"""The quantization_config of a published folder: in which format weights of few bits are stored. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.core.files import DeclaredKeys

BlockSize = tuple[int, int]
BITSANDBYTES, FP8, MXFP4 = "bitsandbytes", "fp8", "mxfp4"
MXFP4_KEYS = DeclaredKeys(
    used=frozenset(("quant_method",)), harmless=frozenset(("modules_to_not_convert", "dequantize"))
)
"""Keys of MXFP4's. The names of the tensors say which matrices are packed."""
BITSANDBYTES_KEYS = DeclaredKeys(
    used=frozenset(("quant_method", "load_in_4bit", "load_in_8bit")),
    harmless=frozenset(
        ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
        + ("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_skip_modules")
        + ("llm_int8_threshold",)
    ),
)
"""Keys of bitsandbytes'. The names and sizes of the tensors say which matrices are packed, and how."""
KEYS = {BITSANDBYTES: BITSANDBYTES_KEYS, MXFP4: MXFP4_KEYS}
REMEDY = "convert the weights to bfloat16 first"


@dataclass(frozen=True)
class Quantization:
    """The format of a folder's packed weights. `block`: rows and columns that share one scale of FP8."""

    method: str
    block: BlockSize | None = None


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return the format in which weights may be packed, by a config.json; None if none is.

    Raises JobError for a format that is not read, and for unknown keys.
    """
    table = config.get("quantization_config")
    if table is None:
        return None
    method = table.get("quant_method") if isinstance(table, dict) else None
    if isinstance(method, str) and method in KEYS:
        KEYS[method].check(table, "quantization_config", REMEDY)
        return Quantization(method)
    is_fp8 = method == FP8 and table.get("fmt") in (None, "e4m3", "float8_e4m3fn")  # the latter in MiniMax M2's
    block = table.get("weight_block_size") if is_fp8 else None
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise JobError(
            f"quantization_config = {table!r}; allowed are none, or quant_method 'fp8' with fmt 'e4m3' and a "
            f"weight_block_size of two whole numbers above 0, 'bitsandbytes' or 'mxfp4'. {REMEDY.capitalize()}"
        )
    return Quantization(FP8, (block[0], block[1]))
