"""The quantization_config of a published folder: in which format weights of few bits are stored. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.core.files import DeclaredKeys

BlockSize = tuple[int, int]
"""Rows and columns of a matrix that share a scale; 0 for all of them."""
BITSANDBYTES, COMPRESSED, FP8, MODELOPT, MXFP4 = "bitsandbytes", "compressed-tensors", "fp8", "modelopt", "mxfp4"
LINEAR_METHODS = (BITSANDBYTES, COMPRESSED, FP8, MODELOPT)
"""Methods that pack matrices of linear layers."""
KEYS = {
    BITSANDBYTES: DeclaredKeys(
        used=frozenset(("quant_method", "load_in_4bit", "load_in_8bit")),
        harmless=frozenset(
            ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
            + ("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_skip_modules")
            + ("llm_int8_threshold",)
        ),
    ),
    COMPRESSED: DeclaredKeys(
        used=frozenset(("quant_method", "format", "config_groups")),
        harmless=frozenset(("ignore", "kv_cache_scheme", "global_compression_ratio", "quantization_status", "version")),
    ),
    FP8: DeclaredKeys(
        used=frozenset(("quant_method", "fmt", "weight_block_size")),
        harmless=frozenset(
            ("activation_scheme", "modules_to_not_convert", "ignored_layers", "dequantize", "scale_fmt")
        ),
    ),
    MODELOPT: DeclaredKeys(
        used=frozenset(("quant_method", "quant_algo", "config_groups")),
        harmless=frozenset(("ignore", "exclude_modules", "kv_cache_scheme", "kv_cache_quant_algo", "producer")),
    ),
    MXFP4: DeclaredKeys(
        used=frozenset(("quant_method",)), harmless=frozenset(("modules_to_not_convert", "dequantize"))
    ),
}
"""Keys of each method. The names and sizes of the tensors say which matrices are packed."""
GROUP_KEYS = DeclaredKeys(
    used=frozenset(("weights", "format")), harmless=frozenset(("targets", "input_activations", "output_activations"))
)
WEIGHT_KEYS = DeclaredKeys(
    used=frozenset(("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder")),
    harmless=frozenset(("dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")),
)
FLOAT8, INT8, FLOATS, INTEGERS = "F8_E4M3", "I8", "U8", "I32"
"""Types that codes are stored as, by safetensors' names: of 8 bits, or several of fewer bits in an element."""
FORMATS = {
    "float-quantized": (FLOAT8,),
    "int-quantized": (INT8,),
    "naive-quantized": (FLOAT8, INT8),
    "nvfp4-pack-quantized": (FLOATS,),
    "pack-quantized": (INTEGERS,),
}
"""Compressed-tensors', with the types of each."""
_FLOAT_TYPES, _INTEGER_TYPES = (FLOAT8, FLOATS), (INT8, INTEGERS)
MIXED = "mixed-precision"
"""Format of a folder whose groups of layers have formats of their own."""
ALGORITHMS: dict[str, BlockSize] = {"FP8": (0, 0), "FP8_PER_CHANNEL_PER_TOKEN": (1, 0), "NVFP4": (1, 16)}
ALGORITHMS |= {"W4A16_NVFP4": (1, 16)}
"""ModelOpt's, with the blocks of each."""
REMEDY = "convert the weights to bfloat16 first"
_ADVICE = REMEDY.capitalize()


@dataclass(frozen=True)
class Quantization:
    """The format of a folder's packed weights.

    `blocks`, `types`: the sizes of blocks and the stored types that occur, of methods with scales of blocks.
    """

    method: str
    blocks: tuple[BlockSize, ...] = ()
    types: tuple[str, ...] = ()


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return the format in which weights may be packed, by a config.json; None if none is.

    Raises JobError for a format that is not read, and for unknown keys.
    """
    table = config.get("quantization_config")
    if table is None:
        return None
    method = table.get("quant_method") if isinstance(table, dict) else None
    if not isinstance(method, str) or method not in KEYS:
        raise JobError(
            f"quantization_config = {table!r}; allowed are none, or quant_method {', '.join(KEYS)}. {_ADVICE}"
        )
    KEYS[method].check(table, "quantization_config", REMEDY)
    readers = {COMPRESSED: _read_compressed, FP8: _read_fp8, MODELOPT: _read_modelopt}
    return readers[method](table) if method in readers else Quantization(method)


def _read_fp8(table: Mapping[str, Any]) -> Quantization:
    block = table.get("weight_block_size", [128, 128])  # as transformers
    if table.get("fmt") not in (None, "e4m3", "float8_e4m3fn") or not (block is None or _is_block(block)):
        raise JobError(
            f"quantization_config = {table!r}; allowed for quant_method 'fp8' are fmt 'e4m3' and a weight_block_size "
            f"of two whole numbers above 0, or null for one scale of a matrix. {_ADVICE}"
        )
    return Quantization(FP8, ((0, 0) if block is None else (block[0], block[1]),), (FLOAT8,))


def _read_modelopt(table: Mapping[str, Any]) -> Quantization:
    algorithm = table.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        allowed = f"allowed are {', '.join(ALGORITHMS)}. {_ADVICE}"
        raise JobError(f"quantization_config has quant_algo = {algorithm!r}; {allowed}")
    blocks = _blocks_of_groups(table) if table.get("config_groups") else (ALGORITHMS[algorithm],)
    return Quantization(MODELOPT, blocks, (FLOAT8 if algorithm.startswith("FP8") else FLOATS,))


def _read_compressed(table: Mapping[str, Any]) -> Quantization:
    blocks, form = _blocks_of_groups(table), table.get("format")
    groups = table["config_groups"].values()
    forms = [group.get("format") or form for group in groups]
    for used in forms if form == MIXED else [form, *forms]:
        if not isinstance(used, str) or used not in FORMATS:
            raise JobError(f"quantization_config has format = {used!r}; allowed are {', '.join(FORMATS)}. {_ADVICE}")
    numbers = [_FLOAT_TYPES if group["weights"].get("type") == "float" else _INTEGER_TYPES for group in groups]
    types = (kind for used, kinds in zip(forms, numbers, strict=True) for kind in FORMATS[used] if kind in kinds)
    return Quantization(COMPRESSED, blocks, tuple(types))


def _blocks_of_groups(table: Mapping[str, Any]) -> tuple[BlockSize, ...]:
    """Return the blocks of all groups of layers. Raises JobError for weights with zero points or another order."""
    groups = table.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise JobError(f"quantization_config has config_groups = {groups!r}; allowed: a table of tables. {_ADVICE}")
    blocks = []
    for name, group in groups.items():
        place = f"quantization_config's {name}"
        GROUP_KEYS.check(group, place, REMEDY)
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise JobError(f"{place} has weights = {weights!r}; allowed: a table. {_ADVICE}")
        WEIGHT_KEYS.check(weights, f"weights of {place}", REMEDY)
        block = _block_of(weights)
        if (
            block is None
            or weights.get("num_bits", 8) not in (4, 8)
            or weights.get("symmetric", True) is not True
            or weights.get("actorder") not in (None, False, "static", "weight")
        ):
            allowed = "symmetric ones of 4 or 8 bits, in the order of the columns"
            scales = "a scale for a tensor, channel, group or block"
            raise JobError(f"{place} has weights = {weights!r}; allowed: {allowed}, with {scales}. {_ADVICE}")
        blocks.append(block)
    return tuple(blocks)


def _block_of(weights: Mapping[str, Any]) -> BlockSize | None:
    """Return the block size of a table of weights; None if it is not read."""
    group, structure = weights.get("group_size"), weights.get("block_structure")
    strategy = weights.get("strategy") or ("tensor" if group is None else "group")
    if strategy in ("group", "tensor_group") and type(group) is int and group > 0:
        return 1, group
    if strategy == "block" and _is_block(structure):
        return structure[0], structure[1]
    return {"tensor": (0, 0), "channel": (1, 0)}.get(strategy) if isinstance(strategy, str) else None


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
