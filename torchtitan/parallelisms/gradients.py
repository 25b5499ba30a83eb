"""The gradient's global 2-norm over every axis of the mesh, and clipping by it, without waiting for the device."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients in place so that their joint 2-norm is at most `max_norm` (0: only measure). Returns the norm
    before clipping, a 0-dim tensor, float32 or wider, that is the same on all ranks.

    torch.nn.utils.clip_grad_norm_ stacks per-parameter norms and so fails where parameters live on different meshes;
    here the norm is taken per mesh and then combined.
    """
    groups: dict[object, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            groups[grad.device_mesh if isinstance(grad, DTensor) else None].append(grad)
    norms = []
    for grads in groups.values():
        norm = torch.nn.utils.get_total_norm(grads)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norms.append(norm.to(torch.promote_types(norm.dtype, torch.float32)))
    if not norms:
        return torch.zeros(())
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if max_norm > 0:
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # the constant is that of torch's clip_grad_norm_
        for grads in groups.values():
            local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
            torch._foreach_mul_(local, factor.to(local[0].device))
    return total
