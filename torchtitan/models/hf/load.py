"""Read weights in the Hugging Face format: a folder with its index, or a single safetensors file.

All names, shapes and dtypes are checked before any tensor is read. The family's `TensorMap` maps names and layouts.

Weights may be in few bits (hf/packed.py); slices of them are dequantized as they are read.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from torchtitan.core.errors import JobError
from torchtitan.core.files import require_file
from torchtitan.core.progress_bar import progress_bar
from torchtitan.core.random_draws import clean_name, local_part
from torchtitan.core.tensor_storage import packed_names, stores
from torchtitan.models.hf.bitsandbytes import BitsAndBytes
from torchtitan.models.hf.config import (
    CONFIG,
    INDEX,
    SINGLE,
    StoredTensor,
    find_text_config,
    read_json,
    unreadable_weights,
)
from torchtitan.models.hf.config_keys import INDEX_KEYS
from torchtitan.models.hf.mxfp4 import PackedStacks
from torchtitan.models.hf.names import TensorMap
from torchtitan.models.hf.packed import READABLE_DTYPES, InPieces, PackedFormat
from torchtitan.models.hf.quantization import (
    BITSANDBYTES,
    COMPRESSED,
    FP8,
    MODELOPT,
    MXFP4,
    Quantization,
    read_quantization,
)
from torchtitan.models.hf.scaled import ScaledMatrices
from torchtitan.models.hf.wrappers import text_tensors

PACKED_FORMATS: dict[str, Callable[[Quantization], PackedFormat]] = {
    BITSANDBYTES: BitsAndBytes,
    COMPRESSED: ScaledMatrices,
    FP8: ScaledMatrices,
    MODELOPT: ScaledMatrices,
    MXFP4: PackedStacks,
}


@contextmanager
def translated_errors(path: Path) -> Iterator[None]:
    """Raise the errors of reading weights at a path as JobErrors."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        reason = f"cannot read the weights: {error}. A file is cut off or missing: get it again"
        raise JobError(f"{path}: {reason}") from error


class StoredWeights:
    """Weights in a folder or file, read by our names within a `with` block.

    Entering it raises a JobError that lists all mismatches of names, shapes or dtypes, the same on all ranks; later
    read errors are JobErrors too. `shapes` are the full model's; `is_ignored` is True for stored names that need not be
    read. `optional_names`: parameters of the task's head, by our names, that may be absent, but only all together;
    `missing_head` then holds them once the weights are open.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensor_map: TensorMap,
        shapes: Mapping[str, tuple[int, ...]],
        is_ignored: Callable[[str], bool],
        optional_names: Collection[str] = (),
    ):
        self.path, self.shapes, self.is_ignored = Path(path), shapes, is_ignored
        self.optional_names, self.missing_head = frozenset(optional_names), frozenset[str]()
        self._use(tensor_map)
        self.stack = ExitStack()

    def _use(self, tensor_map: TensorMap) -> None:
        self.tensor_map = tensor_map
        self.hf_names_by_name = {
            name: tensor_map.hf_names(name) for name in self.shapes if not (tensor_map.tied and name == "output.weight")
        }

    def __enter__(self) -> "StoredWeights":
        folder = self.path.parent if self.path.is_file() else self.path
        stored_files, form = tensor_files(self.path), _packed_format(folder)
        stored_names = text_tensors(find_text_config(self.path), stored_files)
        files = {hf_name: stored_files[stored_name] for hf_name, stored_name in stored_names.items()}
        for layout in self.tensor_map.other_layouts():
            other_names = {hf_name for name in self.shapes for hf_name in layout.hf_names(name)} - {
                hf_name for names in self.hf_names_by_name.values() for hf_name in names
            }
            if not other_names.isdisjoint(files):
                self._use(layout)
                break
        prefix = self.tensor_map.optional_prefix
        if prefix and not any(hf_name.startswith(prefix) for hf_name in files):
            without_prefix = {
                name: [hf_name.removeprefix(prefix) for hf_name in names]
                for name, names in self.hf_names_by_name.items()
            }
            self.hf_names_by_name = without_prefix
        if not any(
            hf_name in files for name in self.tensor_map.head for hf_name in self.hf_names_by_name.get(name, ())
        ):
            self.missing_head = self.tensor_map.head & self.hf_names_by_name.keys() & self.optional_names
            self.hf_names_by_name = {
                name: names for name, names in self.hf_names_by_name.items() if name not in self.missing_head
            }
        hf_names = list(dict.fromkeys(hf_name for names in self.hf_names_by_name.values() for hf_name in names))
        hf_names = [part for hf_name in hf_names for part in form.parts(hf_name, files)]
        faults = [f"{hf_name} is missing" for hf_name in hf_names if hf_name not in files]
        expected = {*hf_names}
        faults += [
            f"{stored_names[hf_name]} is not part of the model"
            for hf_name in files
            if hf_name not in expected and not self.is_ignored(hf_name)
        ]
        raise_mismatches(self.path, faults)
        try:
            expected_files = {hf_name: files[hf_name] for hf_name in expected}
            self.shards = Shards(folder, expected_files, form, self.stack, stored_names)
            in_files = {name: file for file, names in self.shards.names_in_file.items() for name in names}
            self._refuse_another_head(in_files | files, stored_names)
            for name, hf_names_of_one in self.hf_names_by_name.items():
                shape = self.tensor_map.hf_shape(name, self.shapes[name])
                for hf_name in hf_names_of_one:
                    faults += self.shards.mismatches(hf_name, shape)
            raise_mismatches(self.path, list(dict.fromkeys(faults)))
            self._refuse_tensors_twice(stored_files)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _refuse_another_head(self, files: Mapping[str, str], stored_names: Mapping[str, str]) -> None:
        """Raise JobError if the model ties its head to the embedding, but a file has another one, indexed or not."""
        head = self.tensor_map.outer_names.get("output.weight")
        if not self.tensor_map.tied or head not in files:
            return
        folder = self.path.parent if self.path.is_file() else self.path
        (embedding,) = self.hf_names_by_name["tok_embeddings.weight"]
        stored = ((files[name], stored_names.get(name, name)) for name in (embedding, head))
        source, copy = (StoredTensor.find(folder / file, name) for file, name in stored)
        if source is not None and copy is not None and not source.equals(copy):
            raise JobError(
                f"{self.path}: {head} differs from {embedding}, but the job's model ties them, so it would be lost; "
                "set model.overrides = {tied_embeddings = false} if the family can have a separate head, or remove "
                "it from the file"
            )

    def _refuse_tensors_twice(self, stored_files: Mapping[str, str]) -> None:
        """Raise JobError if files hold tensors that the index does not know, or knows in another file.

        transformers reads all tensors of each file.
        """
        faults = [
            f"{name} is in {file}, but by {INDEX} {f'in {stored_files[name]}' if name in stored_files else 'nowhere'}"
            for file, names in self.shards.names_in_file.items()
            for name in sorted(names)
            if stored_files.get(name) != file and not (name not in stored_files and self.is_ignored(name))
        ]
        if faults:
            raise JobError(f"{self.path}: {summarize(faults)}; remove what is out of date")

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.stack.close()
        if error is not None:
            with translated_errors(self.path):
                raise error

    def read_into(self, tensor: torch.Tensor, name: str) -> None:
        """Read this rank's part of a parameter into a tensor of its full shape, sharded or not."""
        if self.tensor_map.tied and name == "output.weight":  # the last pipeline stage has a copy
            name = "tok_embeddings.weight"
        assert self.shapes[name] == tuple(tensor.shape), name
        hf_names = self.hf_names_by_name[name]
        read_part([self.shards.stored(hf_name) for hf_name in hf_names], tensor, name, self.tensor_map)
        self.shards.count_bytes(local_part(tensor)[0].numel() * self.dtype(name).itemsize)

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype; of packed weights the one that their format states."""
        return self.shards.dtype(self.hf_names_by_name[name][0])

    def read_full(self, name: str) -> torch.Tensor:
        """Return the full tensor, of our shape, on the CPU in the stored dtype."""
        tensor = torch.empty(self.shapes[name], dtype=self.dtype(name))
        self.read_into(tensor, name)
        return tensor


@torch.no_grad()
def load_weights(weights: StoredWeights, model: nn.Module, fresh: Collection[str] = ()) -> frozenset[str]:
    """Load parameters and persistent buffers of a model or pipeline stage, plain or sharded.

    Each rank reads its own rows. Parameters that an adapter added (`fresh`) stay unchanged, and so do those that are
    returned: a head that the folder lacks.

    Raises JobError if the weights do not fit. The model is then unchanged, unless a file turns out to be unreadable
    halfway.
    """
    packed = packed_names(model)
    tensors = {clean_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    plain = {name: tensor for name, tensor in tensors.items() if name not in fresh and name not in packed}
    with weights, progress_bar(f"loading {weights.path.name}", len(plain), unit=" tensors") as progress:
        for name, tensor in plain.items():
            if name not in weights.missing_head:
                weights.read_into(tensor, name)
            progress.update()
        for name, store in stores(model):  # one at a time, because they are larger before they are packed
            values = store.empty()
            weights.read_into(values, name)
            store.write(values)
    return weights.missing_head


def read_part(stored: list[Any], tensor: torch.Tensor, name: str, tensor_map: TensorMap) -> None:
    """Copy this rank's part of a stored parameter into its tensor, of our shape.

    `stored` has one tensor, or one [out, in] for each expert. Rows in another order are read by full heads.
    """
    local, shape, offset = local_part(tensor)
    if not local.numel():
        return
    if not shape:
        local.copy_(stored[0][...])
        return
    spans = [slice(start, start + size) for start, size in zip(offset, local.shape, strict=True)]
    if tensor_map.is_by_head(name):
        stored = [_JoinedRows(stored)]
    elif tensor_map.is_stacked(name):
        for position, expert in enumerate(range(spans[0].start, spans[0].stop)):
            local[position].copy_(stored[expert][spans[2], spans[1]].t())
        return
    if tensor_map.is_interleaved(name):
        names, last = tensor_map.joined_names(name), spans[-1]
        columns = slice(last.start * len(names), last.stop * len(names))
        local.copy_(stored[0][(*spans[:-1], columns)][..., names.index(name) :: len(names)])
        return
    if tensor_map.has_joined_columns(name):
        before = tensor_map.joined_names(name).index(name) * shape[-1]
        columns = slice(spans[-1].start + before, spans[-1].stop + before)
        local.copy_(stored[0][(*spans[:-1], columns)])
        return
    if tensor_map.is_stack(name):
        before = tensor_map.joined_names(name).index(name) * shape[2]
        rows = slice(spans[2].start + before, spans[2].stop + before)
        local.copy_(stored[0][spans[0], rows, spans[1]].transpose(1, 2))
        return
    if tensor_map.is_reordered(name):
        head, first, last = tensor_map.rows_of_head(name), spans[0].start, spans[0].stop
        start = first // head * head
        heads = slice(start, min(-(-last // head) * head, shape[0]))
        rows = _read_rows(stored[0], (heads, *spans[1:]), name, shape[0], tensor_map)
        local.copy_(tensor_map.rows_from_hf(name, rows)[first - start : last - start])
    elif tensor_map.is_transposed(name):
        before, _ = tensor_map.place(name, shape[0])
        spans[0] = slice(spans[0].start + before, spans[0].stop + before)
        local.copy_(stored[0][tuple(spans[::-1])].t())
    else:
        local.copy_(_read_rows(stored[0], tuple(spans), name, shape[0], tensor_map))


@dataclass
class _JoinedRows:
    """Stored tensors of equal length, read as one of all their rows."""

    parts: list[Any]

    def __getitem__(self, spans: tuple[slice]) -> torch.Tensor:
        return torch.cat([part[:] for part in self.parts])[spans]


def _read_rows(stored: Any, spans: tuple[slice, ...], name: str, rows: int, tensor_map: TensorMap) -> torch.Tensor:
    """Read a slice of a tensor with this number of rows from the stored one, which may have rows of others, too."""
    before, _ = tensor_map.place(name, rows)
    first, last = before + spans[0].start, before + spans[0].stop
    if not tensor_map.is_grouped(name):
        return stored[(slice(first, last), *spans[1:])]
    places = tensor_map.rows_in_groups(name)[first:last]
    lowest = int(places.min())
    return stored[(slice(lowest, int(places.max()) + 1), *spans[1:])][places - lowest]


MAPPED_BYTES = 2**28
"""Bytes to read from mapped files before they are unmapped: until then the pages count as this process's memory."""


class Shards:
    """Tensors of a folder, in files that are open at most as long as `stack`.

    `files`: name -> file. `stored_names`: names under which the files have them, if these are other ones.
    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, str],
        form: PackedFormat,
        stack: ExitStack,
        stored_names: Mapping[str, str] = MappingProxyType({}),
    ):
        self.folder, self.files, self.form, self.stored_names = folder, files, form, stored_names
        self.stack = stack.enter_context(ExitStack())
        self.open_files: dict[str, Any] = {}
        self.mapped_bytes = 0
        names = sorted(set(files.values()))
        for name in names:
            require_file(folder / name)
        self.names_in_file = {name: set(self._open(name).keys()) for name in names}

    def _open(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self.open_files:
            with translated_errors(self.folder / file):
                self.open_files[file] = self.stack.enter_context(safe_open(self.folder / file, framework="pt"))
        return self.open_files[file]

    def count_bytes(self, number: int) -> None:
        """Count bytes that were read, and unmap the files if these are many."""
        self.mapped_bytes += number
        if self.mapped_bytes > MAPPED_BYTES:
            self.stack.close()
            self.open_files.clear()
            self.mapped_bytes = 0

    def stored(self, name: str) -> Any:
        """Return an object that by slicing reads a tensor of the model's shape, dequantized if it is packed."""
        packed = self.form.open(name, self)
        return self.slice(name) if packed is None else InPieces(packed)

    def mismatches(self, name: str, shape: tuple[int, ...], expected: str = "the model's is") -> list[str]:
        """List the faults of a stored tensor: not in its file, another shape, an unreadable dtype, faults of parts."""
        if name in self.files and (fault := self.absence(name)):
            return [fault]
        faults = self.form.faults(name, shape, self)
        return self.plain_faults(name, shape, expected) if faults is None else faults

    def absence(self, name: str) -> str:
        """Return the fault of a tensor that is not in its file, or ""."""
        stored_name, file = self.stored_names.get(name, name), self.files[name]
        is_there = stored_name in self.names_in_file[file]
        return "" if is_there else f"{stored_name} is not in {file}, where the index says it is"

    def plain_faults(self, name: str, shape: tuple[int, ...], expected: str = "the model's is") -> list[str]:
        """List the faults of a tensor that is in its file, and stored as its numbers."""
        dtype, stored_shape = self.header(name)
        if stored_shape != shape:
            return [f"{name} has shape {stored_shape}, {expected} {shape}"]
        if dtype not in READABLE_DTYPES:
            readable = ", ".join(sorted(READABLE_DTYPES))
            packed = "and packed ones for matrices if config.json has a quantization_config"
            return [f"{name} is stored as {dtype}; readable are {readable}, {packed}"]
        return []

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the dtype, as safetensors names it, and the shape of a stored tensor."""
        stored = self.slice(name)
        return stored.get_dtype(), tuple(stored.get_shape())

    def dtype(self, name: str) -> torch.dtype:
        packed = self.form.open(name, self)
        return READABLE_DTYPES[self.header(name)[0]] if packed is None else packed.dtype

    def read(self, name: str) -> torch.Tensor:
        """Return a full tensor of the stored shape and dtype. Raises JobError if its file cannot be read."""
        with translated_errors(self.folder / self.files[name]):
            tensor = self._open(self.files[name]).get_tensor(self.stored_names.get(name, name))
        self.count_bytes(tensor.nbytes)
        return tensor

    def slice(self, name: str) -> Any:
        """Return the object that by slicing reads a stored tensor as it is."""
        return self._open(self.files[name]).get_slice(self.stored_names.get(name, name))


def tensor_files(path: Path) -> dict[str, str]:
    """Return tensor name -> file name, from a folder's index, or of its single file without one."""
    from safetensors import SafetensorError, safe_open

    folder = path
    if path.is_file():
        try:
            with safe_open(path, framework="pt") as file:
                return dict.fromkeys(file.keys(), path.name)
        except (SafetensorError, OSError) as error:
            raise JobError(f"{path} is no safetensors file, or one that is cut off: {error}") from error

    if not (folder / INDEX).exists():
        require_file(folder / SINGLE, missing_ok=True)
        try:
            with safe_open(folder / SINGLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE)
        except (SafetensorError, OSError) as error:
            other = unreadable_weights(folder)
            raise JobError(f"{folder}: has neither {INDEX} nor a readable {SINGLE}: {other or error}") from error
    index = read_json(folder / INDEX)
    INDEX_KEYS.check(index, str(folder / INDEX), "write it again with the program that wrote the folder")
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise JobError(f"{folder / INDEX}: has no weight_map of tensor names to file names")
    for file in sorted(set(files.values())):
        if file != os.path.basename(file) or "\\" in file or not file.endswith(".safetensors"):
            raise JobError(f"{folder / INDEX}: {file!r} is not the plain name of a .safetensors file in this folder")
    if files and SINGLE not in files.values() and (folder / SINGLE).exists():  # which transformers would read
        raise JobError(f"{folder}: it has {SINGLE}, and other files by {INDEX}; remove what is out of date")
    return files


def _packed_format(folder: Path) -> PackedFormat:
    """Return the format of packed weights by a folder's config.json."""
    if not (folder / CONFIG).exists():
        return PackedFormat()  # a file alone
    try:
        quantization = read_quantization(find_text_config(folder) or {})
    except ValueError as error:
        raise JobError(f"{folder / CONFIG}: {error}") from error
    return PACKED_FORMATS[quantization.method](quantization) if quantization else PackedFormat()


def summarize(faults: list[str]) -> str:
    """Join the first eight faults, and the number of the others."""
    return "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")


def raise_mismatches(folder: str | os.PathLike[str], faults: list[str]) -> None:
    """Raise JobError if there are faults."""
    if faults:
        remedy = "Choose its model.name and model.flavor, or overrides"
        raise JobError(f"{folder} does not fit the model: {summarize(faults)}. {remedy}")
