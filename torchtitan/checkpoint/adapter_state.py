"""What ranks have beside parameters and moments, each for itself: tensors under its own number, which go back to the
same rank of an equal plan, or to nobody.
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
    """`tensors()` gives them by names, `take_back(trainer_state, shapes)` the same to be filled, as a checkpoint of as
    many ranks has them, or None where they do not fit. `tell` is told whether all ranks take theirs.
    """

    def __init__(
        self,
        tensors: Callable[[], Tensors] = dict,
        take_back: Callable[[dict[str, Any], Mapping[str, list[int]]], Tensors | None] = lambda trainer, shapes: {},
        tell: Callable[[bool], object] = lambda taken: None,
    ):
        self.tensors, self.take_back, self.tell = tensors, take_back, tell

    def live(self, rank: int) -> Tensors:
        """By their names in a checkpoint."""
        return {f"{KEPT}{rank}.{name}": tensor for name, tensor in self.tensors().items()}

    def taken(self, source: Source, peers: Peers) -> tuple[Tensors, tuple[str, ...]]:
        """What this rank takes of a checkpoint, and the prefix under which all of it is read: of all ranks or of none.
        Every rank calls it.
        """
        own, saved = f"{KEPT}{peers.rank}.", source.manifest.tensors
        shapes = {name.removeprefix(own): entry.shape for name, entry in saved.items() if name.startswith(own)}
        equal = len(source.state["ranks"]) == peers.size
        found = self.take_back(source.state["trainer"], shapes)
        if found and not equal:
            found = None
        misfit, some = peers.maximum(found is None, bool(found))
        taken = not misfit and bool(some)
        self.tell(taken)
        if not taken or found is None:
            if misfit and peers.is_main and any(name.startswith(KEPT) for name in saved):
                logger.warning("what the ranks of %s kept for themselves is of another plan or batch", source.folder)
            return {}, ()
        return {own + name: tensor for name, tensor in found.items()}, (KEPT,)
