"""Detect damaged memory by checksums of weights and optimizer state.

`Replicas` compares tensors that several ranks must hold alike: replicas of DDP and HSDP, parameters that tensor
parallel does not split, both ends of tied weights, and their optimizer state. Ranks that hold the same part of the same
tensor compare it, whatever the parallel plan. Hashes are computed on the tensors' devices, and the ranks exchange 16
bytes per tensor.

A shard that only one rank holds cannot be compared with another. `ShardSums` detects bits that flip in it between two
optimizer steps: each rank records a checksum of each of its tensors after a step, and compares the checksums before the
next update and before every save. Such a checksum is the sum of the tensor's raw bits as 64-bit integers: any single
flipped bit changes it, and no order of summation does. Buffers are left out, because a forward pass may change them.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.core.random_draws import clean_name, local_part
from torchtitan.process import distributed
from torchtitan.process.host import host

TensorPart = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A tensor's name in the whole model, the offset of this rank's part in it, and that part's shape."""
MAX_NAMES_IN_ERRORS = 3
COMPARED = "checksums, for the guard that the job asks for"
"""Why the host reads from the device in a step that compares."""


class ReplicasDiffer(RuntimeError):
    """Ranks that must hold the same numbers do not."""


class Replicas:
    """Compares the replicated tensors of this rank's model parts and their optimizers."""

    def __init__(self, parts: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]):
        self.parts, self.optimizers = parts, optimizers
        self.shared = 0
        """Number of this rank's tensors that other ranks also held at the last comparison."""
        self._places: dict[torch.Tensor, TensorPart] = {}
        self._alone: set[int] = set()
        """Keys that only this rank holds; their tensors are not hashed again."""

    @torch.no_grad()
    def check(self) -> None:
        """Compare all replicated tensors. Every rank calls it.

        Raises `ReplicasDiffer`, on all ranks, with the ranks and the tensors that differ.
        """
        if dist.get_world_size() == 1:
            return
        keys, tensors, names = [], [], {}
        for place, tensor in local_tensors(self.parts, self.optimizers, self._places):
            key = key_of(place, tensor)
            if key not in self._alone and key not in names and tensor.numel():
                names[key] = place[0]
                keys.append(key)
                tensors.append(tensor)
        ranks, gathered_keys, contents = _exchange(torch.tensor(keys, dtype=torch.int64), digests(tensors))
        distinct, key_index, holder_counts = gathered_keys.unique(return_inverse=True, return_counts=True)
        self._alone |= set(distinct[holder_counts == 1].tolist())
        self.shared = len(set(keys) - self._alone)
        smallest, largest = (
            contents.new_zeros(len(distinct)).scatter_reduce(0, key_index, contents, reduction, include_self=False)
            for reduction in ("amin", "amax")
        )
        digests_by_rank = {
            key: dict(zip(ranks[gathered_keys == key].tolist(), contents[gathered_keys == key].tolist(), strict=True))
            for key in distinct[smallest != largest].tolist()
        }
        if digests_by_rank:
            named_keys = distributed.all_gather_json([[key, names[key]] for key in digests_by_rank if key in names])
            raise ReplicasDiffer(
                describe_differences(digests_by_rank, {key: name for pairs in named_keys for key, name in pairs})
            )


def local_tensors(
    parts: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], places: dict[torch.Tensor, TensorPart]
) -> Iterator[tuple[TensorPart, torch.Tensor]]:
    """Yield this rank's parameters, buffers and optimizer state, of any shape, with their places.

    Under a pipeline the copy of tied weights has the name of its original. Optimizer state is compared where its
    parameter is, whatever its own shape. `places` caches the places of tensors seen before and is extended.
    """
    for part in parts:
        tied = getattr(part, "tied_names", {})
        for wrapped_name, tensor in part.state_dict(keep_vars=True).items():
            if tensor not in places:
                name, (local, _, offset) = clean_name(wrapped_name), local_part(tensor)
                places[tensor] = tied.get(name, name), tuple(offset), tuple(local.shape)
            yield places[tensor], _local(tensor.detach())
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            name, offset, shape = places[parameter]
            for entry, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield (f"{entry} of {name}", offset, shape), _local(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def key_of(place: TensorPart, tensor: torch.Tensor) -> int:
    """Return a number that is the same on all ranks for a tensor of this shape and dtype at this place."""
    text = f"{place} {tuple(tensor.shape)} {tensor.dtype}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a 64-bit digest of each tensor, [n] int64 on the host. Waits once for each device."""
    on_device = [digest(tensor) for tensor in tensors]
    on_host = torch.zeros(len(on_device), dtype=torch.int64)
    for device in {value.device for value in on_device}:
        places = [index for index, value in enumerate(on_device) if value.device == device]
        with host.reading(COMPARED):
            on_host[places] = torch.stack([on_device[index] for index in places]).cpu()
    return on_host


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest of a tensor [..., n] as a scalar int64 tensor on its device.

    Each row is hashed by torch.hash_tensor (exclusive or), and the row hashes are summed with odd multipliers, modulo
    2^64. So any single flipped bit changes the digest, and so does the same bit flipped twice unless both are in one
    row. The order of the integer additions does not matter.
    """
    rows = tensor if tensor.dim() > 1 else tensor.reshape(-1, 1)
    hashed = torch.hash_tensor(rows, dim=-1).view(torch.int64).flatten()
    return (hashed * torch.arange(1, 2 * hashed.numel(), 2, device=hashed.device)).sum()


def describe_differences(digests_by_rank: dict[int, dict[int, int]], names: dict[int, str]) -> str:
    """Describe the ranks that differ from the majority, and the tensors that differ."""
    tensors_of: dict[str, list[str]] = defaultdict(list)
    for key, ranks in digests_by_rank.items():
        digest_counts = Counter(ranks.values()).most_common()
        majority = digest_counts[0][0]
        if digest_counts[0][1] * 2 > len(ranks):
            odd_ranks = [rank for rank, digest in ranks.items() if digest != majority]
            peers = _rank_names([rank for rank in ranks if rank not in odd_ranks])
            tensors_of[f"{_rank_names(odd_ranks)} differ{'s' if len(odd_ranks) == 1 else ''} from {peers}"].append(
                names[key]
            )
        else:
            tensors_of[f"{_rank_names(list(ranks))} differ, and which is right is not known"].append(names[key])
    return "; ".join(
        f"{odd_ranks} in {', '.join(sorted(tensor_names)[:MAX_NAMES_IN_ERRORS])}"
        + (f" and {len(tensor_names) - MAX_NAMES_IN_ERRORS} more" if len(tensor_names) > MAX_NAMES_IN_ERRORS else "")
        for odd_ranks, tensor_names in sorted(tensors_of.items())
    )


def _rank_names(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _exchange(keys: torch.Tensor, contents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gather the keys [n] and digests [n] (int64) of all ranks; n differs by rank.

    Return rank, key and digest of each entry, [N] each.
    """
    size, length = dist.get_world_size(), torch.tensor([len(keys)])
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    padded = torch.zeros(int(length), 3, dtype=torch.int64)
    padded[: len(keys)] = torch.stack((torch.ones_like(keys), keys, contents), 1)
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded)
    rows = torch.stack(gathered)
    is_entry = rows[..., 0] == 1
    ranks = torch.arange(size).unsqueeze(1).expand_as(is_entry)
    return ranks[is_entry], rows[..., 1][is_entry], rows[..., 2][is_entry]


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
            with host.reading(COMPARED):
                are_equal = (values == self._sums[device]).tolist()
            changes += [name for name, is_equal in zip(names[start:], are_equal, strict=False) if not is_equal]
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
