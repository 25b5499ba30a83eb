"""AFMoE: its layers without a window, beside what test_gated.py compares with transformers."""

import dataclasses

import torch

from tests.support.hf_parity import build
from tests.support.tiny_decoders import GATED
from torchtitan.models.afmoe import CONFIG
from torchtitan.models.afmoe.model import Afmoe

ARGS = GATED["afmoe"]


def test_layers_without_a_window_have_no_positions():
    assert [ARGS.rope(layer) is None for layer in range(3)] == [False, True, False]
    one = dataclasses.replace(ARGS, n_layers=1, global_interval=1)
    model, tokens = build(Afmoe, one), torch.tensor([[1, 2, 3, 4], [3, 1, 2, 4]])
    torch.testing.assert_close(*model(tokens)[:, -1])  # the order of the tokens before it does not matter
    windowed = build(Afmoe, dataclasses.replace(one, global_interval=2))
    first, second = windowed(tokens)[:, -1]
    assert (first - second).abs().max() > 1e-3


def test_a_config_without_kinds_of_layers_has_every_fourth_without_a_window():
    config = {key: value for key, value in CONFIG.to_hf(ARGS).items() if not key.startswith(("layer_t", "global_attn"))}
    assert CONFIG.args_from_config(config).global_interval == 4
