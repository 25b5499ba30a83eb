"""Rehearse a whole step of one rank for `torchtitan rehearse`: memory, kernels, host waits and messages in order.

The step is the trainer's (training/step.py). The first one is the planner's rehearsal, with all live tensors counted
(planner/rehearsal.py). The second one has its state, as later steps do, and shows the rest. A third one is logged, for
its host waits and messages. Blocks are not compiled: a compiled function counts as one kernel, and
what the compiler makes of a block is not known here. Attention and norms are the single kernels that a GPU has.
"""

import traceback
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torchtitan.planner.fake_cuda import device, kernels  # first: see there

import torch  # isort: skip

from torchtitan.core.errors import JobError
from torchtitan.job import ResolvedJob
from torchtitan.planner.estimate import Stages
from torchtitan.planner.fake_cuda.step import HostWaits, job_on_rank, use_fused_norms
from torchtitan.planner.memory.live_tensors import ACTIVATIONS, LiveTensors
from torchtitan.planner.rehearsal import WITHOUT_VALUES, Rehearsal, rows_of_experts
from torchtitan.planner.time.traffic import Traffic
from torchtitan.rules.loading import load_job
from torchtitan.torch_internals.dispatch import VALUES_NEEDED
from torchtitan.torch_internals.dtensor import local_part
from torchtitan.training.callbacks import CallbackError, callbacks_of
from torchtitan.training.step import FORWARD_BACKWARD, StepObserver

MOST = 128
"""Layers times forward passes of a rank in a rehearsal of all layers. Each takes about half a second of a processor."""
BEFORE, PARTS = "before", ("forward and backward", "clipping and optimizer")
Wait = tuple[str, str, str]
"""Its kind, its line, and its reason; "" for a mistake."""


class TypedTensors(LiveTensors):
    """Live tensors, and the bytes of the activations that were ever allocated, by type."""

    def __init__(self) -> None:
        super().__init__()
        self.activations: Counter[str] = Counter()

    def _count(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        before = self.now[ACTIVATIONS]
        super()._count(tensor, kind)
        if (grown := self.now[ACTIVATIONS] - before) > 0:
            self.activations[_type(tensor)] += grown


class OrderedTraffic(Traffic):
    """Messages in order, with the line that issued each, or "" where torch does so by itself, as in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def _record(self, *args: Any) -> None:
        before = len(self.exchanges)
        super()._record(*args)
        if len(self.exchanges) > before:
            self.lines.append(device.line_of(device.frame_of_package()))

    def as_record(self) -> dict[str, Any]:
        """Return the distinct messages, (group, kind, type, elements, peer, line), and the order of their numbers."""
        numbers: dict[tuple[Any, ...], int] = {}
        order = []
        for one, line in zip(self.exchanges, self.lines, strict=True):
            message = one.group, one.kind, _name(one.dtype), one.elements, one.peer, line
            order.append(numbers.setdefault(message, len(numbers)))
        return {"messages": list(numbers), "order": order}


def rehearse(argv: list[str], rank: int, world_size: int, all_layers: bool) -> dict[str, Any]:
    """Return what a step of the job `argv` does on a rank, or under "failure" and "refusal" why there is none.

    Without `all_layers`, each stage of a job with many layers and microbatches has a few of its layers.
    """
    full_job = ResolvedJob(load_job(argv)[0], world_size, "cuda").with_options({"compile.enable": False})
    job = full_job if all_layers else Stages.of(full_job).with_few_layers(MOST)
    use_fused_norms()
    try:
        with job_on_rank(job, rank, WITHOUT_VALUES) as (model, optimizers, batch):
            callbacks = callbacks_of(job.config.callbacks)
            live, rehearsal = TypedTensors(), Rehearsal(job, model, optimizers, batch, callbacks)
            first, second = rehearsal.measure(live), _later_steps(rehearsal)
    except CallbackError as error:
        kind = "refusal" if isinstance(error.__cause__, VALUES_NEEDED) else "failure"
        return {kind: f"a hook: {error}", "traceback": traceback.format_exc()}
    except JobError:
        raise
    except VALUES_NEEDED as error:
        return {"refusal": _described(error)}
    except Exception as error:
        return {"failure": _described(error), "traceback": traceback.format_exc()}
    moment = max(first.moments, key=lambda name: first.moments[name].total())
    memory = {kind: int(size) for kind, size in first.moments[moment].items() if size >= 1}
    sent = Counter[tuple[str, str, str]]()
    for key, amount in first.sent.items():
        sent[key] += int(amount)
    return {
        "layers": [job.model.args.n_layers, full_job.model.args.n_layers],
        "moment": moment,
        "memory": dict(sorted(memory.items(), key=lambda item: -item[1])),
        "sent": [[*key, amount] for key, amount in sorted(sent.items())],
        "groups": first.groups,
        "types": second.pop("types") | {"activations": dict(live.activations)},
        **second,
    }


class _Costs(StepObserver):
    """Counts kernels and host waits of a step, for all of its passes."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal, self.counter, self.times = rehearsal, kernels.Kernels(), iter(rehearsal.times)
        self.costs = {part: Counter[str]() for part in (BEFORE, *PARTS)}
        self.waits = Counter[Wait]()
        self.gradients: dict[str, int] = {}
        """Their bytes by type, before they are clipped."""

    def begin(self, part: str) -> None:
        if part == FORWARD_BACKWARD:
            self.add(BEFORE)

    def end(self, part: str) -> None:
        if part == FORWARD_BACKWARD:
            self.add(PARTS[0], next(self.times))
            self.gradients = _types(p.grad for _, p in self.rehearsal.model.named_parameters() if p.grad is not None)

    def add(self, part: str, times: int = 1) -> None:
        """Add what has been counted since the last call to a part, `times` times."""
        for unit in ("kernels", "bytes"):
            self.costs[part][unit] += times * self.counter.by_place[unit].total()
            self.counter.by_place[unit].clear()
        self.waits.update({wait: times * number for wait, number in device.wait_lines.items()})
        device.wait_lines.clear()

    def of_step(self, logged: bool = False) -> "_Costs":
        """Run a step and count it."""
        device.wait_lines.clear()
        with self.counter:
            self.rehearsal.run(self, logged)
        self.add(PARTS[1])
        return self


def _later_steps(rehearsal: Rehearsal) -> dict[str, Any]:
    """Run a step with the state of the first one, and one that is logged."""
    job, not_rehearsed = rehearsal.job, ""
    with HostWaits(rows_of_experts(job.layout, job.model), job.layout.ep), OrderedTraffic() as order:
        quiet = _Costs(rehearsal).of_step()
        count = len(order.exchanges)
        try:
            logged = _Costs(rehearsal).of_step(logged=True).waits
        except VALUES_NEEDED as error:
            not_rehearsed, logged = _described(error), Counter()
            del order.exchanges[count:], order.lines[count:]
    # a logged step waits for the values that it logs, so only a wait without a reason matters
    waits = quiet.waits | Counter({wait: number for wait, number in logged.items() if not wait[-1]})
    parameters = [p for _, p in rehearsal.model.named_parameters()]
    moments = [
        t for o in rehearsal.optimizers for state in o.state.values() for t in state.values() if torch.is_tensor(t)
    ]
    types = {
        "parameters": _types(p for p in parameters if p.requires_grad),
        "frozen parameters": _types(p for p in parameters if not p.requires_grad),
        "gradients": quiet.gradients,
        "optimizer state": _types(moments),
    }
    return {
        "costs": {part: quiet.costs[part] for part in PARTS},
        "trained": sum(local_part(p).numel() for p in parameters if p.requires_grad),
        "waits": [[kind, line, number, reason] for (kind, line, reason), number in sorted(waits.items())],
        "not_rehearsed": not_rehearsed,
        "types": {name: sizes for name, sizes in types.items() if sizes},
        **order.as_record(),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type(tensor: torch.Tensor) -> str:
    local = local_part(tensor)
    return f"{_name(local.dtype)} {local.device.type}"


def _types(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Return the bytes of the rank's parts by type and device."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[_type(tensor)] += local_part(tensor).nbytes
    return dict(sizes)


def _described(error: BaseException) -> str:
    """Return the line at which the step failed, and the first line of the error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [f"{device.shown(s.filename)}:{s.lineno}" for s in traceback.extract_tb(error.__traceback__)]
    places = [line for frame, line in zip(frames, lines, strict=True) if device.is_place(frame.f_code.co_filename)]
    message = str(error).strip().splitlines() or [""]
    return f"{places[-1] if places else 'in torch'}: {type(error).__name__}: {message[0]}"
