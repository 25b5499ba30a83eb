"""The checks of a row, each run on the row's ranks, and in words what it found: which tensor, by how much, and what
that usually means.
"""

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from torchtitan.adapters.interface import Adapter, full_tensor
from torchtitan.assembly import parts
from torchtitan.assembly.parts import ModelBuilder, model_spec
from torchtitan.config.manager import load
from torchtitan.contract.items import CP, PLANS, PP, SHARD, TP, Item, Row
from torchtitan.contract.step import (
    SAMPLES,
    device_step,
    device_weights,
    local_batch,
    micro_batch,
    rank_step,
    rank_weights,
)
from torchtitan.core.random_draws import Normal, clean_name, draw, initialize
from torchtitan.core.tensor_storage import Deferred, draw_stores
from torchtitan.job import ResolvedJob
from torchtitan.losses.objective import IGNORE_INDEX, Batch, Objective
from torchtitan.lr_schedules import DECAYS
from torchtitan.parallelisms.degrees import AXIS_OPTIONS
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process.ranks import read_ranks
from torchtitan.training.batches import batch_keys
from torchtitan.training.trainer import Trainer

SEED, STEPS, SAVED = 7, 3, 2
DEVICE = torch.device("cpu")
UNTRIED = "-"
"""What the answer of a check begins with where there is nothing to try; the reason follows."""


def job_of(row: Row) -> ResolvedJob:
    return ResolvedJob(load(row.arguments()), row.ranks)


@torch.no_grad()
def perturb(model: nn.Module | ParallelModel, adapter: Adapter | None) -> None:
    """Move biases and an adapter's parameters from initial values at which gradients would be zero."""
    added = () if adapter is None else adapter.added_parameters
    for name, parameter in model.named_parameters():
        if (clean_name(name) in added or name.endswith(".bias")) and parameter.is_floating_point():
            before = parameter.detach().clone()
            draw(parameter, Normal(0.1), clean_name(name))
            parameter.add_(before)


def plain_model(job: ResolvedJob) -> tuple[nn.Module, Adapter | None]:
    """Return the model and its adapter on one device in float64."""
    builder, spec = ModelBuilder(job), model_spec(job.model)
    model: Any = spec.build(job.model.args)
    model.loss = builder.objective()
    if (adapter := builder.adapter()) is not None:
        adapter.install(model, spec.plan)
    model.double()
    initialize(model, SEED, model.init_rule)
    draw_stores(model, SEED, model.init_rule)
    if adapter is not None:
        adapter.init_from_base([model])
    perturb(model, adapter)
    return model, adapter


def parallel_model(job: ResolvedJob) -> ParallelModel:
    """Return the same on this rank of the job's plan."""
    builder, dims = ModelBuilder(job), job.layout.dims
    model, plan, adapter = builder.adapted_model()
    parallel = ParallelModel(
        model.double(),
        dims.build_mesh("cpu"),
        dims,
        plan,
        replace(builder.parallel_options(), param_dtype=torch.float64, reduce_dtype=torch.float64),
        device=DEVICE,
        seed=SEED,
        pipeline=builder.pipeline_options(),
        balance=model_spec(job.model).balance_of(job.model.args),
        adapter=adapter,
    )
    perturb(parallel, adapter)
    return parallel


def batch_of(job: ResolvedJob, model: Any) -> tuple[Batch, int, Objective]:
    """Return the tensors that the model reads, the number of loss terms, and the objective."""
    objective, batch = ModelBuilder(job).objective(), micro_batch(job.model.args.vocab_size)
    labels = torch.full_like(batch["labels"], IGNORE_INDEX)
    if job.model.spec.labels == "classes":
        labels[:, -1 if job.model.args.causal else 0] = batch["classes"]
        batch["labels"] = labels
    elif job.model.spec.labels == "ends":
        labels[:, -1] = 0
        batch["labels"] = labels
    elif job.model.spec.labels == "same":
        hidden = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)) < 0.3
        batch["labels"] = torch.where(hidden & (batch["labels"] != IGNORE_INDEX), batch["tokens"], labels)
    unknown = torch.linspace(-1, 0, SAMPLES, dtype=torch.float64)  # such as log-probabilities of a reference
    names = batch_keys(objective, True, ("keys",) * getattr(model, "needs_keys", False))
    return {name: batch.get(name, unknown) for name in names}, objective.count(batch), objective


def reference(row: Row, file: str) -> dict[str, Any]:
    """Write the gradients of one device, or for an optimizer its weights, to a file; return loss and norm."""
    job = job_of(row)
    model, _ = plain_model(job)
    batch, valid, _ = batch_of(job, model)
    balance = model_spec(job.model).balance_of(job.model.args)
    if row.item.kind == "optimizer":
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        built = parts.optimizers(job.config.optimizer, SimpleNamespace(parts=[model], adapter=None))  # type: ignore[arg-type]
        tensors = device_weights(model, built, batch, valid, STEPS, balance)
        moved = {name: (tensor - before[name]).abs().max().item() for name, tensor in tensors.items()}
        _write(file, tensors)
        return {"scales": moved, "names": list(tensors)}
    if balance is not None:
        balance.set_aux_loss_scale(model, 1 / valid)
    loss, norm, tensors = device_step(model, batch, valid)
    _write(file, tensors)
    # gradients that cancel to rounding are held against the norm of all
    scales = {name: max(tensor.abs().max().item(), 1e-4 * norm) for name, tensor in tensors.items()}
    return {"loss": loss, "norm": norm, "scales": scales, "names": list(tensors)}


def _write(file: str, tensors: Mapping[str, torch.Tensor]) -> None:
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.savez(file, **arrays)


def under_plan(row: Row, expected: dict[str, Any], file: str, tolerance: float) -> dict[str, Any]:
    """Run the row's plan on this rank. Return loss, norm, the names of its tensors, and those that differ."""
    job = job_of(row)
    model = parallel_model(job)
    batch, valid, _ = batch_of(job, model)
    local = local_batch(model, batch, job.model.spec.rows_per_sample)
    values: dict[str, Any] = {"loss": None, "norm": None}
    if row.item.kind == "optimizer":
        tensors = rank_weights(model, parts.optimizers(job.config.optimizer, model), local, valid, STEPS)
    else:
        values["loss"], values["norm"], tensors, _ = rank_step(model, local, valid)
    stored = np.load(file)
    tied = {copy: name for part in model.parts for copy, name in part.tied_names.items()}  # a pipeline names both
    tensors = {name if name in stored else tied.get(name, name): tensor for name, tensor in tensors.items()}
    scales = expected["scales"]
    faulty = {n: t for n, t in tensors.items() if not np.abs(t - stored[n]).max() <= tolerance * scales[n]}
    return values | {"names": list(tensors), "faulty": faulty}


def resumed(row: Row, folder: Path) -> list[Any]:
    """Return (loss of each step, digests of weights and optimizer state) of a run, and of one that resumes in it."""
    options: dict[str, Any] = {"job__dump_folder": folder, "checkpoint__enable": True, "checkpoint__interval": SAVED}
    options |= _records(job_of(row), folder)
    return [_train(row, options), _train(row, options | {"checkpoint__load_step": SAVED})]


def _records(job: ResolvedJob, folder: Path) -> dict[str, Any]:
    """Write data of the job's task; return the options that read them."""
    letters = [chr(97 + number % 26) * (1 + number % 5) for number in range(64)]
    fields: list[dict[str, Any]] = [{"text": 20 * a} for a in letters]
    if job.model.spec.whole_records:
        fields = [{"prompt": a, "completion": a + "x"} for a in letters]
    if job.model.spec.rows_per_sample == 2:
        fields = [{"prompt": a, "chosen": a + "x", "rejected": "y"} for a in letters]
    elif job.model.spec.labels == "classes":
        fields = [{"text": a, "label": number % 4} for number, a in enumerate(letters)]
    path = folder / "records.jsonl"
    if dist.get_rank() == 0:
        path.write_text("".join(json.dumps(record) + "\n" for record in fields))
    dist.barrier()
    return {"training__dataset": "text", "training__dataset_path": path}


def _train(row: Row, options: dict[str, Any]) -> Any:
    config = load(row.arguments(**options))
    trainer = Trainer(config, read_ranks())
    trainer.train()
    trainer.metrics.close()
    dist.barrier()
    lines = Path(config.job.dump_folder, "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    return {record["step"]: record["loss"] for record in records}, dict(_digests(trainer))


def _digests(trainer: Trainer) -> Iterator[tuple[str, str]]:
    for name, parameter in trainer.model.named_parameters():
        state: Mapping[str, Any] = next((o.state[parameter] for o in trainer.optimizers if parameter in o.state), {})
        for key, value in (("", parameter.detach()), *state.items()):
            content = full_tensor(value).double().numpy().tobytes() if torch.is_tensor(value) else repr(value).encode()
            yield f"{name} {key}".strip(), hashlib.sha256(content).hexdigest()


def export(row: Row) -> str:
    """Write the family as a folder of Hugging Face, read it back, and return what differs."""
    job = job_of(row)
    hf = model_spec(job.model).hf
    if hf is None or hf.config is None:
        return f"{UNTRIED}the family declares no folder of Hugging Face"
    model, other = plain_model(job)[0].float(), plain_model(job)[0].float()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for parameter in other.parameters():
        parameter.data.fill_(float("nan"))
    with tempfile.TemporaryDirectory() as folder:
        hf.save_hf(folder, state, job.model.args)
        hf.load_hf(folder, other, job.model.args)
    loaded = other.state_dict()
    faulty = [name for name in state if not torch.equal(state[name], loaded[name])]
    return f"{faulty[0]} differs in a folder of Hugging Face, written and read ({len(faulty)} in all)" if faulty else ""


def merge(row: Row) -> str:
    """Return how the model with the adapter merged in differs from the adapted one."""
    job = job_of(row)
    model, adapter = plain_model(job)
    assert adapter is not None
    spec = model_spec(job.model)
    plain = spec.build(job.model.args).double()
    plain.loss = ModelBuilder(job).objective()
    merged = adapter.merged_tensors([model])
    if not any(isinstance(value, Deferred) for value in merged.values()):
        return f"{UNTRIED}no module of the adapter has `merged_weight`"
    plain.load_state_dict({name: value.detach() for name, value in merged.items()})
    batch, _, _ = batch_of(job, model)
    with torch.no_grad():
        adapted, plainly = (m.eval()(**batch).item() for m in (model, plain))
    if abs(adapted - plainly) <= 1e-6 * abs(adapted):
        return ""
    return f"the loss is {plainly:.8g} with merged weights and {adapted:.8g} with the adapter: correct `merged_weight`"


def count(row: Row) -> str:
    """Return how the objective's count of a batch differs from the sum over its parts."""
    job = job_of(row)
    batch, total, objective = batch_of(job, None)
    parts_of_batch = [{k: v[rows] for k, v in batch.items()} for rows in torch.arange(SAMPLES).chunk(4)]
    summed = sum(map(objective.count, parts_of_batch))
    if summed == total:
        return ""
    return (
        f"`count` of {SAMPLES} rows is {total}, and {summed} summed over parts of two rows: it is not additive, so the "
        "loss would depend on the number of ranks; return the number of loss terms in the batch"
    )


def function_of_step(item: Item) -> str:
    """Return how the shape of a schedule differs from a function of the fraction decayed."""
    item.load()
    shape, points = DECAYS[item.name], [number / 16 for number in range(17)]
    first = [shape(point, 1) for point in points]
    second = [shape(point, 1) for point in reversed(points)][::-1]
    for point, value, other in zip(points, first, second, strict=True):
        if not isinstance(value, int | float) or not math.isfinite(value):
            return f"f({point:g}, 1) = {value!r}; allowed: a finite number, 1 at the peak and 0 at the floor"
        if value != other:
            return (
                f"f({point:g}, 1) is {value:.6g} in one call and {other:.6g} in a later one: it is no function of the "
                "step, so a resumed run has other rates; compute it from p and cycles alone"
            )
    return ""


AXES = {axis: f"parallelism.{option}" for axis, option in AXIS_OPTIONS.items()}
SAME = 1e-6
SHOWN = 2
"""Groups of parameters described in full."""
DECLARE = {
    "family": "declare its module in the ParallelPlan: `sequence` outside of regions of sharded matrices, and inside "
    "`replicated`, `column` or `row`",
    "adapter": "return its gradient's placement from `tensor_placements`",
    "task": "let `compute_loss` return a sum over the rows it is given, without collectives",
}


def differences(
    row: Row,
    expected: Mapping[str, Any],
    answers: Sequence[Mapping[str, Any]],
    stored: Any,
    failing: Collection[str] = (),
) -> list[str]:
    """Return what is wrong with the answers of a plan's ranks; nothing if they equal one device's.

    `failing`: names of the item's rows that have failed so far.
    """
    missing = set(expected["names"]) - {name for answer in answers for name in answer["names"]}
    lines = [f"no rank has {sorted(missing)[0]} ({len(missing)} parameters in all)"] if missing else []
    for name in ("loss", "norm"):
        value, reference = answers[0][name], expected.get(name)
        if reference is not None and not abs(value - reference) <= 1e-9 * abs(reference):
            lines.append(_number(row, {"loss": "loss", "norm": "gradient norm"}[name], value, reference))
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for answer in answers for name in answer["faulty"]):
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    for names in list(groups.values())[:SHOWN]:
        values = [answer["faulty"].get(names[0]) for answer in answers if names[0] in answer["names"]]
        right = stored[names[0]]
        values = [right if value is None else value for value in values]
        like_it = f" (and of {len(names) - 1} like it)" * (len(names) > 1)
        text = _weight if row.item.kind == "optimizer" else _gradient
        lines.append(text(row, names[0] + like_it, values, right, expected["scales"][names[0]]))
    if groups and row.item.kind == "optimizer":
        lines[-1] += f": {_step_reads(row, failing)}"
    if more := sum(map(len, list(groups.values())[SHOWN:])):
        lines.append(f"and {more} more parameters")
    if len(lines) > 1 and lines[0].startswith("the gradient norm") and groups:
        del lines[0]  # it follows
    return lines


def _number(row: Row, name: str, value: float, reference: float) -> str:
    text = f"the {name} is {value:.8g}, one device's is {reference:.8g}"
    ratio = value / reference if reference else float("nan")
    if axes := _axes_of_size(row, ratio):
        return f"{text}, {ratio:g} times as much: it is summed over {axes} once too often"
    if axes := _axes_of_size(row, 1 / ratio if ratio else 0.0):
        return f"{text}, {ratio:g} of it: it is a part, or a mean, over {axes}"
    return f"{text}: the forward pass differs under this plan" * (name == "loss") or text


def _gradient(row: Row, name: str, values: list[np.ndarray], right: np.ndarray, scale: float) -> str:
    largest = max(float(np.abs(value - right).max()) for value in values) / scale
    text = f"the gradient of {name} differs by {largest:.2g} of its largest entry"
    remedy = DECLARE.get(row.item.kind, "")
    ratios, remainders = zip(*(_multiple(value, right) for value in values), strict=True)
    if max(remainders) < SAME and max(ratios) - min(ratios) < SAME:
        ratio = ratios[0]
        if abs(ratio) < SAME:
            return f"{text}: it is 0, so the way back to it is cut (a detach, or a copy that is never reduced)"
        text = f"the gradient of {name} is {ratio:.6g} times one device's"
        if axes := _axes_of_size(row, ratio):
            return f"{text}: it is summed over {axes} once too often, or each rank computes it in full; {remedy}"
        if axes := _axes_of_size(row, 1 / ratio):
            return f"{text}: it is averaged over {axes}, where gradients are summed; {remedy}"
        return f"{text}: the loss is scaled otherwise, as by a count of this rank's terms alone"
    multiple, remainder = _multiple(np.sum(values, axis=0), right)
    if len(values) > 1 and remainder < SAME and multiple > SAME:
        axes = _axes(row, (CP, TP)) or _axes(row, AXES.values())
        return f"{text}: each rank has a part of it, and they are not added up over {axes}; {remedy}"
    return (
        f"{text} and is no multiple of one device's: something is computed from this rank's part alone, as a norm "
        "or a mean would be, or a partial sum is used before it is reduced"
    )


def _weight(row: Row, name: str, values: list[np.ndarray], right: np.ndarray, scale: float) -> str:
    largest = max(float(np.abs(value - right).max()) for value in values) / max(scale, 1e-30)
    return f"{name} differs after three steps by {largest:.2g} of its largest change"


def _step_reads(row: Row, failing: Collection[str]) -> str:
    """Return what the step of an optimizer reads that one device has otherwise."""
    only_pipelines = all(PP in PLANS[name] for name in failing if name in PLANS)
    if PP in row.plan and (only_pipelines or not {SHARD, TP} & row.plan.keys()):
        return (
            "its step reads other parameters, of which a stage has only some: make it per parameter, or sum over all "
            "stages"
        )
    return (
        "its step reads what depends on the shard, as a norm or a maximum of `to_local()` would; reduce it over the "
        "ranks of the DTensor, or take it of `full_tensor()`"
    )


def _multiple(value: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """Return the number that `right` has to be multiplied with to come closest to a value, and what then remains."""
    square = float((right * right).sum())
    if not square or not np.isfinite(value).all():
        return float("nan"), float("inf")
    ratio = float((value * right).sum()) / square
    return ratio, float(np.linalg.norm(value - ratio * right)) / square**0.5


def _axes_of_size(row: Row, ratio: float) -> str:
    fitting = [key for key in AXES.values() if row.plan.get(key, 1) > 1 and abs(row.plan[key] - ratio) < SAME]
    return _axes(row, fitting)


def _axes(row: Row, keys: Any) -> str:
    return " or ".join(name for name, key in AXES.items() if key in keys and row.plan.get(key, 1) > 1)


def resume_difference(row: Row, runs: Sequence[tuple[Mapping[int, float], Mapping[str, str]]]) -> list[str]:
    """Return how a resumed run differs from one that was not interrupted."""
    (losses, digests), (resumed_losses, resumed_digests) = runs
    remedies = {
        "adapter": "return what `after_step` and the forward read from `state_dict`, and take it in `load_state_dict`",
        "optimizer": "keep all that a step reads in `self.state[parameter]`, and draw nothing from a generator",
        "family": "keep what training changes in parameters or persistent buffers",
        "task": "keep nothing from one step to the next",
    }
    remedy = remedies[row.item.kind]
    for step, loss in losses.items():
        if step in resumed_losses and resumed_losses[step] != loss:
            return [
                f"after a resume the loss of step {step} is {resumed_losses[step]:.8g}, without one {loss:.8g}: "
                f"something that a step reads is not in the checkpoint; {remedy}"
            ]
    if faulty := [name for name, digest in digests.items() if resumed_digests.get(name) != digest]:
        return [f"after a resume {faulty[0]} differs at the end ({len(faulty)} tensors in all); {remedy}"]
    return []
