"""What ranks keep for themselves in a checkpoint: taken by all or none, and only a misfit is said."""

import logging
from types import SimpleNamespace

import pytest
import torch

from torchtitan.checkpoint.adapter_state import Kept

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
    kept = Kept(take_back=lambda trainer, shapes: found, tell=told.append)
    with caplog.at_level(logging.WARNING):
        tensors, prefixes = kept.taken(source(ranks), PEERS)
    assert told == [taken] and bool(tensors) == bool(prefixes) == taken
    assert ("of another plan or batch" in caplog.text) == warned


def test_who_keeps_nothing_is_told_of_no_misfit(caplog):
    with caplog.at_level(logging.WARNING):
        assert Kept().taken(source(ranks=2), PEERS) == ({}, ())
    assert not caplog.text
