"""A block defines its computation once, as steps: its forward and a segmented pipeline run the same steps, and a block
with a separate forward is refused."""

import dataclasses
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.plans.combinations import EXPERT_LAYOUTS, Combination
from tests.support import table_rows
from tests.support.no_exchange import NoExchange
from tests.support.pool import run_ranks
from tests.support.segment_policies import POLICIES
from torchtitan.core.random_draws import Normal, initialize
from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.models.attention import AttentionKernel, GroupedQueryAttention, SharedInputs
from torchtitan.models.decoder import Block
from torchtitan.models.deepseek import DeepseekArgs
from torchtitan.models.deepseek.model import Deepseek
from torchtitan.models.dropout import Dropout, token_keys
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.moe import router as balance
from torchtitan.models.moe.layer import MoE, MoEBlock
from torchtitan.models.qwen3_moe import Qwen3MoEArgs
from torchtitan.models.spec import MODELS
from torchtitan.parallelisms import steps
from torchtitan.parallelisms.expert_parallel import apply_expert_parallel
from torchtitan.parallelisms.pipeline.overlap.chunk import Chunk, NodeLoop
from torchtitan.parallelisms.pipeline.overlap.exchange import AllToAll
from torchtitan.parallelisms.pipeline.overlap.segments import NodeLists, in_order
from torchtitan.parallelisms.pipeline.overlap.stage import build_programs
from torchtitan.parallelisms.sequence_layout import default_positions
from torchtitan.parallelisms.steps import Segment, Stepwise, require_steps

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
    "norms behind and dropout": ("qwen3_moe", QWEN),
    "llama3": ("llama3", LlamaArgs(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=32, multiple_of=16)),
}


def build_float64(name, mesh=None):
    family, args = MODELS_HERE[name]
    model = MODELS[family].build(args)
    if name == "norms behind and dropout":
        for layer, block in model.layers.items():
            norm = partial(nn.LayerNorm, args.dim)
            model.layers[layer] = MoEBlock(args, block.attention, norm, order="post", dropout=0.25)
    model = model.double()
    model.loss = SummedCrossEntropy()
    if mesh is not None:
        apply_expert_parallel(model, mesh, MODELS[family].plan)
    initialize(model, 0, model.init_rule)
    balance.set_aux_loss_scale(model, 0.05)
    return model


def batch(rank=0):
    generator = torch.Generator().manual_seed(rank)
    tokens, labels = (torch.randint(32, (2, 6), generator=generator) for _ in range(2))
    documents, keys = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2), token_keys(0, rank, torch.arange(2), 6)
    return {"tokens": tokens, "labels": labels, "document_ids": documents, "keys": keys}


@pytest.mark.parametrize("order", ["pre", "post"])
def test_a_moe_block_uses_norm_order_and_dropout_of_its_family(order):
    attention = GroupedQueryAttention(QWEN, AttentionKernel())
    block = MoEBlock(QWEN, attention, partial(nn.LayerNorm, 16), order, dropout=0.25).double()
    initialize(block, 0, lambda name: Normal(0.3))
    x, keys = torch.randn(2, 6, 16, dtype=torch.float64), token_keys(0, 0, torch.arange(2), 6)
    shared = SharedInputs(torch.arange(6)[None], None, None, None, keys)
    first, then = (lambda y, place=place: Dropout(0.25, place)(y, keys) for place in (0, 1))
    if order == "pre":
        h = x + first(attention(block.attention_norm(x), shared))
        expected = h + then(block.moe(block.ffn_norm(h)))
    else:
        h = block.attention_norm(x + first(attention(x, shared)))
        expected = block.ffn_norm(h + then(block.moe(h)))
    assert torch.equal(block(x, shared), expected)


def loss_and_gradients(model, loss):
    grads = {name: p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for name, p in model.named_parameters()}
    load = [router.load.tolist() for router in balance.routers(model).values()]
    return loss.item(), grads, load


def by_forward(model, inputs):
    """Return loss and gradients of the model's own forward."""
    loss = model(**inputs)
    (0.05 * loss).backward()
    return loss_and_gradients(model, loss)


def by_segments(model, inputs, policy, transport, split):
    """Return loss and gradients of the model's steps, run as segments by the pipeline's loop."""
    lists = NodeLists(build_programs(model), policy)
    inputs = dict(inputs)
    tokens = inputs.pop("tokens")
    chunk, loop = Chunk(lists, transport, tokens, model.context(tokens, **inputs)), NodeLoop()
    loop.run(in_order(lists.forward), lambda: chunk)
    loss = chunk.output
    (0.05 * loss).backward()
    chunk.start_backward(None)
    loop.run(in_order(lists.input_grads if split else lists.backward), lambda: chunk)
    loop.run_deferred(lambda _: True)
    return loss_and_gradients(model, loss)


def largest_difference(one, other):
    """Return the largest difference of loss and gradients; in float64 only the order of gradient sums differs."""
    assert one[2] == other[2]
    errors = [abs(one[0] - other[0])]
    for name, grad in one[1].items():
        other_grad = other[1][name]
        assert (grad is None) == (other_grad is None), name
        errors += [] if grad is None else [(grad - other_grad).abs().max().item()]
    return max(errors)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS_HERE)
def test_segments_compute_the_same_as_the_model(name, policy, split):
    expected = by_forward(build_float64(name), batch())
    assert (
        largest_difference(expected, by_segments(build_float64(name), batch(), POLICIES[policy], NoExchange(), split))
        < 1e-12
    )


def test_a_middle_stage_returns_hidden_states():
    model = build_float64("qwen3_moe")
    model.tok_embeddings = model.norm = model.output = None
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    lists = NodeLists(build_programs(model), POLICIES["none"])
    positions = default_positions(x)
    chunk = Chunk(lists, NoExchange(), x, model.context(x[:, :3], positions))
    NodeLoop().run(in_order(lists.forward), lambda: chunk)
    assert torch.allclose(chunk.output, model(x, positions))


def difference_under_expert_parallel(name, policy):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    transport = AllToAll(mesh.get_group())
    expected = by_forward(build_float64(name, mesh), batch(dist.get_rank()))
    by_parts = by_segments(build_float64(name, mesh), batch(dist.get_rank()), POLICIES[policy], transport, True)
    return largest_difference(expected, by_parts)


@pytest.mark.parametrize("policy", ["none", "full_keep_comm", "full"])
@pytest.mark.parametrize("name", ["deepseek", "qwen3_moe"])
def test_segments_compute_the_same_under_expert_parallel(name, policy):
    assert max(run_ranks(2, difference_under_expert_parallel, name, policy)) < 1e-12


# Custom models

OVERLAPPED = Combination(
    **EXPERT_LAYOUTS["PP 2 x FSDP 2"], model="deepseek", precision="float64", schedule="DualPipeV", overlap=True
)


def halve_branch(step):
    """Wrap a step of a residual branch to add only half of its output."""
    return lambda self, notes, x: x + 0.5 * (step(self, notes, x) - x)


@contextmanager
def halved_residuals():
    """Halve the residuals of attention, feed-forward and experts, each in the one place that defines it."""
    combine = MoE.combine
    with (
        patch.object(Block, "attention_residual", halve_branch(Block.attention_residual)),
        patch.object(Block, "feed_forward_step", halve_branch(Block.feed_forward_step)),
        patch.object(MoEBlock, "attention_residual", halve_branch(MoEBlock.attention_residual)),
        patch.object(MoE, "combine", lambda *inputs: 0.5 * combine(*inputs)),
    ):
        yield


def run_halved(row):
    with halved_residuals():
        return table_rows.run_row(row)


def test_overlap_runs_changed_residuals():
    """With changed residuals, loss and gradients still equal one device."""
    plain = table_rows.plain_twin(OVERLAPPED)
    usual = table_rows.reference(plain)[0]
    with halved_residuals():
        loss, _, grads, _, _ = table_rows.reference.__wrapped__(plain)
    assert abs(loss - usual) > 1e-4  # far above the tolerance
    for got_loss, _, got_grads, _, _ in run_ranks(4, run_halved, OVERLAPPED):
        assert got_loss == pytest.approx(loss, rel=1e-10)
        for name, grad in got_grads.items():
            assert (torch.from_numpy(grad) - grads[name]).abs().max() <= 1e-10 * grads[name].abs().max(), name


class OwnForward(MoEBlock):
    """A block with a changed forward, which disagrees with its steps."""

    def forward(self, x, shared):
        return 0.5 * super().forward(x, shared)


class OwnModel(Deepseek):
    """A model with its own forward."""

    def forward(self, tokens, **batch):
        return super().forward(tokens, **batch)


class OwnSteps(MoEBlock):
    """A block with changed steps, which its forward runs too."""

    def steps(self):
        *segments, last = super().steps()
        return (*segments, last._replace(outputs=("y",)), Segment("half", lambda _, y: y / 2, ("y",), ("out",)))


def changed_model(change):
    model = build_float64("deepseek")
    change(model)
    return model


def replace_forward(model):
    model.layers["1"].forward = lambda x, shared: x


REFUSED = {
    "its class": (lambda m: setattr(m.layers["1"], "__class__", OwnForward), r"layers\.1 \(OwnForward\).*forward"),
    "itself": (replace_forward, r"layers\.1 \(MoEBlock\) has a forward"),
    "hooks": (lambda m: m.layers["2"].register_forward_hook(lambda *_: None), r"layers\.2 \(MoEBlock\) has hooks"),
    "another block": (lambda m: m.layers.update({"0": torch.nn.Identity()}), r"layers\.0 \(Identity\) has a forward"),
    "the model": (lambda m: setattr(m, "__class__", OwnModel), r"the model \(OwnModel\) has a forward"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_forward_that_bypasses_the_steps_is_refused_by_name(case):
    change, message = REFUSED[case]
    plan = MODELS["deepseek"].plan
    require_steps(build_float64("deepseek"), plan)
    with pytest.raises(ValueError, match=message) as caught:
        require_steps(changed_model(change), plan)
    assert "turn the overlap off" in str(caught.value)


def test_custom_steps_run_in_forward_and_segments():
    def change(model):
        model.layers["1"].__class__ = OwnSteps

    require_steps(changed_model(change), MODELS["deepseek"].plan)
    expected = by_forward(changed_model(change), batch())
    assert abs(expected[0] - by_forward(build_float64("deepseek"), batch())[0]) > 1e-6
    assert (
        largest_difference(expected, by_segments(changed_model(change), batch(), POLICIES["full"], NoExchange(), True))
        < 1e-12
    )


def assembled_with_own_forward():
    """Assemble an overlapped pipeline of a model with a changed forward; return the error."""
    build = table_rows.build_adapted

    def with_own_forward(row):
        model, *rest_of_build = build(row)
        model.layers["1"].__class__ = OwnForward
        return model, *rest_of_build

    with patch.object(table_rows, "build_adapted", with_own_forward):
        try:
            table_rows.assembled(OVERLAPPED)
        except ValueError as error:
            return str(error)
    return "no error"


def test_overlap_checks_for_custom_forwards():
    for message in run_ranks(4, assembled_with_own_forward):
        assert message.startswith("layers.1 (OwnForward) has a forward that is not Stepwise's")


def test_a_module_without_steps_is_named():
    with pytest.raises(NotImplementedError):
        Stepwise()(torch.zeros(1))


def test_a_compiled_block_is_compiled_once():
    """Also in a process that has run no step yet."""
    model = Llama(LlamaArgs(dim=16, n_layers=2, n_heads=2, vocab_size=32, multiple_of=32))
    initialize(model, 0, model.init_rule)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in model.layers.values():
        block.compile(backend=backend, fullgraph=True)
    with patch.object(steps, "_now", steps._Now()):
        for _ in range(2):
            model(torch.arange(32).view(2, 16)).sum().backward()
    assert len(graphs) == 1
