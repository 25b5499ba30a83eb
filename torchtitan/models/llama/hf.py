"""Llama weights and sizes in the form of Hugging Face: names, order of rows, config.json, safetensors shards.

The one numerical difference: we turn neighbouring pairs of a head's features (Meta's order), transformers turns feature
i with i + head_dim / 2, so the rows of wq and wk come in another order. Everything else is a renaming.
"""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.initialization import clean_name, local_part
from torchtitan.models.llama import LlamaArgs, RopeScaling

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
SHARD_BYTES = 5 * 10**9
READABLE = {"F64", "F32", "F16", "BF16"}

ENDS = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
PARTS = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
OUR_PARTS = {theirs: ours for ours, theirs in PARTS.items()}
OUR_ENDS = {theirs: ours for ours, theirs in ENDS.items()}

# -- names and rows ---------------------------------------------------------------------------------------------------


def hf_name(name: str) -> str:
    """ "layers.3.attention.wq.weight" -> "model.layers.3.self_attn.q_proj.weight"; KeyError for what is not ours."""
    module, _, kind = name.rpartition(".")
    if module.startswith("layers."):
        _, index, part = module.split(".", 2)
        return f"model.layers.{index}.{PARTS[part]}.{kind}"
    return f"{ENDS[module]}.{kind}"


def our_name(name: str) -> str:
    """The inverse of hf_name."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, index, part = module.split(".", 3)
        return f"layers.{index}.{OUR_PARTS[part]}.{kind}"
    return f"{OUR_ENDS[module]}.{kind}"


def _is_turned(name: str) -> bool:
    return name.endswith((".wq.weight", ".wk.weight"))


def _rows_to_hf(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _rows_from_hf(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def to_hf(state: Mapping[str, torch.Tensor], args: LlamaArgs) -> dict[str, torch.Tensor]:
    """Full tensors by our names (weights, or their gradients) -> by transformers' names. A tied head is left out."""
    return {
        hf_name(name): _rows_to_hf(value, args.head_dim) if _is_turned(name) else value
        for name, value in state.items()
        if not (args.tied_embeddings and name == "output.weight")
    }


def from_hf(state: Mapping[str, torch.Tensor], args: LlamaArgs) -> dict[str, torch.Tensor]:
    """The inverse of to_hf, for Llama.load_state_dict: a tied head is there again."""
    named = {our_name(name): value for name, value in state.items()}
    ours = {n: _rows_from_hf(v, args.head_dim) if _is_turned(n) else v for n, v in named.items()}
    if args.tied_embeddings:
        ours["output.weight"] = ours["tok_embeddings.weight"]
    return ours


# -- config.json ------------------------------------------------------------------------------------------------------


def config_to_hf(args: LlamaArgs, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The fields of transformers' LlamaConfig, in the spelling that its versions 4 and 5 both read."""
    scaling = args.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.num_kv_heads,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": args.norm_eps,
        "max_position_embeddings": args.max_seq_len,
        "rope_theta": args.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
        "tie_word_embeddings": args.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def config_from_hf(config: Mapping[str, Any]) -> LlamaArgs:
    """Sizes from a config.json of transformers 4 or 5. ValueError for what this model does not have."""
    if config.get("model_type") != "llama":
        raise ValueError(f"model_type = {config.get('model_type')!r}, but this model is a llama")
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [key for key in needed if not isinstance(config.get(key), int) or config[key] < 1]
    if missing:
        raise ValueError(f"no whole number above 0 for {', '.join(missing)}")
    dim, heads, ffn_dim = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    only = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "head_dim": dim // heads}
    for key, wanted in only.items():
        if config.get(key) not in (None, wanted):
            raise ValueError(f"{key} = {config[key]!r}, but this model only has {wanted!r}")
    rope = config.get("rope_parameters") or {}
    plain_width = int(2 * 4 * dim / 3)
    return LlamaArgs(
        dim=dim,
        n_layers=config["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads"),
        vocab_size=config["vocab_size"],
        multiple_of=ffn_dim,  # rounding up to it gives just it, once the plain width is not above
        ffn_dim_multiplier=None if plain_width <= ffn_dim else ffn_dim / plain_width,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        rope_scaling=_scaling_from_hf(rope or config.get("rope_scaling") or {}),
        tied_embeddings=config.get("tie_word_embeddings", False),
        max_seq_len=config.get("max_position_embeddings", 2048),
    )


def _scaling_from_hf(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if kind != "llama3" or any(key not in rope for key in keys):
        raise ValueError(f"rotary scaling {dict(rope)}; allowed are none and type llama3 with {', '.join(keys)}")
    return RopeScaling(*(rope[key] for key in keys))


# -- folders ----------------------------------------------------------------------------------------------------------


def save_hf(
    folder: str | os.PathLike[str],
    state: Mapping[str, torch.Tensor],
    args: LlamaArgs,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    write: bool = True,
) -> None:
    """Write config.json, safetensors shards and, last, their index. `state` is the model's, by our names.

    With sharded tensors all ranks call it, one of them with `write`: tensors are gathered one at a time, and the
    writing rank holds one file's worth of them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(folder)
    files = _split({clean_name(name): value for name, value in state.items()}, args, dtype, shard_bytes)
    failure: OSError | None = None  # raised at the end, as the other ranks go on gathering
    if write:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CONFIG).write_text(json.dumps(config_to_hf(args, dtype), indent=2) + "\n")
        except OSError as error:
            failure = error
    weight_map, total = {}, 0
    for number, part in enumerate(files, 1):
        file, tensors = f"model-{number:05}-of-{len(files):05}.safetensors", {}
        for name, value in part.items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            if write and failure is None:
                ((theirs, value),) = to_hf({name: value.detach()}, args).items()
                tensors[theirs] = value.to("cpu", dtype, copy=True).contiguous()
                weight_map[theirs] = file
                total += tensors[theirs].nbytes
        if write and failure is None:
            try:
                save_file(tensors, folder / file, metadata={"format": "pt"})
            except (OSError, SafetensorError) as error:
                failure = OSError(str(error))
    if failure is not None:
        raise failure
    if write:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _split(
    state: Mapping[str, torch.Tensor], args: LlamaArgs, dtype: torch.dtype, shard_bytes: int
) -> list[dict[str, torch.Tensor]]:
    """Tensors in order, cut where a file would outgrow shard_bytes; a larger tensor gets a file of its own."""
    files: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, value in state.items():
        if args.tied_embeddings and name == "output.weight":
            continue
        size = value.numel() * dtype.itemsize
        if files[-1] and used + size > shard_bytes:
            files.append({})
            used = 0
        files[-1][name] = value
        used += size
    return files


@torch.no_grad()
def load_hf(folder: str | os.PathLike[str], model: nn.Module, args: LlamaArgs) -> None:
    """Fill the model's parameters, plain or sharded, from a folder of safetensors; each rank reads its own rows.

    ValueError, with everything that is wrong, for a folder whose config.json, names, shapes or types do not fit; the
    model is then untouched, unless a file proves unreadable only in its middle.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    try:
        stored_args = config_from_hf(_read_json(folder / CONFIG))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    _compare(stored_args, args, folder)
    parameters = {clean_name(name): parameter for name, parameter in model.named_parameters()}
    files = _files(folder)
    faults = [f"{hf_name(name)} is missing" for name in parameters if hf_name(name) not in files]
    faults += [f"{name} is not part of the model" for name in files if not _belongs(name, parameters, args)]
    _refuse(folder, faults)
    try:
        with ExitStack() as stack:
            names = sorted(set(files.values()))
            opened = {name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in names}
            for name, parameter in parameters.items():
                faults += _misfit(opened[files[hf_name(name)]], hf_name(name), tuple(parameter.shape), files)
            _refuse(folder, faults)
            for name, parameter in parameters.items():
                _read(opened[files[hf_name(name)]].get_slice(hf_name(name)), parameter, name, args)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{folder}: cannot read the weights: {error}. A file is cut off or missing: get it again"
        ) from error


def _read(stored: Any, parameter: nn.Parameter, name: str, args: LlamaArgs) -> None:
    """Copy this rank's part of a stored tensor into its parameter. wq and wk are read by whole heads, as their rows
    come in another order there.
    """
    local, shape, offset = local_part(parameter)
    if not local.numel():
        return
    first, last = offset[0], offset[0] + local.shape[0]
    within_row = tuple(slice(start, start + size) for start, size in zip(offset[1:], local.shape[1:], strict=True))
    if not _is_turned(name):
        local.copy_(stored[(slice(first, last), *within_row)])
        return
    head = args.head_dim
    start = first // head * head
    rows = stored[(slice(start, min(-(-last // head) * head, shape[0])), *within_row)]
    local.copy_(_rows_from_hf(rows, head)[first - start : last - start])


def _belongs(name: str, parameters: Mapping[str, nn.Parameter], args: LlamaArgs) -> bool:
    if name.endswith("rotary_emb.inv_freq") or (args.tied_embeddings and name == "lm_head.weight"):
        return True  # computed, and a copy of the embedding: some exports hold them, transformers reads neither
    try:
        return our_name(name) in parameters
    except (KeyError, ValueError):
        return False


def _misfit(file: Any, name: str, shape: tuple[int, ...], files: Mapping[str, str]) -> list[str]:
    if name not in set(file.keys()):
        return [f"{name} is not in {files[name]}, where the index says it is"]
    stored = file.get_slice(name)
    if tuple(stored.get_shape()) != shape:
        return [f"{name} has shape {tuple(stored.get_shape())}, the model's is {shape}"]
    if stored.get_dtype() not in READABLE:
        return [f"{name} is stored as {stored.get_dtype()}; readable are {', '.join(sorted(READABLE))}"]
    return []


def _files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index, or of the single file where there is no index."""
    from safetensors import SafetensorError, safe_open

    if not (folder / INDEX).exists():
        try:
            with safe_open(folder / SINGLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder}: has neither {INDEX} nor a readable {SINGLE}: {error}") from error
    files = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{folder / INDEX}: has no weight_map of tensor names to file names")
    for file in sorted(set(files.values())):
        if file != os.path.basename(file) or "\\" in file or not file.endswith(".safetensors"):
            raise ValueError(f"{folder / INDEX}: {file!r} is not the plain name of a .safetensors file in this folder")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content


def _compare(stored: LlamaArgs, args: LlamaArgs, folder: Path) -> None:
    """Sizes and constants of the folder against the job's, also those that no tensor's shape shows."""
    fields = ("dim", "n_layers", "n_heads", "num_kv_heads", "ffn_dim", "vocab_size", "norm_eps", "rope_theta")
    _refuse(
        folder,
        [
            f"{field} is {getattr(stored, field)!r}, the job's is {getattr(args, field)!r}"
            for field in (*fields, "rope_scaling", "tied_embeddings")
            if getattr(stored, field) != getattr(args, field)
        ],
    )


def _refuse(folder: Path, faults: list[str]) -> None:
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise ValueError(
            f"{folder} does not fit the model: {shown}. Choose its model.name and model.flavor, or overrides"
        )
