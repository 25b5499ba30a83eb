"""Read weights in the Hugging Face format: a folder with its index, or a single safetensors file.

All names, shapes and dtypes are checked before any tensor is read. The family's `TensorMap` maps names and layouts.

Weights may be in 8 bits with a scale for each block, as DeepSeek V3 is published (arXiv:2412.19437, section 3.3). A
matrix in float8_e4m3fn comes with a second one, named with the suffix `_scale_inv`, which has one number for each block
of weight_block_size rows and columns (blocks at the edges are smaller). A weight is its 8-bit value times the number of
its block. Matrices of experts may be in 4 bits (hf/mxfp4.py).
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
from torchtitan.models.hf.config import (
    CONFIG,
    INDEX,
    SINGLE,
    BlockSize,
    StoredTensor,
    find_text_config,
    fp8_block_size,
    is_mxfp4,
    read_json,
    unreadable_weights,
)
from torchtitan.models.hf.config_keys import INDEX_KEYS
from torchtitan.models.hf.mxfp4 import BLOCK, STORED_TYPE, PackedExperts, packed_shapes
from torchtitan.models.hf.names import TensorMap
from torchtitan.models.hf.wrappers import text_tensors

FP8 = "F8_E4M3"


def scales_name(name: str) -> str:
    """Return the name of the scales of an 8-bit matrix."""
    return f"{name}_scale_inv"


def scales_shape(shape: tuple[int, ...], block: BlockSize) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix of this shape."""
    return tuple(-(-length // size) for length, size in zip(shape, block, strict=True))


@dataclass(frozen=True)
class Dequantized:
    """A stored 8-bit matrix and its scales; slicing reads and dequantizes only the slice."""

    weight: Any  # both as returned by safetensors' get_slice
    scales: Any
    block: BlockSize

    def __getitem__(self, spans: tuple[slice, slice]) -> torch.Tensor:
        """Return a slice [rows, columns] in float32."""
        first = [span.start // size for span, size in zip(spans, self.block, strict=True)]
        last = [-(-span.stop // size) for span, size in zip(spans, self.block, strict=True)]
        scales = self.scales[slice(first[0], last[0]), slice(first[1], last[1])].float()
        for dim, (span, size) in enumerate(zip(spans, self.block, strict=True)):
            # the file may hold any size; limiting it to the matrix does not change the quotient
            blocks = torch.arange(span.start, span.stop) // min(size, span.stop) - first[dim]
            scales = scales.index_select(dim, blocks)
        return self.weight[spans].float() * scales


@contextmanager
def translated_errors(path: Path) -> Iterator[None]:
    """Raise the errors of reading weights at a path as JobErrors."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        reason = f"cannot read the weights: {error}. A file is cut off or missing: get it again"
        raise JobError(f"{path}: {reason}") from error


READABLE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
        stored_files, (block, may_be_packed) = tensor_files(self.path), _quantization(folder)
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
        scales = {scales_name(hf_name) for hf_name in hf_names} & files.keys() if block else set()
        if may_be_packed:
            hf_names = [part for hf_name in hf_names for part in self._stored_parts(hf_name, files)]
        faults = [f"{hf_name} is missing" for hf_name in hf_names if hf_name not in files]
        expected = {*hf_names, *scales}
        faults += [
            f"{stored_names[hf_name]} is not part of the model"
            for hf_name in files
            if hf_name not in expected and not self.is_ignored(hf_name)
        ]
        raise_mismatches(self.path, faults)
        try:
            expected_files = {hf_name: files[hf_name] for hf_name in expected}
            self.shards = Shards(folder, expected_files, block, self.stack, stored_names)
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

    @staticmethod
    def _stored_parts(hf_name: str, files: Mapping[str, str]) -> list[str]:
        """Return the names of the tensors in `files` that hold one: the one of its name, or packed matrices."""
        packed = [*packed_shapes(hf_name, (0, 0, 0))]
        return packed if hf_name not in files and not files.keys().isdisjoint(packed) else [hf_name]

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
        """Return the stored dtype, or bfloat16 for weights in 8 or 4 bits."""
        return READABLE_DTYPES.get(self.shards.dtype(self.hf_names_by_name[name][0]), torch.bfloat16)

    def read_full(self, name: str) -> torch.Tensor:
        """Return the full tensor, of our shape, on the CPU in the stored dtype."""
        tensor = torch.empty(self.shapes[name], dtype=self.dtype(name))
        self.read_into(tensor, name)
        return tensor


@torch.no_grad()
def load_weights(weights: StoredWeights, model: nn.Module, fresh: Collection[str] = ()) -> frozenset[str]:
    """Load parameters and persistent buffers of a model or pipeline stage, plain or sharded.

    Each rank reads its own rows. Parameters that an adapter added (`fresh`) stay unchanged, and so do those that are
    returned: a head that the folder lacks. Matrices may be in 8 bits.

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
        block: BlockSize | None,
        stack: ExitStack,
        stored_names: Mapping[str, str] = MappingProxyType({}),
    ):
        self.folder, self.files, self.block, self.stored_names = folder, files, block, stored_names
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
        """Return an object that by slicing reads a tensor of the model's shape, dequantized if it is in 8 or 4 bits."""
        if name not in self.files:
            return PackedExperts(*map(self._slice, packed_shapes(name, (0, 0, 0))))
        stored = self._slice(name)
        if stored.get_dtype() != FP8:
            return stored
        return Dequantized(stored, self._slice(scales_name(name)), self.block)

    def mismatches(self, name: str, shape: tuple[int, ...], expected: str = "the model's is") -> list[str]:
        """List the faults of a stored tensor: not in its file, another shape, an unreadable dtype, missing scales."""
        if name not in self.files:
            return self._packed_mismatches(name, shape)
        readable = ", ".join(sorted(READABLE_DTYPES))
        if (stored_name := self.stored_names.get(name, name)) not in self.names_in_file[self.files[name]]:
            return [f"{stored_name} is not in {self.files[name]}, where the index says it is"]
        stored, scales = self._slice(name), scales_name(name)
        dtype = stored.get_dtype()
        if tuple(stored.get_shape()) != shape:
            return [f"{name} has shape {tuple(stored.get_shape())}, {expected} {shape}"]
        if dtype == FP8 and self.block and len(shape) == 2:
            if scales not in self.files:
                return [f"{name} is stored as {FP8}, but its scales, {scales}, are missing"]
            return self.mismatches(scales, scales_shape(shape, self.block), f"blocks of {self.block} make")
        if dtype not in READABLE_DTYPES:
            return [
                f"{name} is stored as {dtype}; readable are {readable}, and {FP8} for matrices if config.json has a "
                f"quantization_config"
            ]
        return [f"{scales} is there, but {name} is stored as {dtype} instead of {FP8}"] if scales in self.files else []

    def _packed_mismatches(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """List the faults of matrices of experts in MXFP4."""
        if len(shape) != 3 or shape[1] % BLOCK:
            return [f"{name} is in blocks of {BLOCK} rows, but the model's is {shape}"]
        faults = []
        for part, expected in packed_shapes(name, shape).items():
            if part not in self.names_in_file[self.files[part]]:
                faults.append(f"{part} is not in {self.files[part]}, where the index says it is")
                continue
            stored = self._slice(part).get_dtype(), tuple(self._slice(part).get_shape())
            if stored != (STORED_TYPE, expected):
                faults.append(f"{part} is {stored[1]} of {stored[0]}, the model's is {expected} of {STORED_TYPE}")
        return faults

    def dtype(self, name: str) -> str:
        return self._slice(name).get_dtype() if name in self.files else STORED_TYPE

    def read(self, name: str) -> torch.Tensor:
        """Return a full tensor of the stored shape and dtype. Raises JobError if its file cannot be read."""
        with translated_errors(self.folder / self.files[name]):
            tensor = self._open(self.files[name]).get_tensor(self.stored_names.get(name, name))
        self.count_bytes(tensor.nbytes)
        return tensor

    def _slice(self, name: str) -> Any:
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


def _quantization(folder: Path) -> tuple[BlockSize | None, bool]:
    """Return, from a folder's config.json, the block size of 8-bit weights, and True if some may be in MXFP4."""
    if not (folder / CONFIG).exists():
        return None, False  # a file alone
    try:
        config = read_json(folder / CONFIG)
        return fp8_block_size(config), is_mxfp4(config)
    except ValueError as error:
        raise JobError(f"{folder / CONFIG}: {error}") from error


def summarize(faults: list[str]) -> str:
    """Join the first eight faults, and the number of the others."""
    return "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")


def raise_mismatches(folder: str | os.PathLike[str], faults: list[str]) -> None:
    """Raise JobError if there are faults."""
    if faults:
        remedy = "Choose its model.name and model.flavor, or overrides"
        raise JobError(f"{folder} does not fit the model: {summarize(faults)}. {remedy}")
