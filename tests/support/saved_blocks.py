"""Blocks of token ids, saved as ReLoRA's scripts do."""

import json

import datasets as hub
import numpy as np

LENGTH = 16


def blocks(count=40, length=LENGTH, largest=255):
    return np.random.default_rng(0).integers(0, largest, (count, length)).tolist()


def save(folder, ids=None, split=None, **overrides):
    """Write a folder in the format of pretokenize.py."""
    table = hub.Dataset.from_dict({"input_ids": blocks() if ids is None else ids})
    dataset = table if split is None else hub.DatasetDict({"train": table, split: table.select(range(8))})
    dataset.save_to_disk(folder)
    about = {"tokenizer": "bytes", "dataset": "wikitext", "text_field": "text", "sequence_length": LENGTH} | overrides
    (folder / "args.json").write_text(json.dumps(about))
    return folder
