"""Read model weights of any supported format by this project's names, one tensor at a time: its own checkpoints and
exports, checkpoints of PyTorch's torchtitan, and folders and files of Hugging Face.

A checkpoint of PyTorch's torchtitan has no manifest to verify it against. Its metadata are a pickle, which is read
without executing it (safe_unpickle.py), and only files of the checkpoint are opened. Pickled values in it are never
read.
"""

import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from torchtitan.checkpoint import safe_unpickle
from torchtitan.checkpoint.agreement import Peers
from torchtitan.checkpoint.base_weights import find_weights
from torchtitan.checkpoint.layout import METADATA, MODEL, CheckpointError, read_bytes
from torchtitan.checkpoint.loading import NO_HEADS, CheckpointSource, Heads, open_checkpoint
from torchtitan.checkpoint.storage import CheckedReader, read_tensors, translated_errors
from torchtitan.checkpoint.tensors import differences, entries, not_finite
from torchtitan.core.errors import JobError
from torchtitan.core.progress_bar import progress_bar
from torchtitan.core.random_draws import clean_name, local_part
from torchtitan.core.tensor_storage import Deferred, packed_names, stores
from torchtitan.models.hf.load import StoredWeights
from torchtitan.models.hf.torchtitan_names import MAIN, TORCHTITAN_NAMES, TorchtitanNames
from torchtitan.models.spec import MODELS

_FILE = re.compile(r"[A-Za-z0-9_]{1,128}\.distcp")
NOT_WEIGHTS = ("optimizer", "lr_scheduler", "dataloader", "train_state")
COMPUTED = ("freqs_cis",)
"""A table of rotary angles, which some versions of PyTorch's torchtitan saved."""


class TorchtitanCheckpoint:
    """The weights in a checkpoint of PyTorch's torchtitan. `tensors`: their names there -> dtype and shape.

    Raises `CheckpointError`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.index = safe_unpickle.read_foreign(read_bytes(folder / METADATA, safe_unpickle.LARGEST))
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        entries = self.index.state_dict_metadata
        # until 2024 the names of all weights had the prefix "model."
        self.prefix = MODEL if any(name.startswith(MODEL) for name in entries) else ""
        weights = {name.removeprefix(self.prefix): entry for name, entry in entries.items() if self._is_weight(name)}
        self.tensors = {name: (entry.properties.dtype, tuple(entry.size)) for name, entry in weights.items()}
        if not self.tensors:
            raise CheckpointError(f"{folder}: holds no weights, only {', '.join(sorted(entries)[:5]) or 'values'}")
        self._check_places()
        for name in self.tensors:
            if (fault := safe_unpickle.coverage_fault(self.prefix + name, self.index)) is not None:
                raise CheckpointError(f"{folder / METADATA}: {name} {fault}")

    def _is_weight(self, name: str) -> bool:
        inner = name.removeprefix(self.prefix)
        return name.startswith(self.prefix) and inner not in COMPUTED and inner.split(".")[0] not in NOT_WEIGHTS

    def _check_places(self) -> None:
        """Check that each tensor is stored in regular files of this folder."""
        for index, place in self.index.storage_data.items():
            if index.fqn.removeprefix(self.prefix) not in self.tensors:
                continue
            if not _FILE.fullmatch(place.relative_path):
                raise CheckpointError(f"{self.folder / METADATA} points to {place.relative_path!r}: not opened")
            if place.transform_descriptors is not None:
                raise CheckpointError(
                    f"{self.folder / METADATA}: {index.fqn} is stored in a transformed way: not opened"
                )
            try:
                status = (self.folder / place.relative_path).lstat()
            except OSError as error:
                raise CheckpointError(
                    f"{self.folder / place.relative_path} cannot be read ({error.strerror})"
                ) from None
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{self.folder / place.relative_path} is not a regular file")
            if place.offset + place.length > status.st_size:
                raise CheckpointError(f"{self.folder / place.relative_path} is cut off: {index.fqn} is not all there")

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor, of the shape in `tensors`, from any number of ranks' files."""
        dtype, shape = self.tensors[name]
        target = {self.prefix + name: torch.empty(shape, dtype=dtype)}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with translated_errors():
            dcp.load(target, storage_reader=CheckedReader(self.folder, self.index), planner=planner, no_dist=True)
        return target[self.prefix + name]


Shapes = Mapping[str, tuple[int, ...]]


class Weights(ABC):
    """The weights of a model. `step`: the step at which they were saved; 0 if it is not known."""

    step = 0
    packed: Collection[str] = ()
    """Names of packed tensors that are stored as such. Plain parameters are stored in place of the others."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a stored tensor."""

    @abstractmethod
    def full_tensor(self, name: str) -> torch.Tensor:
        """Return the full tensor on the CPU, with the model's shape and the stored dtype."""

    def finite_tensor(self, name: str) -> torch.Tensor:
        """Return `full_tensor`, of any shape. Raises JobError for NaN and infinity, which no program should pass on."""
        tensor = self.full_tensor(name)
        if tensor.is_floating_point() and not_finite({name: tensor}):
            raise JobError(
                f"{name} holds NaN or infinity: the weights are damaged; get them again, or an older checkpoint"
            )
        return tensor

    def deferred(self, name: str, shape: tuple[int, ...]) -> Deferred:
        """Return a placeholder that reads the tensor when its value is needed, and refuses NaN and infinity."""
        return Deferred(shape, partial(self.finite_tensor, name))


class NativeWeights(Weights):
    """The weights of one of this project's checkpoints, which has exactly the names and shapes of `templates`.

    It may have the other one of `heads`, which is not read; it then lacks the task's own.
    """

    def __init__(self, folder: Path, templates: Mapping[str, torch.Tensor], heads: Heads = NO_HEADS):
        self.peers = Peers("weights")
        self.source: CheckpointSource = open_checkpoint(folder, self.peers)
        self.step, self.templates = self.source.manifest.step, templates
        heads = heads.replaced(self.source.manifest.tensors)
        saved = {name: e for name, e in self.source.manifest.tensors.items() if name.startswith(MODEL)}
        saved = {name: e for name, e in saved.items() if name not in heads.other_names}
        expected = entries({MODEL + name: tensor for name, tensor in templates.items()})
        expected = {name: e for name, e in expected.items() if name not in heads.names}
        reason, _ = differences(expected, saved, cast=True)
        if reason is not None:
            raise CheckpointError(f"{folder} does not fit the model: {reason}")

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self.source.manifest.tensors[MODEL + name].dtype)

    def full_tensor(self, name: str) -> torch.Tensor:
        return self.full_tensors([name])[name]

    def full_tensors(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return several full tensors, which are faster to read together."""
        tensors = {name: torch.empty(self.templates[name].shape, dtype=self.dtype(name)) for name in names}
        targets = {MODEL + name: tensor for name, tensor in tensors.items()}
        read_tensors(self.source.folder, self.source.index, targets, self.peers)
        return tensors


def torchtitan_names(folder: Path, family: str, args: Any) -> TorchtitanNames:
    """Return a family's names in checkpoints of PyTorch's torchtitan. Raises CheckpointError if it lacks the family."""
    if family not in TORCHTITAN_NAMES:
        raise CheckpointError(
            f"{folder} is of PyTorch's torchtitan, which has no {family}; families are {', '.join(TORCHTITAN_NAMES)}"
        )
    return TORCHTITAN_NAMES[family](args, MODELS[family].hf.tensor_map(args))


class _TorchtitanWeights(Weights):
    """Weights in a checkpoint of PyTorch's torchtitan. It describes the model only by names and shapes, which have to
    match."""

    def __init__(self, folder: Path, family: str, args: Any, shapes: Shapes, tied: bool):
        self.torchtitan_names = torchtitan_names(folder, family, args)
        self.checkpoint = TorchtitanCheckpoint(folder)
        self.step = int(folder.name.removeprefix("step-")) if folder.name.removeprefix("step-").isdecimal() else 0
        saved = self.checkpoint.tensors
        self.stored_names = {name: self.torchtitan_names.stored_name(name, saved) for name in shapes}
        expected = {self.stored_names[name]: self.torchtitan_names.shape(name, shape) for name, shape in shapes.items()}
        if tied:  # both ends of tied weights are saved there
            head = self.torchtitan_names.stored_name("output.weight", saved)
            saved = {name: entry for name, entry in saved.items() if name != head}
            expected.pop(head, None)
        biases = self.torchtitan_names.absent_biases(shapes, MAIN)
        zeros = {name for name in biases if name in saved and not self.checkpoint.read(name).any()}
        saved = {name: entry for name, entry in saved.items() if name not in zeros}
        faults = [f"{name} is missing" for name in expected if name not in saved]
        faults += [f"{name} is not part of the model" for name in saved if name not in expected]
        faults += [
            f"{name} has shape {saved[name][1]}, the model's is {shape}"
            for name, shape in expected.items()
            if name in saved and saved[name][1] != shape
        ]
        if faults:
            remainder = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
            remedy = "Give the sizes that it was trained with: model.name, model.flavor, model.overrides"
            raise CheckpointError(f"{folder} does not fit the model: {'; '.join(faults[:8])}{remainder}. {remedy}")

    def dtype(self, name: str) -> torch.dtype:
        return self.checkpoint.tensors[self.stored_names[name]][0]

    def full_tensor(self, name: str) -> torch.Tensor:
        return self.torchtitan_names.to_ours(name, self.checkpoint.read(self.stored_names[name]))


class _HuggingFaceWeights(Weights):
    def __init__(self, stored: StoredWeights):
        self.stored = stored

    def dtype(self, name: str) -> torch.dtype:
        return self.stored.dtype(name)

    def full_tensor(self, name: str) -> torch.Tensor:
        return self.stored.read_full(name)


@contextmanager
def open_weights(
    path: str | os.PathLike[str],
    family: str,
    args: Any,
    ignored_keys: Collection[str] = (),
    heads: Heads = NO_HEADS,
) -> Iterator[Weights]:
    """Open the weights at a path for a model of `family` with the sizes in `args`. Raises `JobError` if there are none
    or they do not fit. `ignored_keys`: keys of a config.json that are not judged. `heads`: those of which the weights
    may have the other one, or none, where the caller has the task's own.
    """
    kind, location = find_weights(Path(path))
    hf = MODELS[family].hf
    if kind == "hf":
        optional_names = {name.removeprefix(MODEL) for name in heads.names}
        with hf.stored_weights(location, args, optional_names, ignored_keys) as stored:
            yield _HuggingFaceWeights(stored)
    elif kind == "native":
        shapes = hf.shapes(args)
        if args.tied_embeddings:
            shapes.pop("output.weight", None)
        templates = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        yield NativeWeights(location, templates, heads)
    else:
        yield _TorchtitanWeights(location, family, args, hf.shapes(args), args.tied_embeddings)


@torch.no_grad()
def fill(model: nn.Module, weights: Weights, tied: bool, fresh: Collection[str] = (), prefix: str = "") -> None:
    """Fill a model or a part of it, plain or sharded. Each rank reads one full tensor at a time and keeps its part.

    `fresh`: names that keep their values. `prefix`: the path of `model` in the full model, with a dot at its end.
    """
    kept_out = {*fresh, *(prefix + name for name in packed_names(model) if prefix + name not in weights.packed)}
    tensors = model.state_dict(prefix=prefix, keep_vars=True).items()
    with progress_bar("loading the weights", len(tensors), unit=" tensors") as progress:
        for wrapped_name, tensor in tensors:
            name = clean_name(wrapped_name)
            if name not in kept_out:
                _copy_part(
                    weights.full_tensor("tok_embeddings.weight" if tied and name == "output.weight" else name), tensor
                )
            progress.update()
    if weights.packed:
        return
    for local_name, store in stores(model):  # one at a time, because they are larger before they are packed
        if (name := prefix + local_name) not in fresh:
            values = store.empty()
            _copy_part(weights.full_tensor(name), values)
            store.write(values)


def _copy_part(full_tensor: torch.Tensor, tensor: torch.Tensor) -> None:
    local, _, offset = local_part(tensor)
    local.copy_(full_tensor[tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))])


def load_foreign(
    place: Path,
    parts: Sequence[nn.Module],
    family: str,
    args: Any,
    fresh: Collection[str] = (),
    may_lack: Collection[str] = (),
    ignored_keys: Collection[str] = (),
) -> frozenset[str]:
    """Fill a model, or the parts of a pipeline's rank, from weights of another format (`base_weights.find_weights`).

    Raises `JobError` if they do not fit. `may_lack`: tensors of the head that a checkpoint for another task may lack.
    The missing ones keep their values, and their names are returned.
    """
    missing: frozenset[str] = frozenset()
    if find_weights(place)[0] == "hf":  # each rank reads only its own rows
        for part in parts:
            missing = MODELS[family].hf.load_hf(place, part, args, fresh, may_lack, ignored_keys)
        return missing
    with open_weights(place, family, args, ignored_keys) as weights:
        for part in parts:
            fill(part, weights, args.tied_embeddings, fresh)
    return missing
