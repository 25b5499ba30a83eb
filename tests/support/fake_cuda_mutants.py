"""Faults that the checks on the fake CUDA have to find, each planted before a step is built."""

import functools
import inspect
import os
import textwrap

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from torchtitan.guards import Guards
from torchtitan.parallelisms import parallel_model
from torchtitan.parallelisms.pipeline import pipeline_parallel
from torchtitan.training.step import TrainingStep


def wrong_device() -> None:
    """Create a tensor without naming a device."""
    clip = parallel_model.clip_gradients
    parallel_model.clip_gradients = lambda *args, **kwargs: clip(*args, **kwargs).reshape(1) + torch.ones(1)


def host_wait() -> None:
    """Read the gradient norm on the host in every step."""
    clip = parallel_model.clip_gradients

    def clip_and_read(*args, **kwargs):
        total = clip(*args, **kwargs)
        assert total.item() >= 0
        return total

    parallel_model.clip_gradients = clip_and_read


def copied_numbers() -> None:
    """Copy numbers of the host to the device in every step."""
    clip = parallel_model.clip_gradients
    parallel_model.clip_gradients = lambda *args, **kwargs: clip(*args, **kwargs) * torch.tensor(1.0, device="cuda")


def coalesced() -> None:
    """Coalesce receives as torch did before 2.12.1; these never match plain sends."""
    schedules._batch_p2p = lambda operations, desc=None: dist.batch_isend_irecv(operations) if operations else []


def other_order() -> None:
    """Swap the first two microbatches on odd ranks."""
    build = pipeline_parallel.build_table

    def build_by_rank(*args, **kwargs):
        table = build(*args, **kwargs)
        if dist.get_rank() % 2:
            swapped = {0: 1, 1: 0}
            row = table[dist.get_rank()]
            table[dist.get_rank()] = [a._replace(microbatch=swapped.get(a.microbatch, a.microbatch)) for a in row]
        return table

    pipeline_parallel.build_table = build_by_rank


def other_collective() -> None:
    """Reduce the gradient norm once more on odd ranks."""
    clip = parallel_model.clip_gradients

    def clip_and_reduce(*args, **kwargs):
        total = clip(*args, **kwargs)
        if dist.get_rank() % 2:
            dist.all_reduce(total)
        return total

    parallel_model.clip_gradients = clip_and_reduce


def shape_by_values() -> None:
    """Use a shape that only the values of a tensor on the device decide."""
    clip = parallel_model.clip_gradients
    parallel_model.clip_gradients = lambda *args, **kwargs: clip(*args, **kwargs).reshape(1).nonzero()


def ends() -> None:
    """End the process of the rank."""
    os._exit(9)


STEP_FAULTS = {
    "before_forward": (TrainingStep.forward_backward, "self.observer.start(data)", "self.state.loss"),
    "in_forward_and_backward": (TrainingStep.forward_backward, "loss += self.model.forward_backward(", "loss"),
    "in_clipping": (TrainingStep.clip, "norm = self.model.clip_gradients(", "norm"),
    "before_guards": (TrainingStep.reason_to_skip, "step = self.state.step + 1", "norm"),
    "in_guards": (Guards.reason_to_skip, "self.refuse_changed_shards(step - 1)", "loss"),
    "in_optimizer": (TrainingStep.update, "self.optimizers.step()", "norm"),
    "after_update": (TrainingStep.run_hooks, "self.model.after_step(", "self.state.loss"),
    "in_log": (TrainingStep.log, "tokens = self.state.tokens -", "norm"),
    "in_logged_values": (TrainingStep.losses, "means[-1] = ", "0"),  # where the host waits anyway
    "after_log": (TrainingStep.update, "state.position, state.random, state.is_complete = data", "loss"),
    "after_comparison": (TrainingStep.update, "self.guards.compare(state.step)", "loss"),
}
"""Part of the trainer's step -> the function, a line of it, and what is read from the device after that line."""


def plant_in_step(part: str) -> None:
    """Read a number from the device, and wait for all ranks on rank 0 alone, in a line after one of the step."""
    function, anchor, value = STEP_FAULTS[part]
    number, lines = source_with_fault(part)
    function = inspect.unwrap(function)
    source = "\n" * (number - 1) + textwrap.dedent("".join(lines))
    namespace = dict(function.__globals__)
    exec(compile(source, function.__code__.co_filename, "exec"), namespace)
    owner = namespace[function.__qualname__.partition(".")[0]]
    setattr(owner, function.__name__, namespace[function.__name__])


def source_with_fault(part: str) -> tuple[int, list[str]]:
    """Return the number of the first line of the function, and its lines with the fault."""
    function, anchor, value = STEP_FAULTS[part]
    lines, number = inspect.getsourcelines(inspect.unwrap(function))
    ((at, line),) = [(at, line) for at, line in enumerate(lines) if anchor in line]
    indent = " " * (len(line) - len(line.lstrip()))
    lines.insert(at + 1, f"{indent}print(float({value})); {BARRIER}\n")
    return number, lines


BARRIER = "torch.distributed.get_rank() or torch.distributed.barrier()"
globals().update({part: functools.partial(plant_in_step, part) for part in STEP_FAULTS})
