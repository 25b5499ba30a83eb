"""Weights in 8 bits with a scale for each block, in which DeepSeek V3 is published (arXiv:2412.19437, section 3.3).

Beside a matrix in float8_e4m3fn stands another one of the same name and `_scale_inv`, with one number for each block of
weight_block_size rows and columns, those at the edges being smaller. A weight is its 8 bits times its block's number.

Weights in the form of Hugging Face as they are read: a folder with its index, or a file of safetensors alone.

Nothing is read before all names, shapes and types are known to fit. What they are called and how they lie in a file is
the family's `Form`.
"""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan.core.errors import JobError
from torchtitan.core.files import require_file
from torchtitan.core.initialization import clean_name, local_part
from torchtitan.core.progress_bar import progress_bar
from torchtitan.core.tensor_storage import packed_names, stores
from torchtitan.models.hf.config import CONFIG, INDEX, SINGLE, Block, block_of, read_json
from torchtitan.models.hf.names import Form

FP8 = "F8_E4M3"


def scales_name(name: str) -> str:
    return f"{name}_scale_inv"


def scales_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    return tuple(-(-length // size) for length, size in zip(shape, block, strict=True))


@dataclass(frozen=True)
class Dequantized:
    """A stored matrix and its scales, of which only what a slice needs is read."""

    weight: Any  # both as safetensors' get_slice gives them
    scales: Any
    block: Block

    def __getitem__(self, spans: tuple[slice, slice]) -> torch.Tensor:
        """float32"""
        first = [span.start // size for span, size in zip(spans, self.block, strict=True)]
        last = [-(-span.stop // size) for span, size in zip(spans, self.block, strict=True)]
        scales = self.scales[slice(first[0], last[0]), slice(first[1], last[1])].float()
        for dim, (span, size) in enumerate(zip(spans, self.block, strict=True)):
            # a size comes from the file, and may be any: no larger than the matrix, it divides to the same
            blocks = torch.arange(span.start, span.stop) // min(size, span.stop) - first[dim]
            scales = scales.index_select(dim, blocks)
        return self.weight[spans].float() * scales


READABLE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredWeights:
    """By our names. Open as long as the `with` block; what cannot be read then is a JobError too.

    JobError, with everything that is wrong and the same on all ranks, where names, shapes or types do not fit.
    `shapes` are the whole model's; `ignored` says which of their names may stay unread. `may_lack`: ours of the form's
    head that need not be there, all of it or nothing; `lacking` has them, once open, where they are not.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        form: Form,
        shapes: Mapping[str, tuple[int, ...]],
        ignored: Callable[[str], bool],
        may_lack: Collection[str] = (),
    ):
        self.path, self.form, self.shapes, self.ignored = Path(path), form, shapes, ignored
        self.may_lack, self.lacking = frozenset(may_lack), frozenset[str]()
        self.wanted = {name: form.hf_names(name) for name in shapes if not (form.tied and name == "output.weight")}
        self.stack = ExitStack()

    def __enter__(self) -> "StoredWeights":
        folder = self.path.parent if self.path.is_file() else self.path
        files, block = _files(self.path), _block(folder)
        base = self.form.base
        if base and not any(each.startswith(base) for each in files):
            bare = {name: [each.removeprefix(base) for each in names] for name, names in self.wanted.items()}
            self.wanted = bare
        if not any(each in files for name in self.form.head for each in self.wanted.get(name, ())):
            self.lacking = self.form.head & self.wanted.keys() & self.may_lack
            self.wanted = {name: names for name, names in self.wanted.items() if name not in self.lacking}
        theirs = list(dict.fromkeys(each for names in self.wanted.values() for each in names))
        scales = {scales_name(each) for each in theirs} & files.keys() if block else set()
        faults = [f"{each} is missing" for each in theirs if each not in files]
        known = {*theirs, *scales}
        faults += [f"{each} is not part of the model" for each in files if each not in known and not self.ignored(each)]
        refuse(self.path, faults)
        try:
            self.shards = _Shards(folder, {each: files[each] for each in known}, block, self.stack)
            for name, each_name in self.wanted.items():
                shape = self.form.hf_shape(name, self.shapes[name])
                for each in each_name:
                    faults += self.shards.misfits(each, shape)
            refuse(self.path, list(dict.fromkeys(faults)))
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        from safetensors import SafetensorError

        self.stack.close()
        if isinstance(error, (SafetensorError, OSError)):
            raise JobError(
                f"{self.path}: cannot read the weights: {error}. A file is cut off or missing: get it again"
            ) from error

    def read_into(self, tensor: torch.Tensor, name: str) -> None:
        """This rank's part of what has that name, whose shape the tensor has."""
        if self.form.tied and name == "output.weight":  # the end of a pipeline has a copy
            name = "tok_embeddings.weight"
        assert self.shapes[name] == tuple(tensor.shape), name
        read_part([self.shards.stored(each) for each in self.wanted[name]], tensor, name, self.form)

    def dtype(self, name: str) -> torch.dtype:
        """As it is stored; of 8 bits, the type to make of them."""
        return READABLE.get(self.shards.dtype(self.wanted[name][0]), torch.bfloat16)

    def whole(self, name: str) -> torch.Tensor:
        """On the CPU, of our shape, in that type."""
        tensor = torch.empty(self.shapes[name], dtype=self.dtype(name))
        self.read_into(tensor, name)
        return tensor


@torch.no_grad()
def load_weights(weights: StoredWeights, model: nn.Module, fresh: Collection[str] = ()) -> frozenset[str]:
    """Fill parameters and persistent buffers of the model, or of a pipeline's part of it, plain or sharded; each rank
    reads its own rows. What the model has beside them, `fresh` of an adapter, stays as it is, and so does what is
    returned: a head that the folder lacks. Matrices may be in 8 bits (stored.py).

    JobError where they do not fit; the model is then untouched, unless a file proves unreadable only in its middle.
    """
    packed = packed_names(model)
    named = {clean_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    plain = {name: tensor for name, tensor in named.items() if name not in fresh and name not in packed}
    with weights, progress_bar(f"loading {weights.path.name}", len(plain), unit=" tensors") as progress:
        for name, tensor in plain.items():
            if name not in weights.lacking:
                weights.read_into(tensor, name)
            progress.update()
        for name, store in stores(model):  # one after the other, as they are larger before they are packed
            values = store.empty()
            weights.read_into(values, name)
            store.write(values)
    return weights.lacking


def read_part(stored: list[Any], tensor: torch.Tensor, name: str, form: Form) -> None:
    """Copy this rank's part of what is stored (one tensor, or one [out, in] for each expert) into its tensor, of our
    shape; rows in another order are read by whole heads.
    """
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
        before = form.together(name).index(name) * shape[0]  # rows of what else is of the same tensor there
        spans[0] = slice(spans[0].start + before, spans[0].stop + before)
        transposed = form.is_transposed(name)
        part = stored[0][tuple(spans[::-1] if transposed else spans)]
        local.copy_(part.t() if transposed else part)


class _Shards:
    """The tensors of a folder by their names there, in files that stay open as long as `stack`."""

    def __init__(self, folder: Path, files: Mapping[str, str], block: Block | None, stack: ExitStack):
        from safetensors import safe_open

        self.files, self.block = files, block
        names = sorted(set(files.values()))
        for name in names:
            require_file(folder / name)
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

    def dtype(self, name: str) -> str:
        return self._slice(name).get_dtype()

    def _slice(self, name: str) -> Any:
        return self.opened[self.files[name]].get_slice(name)


def _files(path: Path) -> dict[str, str]:
    """Tensor name -> file name, from a folder's index, or of the single file where there is no index."""
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
            raise JobError(f"{folder}: has neither {INDEX} nor a readable {SINGLE}: {error}") from error
    files = read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise JobError(f"{folder / INDEX}: has no weight_map of tensor names to file names")
    for file in sorted(set(files.values())):
        if file != os.path.basename(file) or "\\" in file or not file.endswith(".safetensors"):
            raise JobError(f"{folder / INDEX}: {file!r} is not the plain name of a .safetensors file in this folder")
    return files


def _block(folder: Path) -> Block | None:
    if not (folder / CONFIG).exists():
        return None  # a file alone
    try:
        return block_of(read_json(folder / CONFIG))
    except ValueError as error:
        raise JobError(f"{folder / CONFIG}: {error}") from error


def some(faults: list[str]) -> str:
    return "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")


def refuse(folder: str | os.PathLike[str], faults: list[str]) -> None:
    if faults:
        raise JobError(
            f"{folder} does not fit the model: {some(faults)}. Choose its model.name and model.flavor, or overrides"
        )
