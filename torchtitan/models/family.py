"""A model family as `torchtitan check` needs it: sizes, and their conversion from and to config.json. No torch."""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.core.files import DeclaredKeys, agreed_value
from torchtitan.models.hf.config import (
    CONFIG,
    StoredTensor,
    check_ranges,
    check_types,
    find_text_config,
    read_json,
    read_number,
    tensor_files,
)
from torchtitan.models.hf.quantization import LINEAR_METHODS, REMEDY, read_quantization
from torchtitan.models.hf.wrappers import OUTSIDE, check_outside, text_tensors

logger = logging.getLogger(__name__)

NOT_IN_FORWARD = ("max_seq_len", "bias_rate", "aux_loss_weight", "n_classes")
"""Shared arguments that do not affect the logits, or what is below the head."""
CLASS_KEYS = frozenset(("architectures", "id2label", "num_labels"))
"""Keys of config.json that `read_num_classes` reads."""
ROPE_FIELDS = ("rope_scaling", "rope_theta", "longrope")
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
    compared: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = NOT_IN_FORWARD
    keys: DeclaredKeys  # of config.json, see hf/config_keys.py
    aliases: Mapping[str, str] = field(default_factory=dict)  # second name of a key -> the name that `from_hf` reads
    is_causal: bool = True
    packed_methods: tuple[str, ...] = LINEAR_METHODS  # of weights in few bits that are read
    ignored_keys: frozenset[str] = frozenset()  # model.ignore_config_keys
    tied_tensors: tuple[tuple[str, str], ...] = (("embed_tokens.weight", "lm_head.weight"),)
    """Ends of the names of tensors of a folder and the names of their copies, of which the first pair is the
    embedding and the head."""
    fit_to_tensors: Callable[[Any, Mapping[str, str]], Any] = lambda args, names: args

    def args_from_config(self, config: Mapping[str, Any]) -> Any:
        """Return the arguments of a config of transformers 4 or 5. Raises JobError for unsupported features."""
        model_type = config.get("model_type")
        if model_type not in self.model_types:
            expected = ("one of " if len(self.model_types) > 1 else "a ") + ", ".join(self.model_types)
            raise JobError(f"model_type = {model_type!r}, but this model is {expected}")
        config = self._known_part(config)
        quantization = read_quantization(config)
        if quantization and quantization.method not in self.packed_methods:
            raise JobError(
                f"quantization_config has quant_method = {quantization.method!r}, which this model's weights are not "
                f"read from; {REMEDY}"
            )
        args = self.from_hf(config)
        if (dropped := read_number(config, "attention_dropout", 0.0, null=0.0)) and not hasattr(
            args, "attention_dropout"
        ):
            raise JobError(
                f"attention_dropout = {dropped!r}, but attention of this family drops no probabilities; allowed: 0, or "
                "nothing said"
            )
        check_types(args)
        check_ranges(args, config)
        return args

    def ignoring(self, keys: Collection[str]) -> "ConfigConverter":
        """Return the converter that ignores these keys (model.ignore_config_keys) in every config.json."""
        return replace(self, ignored_keys=frozenset(keys))

    def _known_part(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config without ignored keys and second names. JobError if a key would be ignored in silence."""
        if used := sorted(self.ignored_keys & {*self.keys.used, *self.aliases}):
            raise JobError(
                f"model.ignore_config_keys has {', '.join(used)}, which this model uses; allowed: keys that it does "
                f"not know; correct the value in {CONFIG}, or leave the key out there"
            )
        if OUTSIDE in config:
            check_outside(config, self.ignored_keys, _remedy)
        remaining = {key: value for key, value in config.items() if key not in {*self.ignored_keys, OUTSIDE}}
        read = {key: value for key, value in remaining.items() if key not in self.aliases}
        self.keys.check(read, "it", _remedy(self.keys.unknown(read)))
        for alias, key in self.aliases.items():
            if alias in remaining:
                read[key] = agreed_value(key, {key: read.get(key), alias: remaining[alias]}, "remove the wrong one")
        if config.get("is_causal", self.is_causal) is not self.is_causal:
            raise JobError(f"is_causal = {config['is_causal']!r}, but this model only has {self.is_causal}")
        return read

    def args_from_folder(self, folder: str | Path) -> Any:
        """Return the arguments of a folder's model. Raises JobError, which names the file, for unsupported features."""
        folder = Path(folder)
        args = self._read(folder)
        try:
            return self.fit_to_folder(args, folder)
        except JobError as error:
            raise JobError(f"{folder}: {error}") from error

    def fit_to_folder(self, args: Any, path: Path) -> Any:
        """Return the arguments of the model that the tensors at a path are.

        A head that the config ties to the embedding, but which differs from it in the file, is one of its own, as
        transformers reads it. Raises JobError if the family has no such head, or for another number of tokens.
        """
        files, config = tensor_files(path), find_text_config(path)
        names = text_tensors(config, files)
        if config is not None and OUTSIDE in config:
            _describe_text_part(path, config, len(files) - len(names))
        if not names:
            return args
        home = path.parent if path.is_file() else path
        for source, copy in self.tied_tensors:
            source_name = next((name for name in names if f".{name}".endswith(f".{source}")), None)
            if source_name is None:
                continue
            stored = StoredTensor.find(home / files[names[source_name]], names[source_name])
            if stored and stored.shape and not source.endswith("bias") and stored.shape[0] != args.vocab_size:
                raise JobError(
                    f"vocab_size = {args.vocab_size}, but {source_name} has {stored.shape[0]} rows; set vocab_size to "
                    f"{stored.shape[0]}, and check that the tokenizer has as many tokens at most"
                )
            if not args.tied_embeddings or copy not in names or stored is None:
                continue
            other = StoredTensor.find(home / files[names[copy]], names[copy])
            if other is not None and not _are_equal(stored, other):
                args = self._untied(args, home, source_name, copy)
        return self.fit_to_tensors(args, names)

    def _untied(self, args: Any, home: Path, source: str, copy: str) -> Any:
        if not any(field.name == "tied_embeddings" for field in fields(args)):
            raise JobError(
                f"{copy} differs from {source}, to which this family always ties it: it would be lost; transformers "
                f"keeps it; remove it from the file, if {source} is the one to use"
            )
        _warn_once(f"{home}: {copy} differs from {source}, so it is read, although tie_word_embeddings is true")
        return replace(args, tied_embeddings=False)

    def differences(self, folder: str | Path, args: Any) -> list[str]:
        """Describe each argument that differs between a folder's config.json and `args`.

        It compares also constants that no tensor shape shows.
        """
        stored = self.args_from_folder(folder)
        differing = self.differing_fields(stored, args)
        return [f"{name} is {getattr(stored, name)!r}, the job's is {getattr(args, name)!r}" for name in differing]

    def args_for_weights(self, path: str | Path, args: Any, overrides: Collection[str]) -> Any:
        """Return `args`, but with the weights' own values of ROPE_FIELDS fields that the job overrides.

        They come from the weights' config.json; without one nothing changes. The job changes these fields on purpose,
        so they must not count as differences.
        """
        changed_names = [name for name in ROPE_FIELDS if name in overrides]
        if not changed_names or find_text_config(Path(path)) is None:
            return args
        stored = self.args_from_folder(path)
        return replace(args, **{name: getattr(stored, name) for name in changed_names})

    def differing_fields(self, args: Any, reference_args: Any) -> list[str]:
        """Return the names of the compared fields that differ."""
        names = self.compared or [field.name for field in fields(args) if field.name not in self.not_compared]
        if getattr(args, "n_classes", 0) or getattr(reference_args, "n_classes", 0):
            names = [name for name in names if name != "tied_embeddings"]  # one of them may have a head of its own
        return [name for name in names if getattr(args, name) != getattr(reference_args, name)]

    def _read(self, folder: Path) -> Any:
        try:
            config = find_text_config(folder)
            return self.args_from_config(read_json(folder / CONFIG) if config is None else config)
        except (TypeError, ValueError, OverflowError) as error:
            raise JobError(f"{folder / CONFIG}: {error}") from error


def _remedy(unknown_keys: Iterable[str]) -> str:
    names = ", ".join(map(json.dumps, unknown_keys))
    return f"if it has no effect on this model, set model.ignore_config_keys = [{names}]"


def read_num_classes(config: Mapping[str, Any]) -> int:
    """Return the number of classes of a config; 0 for a language model."""
    kinds = config.get("architectures")
    if not isinstance(kinds, list) or not any("SequenceClassification" in str(kind) for kind in kinds):
        return 0
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, Mapping) else read_number(config, "num_labels", 2)


def label_fields(args: Any) -> dict[str, Any]:
    """Return the fields that name the classes LABEL_0, LABEL_1, ..., as transformers does by default."""
    names = [f"LABEL_{number}" for number in range(args.n_classes)]
    if not names:
        return {}
    return {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}


def task_fields(name: str, args: Any) -> dict[str, Any]:
    """Return the fields that say what the head of a causal model of transformers is; `name` is that of its classes."""
    kind = "SequenceClassification" if args.n_classes else "CausalLM"
    return {"architectures": [f"{name}For{kind}"]} | label_fields(args)


@cache
def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    return first.equals(second)


def _describe_text_part(path: Path, config: Mapping[str, Any], unread: int) -> None:
    """Tell the user once that a folder's text part is the model."""
    tensors = f"; {unread:,} tensors of its other parts are not read" if unread else ""
    kinds = f"a {config[OUTSIDE]['model_type']} model, of which the text part ({config['model_type']}) is read"
    _warn_once(f"{path}: {kinds}, trained and saved as a text model{tensors}")


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


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
