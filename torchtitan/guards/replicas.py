"""Compare tensors that several ranks must hold alike: replicas of DDP and HSDP, parameters that tensor parallel does
not split, both ends of tied weights, and their optimizer state. A flipped bit in one copy would otherwise corrupt the
model unnoticed.

Ranks that hold the same part of the same tensor compare it, whatever the parallel plan. A shard that only one rank
holds cannot be compared. Hashes are computed on the tensors' devices, and the ranks exchange 16 bytes per tensor.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.core.initialization import clean_name, local_part
from torchtitan.process import distributed

Place = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A tensor's name in the whole model, the offset of this rank's part in it, and that part's shape."""
NAMED_IN_ERRORS = 3


class ReplicasDiffer(RuntimeError):
    """Ranks that must hold the same numbers do not."""


class Replicas:
    """Compares the replicated tensors of this rank's model parts and their optimizers."""

    def __init__(self, parts: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]):
        self.parts, self.optimizers = parts, optimizers
        self.shared = 0
        """Number of this rank's tensors that other ranks also held at the last comparison."""
        self._places: dict[torch.Tensor, Place] = {}
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
        for place, tensor in held(self.parts, self.optimizers, self._places):
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
            raise ReplicasDiffer(told(digests_by_rank, {key: name for pairs in named_keys for key, name in pairs}))


def held(
    parts: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], places: dict[torch.Tensor, Place]
) -> Iterator[tuple[Place, torch.Tensor]]:
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


def key_of(place: Place, tensor: torch.Tensor) -> int:
    """Return a number that is the same on all ranks for a tensor of this shape and dtype at this place."""
    text = f"{place} {tuple(tensor.shape)} {tensor.dtype}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a 64-bit digest of each tensor, [n] int64 on the host. Waits once for each device."""
    on_device = [digest(tensor) for tensor in tensors]
    on_host = torch.zeros(len(on_device), dtype=torch.int64)
    for device in {value.device for value in on_device}:
        places = [index for index, value in enumerate(on_device) if value.device == device]
        on_host[places] = torch.stack([on_device[index] for index in places]).cpu()
    return on_host


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest of a tensor [..., n] as a scalar int64 tensor on its device.

    Each row is hashed by torch.hash_tensor (exclusive or), and the row hashes are summed with odd multipliers, modulo
    2^64. So any single flipped bit changes the digest, and so does the same bit flipped twice unless both are in one
    row. Integer addition does not depend on the order in which a device adds.
    """
    rows = tensor if tensor.dim() > 1 else tensor.reshape(-1, 1)
    hashed = torch.hash_tensor(rows, dim=-1).view(torch.int64).flatten()
    return (hashed * torch.arange(1, 2 * hashed.numel(), 2, device=hashed.device)).sum()


def told(digests_by_rank: dict[int, dict[int, int]], names: dict[int, str]) -> str:
    """Describe which ranks differ from the majority, and in which tensors."""
    tensors_of: dict[str, list[str]] = defaultdict(list)
    for key, ranks in digests_by_rank.items():
        digest_counts = Counter(ranks.values()).most_common()
        majority = digest_counts[0][0]
        if digest_counts[0][1] * 2 > len(ranks):
            odd_ranks = [rank for rank, digest in ranks.items() if digest != majority]
            peers = _named([rank for rank in ranks if rank not in odd_ranks])
            tensors_of[f"{_named(odd_ranks)} differ{'s' if len(odd_ranks) == 1 else ''} from {peers}"].append(
                names[key]
            )
        else:
            tensors_of[f"{_named(list(ranks))} differ, and which is right is not known"].append(names[key])
    return "; ".join(
        f"{odd_ranks} in {', '.join(sorted(tensor_names)[:NAMED_IN_ERRORS])}"
        + (f" and {len(tensor_names) - NAMED_IN_ERRORS} more" if len(tensor_names) > NAMED_IN_ERRORS else "")
        for odd_ranks, tensor_names in sorted(tensors_of.items())
    )


def _named(ranks: list[int]) -> str:
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
