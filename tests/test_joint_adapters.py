"""Adapters beside queries, keys and values of a GPT-2, which are one matrix in the form of Hugging Face: equal to the
library peft, folders in both directions.
"""

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.adapted import learn_something
from tests.support.hf_parity import build, tokens_for, twin
from tests.support.tiny_decoders import GPT2 as TINY
from tests.test_low_rank import fresh_tensors
from torchtitan.adapters import peft_folder
from torchtitan.adapters.lora import DoRA, LoRA
from torchtitan.config.sections.adapter import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.core.initialization import initialize
from torchtitan.models.gpt2.model import GPT2, HF
from torchtitan.models.learned_positions.model import PLAN

ARGS, FORM = TINY["words"], HF.form(TINY["words"])
OPTIONS = Options(kind="lora", rank=4, alpha=8.0)


def adapted(options, kind=LoRA):
    """A model, its twin, both in float64, and the adapter that the first has learned."""
    model = build(GPT2, ARGS, dtype=torch.float64)
    theirs = twin(GPT2LMHeadModel, GPT2Config, model, HF, torch.float64)
    adapter = kind(options)
    adapter.install(model, PLAN)
    initialize(model, 0, model.init_rule, names=adapter.added_parameters)
    learn_something(model.named_parameters())
    return model, theirs, adapter


def shapes_of(state):
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("target", [["*attention*", "*feed_forward*"], ["*wq", "*wv"], ["*wk"]], ids=str)
def test_logits_are_those_of_peft(target, rslora, tmp_path):
    from peft import PeftModel

    options = replace(OPTIONS, target=target, rslora=rslora)
    model, theirs, adapter = adapted(options)
    plain = theirs(tokens_for(ARGS)).logits
    state = fresh_tensors(model, adapter)
    peft_folder.save(tmp_path, state, options, FORM)
    expected = PeftModel.from_pretrained(theirs, tmp_path).double().eval()(tokens_for(ARGS)).logits
    assert not torch.allclose(plain, expected, atol=1e-4)
    torch.testing.assert_close(model(tokens_for(ARGS)), expected, rtol=1e-12, atol=1e-12)
    again = peft_folder.load(tmp_path, options, FORM, shapes_of(state))
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_a_pair_beside_the_whole_is_read_as_three(tmp_path):
    from peft import LoraConfig, get_peft_model

    options = replace(OPTIONS, target=["*wq", "*wk", "*wv"])
    model, theirs, adapter = adapted(options)
    config = LoraConfig(r=4, lora_alpha=8.0, target_modules=["c_attn"], fan_in_fan_out=True)
    theirs = get_peft_model(theirs, config)
    learn_something(theirs.named_parameters())
    theirs.save_pretrained(tmp_path)
    state = peft_folder.load(tmp_path, options, FORM, shapes_of(fresh_tensors(model, adapter)))
    adapter.load_tensors([model], state)
    torch.testing.assert_close(
        model(tokens_for(ARGS)), theirs.eval()(tokens_for(ARGS)).logits, rtol=1e-6, atol=1e-6
    )  # peft keeps its matrices in float32


def test_a_pair_that_makes_no_blocks_is_refused(tmp_path):
    """Of the rank of all three, but queries are told by the A of keys too."""
    options = replace(OPTIONS, target=["*wq", "*wk", "*wv"])
    model, _, adapter = adapted(options)
    state = fresh_tensors(model, adapter)
    theirs = peft_folder.to_peft(state, FORM)
    name = next(name for name in theirs if "lora_B" in name)
    theirs[name][0, -1] = 1.0
    with pytest.raises(JobError, match=r"c_attn.lora_B.weight makes layers.0.attention.wq.lora_B of \(96, 12\)"):
        peft_folder.from_peft(theirs, FORM, shapes_of(state))


def test_magnitudes_of_some_have_no_form():
    model, _, adapter = adapted(replace(OPTIONS, kind="dora", target=["*wq"]), DoRA)
    with pytest.raises(JobError, match="attention.wq: in peft's layout .* have a DoRA together or none"):
        peft_folder.to_peft(fresh_tensors(model, adapter), FORM)
