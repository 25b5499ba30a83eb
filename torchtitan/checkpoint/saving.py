"""Save a snapshot to a published folder, with the same code inline and in the background thread, and delete old
checkpoints.

Rank 0 creates the folder, all ranks write and hash their own files, and rank 0 writes state and manifest and publishes
the folder. After each phase all ranks exchange one number to agree on its success, so they continue or abort together.
An interruption leaves at worst a temporary folder. The data that a rank sends to rank 0 does not grow with the model.

Before old checkpoints are deleted, the retained ones are verified: disks fail, and a good old checkpoint is worth more
than two damaged new ones.
"""

import contextlib
import json
import logging
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchtitan.checkpoint import folders, layout, storage, tensors
from torchtitan.checkpoint.agreement import Peers
from torchtitan.checkpoint.folders import Metric, best_of
from torchtitan.checkpoint.hashed_files import hash_files, sha256_of
from torchtitan.checkpoint.layout import MANIFEST, MODEL, STATE, CheckpointError, FileEntry, Manifest, TensorEntry
from torchtitan.checkpoint.tensors import Tensors
from torchtitan.core.errors import format_bytes
from torchtitan.core.machine_errors import MachineError, is_out_of_inodes
from torchtitan.core.random_draws import clean_name
from torchtitan.core.tensor_storage import Deferred, Value

logger = logging.getLogger(__name__)

DISTRIBUTION = "torchtitan-toml"


class ExtraState:
    """State of other owners, here none: tensors sharded like parameters, and JSON values that rank 0 writes."""

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return this rank's tensors by their names in a checkpoint, and the values by owner."""
        return {}, {}

    def targets(
        self, values: Mapping[str, Any], saved: Mapping[str, TensorEntry]
    ) -> tuple[Tensors, Tensors, tuple[str, ...]]:
        """Return this rank's tensors to fill from a checkpoint, those to fill as copies of tied weights, and the
        prefixes of the names of all ranks. `values` and `saved`: the checkpoint's values and tensors.
        """
        return {}, {}, ()

    def after_save(self, folder: Path) -> None:
        """Note that a checkpoint is complete. Called on all ranks, in the main thread."""


@dataclass
class TrainerHooks:
    """The trainer's side of saving and loading."""

    trainer_state: Callable[[], dict[str, Any]]
    """Returns JSON-able values that are the same on all ranks."""
    rank_state: Callable[[], dict[str, Any]]
    """Returns JSON-able values of this rank."""
    load_state: Callable[[dict[str, Any], list[dict[str, Any]]], None]
    """Restores the trainer's state and the list of rank states, in the order of the ranks that saved."""
    before_save: Callable[[], None] = lambda: None
    """May raise, on all ranks alike, to reject a state."""
    before_load: Callable[[dict[str, Any], bool], None] = lambda trainer_state, model_only: None
    """May raise to refuse a checkpoint. Nothing has been changed yet."""
    after_save: Callable[[int], None] = lambda step: None
    """Called with the step on rank 0, in the saving thread, after each save is published."""
    after_failed_save: Callable[[str], None] = lambda reason: None
    """Called with the reason, on all ranks, where the run goes on without the save."""
    extra_state: ExtraState = field(default_factory=ExtraState)


@dataclass
class Snapshot:
    """A rank's share of the data to save. `error`: why it could not be collected, which fails the save on all."""

    kind: Literal["full", "model"]
    step: int
    tensors: Tensors = field(default_factory=dict)
    staged: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Copies to write instead of the live tensors; empty for an inline save."""
    trainer: dict[str, Any] = field(default_factory=dict)
    rank: dict[str, Any] = field(default_factory=dict)
    optimizer_values: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def snapshot_of_model(
    step: int,
    parts: Sequence[nn.Module],
    trainer_state: Callable[[], dict[str, Any]],
    dtype: torch.dtype,
    plain: Mapping[str, Value] | None,
) -> Snapshot:
    """Take a snapshot of the model alone, for `Checkpointer.export_model`."""
    snapshot = Snapshot("model", step)
    try:
        snapshot.trainer = json.loads(json.dumps(trainer_state(), allow_nan=False))
        names = (name for part in parts for name, _ in part.named_buffers())
        buffers = {MODEL + clean_name(name) for name in names}  # they keep their dtype: expert biases
        live: Mapping[str, Value] = tensors.model_tensors(parts)
        if plain is not None:
            copies = {name for part in parts for name in getattr(part, "tied_names", ())}
            live = {MODEL + name: value for name, value in plain.items() if name not in copies}
        for name, value in live.items():
            if isinstance(value, Deferred):  # the device has memory for a few of these next to the model, not for all
                snapshot.tensors[name] = value.detach().to(device="cpu", dtype=dtype)
            else:
                snapshot.tensors[name] = value.detach() if name in buffers else value.detach().to(dtype)
    except Exception as error:
        snapshot.error = error
    return snapshot


@dataclass(frozen=True)
class SaveOptions:
    """Checks of a save's disk, and retries."""

    place: folders.CheckpointRoot | None = None
    """The folder that must still be in place."""
    verify: bool = False
    """Read every file back from the disk before it is published."""
    needed_bytes: int = 0
    """Size of a checkpoint, to detect a full disk before writing."""
    pauses: tuple[float, ...] = ()
    """Seconds before each retry."""


def save(snapshot: Snapshot, target: Path, rewound_to: int | None, peers: Peers, care: SaveOptions) -> int:
    """Write and publish `target`, with retries. Return its size in bytes, or 0 if it existed already. Raises
    `CheckpointError` on all ranks or on none.
    """
    try:
        return _save_with_retries(snapshot, target, rewound_to, peers, care)
    except MachineError as error:  # for a save, any failure is the same
        raise CheckpointError(str(error)) from error


def _save_with_retries(
    snapshot: Snapshot, target: Path, rewound_to: int | None, peers: Peers, care: SaveOptions
) -> int:
    started = time.monotonic()
    peers.agree("collecting what to save", snapshot.check)
    for pause in (*care.pauses, None):
        try:
            size = _save_once(snapshot, target, rewound_to, peers, care)
            break
        except (CheckpointError, MachineError) as error:
            if pause is None:
                raise
            if peers.is_main:
                logger.warning("the checkpoint of step %d failed (%s): again in %g s", snapshot.step, error, pause)
            time.sleep(pause)
    if peers.is_main and size:
        logger.info("saved %s: %.1f MB in %.2f s", target, size / 1e6, time.monotonic() - started)
    return size


def _save_once(snapshot: Snapshot, target: Path, rewound_to: int | None, peers: Peers, care: SaveOptions) -> int:
    temporary = peers.decide(
        lambda: _open(snapshot, target, rewound_to, care),
        lambda folder: folder and str(folder),
        lambda name: name and Path(name),
    )
    if temporary is None:
        return 0
    try:
        share, entries = peers.agree("writing a checkpoint", lambda: _write(snapshot, temporary, peers))
        if care.verify:
            peers.agree("reading a checkpoint back", lambda: _read_back(temporary, share))
        gathered = peers.gather(asdict(share))
        shares = None if gathered is None else [_share(fields) for fields in gathered]
        peers.agree("finishing a checkpoint", lambda: _commit(snapshot, temporary, target, shares, entries))
    except (CheckpointError, MachineError):
        storage.forget_plans(peers)
        if peers.is_main and temporary.is_dir():
            with contextlib.suppress(OSError):  # the next save removes it
                folders.delete(temporary)
        raise
    files = () if shares is None else (entry for share in shares for entry in share.files.values())
    return peers.broadcast(sum(entry.size for entry in files))


@dataclass
class _Share:
    """The data that rank 0 gets from each rank, for state and manifest. Small, as there may be thousands."""

    files: dict[str, FileEntry]
    rank: dict[str, Any]
    optimizer_values: dict[str, Any]


def _share(fields: dict[str, Any]) -> _Share:
    """Invert `asdict`."""
    return _Share(**fields | {"files": {name: FileEntry(**entry) for name, entry in fields["files"].items()}})


def _open(snapshot: Snapshot, target: Path, rewound_to: int | None, care: SaveOptions) -> Path | None:
    """Return the temporary folder, once its final name is free; None if there is nothing to save."""
    if care.place is not None:
        care.place.check()
    folders.remove_leftovers(target)
    _look_for_space(target.parent, care.needed_bytes)
    for step, folder in layout.step_folders(target.parent) if rewound_to is not None else []:
        if step > rewound_to:
            aside = folders.move_aside(folder)
            logger.warning("%s is from before the run went back to step %d: now %s", folder, rewound_to, aside.name)
    if target.exists() or target.is_symlink():
        reason = _unfit(target, snapshot)
        if reason is None:
            logger.info("%s is there already and complete: not saved again", target)
            return None
        aside = folders.move_aside(target)
        logger.warning("%s is in the way of a save (%s): now %s", target, reason, aside.name)
    return folders.create_temporary(target)


def _look_for_space(root: Path, needed: int) -> None:
    if root.is_dir() and is_out_of_inodes(root):
        raise CheckpointError(
            f"{root} has no inodes left, though it has bytes: delete files there, such as many small ones (df -i)"
        )
    needed = needed * 11 // 10  # headers, state, and concurrent writes of other programs
    if needed and root.is_dir() and (free := shutil.disk_usage(root).free) < needed:
        raise CheckpointError(
            f"{root} has {format_bytes(free)} free and a checkpoint needs {format_bytes(needed)}: make room, or keep "
            "fewer (checkpoint.keep_latest_k)"
        )


def _unfit(folder: Path, snapshot: Snapshot) -> str | None:
    """Return why the existing folder is not the checkpoint of this step; None if it is."""
    try:
        if layout.check_complete(folder).step != snapshot.step:
            return "it belongs to another step"
        # after a rollback a run reaches a step again: it moved its newer checkpoints aside, but not an export
        other = snapshot.kind == "model" and layout.read_state(folder)["trainer"] != snapshot.trainer
        return "it is of the same step of another job" if other else None
    except CheckpointError as error:
        return str(error)


def _write(snapshot: Snapshot, temporary: Path, peers: Peers) -> tuple[_Share, dict[str, TensorEntry]]:
    """Write this rank's files. Return its share, and the tensors in all ranks' files."""
    keep_plan = snapshot.kind == "full"
    entries, files = storage.write_tensors(temporary, snapshot.tensors, snapshot.staged, peers, keep_plan)
    separate = {key: value for key, value in snapshot.rank.items() if key in layout.SEPARATE_STATE}
    if separate:
        name = layout.rank_state_name(peers.rank)
        folders.write_file(temporary / name, layout.dump_json(separate))
        files[name] = _entry(temporary / name)
    shared = {key: value for key, value in snapshot.rank.items() if key not in separate}
    share = _Share(files, shared, snapshot.optimizer_values)
    layout.dump_json(asdict(share))  # a value that is not JSON-able fails here, on all ranks together
    return share, entries


def _read_back(temporary: Path, share: _Share) -> None:
    """Compare the content on the disk with the bytes that were handed to the system."""
    digests = hash_files([temporary / name for name in share.files], from_disk=True)
    for (name, entry), digest in zip(share.files.items(), digests, strict=True):
        if digest != entry.sha256:
            raise CheckpointError(f"{name} is read back with other content than was written: the disk is not sound")


def _commit(
    snapshot: Snapshot, temporary: Path, target: Path, shares: list[_Share] | None, entries: dict[str, TensorEntry]
) -> None:
    """Write state and manifest and publish the folder. Only on rank 0, which has all shares."""
    if shares is None:
        return
    state = {
        "step": snapshot.step,
        "trainer": snapshot.trainer,
        "ranks": [share.rank for share in shares],
        "optimizer": {name: value for share in shares for name, value in share.optimizer_values.items()},
        "versions": versions(),
    }
    folders.write_file(temporary / STATE, layout.dump_json(state))
    files = {name: entry for share in shares for name, entry in share.files.items()}
    for name, entry in files.items():
        if not (temporary / name).exists():
            raise CheckpointError(f"{name} of another rank is not in {temporary}: give a folder that all hosts share")
        assert (temporary / name).stat().st_size == entry.size, name
    files[STATE] = _entry(temporary / STATE)
    manifest = Manifest(
        format=layout.FORMAT,
        kind=snapshot.kind,
        step=snapshot.step,
        world_size=len(shares),
        versions=versions(),
        files=files,
        tensors=entries,
    )
    folders.write_file(temporary / MANIFEST, layout.manifest_text(manifest))
    folders.publish(temporary, target)


def versions() -> dict[str, str]:
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        version = "not installed"
    return {"torchtitan": version, "torch": torch.__version__, "python": platform.python_version()}


def _entry(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, sha256_of(path))


# Deleting old checkpoints

MIN_GOOD = 2
"""Number of undamaged checkpoints that are never deleted, even if fewer are to be kept."""


def delete_old(
    root: Path,
    keep: int,
    protected: set[Path | None],
    peers: Peers,
    known_good: set[Path] | None,
    metric: Metric | None = None,
) -> None:
    """Delete all complete step folders but the newest `keep` (at least 2; 0 keeps all), the best and the protected
    ones.

    The best is selected by `metric`. Nothing is deleted before two retained checkpoints are verified as undamaged. If
    newer ones are damaged, older ones stay in their place. Folders that are incomplete, links, or not named by this
    project are neither counted nor touched. `known_good` have just been verified; None skips verification. All ranks
    call it and share the reading. A failure to delete is only logged, because the new checkpoint is already safe.
    """
    if keep == 0:
        return

    def sort() -> tuple[list[Path], list[Path]]:
        complete, _ = layout.complete_steps(root)
        cut, best = max(keep, MIN_GOOD), metric and best_of(complete, metric)
        retained = protected | ({best.folder} if best else set())
        return complete[:cut], [folder for folder in complete[cut:] if folder not in retained]

    try:
        staying, surplus = peers.decide(
            sort,
            lambda both: [list(map(str, paths)) for paths in both],
            lambda names: (list(map(Path, names[0])), list(map(Path, names[1]))),
        )
        if surplus and known_good is not None:
            surplus = _without_needed(staying, surplus, known_good, peers)
        if peers.is_main:
            for folder in surplus:
                folders.unpublish(folder)
    except (OSError, CheckpointError, MachineError) as error:
        logger.warning("old checkpoints in %s cannot be deleted: %s", root, error)


def _without_needed(staying: list[Path], surplus: list[Path], known_good: set[Path], peers: Peers) -> list[Path]:
    """Return the surplus that may be deleted. Its newest stay until there are enough undamaged checkpoints."""
    good = 0
    for folder in staying:
        if good == MIN_GOOD:
            break
        good += folder in known_good or is_undamaged(folder, peers)
    surplus = list(surplus)
    while good < MIN_GOOD and surplus:
        good += is_undamaged(surplus.pop(0), peers)
    return surplus


def is_undamaged(folder: Path, peers: Peers) -> bool:
    """Return True if all files of a checkpoint have the content that was written; the ranks share the reading.

    Raises `MachineError` where they cannot be read.
    """

    def verify() -> None:
        manifest = layout.check_complete(folder)
        share = sorted(manifest.files)[peers.rank :: peers.size]
        if damaged := layout.damaged_files(folder, manifest, share):
            raise CheckpointError(f"damaged: {', '.join(damaged)}")

    try:
        peers.agree(f"looking at {folder.name}", verify)
    except CheckpointError as error:
        if peers.is_main:
            logger.warning("%s is damaged (%s): older checkpoints are kept", folder, error)
        return False
    return True
