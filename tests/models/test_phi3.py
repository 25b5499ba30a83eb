"""Phi 3 and 4 for long texts: factors of rotary wavelengths, and the length of the texts for which they are."""

import copy

import pytest
import torch
from transformers import Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support.hf_parity import build, write_folder
from tests.support.judged import lines
from tests.support.tiny_decoders import GATED
from torchtitan.commands import generate
from torchtitan.models.layers import Rotary
from torchtitan.models.phi3.model import HF


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"type": "su", "original_max_position_embeddings": 64},
        {"rope_type": "longrope", "factor": 9.0},
        {"attention_factor": 0.7},
        {"factor": 0.5},
    ],
)
def test_short_factors_of_a_phi_are_those_of_transformers(change):
    table = {"type": "longrope", "short_factor": [1.0, 1.25, 3.0, 4], "long_factor": [2.0, 4.0, 8.0, 9.0]} | change
    config = HF.config_to_hf(GATED["phi3"]) | {"original_max_position_embeddings": 64, "rope_scaling": table}
    args = HF.config.args_from_config(config)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["longrope"](Phi3Config(**copy.deepcopy(config)))
    ours = Rotary(args.rotary_dim, *args.rope(0))
    assert torch.equal(ours.frequencies(torch.device("cpu")), frequencies)
    assert ours.magnitude == magnitude
    assert HF.config.args_from_config(HF.config_to_hf(args)) == args


def test_texts_beyond_the_short_factors_are_refused(tmp_path):
    write_folder(tmp_path, {}, GATED["phi4 long"], HF)
    job = ("--model.name=phi4", "--model.flavor=from_hf", f"--model.hf_folder={tmp_path}", "--training.seq_len=65")
    assert "at most the 64 tokens up to which the model has its short factors" in " ".join(lines(*job))
    assert "short factors" not in " ".join(lines(*job[:3], "--training.seq_len=64"))
    assert "--training.seq_len=64" in generate._hf_arguments(tmp_path, tmp_path, "phi3", [])


@pytest.mark.parametrize("table", ["{attention_factor = 1.5}", "false"])
def test_a_job_may_override_the_factors_of_its_folder(table, tmp_path):
    """As other rotary scalings: no tensor's shape depends on them."""
    args = GATED["phi4 long"]
    HF.save_hf(tmp_path, build(HF.build, args).state_dict(), args)
    job = ["--model.name=phi4", "--model.flavor=from_hf", f"--model.hf_folder={tmp_path}", "--training.seq_len=64"]
    job += ["--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path}", "--checkpoint.initial_load_in_hf"]
    assert not [line for line in lines(*job, f"--model.overrides={{longrope = {table}}}") if "longrope" in line]
    assert "norm_eps is" in " ".join(lines(*job, "--model.overrides={norm_eps = 1e-3}"))
