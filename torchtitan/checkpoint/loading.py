"""Load a checkpoint into live tensors, on any number of ranks and under any parallel plan.

No tensor is written before all ranks have agreed on the files' checksums, the index and every name, dtype and shape. A
tensor that is missing, surplus or of another shape is refused by name.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan.checkpoint import folders, layout, storage, tensors
from torchtitan.checkpoint.agreement import Peers
from torchtitan.checkpoint.layout import ADAPTER_STATE, MODEL, CheckpointError, Manifest, RefusedCheckpoint, TensorEntry
from torchtitan.checkpoint.tensors import Tensors
from torchtitan.core.tensor_storage import Store, packed_names, stores

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint folder that all ranks have found complete and undamaged."""

    folder: Path
    manifest: Manifest
    state: dict[str, Any]
    index: Metadata


def open_checkpoint(folder: Path, peers: Peers) -> CheckpointSource:
    """Validate a folder; the ranks share the hashing. Raises `CheckpointError` on all ranks or on none."""

    def judge() -> CheckpointSource:
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
            state["ranks"][peers.rank] |= layout.read_rank_state(folder, manifest, peers.rank)
        return CheckpointSource(folder, manifest, state, index)

    return peers.agree(f"checking {folder.name}", judge)


OUTPUT = MODEL + "output.weight"
"""The matrix of a head over classes, and of one over words that is not tied to the embedding."""


@dataclass(frozen=True)
class Heads:
    """The names in a checkpoint of the parameters of the task's head, and of the head for the other kind of task.

    One is over words, the other over classes. Both are empty for a family that has only one.
    """

    names: frozenset[str] = frozenset()
    other_names: frozenset[str] = frozenset()
    vocab_size: int = 0
    is_over_classes: bool = False

    @classmethod
    def of(cls, names: Collection[str], other_names: Collection[str], vocab_size: int, over_classes: bool) -> "Heads":
        saved, other_saved = (frozenset(MODEL + name for name in head) for head in (names, other_names))
        return cls(saved, other_saved, vocab_size, over_classes)

    def replaced(self, saved: Mapping[str, TensorEntry]) -> "Heads":
        """Return the heads if the saved weights have the other one, so that the task's own starts afresh.

        A head over words has a row for each, or is tied to the embedding and absent. Without a difference both are
        empty.
        """
        if not self.vocab_size:
            return NO_HEADS
        has_classes = OUTPUT in saved and saved[OUTPUT].shape[:1] != [self.vocab_size]
        return self if has_classes != self.is_over_classes else NO_HEADS


NO_HEADS = Heads()


@dataclass
class LoadTargets:
    """The tensors that one rank's model, or its parts of a pipeline, loads from a checkpoint."""

    tensors: Tensors
    copies: Tensors
    """Filled from the same names: copies of tied weights, possibly on the same rank as their originals."""
    values: Iterable[str] = ()
    """Names of optimizer values that are not tensors."""
    stores: Mapping[str, Store] = field(default_factory=dict)
    """Tensors packed in the model but plain in the checkpoint, by their names in the checkpoint."""

    def unpack(self, parts: Iterable[nn.Module], source: CheckpointSource) -> None:
        """Request plain tensors instead of packed ones if the checkpoint has no packed ones."""
        packed = {MODEL + name for part in parts for name in packed_names(part)} & self.tensors.keys()
        if packed and packed.isdisjoint(source.manifest.tensors):
            self.tensors = {name: tensor for name, tensor in self.tensors.items() if name not in packed}
            self.stores = {MODEL + name: store for part in parts for name, store in stores(part)}


def load_tensors(
    source: CheckpointSource,
    live: LoadTargets,
    peers: Peers,
    *,
    prefixes: tuple[str, ...],
    cast: bool = False,
    unread: Collection[str] = (),
) -> None:
    """Fill the live tensors of all ranks, which together must have exactly the checkpoint's names under `prefixes`.

    `unread`: names in the checkpoint that do not count. `cast` allows saved floating-point tensors to differ in dtype
    from the live ones; this is logged.
    """
    saved = source.manifest.tensors | dict.fromkeys(source.state["optimizer"], tensors.VALUE)
    saved = {name: entry for name, entry in saved.items() if name.startswith(prefixes) and name not in unread}
    packed: dict[str, tensors.TensorEntry] = {}
    for name, store in live.stores.items():
        packed |= tensors.entries({name: store.empty()})
    shares = (tensors.entries(live.tensors, live.values), tensors.entries(live.copies), packed)
    reason, casts = _compare(tensors.merge_entries(shares), saved, cast, peers)
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
    if copied:  # in a separate read, because one read can request each name only once
        read(live.copies)
    for name in compress(sorted(saved), unpacked):  # one by one, because unpacked tensors are larger
        values = {name: live.stores[name].empty()} if name in live.stores else {}
        read(values)
        if values:
            live.stores[name].write(values[name])


def _compare(
    local: dict[str, TensorEntry], saved: dict[str, TensorEntry], cast: bool, peers: Peers
) -> tuple[str | None, set[str]]:
    """Compare the tensors that all ranks request together with the saved ones: `tensors.differences`, equal on all
    ranks.

    If a rank requests only saved tensors, it marks them in the list of saved names, and only these lists are exchanged.
    Names are exchanged only on a mismatch.
    """
    names = sorted(saved)
    mismatch, _ = tensors.differences(local, {name: saved[name] for name in local if name in saved}, cast)
    cast_here = (name in local and local[name].dtype != saved[name].dtype for name in names)
    misfit, *marks = peers.maximum(mismatch is not None, *(name in local for name in names), *cast_here)
    requested = {name: saved[name] for name in compress(names, marks[: len(names)])}
    if not misfit and len(requested) == len(saved):
        return None, {saved[name].dtype for name in compress(names, marks[len(names) :])}
    mismatched_names = [name for name, entry in local.items() if saved.get(name) != entry]
    mismatched_entries: dict[str, Any] = {name: [local[name].dtype, local[name].shape] for name in mismatched_names}
    gathered = peers.gather(mismatched_entries)
    if gathered is not None:
        requested |= tensors.merge_entries(
            [{name: TensorEntry(*entry) for name, entry in part.items()} for part in gathered]
        )
    reason, casts = tensors.differences(requested, saved, cast)
    reason, names = peers.broadcast((reason, sorted(casts)))
    return reason, set(names)


class AdapterState:
    """Saves and restores per-rank adapter state: tensors of one rank in addition to parameters and optimizer state.

    They are restored to the same rank of an equal parallel plan, or not at all. `tensors()` returns them by name.
    `targets_for(trainer_state, shapes)` returns the tensors to fill for a checkpoint with as many ranks, or None if
    they do not fit. `on_restored(restored)` is called with True if all ranks restore theirs.
    """

    def __init__(
        self,
        tensors: Callable[[], Tensors] = dict,
        targets_for: Callable[[dict[str, Any], Mapping[str, list[int]]], Tensors | None] = lambda trainer, shapes: {},
        on_restored: Callable[[bool], object] = lambda restored: None,
    ):
        self.tensors, self.targets_for, self.on_restored = tensors, targets_for, on_restored

    def named_tensors(self, rank: int) -> Tensors:
        """Return this rank's tensors by their names in a checkpoint."""
        return {f"{ADAPTER_STATE}{rank}.{name}": tensor for name, tensor in self.tensors().items()}

    def restore_targets(self, source: CheckpointSource, peers: Peers) -> tuple[Tensors, tuple[str, ...]]:
        """Return the tensors that this rank restores from a checkpoint, and the name prefix of all ranks' tensors.

        Both are empty unless all ranks restore theirs. Every rank calls it.
        """
        prefix, saved = f"{ADAPTER_STATE}{peers.rank}.", source.manifest.tensors
        shapes = {name.removeprefix(prefix): entry.shape for name, entry in saved.items() if name.startswith(prefix)}
        same_size = len(source.state["ranks"]) == peers.size
        targets = self.targets_for(source.state["trainer"], shapes)
        if targets and not same_size:
            targets = None
        mismatch, any_tensors = peers.maximum(targets is None, bool(targets))
        restored = not mismatch and bool(any_tensors)
        self.on_restored(restored)
        if not restored or targets is None:
            if mismatch and peers.is_main and any(name.startswith(ADAPTER_STATE) for name in saved):
                logger.warning(
                    "the adapter state in %s was saved with another parallel plan or batch size and is not restored",
                    source.folder,
                )
            return {}, ()
        return {prefix + name: tensor for name, tensor in targets.items()}, (ADAPTER_STATE,)


def load_model_for_inference(
    path: Path, model: nn.Module, left_out: Collection[str] = (), heads: Heads = NO_HEADS
) -> int:
    """Fill a model, plain or parallel, from a checkpoint, a folder of checkpoints (its newest) or an export, saved
    under any plan. `left_out` are parameters that the checkpoint lacks; they keep their values. So do those of the
    task's head, if the checkpoint has the other one of `heads`.

    Returns the step it was saved at. Weights are cast to the model's dtype. Raises `CheckpointError`.
    """
    return load_weights(path, [model], left_out, heads)


def load_weights(
    path: Path, parts: Sequence[nn.Module], left_out: Collection[str] = (), heads: Heads = NO_HEADS
) -> int:
    """Fill this rank's parts of a pipelined model, like `load_model_for_inference`."""
    peers = Peers("loading")
    source = open_checkpoint(resolve(path, peers), peers)
    heads = heads.replaced(source.manifest.tensors)
    absent = {MODEL + name for name in left_out} | heads.names
    targets, copies = (
        {name: tensor for name, tensor in tensors_of.items() if name not in absent}
        for tensors_of in (tensors.model_tensors(parts), tensors.copied_tensors(parts))
    )
    live = LoadTargets(targets, copies)
    live.unpack(parts, source)
    load_tensors(source, live, peers, prefixes=(MODEL,), cast=True, unread=heads.other_names)
    return source.manifest.step


def resolve(path: Path, peers: Peers) -> Path:
    """Run `layout.resolve` on rank 0, for all ranks."""
    return peers.decide(lambda: layout.resolve(path), str, Path)


def complete_steps(root: Path, peers: Peers) -> tuple[list[Path], list[RefusedCheckpoint]]:
    """Run `layout.complete_steps` on rank 0, for all ranks."""
    return peers.decide(
        lambda: layout.complete_steps(root),
        lambda both: [list(map(str, both[0])), [[str(old.folder), old.reason] for old in both[1]]],
        lambda plain: (
            list(map(Path, plain[0])),
            [RefusedCheckpoint(Path(folder), reason) for folder, reason in plain[1]],
        ),
    )


def claim(root: Path, peers: Peers) -> folders.CheckpointRoot:
    """Run `folders.Place.claim` on rank 0, for all ranks."""
    return folders.CheckpointRoot(root, peers.decide(lambda: folders.CheckpointRoot.claim(root).nonce))
