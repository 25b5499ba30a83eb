"""Detect bits that flip in weights and optimizer moments between two optimizer steps.

A shard has no copy on another rank to compare it with. So each rank keeps a checksum of each of its tensors after a
step, and compares the checksums before the next update and before every save. A checksum is the sum of the tensor's
raw bits as 64-bit integers: any single flipped bit changes it, and no order of summation does. Buffers are left out,
because a forward pass may change them.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

WORD = 8
"""Bytes of each integer in the sum."""


class ShardSums:
    """Checksums of this rank's parameters and optimizer state. `parameters`: names in the plain model, and tensors."""

    def __init__(
        self, parameters: Iterable[tuple[str, torch.Tensor]], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self.parameters = list(parameters)  # sharded ones, as the model is between steps
        self.optimizers = optimizers
        self._names: list[str] = []
        self._sums: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def record(self) -> None:
        """Record the checksums, after an optimizer step or a load in the middle of the run."""
        self._names, self._sums = self._compute()

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Return the names of this rank's tensors that have changed since `record`. Waits for the device once."""
        if not self._sums:
            return []
        names, sums = self._compute()
        if names != self._names:
            return ["the list of the optimizer's tensors"]
        start, changes = 0, []
        for device, values in sums.items():
            different = (values != self._sums[device]).nonzero().flatten().tolist()
            changes += [names[start + index] for index in different]
            start += len(values)
        return changes

    def _compute(self) -> tuple[list[str], dict[torch.device, torch.Tensor]]:
        """Return the names and, for each device, an int64 tensor of checksums in the same order."""
        names: dict[torch.device, list[str]] = {}
        sums: dict[torch.device, list[torch.Tensor]] = {}
        for name, tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            names.setdefault(local.device, []).append(name)
            sums.setdefault(local.device, []).append(bit_sum(local.detach()))
        ordered = [name for of_device in names.values() for name in of_device]
        return ordered, {device: torch.stack(values) for device, values in sums.items()}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.parameters
        names = {parameter: name for name, parameter in self.parameters}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for entry, value in state.items():
                    if isinstance(value, torch.Tensor):
                        yield f"{entry} of {names.get(parameter, 'a parameter')}", value


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's raw bits, of any shape and dtype, as a scalar int64 tensor on its device."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    raw = tensor.contiguous().reshape(-1)
    if raw.storage_offset() * raw.itemsize % WORD:
        raw = raw.clone()
    in_words = raw.numel() * raw.itemsize // WORD * WORD // raw.itemsize
    total = raw[:in_words].view(torch.int64).sum()
    tail = raw[in_words:]
    return total + tail.view(torch.uint8).to(torch.int64).sum() if tail.numel() else total
