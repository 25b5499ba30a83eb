"""Reading a checkpoint into live tensors, on any number of ranks and under any plan.

Nothing is written to a tensor before the files' checksums, the index and every name, dtype and shape have been
agreed on by all ranks; a tensor that is missing, left over or of another shape is refused by name.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan.checkpoint import folders, layout, storage, tensors
from torchtitan.checkpoint.agreement import Peers
from torchtitan.checkpoint.layout import MODEL, CheckpointError, Manifest, Refused, TensorEntry
from torchtitan.checkpoint.tensors import Tensors
from torchtitan.core.tensor_storage import Store, packed_names, stores

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A folder found complete and undamaged by all ranks."""

    folder: Path
    manifest: Manifest
    state: dict[str, Any]
    index: Metadata


def open_checkpoint(folder: Path, peers: Peers) -> Source:
    """Judge a folder; the ranks share the work of hashing. Raises `CheckpointError` on all of them or on none."""

    def judge() -> Source:
        manifest = layout.read_manifest(folder)
        share = sorted(manifest.files)[peers.rank :: peers.size]
        layout.check_sizes(folder, manifest, share)
        if damaged := layout.damaged_files(folder, manifest, share, bar=True):
            raise CheckpointError(f"damaged: {', '.join(damaged)} (other content than was written)")
        index = storage.read_metadata(folder, manifest)
        state = layout.read_state(folder)
        resumable = manifest.kind == "full"
        for step in (state.get("step"), state["trainer"].get("step", manifest.step) if resumable else manifest.step):
            if type(step) is not int or step != manifest.step:
                raise CheckpointError(f"{layout.STATE} is of step {step}, its folder of {manifest.step}")
        if len(state["ranks"]) == peers.size:
            state["ranks"][peers.rank] |= layout.read_own(folder, manifest, peers.rank)
        return Source(folder, manifest, state, index)

    return peers.agree(f"checking {folder.name}", judge)


@dataclass
class Wanted:
    """What one rank's model, or its parts of a pipeline, takes from a checkpoint."""

    tensors: Tensors
    copies: Tensors
    """Filled too, from the same names: the other end's copy of tied weights, maybe beside them on one rank."""
    values: Iterable[str] = ()
    """Names of optimizer values that are no tensors."""
    stores: Mapping[str, Store] = field(default_factory=dict)
    """What is packed here and not there, by its name there."""

    def unpack(self, parts: Iterable[nn.Module], source: Source) -> None:
        """Ask for plain tensors instead of packed ones, if the checkpoint has no packed ones."""
        packed = {MODEL + name for part in parts for name in packed_names(part)} & self.tensors.keys()
        if packed and packed.isdisjoint(source.manifest.tensors):
            self.tensors = {name: tensor for name, tensor in self.tensors.items() if name not in packed}
            self.stores = {MODEL + name: store for part in parts for name, store in stores(part)}


def load_tensors(source: Source, live: Wanted, peers: Peers, *, prefixes: tuple[str, ...], cast: bool = False) -> None:
    """Fill the live tensors of all ranks, which together have exactly the names that the checkpoint has under
    `prefixes`.

    `cast` allows floating-point tensors to be saved in another dtype than the live ones; it is said in the log.
    """
    saved = source.manifest.tensors | dict.fromkeys(source.state["optimizer"], tensors.VALUE)
    saved = {name: entry for name, entry in saved.items() if name.startswith(prefixes)}
    packed: dict[str, tensors.TensorEntry] = {}
    for name, store in live.stores.items():
        packed |= tensors.entries({name: store.empty()})
    own = (tensors.entries(live.tensors, live.values), tensors.entries(live.copies), packed)
    reason, casts = _compare(tensors.united(own), saved, cast, peers)
    if reason is not None:
        raise CheckpointError(f"{source.folder} does not fit this job: {reason}")
    if casts and peers.is_main:
        logger.info("%s: weights saved as %s are cast to the model's dtype", source.folder, ", ".join(sorted(casts)))

    def read(targets: Tensors) -> None:
        peers.agree(
            f"reading {source.folder.name}",
            lambda: storage.read_tensors(source.folder, source.index, targets, peers),
        )

    read(live.tensors)
    copied, *unpacked = peers.maximum(bool(live.copies), *(name in packed for name in sorted(saved)))
    if copied:  # by itself, as a rank can ask for a name only once at a time
        read(live.copies)
    for name in compress(sorted(saved), unpacked):  # one by one: larger before they are packed
        values = {name: live.stores[name].empty()} if name in live.stores else {}
        read(values)
        if values:
            live.stores[name].write(values[name])


def _compare(
    own: dict[str, TensorEntry], saved: dict[str, TensorEntry], cast: bool, peers: Peers
) -> tuple[str | None, set[str]]:
    """`tensors.differences` between what all ranks want together and what is saved; the same on all.

    A rank that wants only what is saved marks its names in a list of the saved ones, and these lists are all that is
    exchanged. Only where something does not fit do names travel.
    """
    names = sorted(saved)
    odd, _ = tensors.differences(own, {name: saved[name] for name in own if name in saved}, cast)
    cast_here = (name in own and own[name].dtype != saved[name].dtype for name in names)
    misfit, *marks = peers.maximum(odd is not None, *(name in own for name in names), *cast_here)
    wanted = {name: saved[name] for name in compress(names, marks[: len(names)])}
    if not misfit and len(wanted) == len(saved):
        return None, {saved[name].dtype for name in compress(names, marks[len(names) :])}
    odd_names = [name for name, entry in own.items() if saved.get(name) != entry]
    odd_entries: dict[str, Any] = {name: [own[name].dtype, own[name].shape] for name in odd_names}
    others = peers.collect(odd_entries)
    if others is not None:
        wanted |= tensors.united([{name: TensorEntry(*entry) for name, entry in plain.items()} for plain in others])
    reason, casts = tensors.differences(wanted, saved, cast)
    reason, names = peers.tell((reason, sorted(casts)))
    return reason, set(names)


def load_model_for_inference(path: Path, model: nn.Module, left_out: Collection[str] = ()) -> int:
    """Fill a model, plain or parallel, from a checkpoint, a folder of checkpoints (its newest) or an export, saved
    under any plan. `left_out` are parameters that it lacks, and that stay as they are.

    Returns the step it was saved at. Weights are cast to the model's dtype. Raises `CheckpointError`.
    """
    return load_weights(path, [model], left_out)


def load_weights(path: Path, parts: Sequence[nn.Module], left_out: Collection[str] = ()) -> int:
    """The same of the parts that this rank has of a model in a pipeline."""
    peers = Peers("loading")
    source = open_checkpoint(resolve(path, peers), peers)
    absent = {MODEL + name for name in left_out}
    own, copies = (
        {name: tensor for name, tensor in found.items() if name not in absent}
        for found in (tensors.model_tensors(parts), tensors.copied_tensors(parts))
    )
    live = Wanted(own, copies)
    live.unpack(parts, source)
    load_tensors(source, live, peers, prefixes=(MODEL,), cast=True)
    return source.manifest.step


def resolve(path: Path, peers: Peers) -> Path:
    """`layout.resolve`, by rank 0 for all."""
    return peers.decide(lambda: layout.resolve(path), str, Path)


def complete_steps(root: Path, peers: Peers) -> tuple[list[Path], list[Refused]]:
    """`layout.complete_steps`, by rank 0 for all."""
    return peers.decide(
        lambda: layout.complete_steps(root),
        lambda both: [list(map(str, both[0])), [[str(old.folder), old.reason] for old in both[1]]],
        lambda plain: (list(map(Path, plain[0])), [Refused(Path(folder), reason) for folder, reason in plain[1]]),
    )


def claim(root: Path, peers: Peers) -> folders.Place:
    """`folders.Place.claim`, by rank 0 for all."""
    return folders.Place(root, peers.decide(lambda: folders.Place.claim(root).nonce))
