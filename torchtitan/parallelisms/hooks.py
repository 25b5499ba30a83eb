"""What happens once per optimizer step beside the optimizer's own: biases of experts move, an adapter is restarted.

A hook is asked after each step, and what it has to remember is saved with the trainer's state under its name.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer


class StepHook(Protocol):
    name: str
    """Of its state in a checkpoint; no other hook's, and none of the trainer's own (step, tokens, ...)."""

    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """The `step`-th of the learning rate's schedule is done; every rank calls it. `parts`: of the model, on this
        rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able and the same on all ranks; empty where there is nothing to remember."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave; empty where a checkpoint has nothing of it."""
        ...


class StepHooks(list[StepHook]):
    """In the order in which they are asked."""

    def append(self, hook: StepHook) -> None:
        assert hook.name not in {other.name for other in self}, f"a second hook called {hook.name}"
        super().append(hook)

    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        for hook in self:
            hook.after_step(step, parts, optimizers)

    def state_dict(self) -> dict[str, Any]:
        """By name, of those that have something to remember."""
        return {hook.name: state for hook in self if (state := hook.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for hook in self:
            hook.load_state_dict(state.get(hook.name, {}))
