"""A model family as `torchtitan check` needs it: sizes, and their conversion from and to config.json. No torch."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.models.hf.config import (
    CONFIG,
    block_of,
    check_ranges,
    check_types,
    config_beside,
    read_json,
    tensor_files,
)

NOT_COMPUTED_WITH = ("max_seq_len", "bias_rate", "aux_loss_weight")
"""Shared arguments that do not affect the logits."""
READ_ANEW = ("rope_scaling", "rope_theta")
"""Arguments that no tensor shape depends on. A job may override them when it continues from given weights."""


@dataclass(frozen=True, kw_only=True)
class ConfigForm:
    """Conversion between a family's arguments and config.json.

    `compared`: fields of the arguments that must agree with a folder's config.json; if it is empty, all but
    `not_compared`, which do not change the logits. `as_held`: adjusts the arguments to the tensors that a folder has,
    by their names, if a config.json may describe more than the folder holds.
    """

    model_types: tuple[str, ...]  # of config.json
    to_hf: Callable[..., dict[str, Any]]  # (args, dtype); JobError for features that transformers lacks
    from_hf: Callable[[Mapping[str, Any]], Any]  # the inverse, of one of the model types; JobError likewise
    compared: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = NOT_COMPUTED_WITH
    as_held: Callable[[Any, Mapping[str, str]], Any] = lambda args, names: args

    def args_from(self, config: Mapping[str, Any]) -> Any:
        """Return the arguments of a config of transformers 4 or 5. Raises JobError for unsupported features."""
        model_type = config.get("model_type")
        if model_type not in self.model_types:
            expected = ("one of " if len(self.model_types) > 1 else "a ") + ", ".join(self.model_types)
            raise JobError(f"model_type = {model_type!r}, but this model is {expected}")
        block_of(config)
        args = self.from_hf(config)
        if (dropped := config.get("attention_dropout")) and not hasattr(args, "attention_dropout"):
            raise JobError(
                f"attention_dropout = {dropped!r}, but attention of this family drops no probabilities; allowed: 0, or "
                "nothing said"
            )
        check_types(args)
        check_ranges(args, config)
        return args

    def args_of(self, folder: str | Path) -> Any:
        """Return the arguments of a folder's model. Raises JobError, which names the file, for unsupported features."""
        folder = Path(folder)
        return self.with_held(self._read(folder), folder)

    def with_held(self, args: Any, path: Path) -> Any:
        return self.as_held(args, names) if (names := tensor_files(path)) else args

    def differences(self, folder: str | Path, args: Any) -> list[str]:
        """Describe each argument that differs between a folder's config.json and `args`.

        It compares also constants that no tensor shape shows.
        """
        stored = self._read(Path(folder))
        differing = self.differing(stored, args)
        return [f"{name} is {getattr(stored, name)!r}, the job's is {getattr(args, name)!r}" for name in differing]

    def of_weights(self, path: str | Path, args: Any, overrides: Collection[str]) -> Any:
        """Return `args`, but with the weights' own values of READ_ANEW fields that the job overrides.

        They come from the weights' config.json; without one nothing changes. The job changes these fields on purpose,
        so they must not count as differences.
        """
        changed_names = [name for name in READ_ANEW if name in overrides]
        if not changed_names or config_beside(Path(path)) is None:
            return args
        stored = self._read(Path(path))
        return replace(args, **{name: getattr(stored, name) for name in changed_names})

    def differing(self, args: Any, reference_args: Any) -> list[str]:
        """Return the names of the compared fields that differ."""
        names = self.compared or [field.name for field in fields(args) if field.name not in self.not_compared]
        return [name for name in names if getattr(args, name) != getattr(reference_args, name)]

    def _read(self, folder: Path) -> Any:
        try:
            config = config_beside(folder)
            return self.args_from(read_json(folder / CONFIG) if config is None else config)
        except (TypeError, ValueError, OverflowError) as error:
            raise JobError(f"{folder / CONFIG}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family, importable without torch; `spec` names the rest."""

    sizes: Mapping[str, Any]
    """Flavor -> frozen dataclass of sizes, including "debugmodel"."""
    config: ConfigForm
    """Conversion from and to config.json."""
    spec: str
    """The "module:attribute" of its ModelSpec, which may import torch."""
    home: str = ""
    """Publisher on huggingface.co, named in messages about a missing tokenizer."""
