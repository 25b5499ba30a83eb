"""Folders whose config.json was changed at random: read as transformers reads them, or refused, for every family."""

import json

import pytest
import transformers

from tests.support.folder_mutations import try_mutations, write_weights
from tests.support.tiny_decoders import (
    DEEPSEEK,
    GATED,
    GEMMA3,
    GPT2,
    LLAMA,
    MISTRAL,
    OPT,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    ROBERTA,
)

SHAPES = {
    "llama": LLAMA["llama3.1"],
    "llama tied": LLAMA["llama3.2"],
    "mistral": MISTRAL["window"],
    "mixtral": GATED["mixtral"],
    "qwen2_moe": GATED["qwen2_moe"],
    "glm4_moe": GATED["glm4_moe"],
    "qwen2": QWEN2["plain"],
    "qwen3": QWEN3["tied"],
    "qwen3_moe": QWEN3_MOE["published"],
    "gemma3_text": GEMMA3["plain"],
    "deepseek_v2": DEEPSEEK["v2"],
    "deepseek_v3": DEEPSEEK["v3"],
    "gpt2": GPT2["words"],
    "opt": OPT["words"],
    "roberta": ROBERTA["words"],
}
SEED = 20261128


@pytest.mark.parametrize("spelling", ["transformers 4", "transformers 5"])
@pytest.mark.parametrize("shape", SHAPES)
def test_mutated_configs(shape, spelling, tmp_path, is_full_run):
    transformers.logging.set_verbosity_error()
    model_type = shape.split()[0]
    write_weights(tmp_path / "weights", model_type, SHAPES[shape])
    config = json.loads((tmp_path / "weights" / "config.json").read_text())
    if spelling == "transformers 5":
        transformers.AutoConfig.for_model(**config).save_pretrained(tmp_path / "written")
        config = json.loads((tmp_path / "written" / "config.json").read_text())
    count = 80 if is_full_run else 15
    counts = try_mutations(tmp_path / "changed", tmp_path / "weights", config, count, SEED)
    assert not counts.faults, "\n".join(counts.faults)
    assert counts.drawn["equal"] and counts.drawn["refused"]
