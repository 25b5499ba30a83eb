"""What several ranks hold they must hold alike: replicas of DDP and HSDP, what tensor parallel does not split, both
ends of tied weights, the moments of all these. With a bit flipped in one of them it is another model's step, and
nothing else would tell.

Whoever holds the same place of the same tensor compares, whatever the plan made of it; what one rank alone holds (a
shard) cannot be compared. Hashes are made where the tensors are, and the ranks exchange 16 bytes a tensor.
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
"""Of a tensor: its name in the whole model, where in it this rank's part begins, and that part's shape."""
NAMED_IN_ERRORS = 3


class ReplicasDiffer(RuntimeError):
    """Ranks that must hold the same numbers do not."""


class Replicas:
    """Of this rank's parts of a model and their optimizers."""

    def __init__(self, parts: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]):
        self.parts, self.optimizers = parts, optimizers
        self.shared = 0
        """Of this rank's tensors, those that others had too when they were last compared."""
        self._places: dict[torch.Tensor, Place] = {}
        self._alone: set[int] = set()
        """Keys that no other rank has; they are not hashed again."""

    @torch.no_grad()
    def check(self) -> None:
        """Every rank calls it. Raises `ReplicasDiffer`, on all of them, with the ranks and the tensors."""
        if dist.get_world_size() == 1:
            return
        keys, tensors, names = [], [], {}
        for place, tensor in held(self.parts, self.optimizers, self._places):
            key = key_of(place, tensor)
            if key not in self._alone and key not in names and tensor.numel():
                names[key] = place[0]
                keys.append(key)
                tensors.append(tensor)
        ranks, everywhere, contents = _exchange(torch.tensor(keys, dtype=torch.int64), digests(tensors))
        distinct, index, holders = everywhere.unique(return_inverse=True, return_counts=True)
        self._alone |= set(distinct[holders == 1].tolist())
        self.shared = len(set(keys) - self._alone)
        least, most = (
            contents.new_zeros(len(distinct)).scatter_reduce(0, index, contents, how, include_self=False)
            for how in ("amin", "amax")
        )
        unlike = {
            key: dict(zip(ranks[everywhere == key].tolist(), contents[everywhere == key].tolist(), strict=True))
            for key in distinct[least != most].tolist()
        }
        if unlike:
            known = distributed.all_gather_json([[key, names[key]] for key in unlike if key in names])
            raise ReplicasDiffer(told(unlike, {key: name for each in known for key, name in each}))


def held(
    parts: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], places: dict[torch.Tensor, Place]
) -> Iterator[tuple[Place, torch.Tensor]]:
    """Parameters, buffers and optimizer state of this rank, of any shape. Under a pipeline the copy of tied weights has
    the name of what it is a copy of. An optimizer's state is compared where its parameter is, whatever its own form.
    `places` are those that are known from before, and learns others.
    """
    for part in parts:
        tied = getattr(part, "tied_names", {})
        for wrapped, tensor in part.state_dict(keep_vars=True).items():
            if tensor not in places:
                name, (local, _, offset) = clean_name(wrapped), local_part(tensor)
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
    """The same number on all ranks with a tensor of this shape and type at this place, whatever their order."""
    text = f"{place} {tuple(tensor.shape)} {tensor.dtype}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A 64-bit number of each one's content, [n] int64 on the host; waits for the device once for each kind of it."""
    found = [digest(tensor) for tensor in tensors]
    made = torch.zeros(len(found), dtype=torch.int64)
    for device in {one.device for one in found}:
        places = [index for index, one in enumerate(found) if one.device == device]
        made[places] = torch.stack([found[index] for index in places]).cpu()
    return made


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """[..., n] -> a scalar: torch.hash_tensor's exclusive or within each row, and the sum, modulo 2^64, of odd
    multiples of the rows': any one flipped bit shows, and so does the same bit flipped twice unless both are in one
    row. In integers, so the order in which a device adds does not matter.
    """
    rows = tensor if tensor.dim() > 1 else tensor.reshape(-1, 1)
    hashed = torch.hash_tensor(rows, dim=-1).view(torch.int64).flatten()
    return (hashed * torch.arange(1, 2 * hashed.numel(), 2, device=hashed.device)).sum()


def told(unlike: dict[int, dict[int, int]], names: dict[int, str]) -> str:
    """Who differs from most of those with the same numbers, and in what."""
    blamed: dict[str, list[str]] = defaultdict(list)
    for key, ranks in unlike.items():
        counts = Counter(ranks.values()).most_common()
        usual = counts[0][0]
        if counts[0][1] * 2 > len(ranks):
            who = [rank for rank, digest in ranks.items() if digest != usual]
            others = _named([rank for rank in ranks if rank not in who])
            blamed[f"{_named(who)} differ{'s' if len(who) == 1 else ''} from {others}"].append(names[key])
        else:
            blamed[f"{_named(list(ranks))} differ, and which is right is not known"].append(names[key])
    return "; ".join(
        f"{who} in {', '.join(sorted(what)[:NAMED_IN_ERRORS])}"
        + (f" and {len(what) - NAMED_IN_ERRORS} more" if len(what) > NAMED_IN_ERRORS else "")
        for who, what in sorted(blamed.items())
    )


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _exchange(keys: torch.Tensor, contents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n] and [n] int64 of each rank -> rank, key and content of all of them together, [N] each. n differs by rank."""
    size, length = dist.get_world_size(), torch.tensor([len(keys)])
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    mine = torch.zeros(int(length), 3, dtype=torch.int64)
    mine[: len(keys)] = torch.stack((torch.ones_like(keys), keys, contents), 1)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine)
    rows = torch.stack(gathered)
    there = rows[..., 0] == 1
    ranks = torch.arange(size).unsqueeze(1).expand_as(there)
    return ranks[there], rows[..., 1][there], rows[..., 2][there]
