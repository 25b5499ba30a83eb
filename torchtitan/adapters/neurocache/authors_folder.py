"""Neurocache adapters in the format of the authors' library: a safetensors file and its config (authors_config.py).

Queries and keys of a cache have no rotary embedding, so either order of their matrices' rows works if both use the
same. They are read and written without reordering.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from torchtitan.adapters.neurocache.authors_config import CONFIG, WEIGHTS, config_of, differences, read
from torchtitan.adapters.neurocache.sizes import layers_of
from torchtitan.config.sections.adapter import Neurocache as Options
from torchtitan.core.errors import JobError
from torchtitan.core.files import require_file

Tensors = dict[str, torch.Tensor]
MEMORY = {
    "memory.h_proj.weight": "h_proj.weight",
    "memory.h_norm.weight": "h_norm.weight",
    "memory.h_norm.bias": "h_norm.bias",
}
ATTENTION = {
    "wq.weight": "q_proj.weight",
    "reading.wk": "k_proj.weight",
    "reading.wv": "v_proj.weight",
    "wo.weight": "o_proj.weight",
}


def names(options: Options, n_layers: int) -> dict[str, str]:
    """Return the names of the cache's tensors, ours -> the authors', for a model with `n_layers`."""
    mapping = dict(MEMORY) if options.compression > 1 else {}
    for number, layer in enumerate(layers_of(options, n_layers).attending):
        mapping |= {
            f"layers.{layer}.attention.cache.{ours}": f"cache_attns.{number}.{theirs}"
            for ours, theirs in ATTENTION.items()
        }
    return mapping


def save(folder: Path, cache: Mapping[str, torch.Tensor], beside: Tensors, options: Options, n: int, base: str) -> None:
    """Write full tensors of the cache (by our names) and of the extra adapter `beside` (by peft's names).

    `n`: number of layers of the model. Raises OSError if the folder cannot be written.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: cache[ours].contiguous() for ours, name in names(options, n).items()}
    save_file(tensors | beside, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config_of(options, n, base), indent=2) + "\n")


def load(folder: Path, options: Options, n: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Tensors, Tensors]:
    """Read the cache's tensors of these shapes by our names, and the folder's remaining tensors.

    Raises JobError if the folder holds a different adapter, or none.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if mismatches := list(differences(read(folder), options, n)):
        raise JobError(f"{folder / CONFIG}: {'; '.join(mismatches)}; give the job's [adapter.neurocache] the same")
    try:
        require_file(folder / WEIGHTS, missing_ok=True)
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise JobError(f"{folder}: no {WEIGHTS} that can be read: {error}; of a .bin file make one first") from error
    ours, faults = {}, []
    for name, authors_name in names(options, n).items():
        value = tensors.pop(authors_name, None)
        if value is None:
            faults.append(f"it lacks {authors_name}")
        elif tuple(value.shape) != shapes[name]:
            faults.append(f"{authors_name} has shape {tuple(value.shape)}, the job's is {shapes[name]}")
        else:
            ours[name] = value
    if faults:
        raise JobError(f"{folder}: {'; '.join(faults[:5])}. Give the job the model that it was made with")
    return ours, tensors
