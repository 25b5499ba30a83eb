"""What ranks keep for themselves in a checkpoint: taken by all or none, and only a misfit is said."""

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


FITS = {"rows": torch.zeros(2)}


@pytest.mark.parametrize(
    "found, ranks, taken, warned",
    [
        (FITS, 1, True, False),
        (FITS, 2, False, True),
        (None, 1, False, True),
        ({}, 1, False, False),
        ({}, 2, False, False),
    ],
    ids=["fits", "more ranks", "misfit", "not asked for", "not asked for of more ranks"],
)
def test_a_warning_is_of_a_misfit_alone(found, ranks, taken, warned, caplog):
    told = []
    kept = AdapterState(targets_for=lambda trainer, shapes: found, on_restored=told.append)
    with caplog.at_level(logging.WARNING):
        tensors, prefixes = kept.restore_targets(source(ranks), PEERS)
    assert told == [taken] and bool(tensors) == bool(prefixes) == taken
    assert ("with another parallel plan or batch size" in caplog.text) == warned


def test_who_keeps_nothing_is_told_of_no_misfit(caplog):
    with caplog.at_level(logging.WARNING):
        assert AdapterState().restore_targets(source(ranks=2), PEERS) == ({}, ())
    assert not caplog.text
