"""Generating with kept keys and values equals reading everything again, in every family, and reads each token once."""

import pytest
import torch

from tests.support.hf_parity import build, close
from tests.support.tiny_decoders import DEEPSEEK, GATED, GEMMA3, LLAMA, MISTRAL, QWEN3_MOE
from torchtitan.commands.generate import sample
from torchtitan.datasets.tokenizer.byte_level import ByteTokenizer
from torchtitan.models.deepseek.model import Deepseek
from torchtitan.models.falcon_h1.model import FalconH1
from torchtitan.models.gemma2.model import Gemma2
from torchtitan.models.gemma3.model import Gemma3
from torchtitan.models.gemma4.model import Gemma4
from torchtitan.models.granite4.model import Granite4
from torchtitan.models.kv_cache import CachedDecoder
from torchtitan.models.lfm2.model import Lfm2
from torchtitan.models.llama.model import Llama
from torchtitan.models.llama4.model import Llama4
from torchtitan.models.mistral.model import Mistral
from torchtitan.models.nemotron_h.model import NemotronH
from torchtitan.models.qwen3_moe.model import Qwen3MoE
from torchtitan.models.qwen3_next.model import Qwen3Next, Qwen35

MODELS = {
    "llama, grouped heads": (Llama, LLAMA["llama3.1"]),
    "llama, tied": (Llama, LLAMA["llama3.2"]),
    "deepseek, values narrower than keys": (Deepseek, DEEPSEEK["v2 lite"]),
    "deepseek, groups of experts": (Deepseek, DEEPSEEK["v3"]),
    "llama4, chunks in most layers": (Llama4, GATED["llama4"]),
    "mistral, a window": (Mistral, MISTRAL["window"]),
    "falcon_h1, a state beside attention": (FalconH1, GATED["falcon_h1"]),
    "gemma2, capped scores": (Gemma2, GATED["gemma2"]),
    "gemma3, windows in some layers": (Gemma3, GEMMA3["plain"]),
    "gemma4, heads of two widths": (Gemma4, GATED["gemma4"]),
    "gemma4, experts": (Gemma4, GATED["gemma4 experts"]),
    "granite4, a state in most layers": (Granite4, GATED["granite4"]),
    "lfm2, convolutions in most layers": (Lfm2, GATED["lfm2"]),
    "nemotron_h, layers without attention": (NemotronH, GATED["nemotron_h dense"]),
    "qwen3_next, a state in most layers": (Qwen3Next, GATED["qwen3_next"]),
    "qwen3_5, a state in most layers": (Qwen35, GATED["qwen3_5"]),
    "qwen3_moe": (Qwen3MoE, QWEN3_MOE["published"]),
}


class Watched:
    """Wraps a model and records the number of tokens of each call."""

    def __init__(self, model):
        self.model, self.read = model, []
        model.register_forward_pre_hook(lambda module, args: self.read.append(args[0].shape[1]))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_pieces_of_any_length_are_as_the_whole(name):
    family, args = MODELS[name]
    model, plain = build(family, args), build(family, args)
    watched, ids = (
        Watched(model),
        torch.randint(0, args.vocab_size, (1, 40), generator=torch.Generator().manual_seed(1)),
    )
    remembering = CachedDecoder(model)
    for end in (5, 6, 9, 10, 31, 40):
        logits = remembering(ids[:, :end])
        assert close(logits, plain(ids[:, :end])[:, -logits.shape[1] :], 2e-6)
    assert watched.read == [5, 1, 3, 1, 21, 9]


@torch.no_grad()
def test_of_a_window_no_more_is_kept_than_the_next_token_sees():
    model = build(*MODELS["mistral, a window"])
    remembering, ids = CachedDecoder(model), torch.arange(60)[None] % 64
    for end in range(10, 61):
        remembering(ids[:, :end])
    assert all(kernel.num_cached == 4 and kernel.cached_tensors[0].shape[2] <= 2 * 10 for kernel in remembering.kernels)


@torch.no_grad()
def test_of_a_chunk_no_more_is_kept_than_the_next_token_sees():
    remembering, ids = CachedDecoder(build(*MODELS["llama4, chunks in most layers"])), torch.arange(60)[None] % 64
    for end in range(10, 59):
        remembering(ids[:, :end])
    assert [kernel.num_cached for kernel in remembering.kernels] == [3, 3, 58, 3]


@torch.no_grad()
def test_layers_without_a_window_keep_all_tokens():
    remembering, ids = CachedDecoder(build(*MODELS["gemma3, windows in some layers"])), torch.arange(60)[None] % 64
    for end in range(10, 61):
        remembering(ids[:, :end])
    assert [kernel.num_cached for kernel in remembering.kernels] == [4, 60, 4]


@torch.no_grad()
def test_another_sequence_is_read_from_its_beginning():
    family, args = MODELS["llama, grouped heads"]
    model, plain = build(family, args), build(family, args)
    remembering = CachedDecoder(model)
    remembering(torch.tensor([[1, 2, 3, 4]]))
    for ids in ([[2, 3, 4, 5]], [[1, 2, 9, 4, 5]], [[1, 2]], [[1, 2]]):
        ids = torch.tensor(ids)
        assert close(remembering(ids), plain(ids), 2e-6)


class Small(ByteTokenizer):
    vocab_size, bos_id, eos_id = 64, 62, 99


@pytest.mark.parametrize("context", [64, 12])
def test_the_same_tokens_are_sampled(context):
    """This holds when the context is full too: then the full window is read again for each token."""
    family, args = MODELS["qwen3_moe"]
    model = build(family, args, dtype=torch.float64)
    options = dict(max_new_tokens=30, context=context, temperature=1.5, top_k=0, seed=3)
    expected = list(sample(model, [62, 5, 6], Small(), **options))
    watched = Watched(build(family, args, dtype=torch.float64))
    assert list(sample(CachedDecoder(watched.model), [62, 5, 6], Small(), **options)) == expected
    assert len(expected) > 15
    grown = min(len(expected) - 1, context - 3)
    assert watched.read[: grown + 1] == [3] + [1] * grown
    assert set(watched.read[grown + 1 :]) <= {context}
