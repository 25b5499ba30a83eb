"""The callbacks of a run: their hooks in order, the failure of one, and their state in checkpoints.

The hooks themselves are in core/callbacks.py. A failure on one rank ends that rank, and with it all others: the
launcher or torchrun ends them, and a collective of a rank that is gone fails.
"""

import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan.checkpoint.layout import CALLBACK, CheckpointError, TensorEntry
from torchtitan.checkpoint.saving import ExtraState
from torchtitan.checkpoint.tensors import Tensors
from torchtitan.config.sections.run import Callbacks as Options
from torchtitan.core.callbacks import HOOKS, Callback, has_hook, make_callback
from torchtitan.core.errors import JobError
from torchtitan.core.machine_errors import MachineError
from torchtitan.guards import BadStep, ReplicasDiffer, RollBack
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process.exit import failure_kind

logger = logging.getLogger(__name__)


class CallbackError(JobError):
    """A callback has failed; the message names it and its hook."""


def callbacks_of(options: Options, more: Sequence[Callback] = ()) -> dict[str, Callback]:
    """Return the callbacks of a job, then those that a program made, by name."""
    by_name = {name: make_callback(name, options.options.get(name, {})) for name in options.use}
    for callback in more:
        if not isinstance(callback, Callback):
            raise CallbackError(f"callbacks: given {callback!r}; allowed: objects of classes derived from Callback")
        name = first = f"{type(callback).__module__}:{type(callback).__qualname__}"
        while name in by_name:
            name = f"{first}-{sum(other.startswith(first) for other in by_name) + 1}"
        by_name[name] = callback
    return by_name


class CallbackRunner(ExtraState):
    """The callbacks of a run, by name and in order. `steps_in_backward`: the optimizer steps in backward."""

    def __init__(self, model: ParallelModel, by_name: Mapping[str, Callback], steps_in_backward: bool = False) -> None:
        self.model, self.by_name = model, dict(by_name)
        self.names = {hook: [name for name in by_name if has_hook(type(by_name[name]), hook)] for hook in HOOKS}
        """The callbacks that have a hook, by hook."""
        self._loaded: dict[str, dict[str, Any]] | None = None
        """State from a checkpoint that was not handed over yet, by callback."""
        self._has_failed = False
        if steps_in_backward and self.names["after_backward"]:
            name = self.names["after_backward"][0]
            raise CallbackError(
                f"callback {name}: after_backward has no gradients with optimizer.early_step_in_backward; turn it off"
            )

    # Hooks

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if error is not None:
            self.on_error(error)

    def run(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks that have it. Raises CallbackError."""
        for name in self.names[hook]:
            self._call(name, hook, *args)

    def _call(self, name: str, hook: str, *args: Any) -> Any:
        try:
            return getattr(self.by_name[name], hook)(*args)
        except Exception as error:
            if isinstance(error, RollBack):  # of a save in the hook: the run goes back and on
                raise
            has_end = isinstance(error, CheckpointError | MachineError | BadStep | ReplicasDiffer)
            if has_end or failure_kind(error):  # has an exit code of its own
                logger.error("callback %s: %s ends with the following failure", name, hook)
                raise
            logger.debug("callback %s: %s", name, hook, exc_info=True)  # to the rank's log file
            frames = traceback.extract_tb(error.__traceback__)[1:2]
            place = "".join(f" at {frame.filename}:{frame.lineno}" for frame in frames)
            raise CallbackError(f"callback {name}: {hook} fails{place}: {type(error).__name__}: {error}") from error

    def start(self, engine: Any) -> None:
        """Begin, and hand over the state of a run that is resumed."""
        for callback in self.by_name.values():
            callback.engine = engine
        try:
            self.run("start", engine)
            self.hand_over()
        except Exception as error:
            self.on_error(error)
            raise

    def on_log(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers that callbacks add to the record of a logged step."""
        logged, added = dict(record), dict[str, float]()
        for name in self.names["on_log"]:
            metrics = dict(logged)
            self._call(name, "on_log", metrics)
            if changed := [key for key in logged if metrics.get(key) is not logged[key]]:
                raise CallbackError(
                    f"callback {name}: on_log changes {changed[0]}; add numbers under names of your own"
                )
            numbers = {key: _number(name, key, value) for key, value in metrics.items() if key not in logged}
            logged, added = logged | numbers, added | numbers
        return added

    def after_save(self, folder: Path) -> None:
        self.run("after_save", folder)

    def on_error(self, error: BaseException) -> None:
        """Tell all callbacks about the error that ends the run, once. Their own errors are only logged."""
        names, self._has_failed = [] if self._has_failed else self.names["on_error"], True
        for name in names:
            try:
                self._call(name, "on_error", error)
            except Exception as another:
                logger.error("%s", another)

    def end(self) -> None:
        """End all callbacks, the last one first. The first of their errors is raised when all have ended."""
        failures = []
        for name in reversed(self.names["end"]):
            try:
                self._call(name, "end")
            except Exception as error:
                failures.append(error)
        if failures:
            self.on_error(failures[0])
            raise failures[0]

    # State

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the tensors of callbacks by their names in a checkpoint, and their JSON values by callback."""
        parameters, tensors, values = dict(self.model.named_parameters()), Tensors(), dict[str, Any]()
        copies = self._tied_names()
        for name in self.names["state_dict"]:
            values[name] = {}
            for key, value in _checked_state(name, self._call(name, "state_dict")).items():
                if isinstance(value, Mapping) and any(isinstance(part, torch.Tensor) for part in value.values()):
                    _check_tensors(name, key, value, parameters)
                    prefix = f"{CALLBACK}{name}.{key}."
                    tensors |= {prefix + part: x.detach() for part, x in value.items() if part not in copies}
                else:
                    values[name][key] = _json_value(name, key, value)
        return tensors, values

    def targets(
        self, values: Mapping[str, Any], saved: Mapping[str, TensorEntry]
    ) -> tuple[Tensors, Tensors, tuple[str, ...]]:
        """Return the tensors to fill from a checkpoint, those to fill as copies of tied weights, and their prefixes.

        `values`: the checkpoint's JSON values by callback. `saved`: its tensors.
        """
        tensors, copies, tied = Tensors(), Tensors(), self._tied_names()
        if not isinstance(values, Mapping) or not all(isinstance(state, Mapping) for state in values.values()):
            raise CheckpointError("the state of the callbacks is no table of tables")
        self._loaded = {name: dict(state) for name, state in values.items()}
        names = [name for name in self.names["load_state_dict"] if name in values]
        for name in names:
            prefix = f"{CALLBACK}{name}."
            for key in sorted(
                {full.removeprefix(prefix).partition(".")[0] for full in saved if full.startswith(prefix)}
            ):
                table = self._loaded[name][key] = {}
                for parameter_name, parameter in self.model.named_parameters():
                    full = f"{prefix}{key}.{tied.get(parameter_name, parameter_name)}"
                    if full in saved:
                        dtype = getattr(torch, saved[full].dtype, None)
                        if not isinstance(dtype, torch.dtype):
                            raise CheckpointError(f"{full} has the type {saved[full].dtype!r}, which is not known")
                        table[parameter_name] = torch.empty_like(parameter.detach(), dtype=dtype)
                        (copies if parameter_name in tied else tensors)[full] = table[parameter_name]
        return tensors, copies, tuple(f"{CALLBACK}{name}." for name in names)

    def hand_over(self) -> None:
        """Pass the loaded state on to the callbacks; nothing in a run that has not loaded a checkpoint."""
        if self._loaded is None:
            return
        loaded, self._loaded = self._loaded, None
        for name in loaded.keys() - self.by_name.keys():
            logger.info("callback %s is not in the job: its state in the checkpoint is left out", name)
        for name in self.names["state_dict"]:
            if name not in loaded:
                logger.info("callback %s starts without a state: the checkpoint has none of it", name)
            elif name in self.names["load_state_dict"]:
                self._call(name, "load_state_dict", loaded[name])

    def _tied_names(self) -> dict[str, str]:
        """Return the names of tied weights that another part of a pipeline saves -> the names that it saves them by."""
        return {name: first for part in self.model.parts for name, first in getattr(part, "tied_names", {}).items()}


def _number(name: str, key: object, value: Any) -> float:
    try:
        return float(value)
    except Exception:
        raise CallbackError(
            f"callback {name}: on_log adds {key!r} of type {type(value).__name__}; allowed: numbers"
        ) from None


def _checked_state(name: str, state: Any) -> Mapping[str, Any]:
    """Return the state of a callback. Raises CallbackError unless it is a table with texts as keys."""
    if not isinstance(state, Mapping):
        fault = f"returns a {type(state).__name__}"
    elif keys := [key for key in state if not isinstance(key, str)]:
        fault = f"has the key {keys[0]!r}"
    else:
        return state
    raise CallbackError(f"callback {name}: state_dict {fault}; allowed: a table with texts as keys")


def _has_text_keys(value: Any) -> bool:
    """Return False if a table inside of a value has other keys than texts, which JSON would turn into texts."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _has_text_keys(inner) for key, inner in value.items())
    return all(map(_has_text_keys, value)) if isinstance(value, list | tuple) else True


def _json_value(name: str, key: str, value: Any) -> Any:
    try:
        text = json.dumps(value, allow_nan=False)
        if not _has_text_keys(value):
            raise TypeError("JSON tables have texts as keys")
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise CallbackError(
            f"callback {name}: state_dict has {key!r}, which cannot be saved ({error}); allowed: JSON values, and "
            "tables of tensors shaped like parameters by parameters' names"
        ) from None


def _check_tensors(name: str, key: str, table: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise CallbackError unless all entries are tensors shaped and sharded like the parameters of their names."""
    fault = "its key has a dot" if "." in key else ""
    for part, tensor in table.items():
        parameter = parameters.get(part)
        if parameter is None:
            fault = f"this rank has no parameter {part}"
        elif not isinstance(tensor, torch.Tensor):
            fault = f"{part} is a {type(tensor).__name__} and no tensor"
        elif tensor.shape != parameter.shape or _placement(tensor) != _placement(parameter):
            fault = f"{part} is {_described(tensor)}, and the parameter is {_described(parameter)}"
        if fault:
            raise CallbackError(
                f"callback {name}: state_dict has {key!r}, which cannot be saved: {fault}; make each with "
                "torch.empty_like(parameter) or clone(), and return other tensors as lists"
            )


def _placement(tensor: torch.Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _described(tensor: torch.Tensor) -> str:
    sharded = f", sharded {tensor.placements}" if isinstance(tensor, DTensor) else ", a plain tensor"
    return f"{list(tensor.shape)}{sharded}"
