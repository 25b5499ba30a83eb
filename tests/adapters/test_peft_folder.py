"""Folders in the layout of peft that fit a job only in part. test_low_rank.py compares adapters with those of peft."""

import json

import pytest
import torch

from tests.support import tiny_decoders
from tests.support.low_rank_adapters import adapter_tensors, moved_model
from torchtitan.adapters import peft_folder
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.models.spec import MODELS

PARTS = [
    ("phi3", "lora", "wq", "self_attn.qkv_proj"),
    ("phi3", "lora", "w3", "mlp.gate_up_proj"),
    ("gpt_neox", "lora", "wk", "attention.query_key_value"),  # rows in groups
    ("phi3", "dora", "wq", "self_attn.qkv_proj"),
]


@pytest.mark.parametrize("family, kind, part, joint", PARTS)
def test_a_pair_of_a_joint_matrix_is_not_read_in_part(family, kind, part, joint):
    """peft's pair has one A for all outputs, so that of one part looks like a pair of the job's."""
    args, options = tiny_decoders.GATED[family], Options(kind="lora", rank=3, target=[f"*{part}"])
    model, adapter = moved_model(family, args, options)
    form, state = MODELS[family].hf.tensor_map(args), adapter_tensors(model, adapter)
    pair, shapes = peft_folder.to_peft(state, form), {name: tuple(tensor.shape) for name, tensor in state.items()}
    if kind == "lora":
        read = peft_folder.from_peft(pair, form, shapes)
        assert all(torch.equal(read[name], tensor) for name, tensor in state.items())
        pair = {name: tensor + 1 if "lora_B" in name else tensor for name, tensor in pair.items()}
    else:
        lengths = {name.removesuffix("B.weight"): len(tensor) for name, tensor in pair.items() if "lora_B" in name}
        pair |= {f"{name}magnitude_vector": torch.ones(length) for name, length in lengths.items()}
        ups = [name for name in shapes if name.endswith("lora_B")]
        shapes |= {name.replace("lora_B", "lora_magnitude"): shapes[name][:1] for name in ups}
    message = rf"layers.0.{joint}.lora_\w+(.weight)? reaches all of .*, the job only .*{part}"
    with pytest.raises(JobError, match=message):
        peft_folder.from_peft(pair, form, shapes)


def test_rank_and_alpha_of_a_joint_pair_belong_together(tmp_path):
    """Either without the other would scale the product three times as much, or a third."""
    args, options = tiny_decoders.GATED["phi3"], Options(kind="lora", rank=3, target=["*wq", "*wk", "*wv"])
    model, adapter = moved_model("phi3", args, options)
    state, form = adapter_tensors(model, adapter), MODELS["phi3"].hf.tensor_map(args)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    peft_folder.save(tmp_path, state, options, form)
    assert peft_folder.load(tmp_path, options, form, shapes).keys() == shapes.keys()
    config = json.loads((tmp_path / peft_folder.CONFIG).read_text())
    for key in ("rank_pattern", "alpha_pattern"):
        assert config[key]
        (tmp_path / peft_folder.CONFIG).write_text(json.dumps(config | {key: {}}))
        with pytest.raises(JobError, match="but the job's rank and alpha apply to all modules"):
            peft_folder.load(tmp_path, options, form, shapes)
