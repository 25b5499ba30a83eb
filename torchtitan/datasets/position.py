"""The position in the data that a checkpoint stores: valid for any number of ranks, but only for the same data."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchtitan.core.errors import JobError
from torchtitan.datasets.record_account import RECORDS
from torchtitan.datasets.sources import CONTENTS, CONVERSATIONS
from torchtitan.datasets.streams import REREAD, SINCE, Cursor

VERSION = 2
"""Version of the order of streams. In version 1 they took turns in a fixed order. Prepared shards have no such streams,
so their order is unchanged."""


@dataclass(frozen=True)
class Position:
    """A position: `samples` consumed by all ranks together, and a cursor for each of the `streams` of text."""

    samples: int
    streams: int
    cursors: dict[int, Cursor]
    fingerprint: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "samples": self.samples,
            "lanes": self.streams,
            "cursors": {str(stream): cursor.to_list() for stream, cursor in sorted(self.cursors.items())},
            "fingerprint": self.fingerprint,
        }


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of all data-parallel ranks after one step; any number of ranks can resume from the result."""
    first = states[0]
    if any(s["samples"] != first["samples"] or s["fingerprint"] != first["fingerprint"] for s in states):
        raise JobError(
            f"data positions of different steps or different data cannot be joined: samples "
            f"{sorted({s['samples'] for s in states})}; save all ranks after the same step"
        )
    # The first number of a cursor counts the stream's samples. Ranks that share a stream differ; the furthest is right.
    cursors: dict[str, list[int]] = {}
    for state in states:
        for stream, cursor in state["cursors"].items():
            cursors[stream] = max(cursor, cursors.get(stream, cursor))
    merged = {**first, "cursors": dict(sorted(cursors.items(), key=lambda item: int(item[0])))}
    if "read" in first:  # what each rank's rows have read, see segments.py
        merged["read"] = {rank: rows for state in states for rank, rows in state["read"].items()}
    return merged


def resume(
    state: dict[str, Any] | None,
    streams: list[int],
    samples_per_stream: Callable[[int], np.ndarray],
    fingerprint: dict[str, Any],
) -> Position:
    """Return the position of a merged state, or the beginning without a state.

    `streams`: the streams with cursors. `samples_per_stream`: maps a number of samples to their numbers by stream.
    Raises JobError if the state belongs to other data, or to a version that read the data in another order."""
    if state is None:
        return Position(0, len(streams), {}, fingerprint)
    if state.get("version") != VERSION and not (state.get("version") == 1 and not streams and not state["lanes"]):
        raise JobError(
            f"the checkpoint's data position has version {state.get('version')}, this program reads {VERSION}, another "
            "order; finish with the program that began, or start the data from the beginning with "
            'checkpoint.exclude_from_loading = ["dataloader"]'
        )
    check_same_data(state, fingerprint)
    if state["lanes"] > len(streams) and fingerprint.get("shuffle") is False:
        raise JobError(
            f"the checkpoint's run read its text in {state['lanes']} streams although training.shuffle = false, so not "
            "in the stored order, which is kept now; finish with the program that began it, or start the data from the "
            'beginning with checkpoint.exclude_from_loading = ["dataloader"]'
        )
    if state["lanes"] != len(streams):
        _refuse([f"streams: {state['lanes']} in the checkpoint, {len(streams)} now"])
    cursors = {int(stream): Cursor.from_list(cursor) for stream, cursor in state["cursors"].items()}
    expected_counts = samples_per_stream(state["samples"]).tolist()
    for stream in streams:
        expected = expected_counts[stream]
        count = cursors.get(stream, Cursor()).samples
        if count != expected:
            raise JobError(
                f"the checkpoint's data position is incomplete: stream {stream} is at sample {count} instead of "
                f"{expected}; join the states of all data-parallel ranks with merge_states"
            )
    return Position(state["samples"], len(streams), cursors, fingerprint)


def check_same_data(state: dict[str, Any], fingerprint: dict[str, Any]) -> None:
    """Raise JobError unless the state belongs to the data with this fingerprint."""
    # A checkpoint is JSON, which returns tuples as lists: compare both after a round trip.
    before, fingerprint = json.loads(json.dumps([state["fingerprint"], fingerprint]))
    # States saved before chat templates existed do not contain one.
    now = {name: value for name, value in fingerprint.items() if name != "chat_template" or name in before}
    _refuse(_differences(before, now), _packing_advice(before, now) + _tokenization_advice(before, now))


def fingerprints_of_sources(fingerprint: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fingerprint of each source; a single source is not nested."""
    return [*fingerprint.get("sources", {"": fingerprint}).values()]


def _tokenization_advice(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return advice if the same data are read or tokenized otherwise than for a saved state; empty if they are not."""
    sources = [fingerprints_of_sources(data) for data in (before, now)]
    versions, readings = (
        [[source.get(key) for source in data] for data in sources] for key in (CONVERSATIONS, RECORDS)
    )
    if readings[0] != readings[1] and any(readings[1]):
        change = REREAD
    elif versions[0] != versions[1] and any(versions[1]):
        if earlier := max(filter(None, versions[0]), default=None):
            return f"; the run began with other rules of tokenization: set data.tokenization_version = {earlier}"
        change = "the tokenization of conversations has changed"
    elif _differ_in_shards_alone(*sources):
        change = "the tokens of these records have changed"
    else:
        return ""
    return f"; {change} {SINCE}"


def _differ_in_shards_alone(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Return True if data that were tokenized before the run give other shards from the same files."""

    def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return {**a, "shards": None} == {**b, "shards": None}

    same_files = len(before) == len(now) and all(same(a, b) for a, b in zip(before, now, strict=True))
    return same_files and before != now and all("files" in source and "shards" in source for source in now)


def _packing_advice(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return advice on restoring the packing of a saved state; empty if it does not differ."""
    windows = [data["packing"].get("window") if "packing" in data else None for data in (before, now)]
    if None in windows or windows[0] == windows[1]:
        return ""
    window = f'data.packing = "best_fit" and data.packing_window = {windows[0]}'
    return "; the checkpoint's samples were packed with " + ('data.packing = "off"' if windows[0] == 1 else window)


def _refuse(different: list[str], advice: str = "") -> None:
    if different:
        shown = "; ".join(different[:10]) + (f"; and {len(different) - 10} more" if len(different) > 10 else "")
        raise JobError(
            f"the data differ from the checkpoint's, so its position means nothing in them: {shown}{advice}. Bring "
            "back the old data and settings, or start the data from the beginning with "
            'checkpoint.exclude_from_loading = ["dataloader"]'
        )


def _differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    differences = []
    for name in sorted(old.keys() | new.keys()):
        if name == CONTENTS and name not in old:
            continue
        a, b = old.get(name, "nothing"), new.get(name, "nothing")
        if name == "dataset_path" and isinstance(a, str):
            a = os.path.expanduser(a)  # old states contain an unexpanded ~
        if isinstance(a, dict) and isinstance(b, dict):
            differences += _differences(a, b, f"{path}{name}: ")
        elif a != b:
            differences.append(f"{path}{name}: {a} in the checkpoint, {b} now")
    return differences
