"""A decoder run by its segments gives what its forward gives: loss, every gradient, the routers' counts."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.pool import run_ranks
from tests.test_segments import POLICIES
from torchtitan.initialization import initialize
from torchtitan.loss import SummedCrossEntropy
from torchtitan.models.deepseek import DeepseekArgs
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.moe import balance
from torchtitan.models.qwen3_moe import Qwen3MoEArgs
from torchtitan.models.registry import MODELS
from torchtitan.parallelisms.chunk import Chunk
from torchtitan.parallelisms.decoder_programs import decoder_context, decoder_programs
from torchtitan.parallelisms.exchange import AllToAll, NoExchange
from torchtitan.parallelisms.expert_parallel import apply_expert_parallel
from torchtitan.parallelisms.overlap import Loop, alone
from torchtitan.parallelisms.segments import NodeLists

DEEPSEEK = DeepseekArgs(
    dim=16,
    n_layers=3,
    n_dense_layers=1,
    n_heads=2,
    vocab_size=32,
    ffn_dim=32,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    expert_dim=8,
    n_experts=4,
    n_shared_experts=1,
    top_k=2,
    score="sigmoid",
    expert_bias=True,
    aux_loss_weight=0.1,
)
QWEN = Qwen3MoEArgs(
    dim=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, vocab_size=32, expert_dim=8, n_experts=4, top_k=2
)
MODELS_HERE = {
    "deepseek": ("deepseek", DEEPSEEK),
    "score before experts": ("deepseek", dataclasses.replace(DEEPSEEK, score_before_experts=True)),
    "qwen3_moe": ("qwen3_moe", QWEN),
    "llama3": ("llama3", LlamaArgs(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=32, multiple_of=16)),
}


def made(name, mesh=None):
    family, args = MODELS_HERE[name]
    model = MODELS[family].build(args).double()
    model.loss = SummedCrossEntropy()
    if mesh is not None:
        apply_expert_parallel(model, mesh, MODELS[family].plan)
    initialize(model, 0, model.init_rule)
    balance.set_aux_loss_scale(model, 0.05)
    return model


def batch(rank=0):
    generator = torch.Generator().manual_seed(rank)
    tokens, labels = (torch.randint(32, (2, 6), generator=generator) for _ in range(2))
    return {"tokens": tokens, "labels": labels, "document_ids": torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)}


def results(model, loss):
    grads = {name: p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for name, p in model.named_parameters()}
    load = [router.load.tolist() for router in balance.routers(model).values()]
    return loss.item(), grads, load


def by_forward(model, inputs):
    loss = model(**inputs)
    (0.05 * loss).backward()
    return results(model, loss)


def by_segments(model, inputs, policy, transport, split):
    lists = NodeLists(decoder_programs(model), policy)
    inputs = dict(inputs)
    tokens = inputs.pop("tokens")
    chunk, loop = Chunk(lists, transport, tokens, decoder_context(model, tokens, **inputs)), Loop()
    loop.run(alone(lists.forward), lambda: chunk)
    loss = chunk.output
    (0.05 * loss).backward()
    chunk.start_backward(None)
    loop.run(alone(lists.input_grads if split else lists.backward), lambda: chunk)
    loop.finish(lambda _: True)
    return results(model, loss)


def difference(one, other):
    """float64 and the same operations, but sums of gradients in another order."""
    assert one[2] == other[2]
    found = [abs(one[0] - other[0])]
    for name, grad in one[1].items():
        mine = other[1][name]
        assert (grad is None) == (mine is None), name
        found += [] if grad is None else [(grad - mine).abs().max().item()]
    return max(found)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS_HERE)
def test_segments_are_the_model(name, policy, split):
    expected = by_forward(made(name), batch())
    assert difference(expected, by_segments(made(name), batch(), POLICIES[policy], NoExchange(), split)) < 1e-12


def test_a_part_without_ends_hands_hidden_states_on():
    model = made("qwen3_moe")
    model.tok_embeddings = model.norm = model.output = None
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    lists = NodeLists(decoder_programs(model), POLICIES["none"])
    chunk = Chunk(lists, NoExchange(), x, decoder_context(model, x[:, :3], sequence_shards=2))
    Loop().run(alone(lists.forward), lambda: chunk)
    assert torch.allclose(chunk.output, model(x))


def split_over_two(name, policy):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    transport = AllToAll(mesh.get_group())
    expected = by_forward(made(name, mesh), batch(dist.get_rank()))
    found = by_segments(made(name, mesh), batch(dist.get_rank()), POLICIES[policy], transport, True)
    return difference(expected, found)


@pytest.mark.parametrize("policy", ["none", "full_keep_comm", "full"])
@pytest.mark.parametrize("name", ["deepseek", "qwen3_moe"])
def test_segments_are_the_model_under_expert_parallel(name, policy):
    assert max(run_ranks(2, split_over_two, name, policy)) < 1e-12
