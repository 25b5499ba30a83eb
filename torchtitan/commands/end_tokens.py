"""Count the records that teach a model to stop: the line on trained end tokens of `check` and `preview`. No torch."""

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.core.machine_errors import MachineError
from torchtitan.datasets import open_source
from torchtitan.datasets.sources import Document, Pair
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.rules import Facts

ENCODING = "torchtitan.datasets.encoding"
"""Imported by name on demand, as it needs numpy."""
MOST_RECORDS, MOST_SECONDS = 100, 1.0
"""Limits on the records that are looked at, and on the time that this takes."""


def end_token_line(facts: Facts) -> str:
    """Return a line on the first records of the training data; empty if these are not at hand or have no end.

    Only local files of records that are learned as a whole are looked at.
    """
    if not facts.model.spec.whole_records or facts.model.learns_classes:
        return ""
    try:
        looked_at, trained = _count(facts)
    except (JobError, MachineError, OSError):  # training reports it, with the record's location
        return ""
    if not looked_at:
        return ""
    line = f"{trained} of the first {looked_at} records train an end token"
    if trained:
        return line
    return f"{line}: the model will not learn to stop; see data.train_on_eos and the template's end token"


def _count(facts: Facts) -> tuple[int, int]:
    """Return the number of records looked at, and how many of them train an end token."""
    config, end = facts.config, time.monotonic() + MOST_SECONDS
    tokenizer = facts.job.tokenizer()
    scope = "last_turn" if facts.layout.rows_per_sample > 1 else config.data.train_on
    encode, train_on = resolve_name(f"{ENCODING}:encode"), resolve_name(f"{ENCODING}:TrainOn")
    train_on = train_on(scope, config.data.train_on_eos)
    looked_at = trained = 0
    for name, source_config in facts.data.all_sources.items():
        path = source_config.dataset_path
        if not name.startswith("training") or source_config.dataset != "text" or not path or not Path(path).exists():
            continue
        source = open_source(source_config.dataset, path, facts.data.reader(source_config), facts.model.labelled_fields)
        for document in islice(source.documents(), MOST_RECORDS - looked_at):
            if isinstance(document, Document):
                looked_at, trained = looked_at + 1, trained + _trains_end(tokenizer, document, encode, train_on)
            if time.monotonic() > end:
                return looked_at, trained
    return looked_at, trained


def _trains_end(tokenizer: Tokenizer, document: Document, encode: Callable[..., Any], train_on: Any) -> bool:
    if isinstance(document.content, Pair):
        return all(_trains_end(tokenizer, answer, encode, train_on) for answer in document.content)
    ids, loss_mask = encode(tokenizer, document, train_on)
    ends = {tokenizer.eos_id, *tokenizer.special_tokens.values()}
    return any(int(number) in ends for number in ids[loss_mask])
