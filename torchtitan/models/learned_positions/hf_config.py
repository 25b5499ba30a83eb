"""What config.json of GPT-2, OPT and RoBERTa share: shares of dropout, classes. No torch."""

from collections.abc import Mapping
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.models.hf.config import number_of
from torchtitan.models.learned_positions import ClassicArgs

NOT_COMPARED = ("dropout", "attention_dropout", "n_classes")
"""Of the arguments, what a job may have otherwise than the folder that it starts from. Positions are compared: they are
weights."""


def one_dropout(config: Mapping[str, Any], defaults: Mapping[str, float]) -> float:
    """JobError where these shares are not one."""
    given = {name: number_of(config, name, default) for name, default in defaults.items()}
    if len(set(given.values())) > 1:
        told = " and ".join(f"{name} = {share!r}" for name, share in given.items())
        raise JobError(f"{told}, but this model has one share for both")
    return next(iter(given.values()))


def classes_of(config: Mapping[str, Any]) -> int:
    """0 for a model of words."""
    kinds = config.get("architectures")
    if not isinstance(kinds, list) or not any("SequenceClassification" in str(kind) for kind in kinds):
        return 0
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, Mapping) else number_of(config, "num_labels", 2)


def labels_of(args: ClassicArgs) -> dict[str, Any]:
    """As transformers names classes that have no names."""
    names = [f"LABEL_{number}" for number in range(args.n_classes)]
    if not names:
        return {}
    return {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
