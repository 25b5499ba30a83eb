"""FLOPs per token against published anchors and against torch's own counter."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.models import SIZES
from torchtitan.models.flops import causal_keys, document_keys, flops_per_token, with_keys
from torchtitan.models.llama.model import Llama
from torchtitan.models.registry import MODELS


def test_llama_31_8b_at_8192():
    args = SIZES["llama3.1"]["8B"]
    flops = MODELS["llama3.1"].flops_per_token(args, 8192)
    assert round(args.num_matmul_parameters / 1e9, 4) == 7.5047
    assert (round(flops.full / 1e9, 2), round(flops.causal / 1e9, 2)) == (57.91, 51.47)


def test_llama_32_1b_at_4096():
    flops = flops_per_token(SIZES["llama3.2"]["1B"], 4096)
    assert round(flops.causal / 1e9, 2) == 8.22


@pytest.mark.parametrize("family", ["llama3", "llama3.1", "llama3.2"])  # plain, grouped, grouped and tied heads
def test_equal_to_torchs_counter(family):
    args = dataclasses.replace(SIZES[family]["debugmodel"], n_layers=2, vocab_size=256)
    length = 64
    tokens = torch.zeros(2, length, dtype=torch.int64)
    model = Llama(args)
    # the fused kernels of a CPU are counted as nothing, and causality never is
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert counter.get_total_flops() / tokens.numel() == pytest.approx(flops_per_token(args, length).full, rel=1e-3)


def test_keys_per_query_by_counting():
    visible = torch.ones(10, 10).tril()
    assert causal_keys(10) == visible.sum().item() / 10
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 2])
    same = documents[:, None] == documents[None]
    assert document_keys([3, 6, 1]) == (visible * same).sum().item() / 10
    assert document_keys([10]) == causal_keys(10)


def test_documents_cost_less_than_one_sequence():
    args = SIZES["llama3"]["debugmodel"]
    assert with_keys(args, document_keys([1024] * 8)) < flops_per_token(args, 8192).causal
    assert with_keys(args, 0) == 6 * args.num_matmul_parameters
