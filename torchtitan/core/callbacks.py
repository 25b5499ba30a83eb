"""Callbacks: code of a program or of an installed package that a run calls around its steps. Needs no torch.

A job names them in [callbacks], by an entry point of the group torchtitan.callbacks or as "package.module:Name". Only a
package that a job names is imported.
"""

import dataclasses
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, get_type_hints

from pydantic_core import PydanticUndefined

from torchtitan.core.errors import JobError
from torchtitan.core.registry import Option, Registry


class Callback:
    """Code that every rank runs at fixed points of a run. All hooks are optional; one that is missing costs nothing.

    The fields of a callback that is a dataclass are its options in a job. All ranks call all hooks, in the order of the
    job. An exception in a hook ends the run.
    """

    engine: Any = None
    """The Engine of the run, set before `start`."""

    def start(self, engine: Any) -> None:
        """Begin: model and data are ready and restored, and this start of the run has made no step yet."""

    def before_step(self, batch: Any) -> None:
        """Look at the StepData of a step, before its first forward."""

    def after_backward(self) -> None:
        """Look at the gradients of a step, or change them, before they are clipped."""

    def after_step(self, result: Any) -> None:
        """Look at the StepResult of a step, after the update. Reading one of its tensors waits for the device."""

    def on_log(self, metrics: dict[str, Any]) -> None:
        """Look at the metrics of a logged step, as in metrics.jsonl, and add numbers."""

    def after_validation(self, results: dict[str, float]) -> None:
        """Look at the loss and the other metrics of a validation."""

    def after_save(self, path: Any) -> None:
        """Note the Path of a checkpoint that is complete."""

    def on_error(self, error: BaseException) -> None:
        """Note the error that ends the run. `end` is not called after it."""

    def end(self) -> None:
        """End: close what `start` has opened. Called in reverse order."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: JSON values, and tensors shaped like parameters in tables by parameters' names."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; called after `start` when the run resumes, and when it goes back to a step."""


HOOKS = tuple(name for name, member in vars(Callback).items() if callable(member) and not name.startswith("_"))
CALLBACKS: Registry[type] = Registry("torchtitan.callbacks", {}, type)


def has_hook(kind: type[Callback], hook: str) -> bool:
    return getattr(kind, hook) is not getattr(Callback, hook)


def callback_class(name: str) -> type[Callback]:
    """Return the class that a job names. Raises JobError if it cannot be imported or is no Callback."""
    kind = _named_object(name) if ":" in name else CALLBACKS.get(name)
    if kind is None:
        names = ", ".join(CALLBACKS) or "none"
        raise JobError(f'installed are {names}; others are named as "package.module:Name"')
    if not isinstance(kind, type) or not issubclass(kind, Callback):
        raise JobError(f"{name} is no class derived from torchtitan.engine.Callback; derive it")
    return kind


def _named_object(name: str) -> Any:
    module = name.partition(":")[0]
    try:
        return resolve_name(name)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise JobError(
                f"there is no module {error.name}; install its package or add its folder to PYTHONPATH"
            ) from None
        reason = str(error)
    except AttributeError as error:
        reason = str(error)
    except (Exception, SystemExit) as error:  # foreign code may raise any type, from anywhere
        reason = f"{type(error).__name__}: {error}"
    raise JobError(f"{name} cannot be imported ({reason}); correct the name or mend the module")


def options_of(kind: type[Callback]) -> dict[str, Option]:
    """Return the options of a callback: its fields, if it is a dataclass."""
    if not dataclasses.is_dataclass(kind):
        return {}
    try:
        annotations = get_type_hints(kind, include_extras=True)
    except Exception as error:  # of a name that its module lacks
        raise JobError(f"the types of {kind.__qualname__}'s fields cannot be read ({error}); mend them") from error
    options = {}
    for field in dataclasses.fields(kind):
        default = field.default if field.default is not dataclasses.MISSING else PydanticUndefined
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.init:
            options[field.name] = Option(annotations[field.name], default, "")
    return options


def make_callback(name: str, options: Mapping[str, Any]) -> Callback:
    """Create a callback of a job. Raises JobError if it does not take these options."""
    kind = callback_class(name)
    try:
        return kind(**options)
    except Exception as error:
        raise JobError(f"{name} cannot be created ({type(error).__name__}: {error}); correct its options") from error
