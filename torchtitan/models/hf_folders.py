"""A folder in the form of Hugging Face, config.json and safetensors shards with their index: written and read.

Tensors may be sharded over ranks, and of a pipeline a rank has only its part; what they are called and how they lie in
a file is the family's `Form`.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.initialization import clean_name, local_part
from torchtitan.models.hf_blocks import FP8, Block, Dequantized, block_of, scales_name, scales_shape
from torchtitan.models.hf_names import Form, in_order

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
SHARD_BYTES = 5 * 10**9
READABLE = {"F64", "F32", "F16", "BF16"}


def save_folder(
    folder: str | os.PathLike[str],
    state: Mapping[str, torch.Tensor],
    form: Form,
    config: Mapping[str, Any],
    needed: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    write: bool = True,
) -> None:
    """Write config.json, shards and, last, their index. `state` is the model's, by our names; `needed` has the names of
    the whole model, and ValueError is raised if the ranks together lack one.

    In a process group all ranks call it, one of them with `write`. A rank's tensors may be sharded, and of a pipeline
    a rank has those of its parts: they are gathered one at a time, and the writing rank holds one file's worth of them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder, gathered = Path(folder), _Gathered(state, form, dtype, write)
    missing = [name for name in needed if name not in gathered.shapes and not (form.tied and name == "output.weight")]
    if missing:
        raise ValueError(f"cannot export: the state lacks {_some(missing)}. Pass parameters and persistent buffers")
    files = _split(gathered, shard_bytes)
    failure: OSError | None = None  # raised at the end, as the other ranks go on gathering
    if write:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        except OSError as error:
            failure = error
    weight_map, total = {}, 0
    for number, names in enumerate(files, 1):
        file, tensors = f"model-{number:05}-of-{len(files):05}.safetensors", {}
        for name in names:
            value = gathered.whole(name)
            if write and failure is None:
                theirs = {each: part.contiguous() for each, part in form.to_hf({name: value}).items()}
                tensors |= theirs
                weight_map |= dict.fromkeys(theirs, file)
                total += sum(part.nbytes for part in theirs.values())
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


class _Gathered:
    """Whole tensors on the writing rank, from wherever they are: a tied head is left out. All ranks ask for the same
    names in the same order.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], form: Form, dtype: torch.dtype, write: bool):
        named = {clean_name(name): value for name, value in state.items()}
        if form.tied:
            named.pop("output.weight", None)
        self.state, self.form, self.dtype = named, form, dtype
        self.rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        shares: list[Any] = [({name: tuple(value.shape) for name, value in named.items()}, write)]
        if ranks > 1:
            mine, shares = shares[0], [None] * ranks
            dist.all_gather_object(shares, mine)
        self.writer = next((rank for rank, (_, writes) in enumerate(shares) if writes), 0)
        self.shapes = {name: shape for share, _ in shares for name, shape in share.items()}
        self.holders = {name: [r for r, (share, _) in enumerate(shares) if name in share] for name in self.shapes}

    def dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if self.form.is_float32(name) else self.dtype

    def bytes_of(self, name: str) -> int:
        """In the file, with its copies."""
        times = 1 + len(self.form.copies.get(name, ()))
        return times * math.prod(self.shapes[name]) * self.dtype_of(name).itemsize

    def whole(self, name: str) -> torch.Tensor | None:
        """The full tensor on the CPU of the writing rank, in the type of the file; None on the others."""
        writes, holders, dtype = self.rank == self.writer, self.holders[name], self.dtype_of(name)
        sends = self.writer not in holders and self.rank == holders[0]
        value = self.state.get(name)
        if isinstance(value, DTensor):
            value = value.full_tensor()  # all who hold a part of it are here
        if value is not None and (writes or sends):
            value = value.detach().to("cpu", dtype, copy=True)
        if sends:
            dist.send(value, self.writer)
        elif writes and name not in self.state:
            value = torch.empty(self.shapes[name], dtype=dtype)
            dist.recv(value, holders[0])
        return value if writes else None


def _split(gathered: _Gathered, shard_bytes: int) -> list[list[str]]:
    """Names in order, cut where a file would outgrow shard_bytes; a larger tensor gets a file of its own."""
    files: list[list[str]] = [[]]
    used = 0
    for name in in_order(gathered.shapes):
        size = gathered.bytes_of(name)
        if files[-1] and used + size > shard_bytes:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files


def check_config(
    folder: str | os.PathLike[str],
    args: Any,
    from_hf: Callable[[Mapping[str, Any]], Any],
    names: Iterable[str],
) -> None:
    """Compare the sizes and constants of these names in the folder's config.json with the job's, also those that no
    tensor's shape shows. ValueError where they differ, or where `from_hf`, which makes arguments of a config, refuses.
    """
    folder = Path(folder)
    try:
        stored = from_hf(_read_json(folder / CONFIG))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    _refuse(
        folder,
        [
            f"{name} is {getattr(stored, name)!r}, the job's is {getattr(args, name)!r}"
            for name in names
            if getattr(stored, name) != getattr(args, name)
        ],
    )


@torch.no_grad()
def load_folder(
    folder: str | os.PathLike[str],
    model: nn.Module,
    form: Form,
    shapes: Mapping[str, tuple[int, ...]],
    ignored: Callable[[str], bool],
) -> None:
    """Fill parameters and persistent buffers of the model, or of a pipeline's part of it, plain or sharded; each rank
    reads its own rows. `shapes` are the whole model's; `ignored` says which of their names may stay unread. Matrices
    may be in 8 bits (hf_blocks).

    ValueError, with everything that is wrong and the same on all ranks, where names, shapes or types do not fit; the
    model is then untouched, unless a file proves unreadable only in its middle.
    """
    from safetensors import SafetensorError

    folder = Path(folder)
    files, block = _files(folder), _block(folder)
    wanted = {name: form.hf_names(name) for name in shapes if not (form.tied and name == "output.weight")}
    theirs = {each for names in wanted.values() for each in names}
    scales = {scales_name(each) for each in theirs} & files.keys() if block else set()
    faults = [f"{each} is missing" for names in wanted.values() for each in names if each not in files]
    faults += [
        f"{each} is not part of the model" for each in files if each not in theirs | scales and not ignored(each)
    ]
    _refuse(folder, faults)
    try:
        with ExitStack() as stack:
            shards = _Shards(folder, {each: files[each] for each in theirs | scales}, block, stack)
            for name, each_name in wanted.items():
                shape = form.hf_shape(name, shapes[name])
                for each in each_name:
                    faults += shards.misfits(each, shape)
            _refuse(folder, faults)
            for wrapped_name, tensor in model.state_dict(keep_vars=True).items():
                name = clean_name(wrapped_name)
                if form.tied and name == "output.weight":  # the end of a pipeline has a copy
                    name = "tok_embeddings.weight"
                assert shapes[name] == tuple(tensor.shape), name
                _read([shards.stored(each) for each in wanted[name]], tensor, name, form)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{folder}: cannot read the weights: {error}. A file is cut off or missing: get it again"
        ) from error


def _read(stored: list[Any], tensor: torch.Tensor, name: str, form: Form) -> None:
    """Copy this rank's part of what is stored into its tensor; rows in another order are read by whole heads."""
    local, shape, offset = local_part(tensor)
    if not local.numel():
        return
    spans = [slice(start, start + size) for start, size in zip(offset, local.shape, strict=True)]
    if form.is_stacked(name):
        for mine, expert in enumerate(range(spans[0].start, spans[0].stop)):
            local[mine].copy_(stored[expert][spans[2], spans[1]].t())
    elif form.is_turned(name):
        head, first, last = form.head_dim, spans[0].start, spans[0].stop
        start = first // head * head
        rows = stored[0][(slice(start, min(-(-last // head) * head, shape[0])), *spans[1:])]
        local.copy_(form.rows_from_hf(rows)[first - start : last - start])
    else:
        local.copy_(stored[0][tuple(spans)])


class _Shards:
    """The tensors of a folder by their names there, in files that stay open as long as `stack`."""

    def __init__(self, folder: Path, files: Mapping[str, str], block: Block | None, stack: ExitStack):
        from safetensors import safe_open

        self.files, self.block = files, block
        names = sorted(set(files.values()))
        self.opened = {name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in names}
        self.held = {name: set(file.keys()) for name, file in self.opened.items()}

    def stored(self, name: str) -> Any:
        """What is sliced like a tensor, and read by that."""
        stored = self._slice(name)
        if stored.get_dtype() != FP8:
            return stored
        return Dequantized(stored, self._slice(scales_name(name)), self.block)

    def misfits(self, name: str, shape: tuple[int, ...], whose: str = "the model's is") -> list[str]:
        readable = ", ".join(sorted(READABLE))
        if name not in self.held[self.files[name]]:
            return [f"{name} is not in {self.files[name]}, where the index says it is"]
        stored, scales = self._slice(name), scales_name(name)
        dtype = stored.get_dtype()
        if tuple(stored.get_shape()) != shape:
            return [f"{name} has shape {tuple(stored.get_shape())}, {whose} {shape}"]
        if dtype == FP8 and self.block and len(shape) == 2:
            if scales not in self.files:
                return [f"{name} is stored as {FP8}, but its scales, {scales}, are missing"]
            return self.misfits(scales, scales_shape(shape, self.block), f"blocks of {self.block} make")
        if dtype not in READABLE:
            return [
                f"{name} is stored as {dtype}; readable are {readable}, and {FP8} for matrices if config.json has a "
                f"quantization_config"
            ]
        return [f"{scales} is there, but {name} is stored as {dtype} instead of {FP8}"] if scales in self.files else []

    def _slice(self, name: str) -> Any:
        return self.opened[self.files[name]].get_slice(name)


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


def _block(folder: Path) -> Block | None:
    try:
        return block_of(_read_json(folder / CONFIG))
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content


def _some(faults: list[str]) -> str:
    return "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")


def _refuse(folder: Path, faults: list[str]) -> None:
    if faults:
        raise ValueError(
            f"{folder} does not fit the model: {_some(faults)}. Choose its model.name and model.flavor, or overrides"
        )
