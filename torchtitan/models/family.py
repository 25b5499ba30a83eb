"""A model family as `torchtitan check` needs it: sizes, and their conversion from and to config.json. No torch."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.models.hf.config import (
    CONFIG,
    check_ranges,
    check_types,
    find_config,
    fp8_block_size,
    read_json,
    tensor_files,
)

NOT_IN_FORWARD = ("max_seq_len", "bias_rate", "aux_loss_weight")
"""Shared arguments that do not affect the logits."""
ROPE_FIELDS = ("rope_scaling", "rope_theta")
"""Arguments that no tensor shape depends on. A job may override them when it continues from given weights."""


@dataclass(frozen=True, kw_only=True)
class ConfigConverter:
    """Conversion between a family's arguments and config.json.

    `compared`: fields of the arguments that must agree with a folder's config.json; if it is empty, all but
    `not_compared`, which do not change the logits. `fit_to_tensors`: adjusts the arguments to the names of the tensors
    in a folder, if a config.json may describe more than the folder holds.
    """

    model_types: tuple[str, ...]  # of config.json
    to_hf: Callable[..., dict[str, Any]]  # (args, dtype); JobError for features that transformers lacks
    from_hf: Callable[[Mapping[str, Any]], Any]  # the inverse, of one of the model types; JobError likewise
    refused_types: tuple[str, ...] = ()  # among the model types; `from_hf` says why they are not supported
    compared: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = NOT_IN_FORWARD
    fit_to_tensors: Callable[[Any, Mapping[str, str]], Any] = lambda args, names: args

    @property
    def allowed_types(self) -> tuple[str, ...]:
        return tuple(name for name in self.model_types if name not in self.refused_types)

    def args_from_config(self, config: Mapping[str, Any]) -> Any:
        """Return the arguments of a config of transformers 4 or 5. Raises JobError for unsupported features."""
        model_type = config.get("model_type")
        if model_type not in self.model_types:
            expected = ("one of " if len(self.allowed_types) > 1 else "a ") + ", ".join(self.allowed_types)
            raise JobError(f"model_type = {model_type!r}, but this model is {expected}")
        fp8_block_size(config)
        args = self.from_hf(config)
        if (dropped := config.get("attention_dropout")) and not hasattr(args, "attention_dropout"):
            raise JobError(
                f"attention_dropout = {dropped!r}, but attention of this family drops no probabilities; allowed: 0, or "
                "nothing said"
            )
        check_types(args)
        check_ranges(args, config)
        return args

    def args_from_folder(self, folder: str | Path) -> Any:
        """Return the arguments of a folder's model. Raises JobError, which names the file, for unsupported features."""
        folder = Path(folder)
        return self.fit_to_folder(self._read(folder), folder)

    def fit_to_folder(self, args: Any, path: Path) -> Any:
        return self.fit_to_tensors(args, names) if (names := tensor_files(path)) else args

    def differences(self, folder: str | Path, args: Any) -> list[str]:
        """Describe each argument that differs between a folder's config.json and `args`.

        It compares also constants that no tensor shape shows.
        """
        stored = self._read(Path(folder))
        differing = self.differing_fields(stored, args)
        return [f"{name} is {getattr(stored, name)!r}, the job's is {getattr(args, name)!r}" for name in differing]

    def args_for_weights(self, path: str | Path, args: Any, overrides: Collection[str]) -> Any:
        """Return `args`, but with the weights' own values of ROPE_FIELDS fields that the job overrides.

        They come from the weights' config.json; without one nothing changes. The job changes these fields on purpose,
        so they must not count as differences.
        """
        changed_names = [name for name in ROPE_FIELDS if name in overrides]
        if not changed_names or find_config(Path(path)) is None:
            return args
        stored = self._read(Path(path))
        return replace(args, **{name: getattr(stored, name) for name in changed_names})

    def differing_fields(self, args: Any, reference_args: Any) -> list[str]:
        """Return the names of the compared fields that differ."""
        names = self.compared or [field.name for field in fields(args) if field.name not in self.not_compared]
        return [name for name in names if getattr(args, name) != getattr(reference_args, name)]

    def _read(self, folder: Path) -> Any:
        try:
            config = find_config(folder)
            return self.args_from_config(read_json(folder / CONFIG) if config is None else config)
        except (TypeError, ValueError, OverflowError) as error:
            raise JobError(f"{folder / CONFIG}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family, importable without torch; `spec` names the rest."""

    sizes: Mapping[str, Any]
    """Flavor -> frozen dataclass of sizes, including "debugmodel"."""
    config: ConfigConverter
    """Conversion from and to config.json."""
    spec: str
    """The "module:attribute" of its ModelSpec, which may import torch."""
    publisher: str = ""
    """Publisher on huggingface.co, named in messages about a missing tokenizer."""
