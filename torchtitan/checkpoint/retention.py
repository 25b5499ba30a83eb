"""Delete old checkpoints. The retained ones are verified first: disks fail, and a good old checkpoint is worth more
than two damaged new ones.
"""

import logging
from pathlib import Path

from torchtitan.checkpoint import folders, layout
from torchtitan.checkpoint.agreement import Peers
from torchtitan.checkpoint.best_metric import Metric, best_of
from torchtitan.checkpoint.layout import CheckpointError

logger = logging.getLogger(__name__)

GOOD = 2
"""Number of undamaged checkpoints that are never deleted, even if fewer are to be kept."""


def retain(
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
        cut, best = max(keep, GOOD), metric and best_of(complete, metric)
        retained = protected | ({best.folder} if best else set())
        return complete[:cut], [folder for folder in complete[cut:] if folder not in retained]

    try:
        staying, surplus = peers.decide(
            sort,
            lambda both: [list(map(str, paths)) for paths in both],
            lambda names: (list(map(Path, names[0])), list(map(Path, names[1]))),
        )
        if surplus and known_good is not None:
            surplus = _without_the_needed(staying, surplus, known_good, peers)
        if peers.is_main:
            for folder in surplus:
                folders.unpublish(folder)
    except (OSError, CheckpointError) as error:
        logger.warning("old checkpoints in %s cannot be deleted: %s", root, error)


def _without_the_needed(staying: list[Path], surplus: list[Path], known_good: set[Path], peers: Peers) -> list[Path]:
    """Return the surplus that may be deleted. Its newest stay until there are enough undamaged checkpoints."""
    good = 0
    for folder in staying:
        if good == GOOD:
            break
        good += folder in known_good or is_whole(folder, peers)
    surplus = list(surplus)
    while good < GOOD and surplus:
        good += is_whole(surplus.pop(0), peers)
    return surplus


def is_whole(folder: Path, peers: Peers) -> bool:
    """Return True if all files of a checkpoint have the content that was written; the ranks share the reading."""

    def look() -> None:
        manifest = layout.check_complete(folder)
        share = sorted(manifest.files)[peers.rank :: peers.size]
        if damaged := layout.damaged_files(folder, manifest, share):
            raise CheckpointError(f"damaged: {', '.join(damaged)}")

    try:
        peers.agree(f"looking at {folder.name}", look)
    except CheckpointError as error:
        if peers.is_main:
            logger.warning("%s is not sound any more (%s): older ones stay in its place", folder, error)
        return False
    return True
