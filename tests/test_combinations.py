"""Every row of the table of combinations, loss and every gradient, against the plain model on one device."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.combinations import Combination, table
from tests.pool import run_ranks
from torchtitan.initialization import initialize
from torchtitan.loss import IGNORE_INDEX, SummedCrossEntropy
from torchtitan.models import SIZES
from torchtitan.models.registry import MODELS
from torchtitan.parallelisms.data_parallel import set_last_microbatch
from torchtitan.parallelisms.gradients import clip_gradients
from torchtitan.parallelisms.parallel_dims import ParallelDims
from torchtitan.parallelisms.parallelize import ParallelOptions, parallelize, uses_fully_shard

DTYPE = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
# float32 and float64: sums in another order. bfloat16 has 8 bits of mantissa, 2^-8 = 0.4 % per operation; a gradient
# passes tens of them, so 5 % of the largest entry tells a wrong plan from rounding (a missing factor 2 is 100 %).
TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 5e-2}
SAMPLES, SEQ_LEN = 8, 24
MICRO_SIZE = dict(dim=48, n_layers=3, n_heads=4, vocab_size=101, multiple_of=16)


def build_plain(row: Combination) -> torch.nn.Module:
    args = replace(SIZES[row.model]["debugmodel"], **MICRO_SIZE, n_kv_heads=None if row.model == "llama2" else 2)
    model = MODELS[row.model].build(args).to(DTYPE[row.precision])
    model.loss = SummedCrossEntropy(row.loss_chunks)
    return model


def batch() -> dict[str, torch.Tensor]:
    """Documents of uneven length, and ignored labels distributed unevenly over samples (so over ranks)."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, MICRO_SIZE["vocab_size"], (SAMPLES, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for sample in range(SAMPLES):
        labels[sample, : 2 * sample] = IGNORE_INDEX
    starts = (torch.rand(SAMPLES, SEQ_LEN, generator=generator) < 0.15).long()
    starts[:, 0] = 0
    document_ids = starts.cumsum(1)
    index = torch.arange(SEQ_LEN).expand(SAMPLES, -1)
    positions = index - torch.where(starts.bool(), index, 0).cummax(1).values
    return {"tokens": tokens[:, :-1], "labels": labels, "positions": positions, "document_ids": document_ids}


def loss_of(model: torch.nn.Module, part: dict[str, torch.Tensor], row: Combination) -> torch.Tensor:
    masked = {name: part[name] if row.document_mask else None for name in ("positions", "document_ids")}
    return model(part["tokens"], labels=part["labels"], **masked)


def run_row(row: Combination) -> tuple[float, float, dict[str, torch.Tensor]]:
    """On every rank of the row: loss, gradient norm and all gradients of one accumulated step."""
    import torch.distributed as dist

    torch._dynamo.reset()
    dims = ParallelDims(world_size=row.ranks, dp_replicate=row.dp_replicate, dp_shard=row.dp_shard)
    mesh = dims.build_mesh("cpu")
    with torch.device("meta"):
        model = build_plain(row)
    recompute = row.recompute if row.recompute in ("none", "full", "memory_budget") else "selective"
    options = ParallelOptions(
        param_dtype=torch.bfloat16 if row.precision == "bfloat16" else DTYPE[row.precision],
        reduce_dtype=DTYPE[row.precision],
        reshard_after_forward=row.reshard,
        prefetch=row.prefetch,
        cpu_offload=row.cpu_offload,
        recompute=recompute,
        selective_option=row.recompute,
        memory_budget=0.3,
        compile_model=row.compile != "no",
        compile_loss=row.compile != "no",
        compile_scope=row.compile,
        compile_backend="inductor" if row.recompute == "memory_budget" or row.compile == "model" else "aot_eager",
    )
    parallelize(model, mesh, dims, MODELS[row.model].plan, options)
    model.to_empty(device="cpu")
    initialize(model, 7, model.init_rule)

    everything = batch()
    mine = {name: tensor[dims.dp_rank(mesh) :: dims.dp] for name, tensor in everything.items()}
    size = SAMPLES // dims.dp // row.accumulation
    valid = int((everything["labels"] != IGNORE_INDEX).sum())
    total = torch.zeros((), dtype=DTYPE[row.precision])
    mixed = row.precision == "bfloat16" and not uses_fully_shard(dims, options)
    for index in range(row.accumulation):
        part = {name: tensor[index * size : (index + 1) * size] for name, tensor in mine.items()}
        set_last_microbatch(model, index == row.accumulation - 1, row.dp_replicate > 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = loss_of(model, part, row) / valid
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    grads = {
        name.replace("_checkpoint_wrapped_module.", ""): getattr(p.grad, "full_tensor", lambda g=p.grad: g)()
        for name, p in model.named_parameters()
    }
    norm = clip_gradients(model.parameters(), 0.0)
    return total.item(), norm.item(), grads


@cache
def reference(row: Combination) -> tuple[float, float, dict[str, torch.Tensor]]:
    model = build_plain(row)
    initialize(model, 7, model.init_rule)
    everything = batch()
    loss = loss_of(model, everything, row) / int((everything["labels"] != IGNORE_INDEX).sum())
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads.values()]))
    return loss.item(), norm.item(), grads


def plain_twin(row: Combination) -> Combination:
    """The row on one device: what does not change the mathematics set aside."""
    exact = "float32" if row.precision == "bfloat16" else row.precision
    return Combination(precision=exact, document_mask=row.document_mask, model=row.model)


@pytest.mark.parametrize("row", table(), ids=str)
def test_equal_to_one_device(row):
    loss, norm, grads = reference(plain_twin(row))
    tolerance = TOLERANCE[row.precision]
    for got_loss, got_norm, got_grads in run_ranks(row.ranks, run_row, row):
        assert got_loss == pytest.approx(loss, rel=tolerance)
        assert got_norm == pytest.approx(norm, rel=tolerance)
        assert got_grads.keys() == grads.keys()
        for name, grad in grads.items():
            error = (got_grads[name] - grad).abs().max() / grad.abs().max()
            assert error <= tolerance, f"{name}: gradient differs by {error:.2e} of its largest entry"


def test_rows_are_distinct_and_legal():
    rows = table()
    assert len(set(rows)) == len(rows)
    assert all(row.dp_replicate * row.dp_shard == row.ranks for row in rows)
