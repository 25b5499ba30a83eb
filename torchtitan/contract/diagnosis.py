"""Say in words what a row found: which tensor, by how much, and what that usually means."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from torchtitan.contract.items import CP, EP, PLANS, PP, REPLICATE, SHARD, TP, Row

AXES = {"dp_replicate": REPLICATE, "dp_shard": SHARD, "cp": CP, "tp": TP, "pp": PP, "ep": EP}
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
