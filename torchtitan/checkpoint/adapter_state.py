"""Per-rank adapter state in checkpoints: tensors of one rank in addition to parameters and optimizer state. They are
restored to the same rank of an equal parallel plan, or not at all.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torchtitan.checkpoint.agreement import Peers
from torchtitan.checkpoint.layout import KEPT
from torchtitan.checkpoint.loading import Source
from torchtitan.checkpoint.tensors import Tensors

logger = logging.getLogger(__name__)


class Kept:
    """Saves and restores one rank's adapter state.

    `tensors()` returns the tensors by name. `take_back(trainer_state, shapes)` returns the tensors to fill for a
    checkpoint with as many ranks, or None if they do not fit. `tell(restored)` is called with True if all ranks restore
    theirs.
    """

    def __init__(
        self,
        tensors: Callable[[], Tensors] = dict,
        take_back: Callable[[dict[str, Any], Mapping[str, list[int]]], Tensors | None] = lambda trainer, shapes: {},
        tell: Callable[[bool], object] = lambda restored: None,
    ):
        self.tensors, self.take_back, self.tell = tensors, take_back, tell

    def live(self, rank: int) -> Tensors:
        """Return this rank's tensors by their names in a checkpoint."""
        return {f"{KEPT}{rank}.{name}": tensor for name, tensor in self.tensors().items()}

    def taken(self, source: Source, peers: Peers) -> tuple[Tensors, tuple[str, ...]]:
        """Return the tensors that this rank restores from a checkpoint, and the name prefix of all ranks' tensors; both
        are empty unless all ranks restore theirs. Every rank calls it.
        """
        prefix, saved = f"{KEPT}{peers.rank}.", source.manifest.tensors
        shapes = {name.removeprefix(prefix): entry.shape for name, entry in saved.items() if name.startswith(prefix)}
        same_size = len(source.state["ranks"]) == peers.size
        targets = self.take_back(source.state["trainer"], shapes)
        if targets and not same_size:
            targets = None
        misfit, any_tensors = peers.maximum(targets is None, bool(targets))
        restored = not misfit and bool(any_tensors)
        self.tell(restored)
        if not restored or targets is None:
            if misfit and peers.is_main and any(name.startswith(KEPT) for name in saved):
                logger.warning("what the ranks of %s kept for themselves is of another plan or batch", source.folder)
            return {}, ()
        return {prefix + name: tensor for name, tensor in targets.items()}, (KEPT,)
