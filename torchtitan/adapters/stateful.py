"""Adapters with state that lives across batches, for example a cache of the documents being read."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from torchtitan.adapters.interface import Adapter

Batch = dict[str, torch.Tensor]


class StatefulAdapter(Adapter):
    """An adapter with hooks around batches and for its state. Every rank calls all of them, in the same order.

    `parts`: this rank's parts of the model, more than one under an interleaved pipeline schedule.
    """

    def check_parts(self, parts: Iterable[nn.Module]) -> None:
        """Raise JobError if pipeline stages separate layers that share state."""

    def before_training(
        self,
        parts: Sequence[nn.Module],
        run_batch: Callable[[Batch], object],
        replay: Callable[[int], Iterable[Batch]],
        calibration: Callable[[int], Iterable[Batch]] | None,
    ) -> None:
        """Initialize or rebuild the state before the first step of a start, and after a rollback.

        The model is in evaluation mode. `run_batch` runs its forward and then `after_batch`. `replay(n)` returns the
        batches with the last n tokens of each row's current document, none in a new run. `calibration(n)` returns the
        first n segments of the training data; it is None unless the adapter is untrained.
        """

    def after_batch(self, parts: Sequence[nn.Module]) -> None:
        """Run after the forward and backward of each batch, or after its forward in evaluation."""

    def evaluation_variants(self, parts: Iterable[nn.Module]) -> Iterator[str]:
        """Set up each variant of evaluation in turn and yield the suffix of its loss's name.

        The first is the model's default and has an empty suffix.
        """
        yield ""

    state_restored = False
    """True from the load of a checkpoint until `before_training` if `tensors_to_restore` were filled from it."""

    def state_tensors(self, parts: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
        """Return this rank's state for a checkpoint, as tensors of any shape; empty if checkpoints do not hold it."""
        return {}

    def tensors_to_restore(
        self, parts: Iterable[nn.Module], shapes: Mapping[str, list[int]], rows: int, device: torch.device
    ) -> dict[str, torch.Tensor] | None:
        """Return the tensors of `state_tensors` to fill from a checkpoint, or None if they do not fit it.

        A misfit is no error: the state is then rebuilt by `before_training`. `shapes`: as saved by this rank under an
        equal plan. `rows`: rows of a batch. `device`: the compute device.
        """
        return {}
