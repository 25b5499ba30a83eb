"""Adapters of queries, keys and values of GPT-2 and Falcon, which Hugging Face stores as one joint matrix.

Logits equal peft's, and folders convert in both directions.
"""

from dataclasses import replace

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.support.adapted import perturb_parameters
from tests.support.hf_parity import build, tokens_for, twin
from tests.support.low_rank_adapters import adapter_tensors
from tests.support.tiny_decoders import GATED
from tests.support.tiny_decoders import GPT2 as TINY
from torchtitan.adapters import peft_folder
from torchtitan.adapters.low_rank import DoRA, LoRA
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import initialize
from torchtitan.models.gpt2.model import HF, SPEC
from torchtitan.models.spec import MODELS

ARGS, FORM = TINY["words"], HF.tensor_map(TINY["words"])
OPTIONS = Options(kind="lora", rank=4, alpha=8.0)


def adapted_models(options, kind=LoRA, spec=SPEC, args=ARGS, theirs=(GPT2LMHeadModel, GPT2Config)):
    """Return a model with a changed adapter, its transformers twin, both in float64, and the adapter."""
    model = build(spec.build, args, dtype=torch.float64)
    hf_model = twin(*theirs, model, spec.hf, torch.float64)
    adapter = kind(options)
    adapter.install(model, spec.plan)
    initialize(model, 0, model.init_rule, names=adapter.added_parameters)
    perturb_parameters(model.named_parameters())
    return model, hf_model, adapter


def shapes_of(state):
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("target", [["*attention*", "*feed_forward*"], ["*wq", "*wv"], ["*wk"]], ids=str)
def test_logits_are_those_of_peft(target, rslora, tmp_path):
    from peft import PeftModel

    options = replace(OPTIONS, target=target, rslora=rslora)
    model, hf_model, adapter = adapted_models(options)
    plain = hf_model(tokens_for(ARGS)).logits
    state = adapter_tensors(model, adapter)
    peft_folder.save(tmp_path, state, options, FORM)
    expected = PeftModel.from_pretrained(hf_model, tmp_path).double().eval()(tokens_for(ARGS)).logits
    assert not torch.allclose(plain, expected, atol=1e-4)
    torch.testing.assert_close(model(tokens_for(ARGS)), expected, rtol=1e-12, atol=1e-12)
    loaded = peft_folder.load(tmp_path, options, FORM, shapes_of(state))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_logits_are_those_of_peft_where_the_parts_of_a_joint_matrix_alternate(tmp_path):
    from peft import PeftModel

    args, spec = GATED["falcon one norm"], MODELS["falcon"]
    options, form = replace(OPTIONS, target=["*wq", "*wv", "*w1"]), spec.hf.tensor_map(args)
    model, hf_model, adapter = adapted_models(options, LoRA, spec, args, (FalconForCausalLM, FalconConfig))
    state = adapter_tensors(model, adapter)
    peft_folder.save(tmp_path, state, options, form)
    expected = PeftModel.from_pretrained(hf_model, tmp_path).double().eval()(tokens_for(args)).logits
    torch.testing.assert_close(model(tokens_for(args)), expected, rtol=1e-6, atol=1e-6)  # angles are in float32
    loaded = peft_folder.load(tmp_path, options, form, shapes_of(state))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_an_adapter_of_the_joint_matrix_is_split_into_three(tmp_path):
    from peft import LoraConfig, get_peft_model

    options = replace(OPTIONS, target=["*wq", "*wk", "*wv"])
    model, hf_model, adapter = adapted_models(options)
    config = LoraConfig(r=4, lora_alpha=8.0, target_modules=["c_attn"], fan_in_fan_out=True)
    hf_model = get_peft_model(hf_model, config)
    perturb_parameters(hf_model.named_parameters())
    hf_model.save_pretrained(tmp_path)
    state = peft_folder.load(tmp_path, options, FORM, shapes_of(adapter_tensors(model, adapter)))
    adapter.load_tensors([model], state)
    torch.testing.assert_close(
        model(tokens_for(ARGS)), hf_model.eval()(tokens_for(ARGS)).logits, rtol=1e-6, atol=1e-6
    )  # peft keeps A and B in float32


def test_a_joint_adapter_that_does_not_split_is_refused(tmp_path):
    """It has the rank of all three together, but its B mixes A of the keys into the queries."""
    options = replace(OPTIONS, target=["*wq", "*wk", "*wv"])
    model, _, adapter = adapted_models(options)
    state = adapter_tensors(model, adapter)
    peft_state = peft_folder.to_peft(state, FORM)
    name = next(name for name in peft_state if "lora_B" in name)
    peft_state[name][0, -1] = 1.0
    with pytest.raises(JobError, match=r"c_attn.lora_B.weight makes layers.0.attention.wq.lora_B of \(96, 12\)"):
        peft_folder.from_peft(peft_state, FORM, shapes_of(state))


def test_magnitudes_of_only_some_parts_are_refused():
    model, _, adapter = adapted_models(replace(OPTIONS, kind="dora", target=["*wq"]), DoRA)
    with pytest.raises(JobError, match="attention.wq: in peft's layout .* have a DoRA together or none"):
        peft_folder.to_peft(adapter_tensors(model, adapter), FORM)
