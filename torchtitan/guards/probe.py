"""Run a microbatch forward on two data-parallel ranks, to notice a device that computes wrongly.

A damaged weight is noticed by its checksum. A device that multiplies wrongly has right weights and raises no error:
only another one that does the same work can tell. Each rank passes its first microbatch of the step to the
data-parallel rank before it. On both the outputs of all blocks, and the loss, must have the same bits. Gradients are
not compared.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.guards.checksums import COMPARED, ReplicasDiffer, digest
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process import distributed
from torchtitan.process.host import host


@torch.no_grad()
def compare_forwards(model: ParallelModel, batch: Mapping[str, torch.Tensor], step: int) -> None:
    """Compare the forward of this rank's `batch` in a step with the one of another rank. Every rank calls it.

    Raises ReplicasDiffer, on all ranks.
    """
    peer = next_rank(dist.get_rank(), model)
    digests = [_forward(model, part) for part in (batch, _of_next(model, batch))]
    rows = distributed.all_gather_json([peer, *digests])
    wrong = []
    for rank, (peer, _, of_peer) in enumerate(rows):
        names = [name for name, value in rows[peer][1] if [name, value] not in of_peer]
        wrong += [f"ranks {rank} and {peer} from {names[0]} on"] if names else []
    if wrong:
        raise ReplicasDiffer(
            f"step {step}: the same microbatch and weights give other outputs on {', '.join(wrong)}; of more than two "
            "ranks the one that is in several of these pairs computes wrongly"
        )


def next_rank(rank: int, model: ParallelModel) -> int:
    """Return the rank with the next samples, and the same place in tensor, context and pipeline parallel."""
    dims = model.dims
    inner = dims.cp * dims.tp
    place = rank // inner % dims.dp
    return rank + ((place + 1) % dims.dp - place) * inner


def _forward(model: ParallelModel, batch: Mapping[str, torch.Tensor]) -> list[tuple[str, int]]:
    """Run a forward without dropout. Return the digests of the outputs of this rank's blocks, and of its loss."""
    outputs: list[tuple[str, torch.Tensor]] = []

    def note(block: nn.Module, inputs: Any, output: Any, name: str) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs.append((f"{name}, call {len(outputs) + 1}", digest(hidden)))

    hooks = [
        block.register_forward_hook(partial(note, name=f"layers.{number}"))
        for part in model.parts
        for number, block in part.layers.items()
    ]
    (loss,) = model.evaluate(lambda: [dict(batch)]).values()
    for hook in hooks:
        hook.remove()
    with host.reading(COMPARED):
        return [(name, int(value)) for name, value in [*outputs, ("the loss", digest(loss))]]


def _of_next(model: ParallelModel, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the batch of the next rank, and pass this rank's to the one before it."""
    with host.reading(COMPARED):
        local = {name: tensor.cpu().contiguous() for name, tensor in batch.items()}
    rank, size = dist.get_rank(), dist.get_world_size()
    following = next_rank(rank, model)
    (previous,) = (other for other in range(size) if next_rank(other, model) == rank)
    shapes = distributed.all_gather_json({name: list(tensor.shape) for name, tensor in local.items()})[following]
    received = {name: torch.empty(shapes[name], dtype=tensor.dtype) for name, tensor in local.items()}
    with host.computing():
        works = [dist.isend(tensor, previous) for tensor in local.values()]
        works += [dist.irecv(tensor, following) for tensor in received.values()]
        for work in works:
            if work is not None:
                work.wait()
    return {name: tensor.to(model.device) for name, tensor in received.items()}
