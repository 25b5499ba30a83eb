"""Folders whose config.json was changed at random: read as transformers reads them, or refused, for every family."""

import json

import pytest
import transformers

from tests.support.family_folders import BY_MODEL_TYPE, SHAPES
from tests.support.folder_mutations import try_mutations, write_weights
from tests.support.wrapper_folders import text_config, write_flat_config, write_wrapper
from torchtitan.models.hf.wrappers import WRAPPERS
from torchtitan.models.spec import MODELS

DRAWN = [shape for shape, (args, _) in SHAPES.items() if args in BY_MODEL_TYPE.values()] + ["llama3.2"]
"""The first shape of every model_type, and a tied one."""
SEED = 20261128


@pytest.mark.parametrize("spelling", ["transformers 4", "transformers 5"])
@pytest.mark.parametrize("shape", DRAWN)
def test_mutated_configs(shape, spelling, tmp_path, is_full_run):
    transformers.logging.set_verbosity_error()
    args, _ = SHAPES[shape]
    write_weights(tmp_path / "weights", MODELS[shape.split()[0]].hf, args)
    config = json.loads((tmp_path / "weights" / "config.json").read_text())
    if spelling == "transformers 5":
        transformers.AutoConfig.for_model(**config).save_pretrained(tmp_path / "written")
        config = json.loads((tmp_path / "written" / "config.json").read_text())
    count = 30 if is_full_run else 20
    counts = try_mutations(tmp_path / "changed", tmp_path / "weights", config, count, SEED)
    assert not counts.faults, "\n".join(counts.faults)
    assert counts.drawn["equal"] and counts.drawn["refused"]


@pytest.mark.parametrize("kind", [*WRAPPERS, "qwen2_vl, flat"])
def test_mutated_wrappers(kind, tmp_path, is_full_run):
    transformers.logging.set_verbosity_error()
    kind, _, is_flat = kind.partition(", ")
    write_wrapper(tmp_path / "weights", kind, text_config(kind))
    if is_flat:
        write_flat_config(tmp_path / "weights", tmp_path / "flat")
    config = json.loads((tmp_path / ("flat" if is_flat else "weights") / "config.json").read_text())
    counts = try_mutations(tmp_path / "changed", tmp_path / "weights", config, 40 if is_full_run else 12, SEED)
    assert not counts.faults, "\n".join(counts.faults)
    assert counts.drawn["equal"] and counts.drawn["refused"]
