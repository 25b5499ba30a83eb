"""Neurocache adapters in the format of the authors' library: a safetensors file and its config (authors_config.py).

Queries and keys of a cache are not turned by positions, so the rows of their matrices may come in either order, as long
as it is one; they are taken and given as they are.
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
    """Ours -> theirs, of a model with so many layers."""
    found = dict(MEMORY) if options.compression > 1 else {}
    for number, layer in enumerate(layers_of(options, n_layers).attending):
        found |= {
            f"layers.{layer}.attention.cache.{ours}": f"cache_attns.{number}.{theirs}"
            for ours, theirs in ATTENTION.items()
        }
    return found


def save(folder: Path, cache: Mapping[str, torch.Tensor], beside: Tensors, options: Options, n: int, base: str) -> None:
    """Whole tensors of the cache by our names, of any shape, and those beside it by peft's; `n`: layers of the model.
    OSError.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    theirs = {name: cache[ours].contiguous() for ours, name in names(options, n).items()}
    save_file(theirs | beside, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config_of(options, n, base), indent=2) + "\n")


def load(folder: Path, options: Options, n: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Tensors, Tensors]:
    """The inverse: tensors of these shapes by our names, and what else the folder holds. JobError where it is another
    adapter's, or none.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if wrong := list(differences(read(folder), options, n)):
        raise JobError(f"{folder / CONFIG}: {'; '.join(wrong)}; give the job's [adapter.neurocache] the same")
    try:
        require_file(folder / WEIGHTS, missing_ok=True)
        theirs = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise JobError(f"{folder}: no {WEIGHTS} that can be read: {error}; of a .bin file make one first") from error
    ours, faults = {}, []
    for name, other in names(options, n).items():
        value = theirs.pop(other, None)
        if value is None:
            faults.append(f"it lacks {other}")
        elif tuple(value.shape) != shapes[name]:
            faults.append(f"{other} has shape {tuple(value.shape)}, the job's is {shapes[name]}")
        else:
            ours[name] = value
    if faults:
        raise JobError(f"{folder}: {'; '.join(faults[:5])}. Give the job the model that it was made with")
    return ours, theirs
