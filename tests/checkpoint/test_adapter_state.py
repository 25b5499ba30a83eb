"""Tests of an adapter's per-rank state in a checkpoint: all ranks restore it or none, and a mismatch is a warning."""

import logging
from types import SimpleNamespace

import pytest
import torch

from torchtitan.checkpoint.loading import AdapterState

PEERS = SimpleNamespace(rank=0, size=1, is_main=True, maximum=lambda *values: values)


def source(ranks):
    return SimpleNamespace(
        folder="step-3",
        manifest=SimpleNamespace(tensors={"kept.0.rows": SimpleNamespace(shape=[2])}),
        state={"trainer": {}, "ranks": [{}] * ranks},
    )


TARGETS = {"rows": torch.zeros(2)}


@pytest.mark.parametrize(
    "targets, ranks, restored, warned",
    [
        (TARGETS, 1, True, False),
        (TARGETS, 2, False, True),
        (None, 1, False, True),
        ({}, 1, False, False),
        ({}, 2, False, False),
    ],
    ids=["fits", "more ranks", "misfit", "not asked for", "not asked for of more ranks"],
)
def test_only_a_mismatch_is_a_warning(targets, ranks, restored, warned, caplog):
    outcomes = []
    adapter_state = AdapterState(targets_for=lambda trainer, shapes: targets, on_restored=outcomes.append)
    with caplog.at_level(logging.WARNING):
        tensors, prefixes = adapter_state.restore_targets(source(ranks), PEERS)
    assert outcomes == [restored] and bool(tensors) == bool(prefixes) == restored
    assert ("with another parallel plan or batch size" in caplog.text) == warned


def test_without_adapter_state_nothing_is_warned(caplog):
    with caplog.at_level(logging.WARNING):
        assert AdapterState().restore_targets(source(ranks=2), PEERS) == ({}, ())
    assert not caplog.text
