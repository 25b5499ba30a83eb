"""Gemma 2: its caps in the loss by chunks and under adapters; the rest is compared in test_gated.py."""

import dataclasses

import pytest
import torch

from tests.support.hf_parity import build, tokens_for
from tests.support.tiny_decoders import GATED
from torchtitan.adapters.low_rank import LoRA
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.models.gemma2.model import SPEC, Gemma2

TINY = GATED["gemma2"]


@pytest.mark.parametrize(
    "change",
    [{"score_cap": 0.4}, {"logit_cap": 0.6}, {"sliding_window": 6}, {"global_interval": 3}, {"query_scalar": 8}],
)
def test_every_size_changes_the_logits(change):
    tokens = tokens_for(TINY, 1, 40)
    logits, others = build(Gemma2, TINY)(tokens), build(Gemma2, dataclasses.replace(TINY, **change))(tokens)
    assert (logits - others).abs().max() > 1e-4 * logits.abs().max()


@pytest.mark.parametrize("adapted", [False, True])
def test_chunks_of_the_loss_have_capped_logits(adapted):
    """Also of a head with an adapter."""
    tokens, results = tokens_for(TINY, 2, 12), []
    for chunks in (0, 1, 5):
        model = build(Gemma2, TINY, dtype=torch.float64).train()
        if adapted:
            LoRA(Options(rank=2, target=["output", "*wq"])).install(model, SPEC.plan)
            generator = torch.Generator().manual_seed(3)
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    torch.nn.init.normal_(parameter, generator=generator)
            model = model.double()
        if chunks:
            model.loss = SummedCrossEntropy(chunks)
            loss = model(tokens, labels=tokens.flip(1))
        else:
            loss = torch.nn.functional.cross_entropy(
                model(tokens).flatten(0, 1), tokens.flip(1).flatten(), reduction="sum"
            )
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert not adapted or "output.lora_B" in gradients
        results.append((loss.detach(), gradients))
    assert model.output(torch.full((1, TINY.dim), 100.0, dtype=torch.float64)).abs().max() <= TINY.logit_cap
    for loss, gradients in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        torch.testing.assert_close(gradients, results[0][1])
