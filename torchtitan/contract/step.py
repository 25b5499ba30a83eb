"""Training steps of a tiny model on one batch, under a plan and on one device, to be compared.

The table of combinations (tests/plans/combinations.py) and `torchtitan contract` run these.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from torchtitan.adapters.interface import full_tensor
from torchtitan.datasets.samples import global_sample_numbers
from torchtitan.losses.objective import IGNORE_INDEX, Batch
from torchtitan.models.dropout import record_lengths, token_keys
from torchtitan.optimizers.build import Optimizers
from torchtitan.parallelisms.expert_parallel import LoadBalancing
from torchtitan.parallelisms.parallel_model import ParallelModel

SAMPLES, SEQ_LEN, CLASSES = 8, 24, 4
CLIP = 1.0


def micro_batch(vocab_size: int) -> dict[str, torch.Tensor]:
    """Make a batch with documents of uneven length, and ignored labels spread unevenly over samples (so over ranks)."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocab_size, (SAMPLES, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for sample in range(SAMPLES):
        labels[sample, : 2 * sample] = IGNORE_INDEX
    starts = (torch.rand(SAMPLES, SEQ_LEN, generator=generator) < 0.15).long()
    starts[:, 0] = 0
    document_ids = starts.cumsum(1)
    index = torch.arange(SEQ_LEN).expand(SAMPLES, -1)
    positions = index - torch.where(starts.bool(), index, 0).cummax(1).values
    batch = {"tokens": tokens[:, :-1], "labels": labels, "positions": positions, "document_ids": document_ids}
    classes = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    classes = classes.index_fill(0, torch.tensor([2, 5]), IGNORE_INDEX)
    drawn = {"keys": token_keys(7, 3, torch.arange(SAMPLES), SEQ_LEN), "lengths": record_lengths(batch)}
    return batch | {"classes": classes} | drawn


def local_batch(model: ParallelModel, batch: Batch, group_size: int = 1) -> dict[str, torch.Tensor]:
    """Return this rank's samples of a batch. `group_size`: adjacent samples that share a loss term."""
    dims = model.dims
    numbers = torch.arange(SAMPLES // dims.dp)
    samples = global_sample_numbers(numbers, dims.dp_rank(model.mesh), dims.dp, group_size)
    return {name: tensor[samples] for name, tensor in batch.items()}


def accumulate(
    model: ParallelModel, batch: Batch, valid: int, passes: int = 1, extra: Mapping[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """Accumulate the gradients of this rank's batch in several passes, and return its share of the loss, a scalar.

    `valid`: number of loss terms of all ranks. `extra`: further tensors of each pass.
    """
    loss = torch.zeros((), dtype=torch.float64)
    for index in range(passes):
        part = {name: tensor.chunk(passes)[index] for name, tensor in batch.items()} | dict(extra or {})
        loss += model.forward_backward(part, valid, is_last=index == passes - 1)
    return loss


def trained_gradient(name: str, parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient of a trained parameter of any shape. Raises ValueError if there is none."""
    if parameter.grad is None:
        raise ValueError(f"{name} is trained and has no gradient: the loss does not depend on it; use or freeze it")
    return parameter.grad


def rank_step(
    model: ParallelModel,
    batch: dict[str, torch.Tensor],
    valid: int,
    passes: int = 1,
    evaluated: bool = False,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> tuple[float, float, dict[str, np.ndarray], float]:
    """Run a step on this rank's batch, see `accumulate`. Return loss, gradient norm, the full gradients of this rank's
    parameters, and the loss in evaluation, 0 unless `evaluated`.

    Gradients are numpy arrays, because a tensor would be sent to another process through a shared file.
    """
    losses = torch.zeros(2, dtype=torch.float64)
    if evaluated:
        model.train(False)
        losses[1] = model.loss_sum(batch) / valid
        model.train()
    losses[0] = accumulate(model, batch, valid, passes, extra)
    dist.all_reduce(losses)
    losses /= model.dims.tp
    norm = model.clip_gradients(0.0)
    grads = {
        name: full_tensor(trained_gradient(name, p)).numpy() for name, p in model.named_parameters() if p.requires_grad
    }
    return losses[0].item(), norm.item(), grads, losses[1].item()


def device_step(
    model: nn.Module, batch: Batch, valid: int, passes: int = 1, after_pass: Callable[[], object] = lambda: None
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Run the same step on one device. Return loss, gradient norm and gradients."""
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for samples in torch.arange(SAMPLES).chunk(passes):
        part = model(**{name: tensor[samples] for name, tensor in batch.items()}) / valid
        part.backward()
        loss += part.detach()
        after_pass()
    grads = {name: trained_gradient(name, p) for name, p in model.named_parameters() if p.requires_grad}
    norm = torch.linalg.vector_norm(torch.cat([g.flatten().double() for g in grads.values()]))
    return loss.item(), norm.item(), grads


def rank_weights(
    model: ParallelModel, optimizers: Optimizers, batch: Batch, valid: int, steps: int, passes: int = 1
) -> dict[str, np.ndarray]:
    """Take optimizer steps on this rank's batch; return the full weights of its part of the model."""
    for _ in range(steps):
        accumulate(model, batch, valid, passes)
        model.clip_gradients(CLIP)
        optimizers.step()
        optimizers.zero_grad()
    return {name: full_tensor(parameter.detach()).numpy() for name, parameter in model.named_parameters()}


def device_weights(
    model: nn.Module, optimizers: Optimizers, batch: Batch, valid: int, steps: int, balance: LoadBalancing | None = None
) -> dict[str, Any]:
    """Take the same steps on one device; return the weights."""
    for _ in range(steps):
        if balance is not None:
            balance.set_aux_loss_scale(model, 1 / valid)
        (model(**batch) / valid).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizers.step()
        optimizers.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
