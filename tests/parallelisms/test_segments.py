"""Tests of segment programs, recompute policies, node lists, one microbatch, and split backward, on one process."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import toy_moe
from tests.support.no_exchange import NoExchange
from tests.support.segment_policies import POLICIES, SAVED
from torchtitan.parallelisms.pipeline.overlap.chunk import Chunk, NodeLoop
from torchtitan.parallelisms.pipeline.overlap.segments import (
    COMPUTE,
    ISSUE,
    CountExchange,
    NodeLists,
    Program,
    RecomputePolicy,
    RowExchange,
    Segment,
    in_order,
    interleave,
    split_after_issues,
)


def first_tensor(meta, *tensors):
    return tensors[0]


def moe_program(name="b"):
    return Program(
        name,
        (
            Segment("attention", first_tensor, ("x",), ("h",)),
            Segment("route", first_tensor, ("h",), ("xs", "w"), light=True),
            CountExchange(),
            RowExchange("dispatch", "xs", "y"),
            Segment("experts", first_tensor, ("y",), ("z",)),
            RowExchange("combine", "z", "zc", back=True),
            Segment("rest", first_tensor, ("h", "w", "zc"), ("out",), light=True),
        ),
    )


def node_texts(nodes):
    return [str(node) for node in nodes]


# Programs and policies


@pytest.mark.parametrize(
    "steps, message",
    [
        ((Segment("a", first_tensor, ("y",), ("out",)),), "needs 'y'"),
        ((Segment("a", first_tensor, ("x",), ("x",)),), "a second time"),
        ((Segment("a", first_tensor, ("x",), ("y",)),), "no step makes the output 'out'"),
        ((RowExchange("a", "x", "out"), Segment("b", first_tensor, ("x",), ("out",))), "a second time"),
    ],
)
def test_a_program_with_a_wrong_name_is_refused(steps, message):
    with pytest.raises(ValueError, match=message):
        Program("block", steps)


@pytest.mark.parametrize(
    "arguments, message", [({"mode": "half"}, "choose one of"), ({"mode": "selective"}, "operators to save")]
)
def test_an_impossible_policy_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RecomputePolicy(**arguments)


# Lists of nodes


def test_forward_waits_as_late_as_possible():
    assert node_texts(NodeLists([moe_program()], RecomputePolicy()).forward) == [
        "compute F b.attention",
        "compute F b.route",
        "post F b.counts",
        "wait F b.counts",
        "issue F b.dispatch",
        "wait F b.dispatch",
        "compute F b.experts",
        "issue F b.combine",
        "wait F b.combine",
        "compute F b.rest",
        "done F output",
    ]


def test_backward_recomputes_experts_during_the_all_to_all_of_their_gradient():
    nodes = node_texts(NodeLists([moe_program()], RecomputePolicy("full_keep_comm")).backward)
    assert nodes == [
        "compute R b.attention",
        "compute R b.route",
        "compute R b.rest",
        "compute B b.rest",
        "issue B b.combine",
        "compute R b.experts",
        "wait B b.combine",
        "compute I b.experts",  # an all-to-all waits for it, so the weights come later
        "issue B b.dispatch",
        "wait B b.dispatch",
        "compute B b.route",
        "compute I b.attention",  # the rank before waits for it
        "done I input gradient",
    ]


@pytest.mark.parametrize("policy, exchanges", [("none", 0), ("full_keep_comm", 0), ("full", 2)])
def test_segments_are_recomputed_once_with_the_exchanges_of_the_policy(policy, exchanges):
    lists = NodeLists([moe_program("a"), moe_program("b")], POLICIES[policy])
    for nodes in (lists.backward, lists.input_grads):
        recomputed = [node for node in nodes if node.phase == "R"]
        computed = [node.name for node in recomputed if node.kind == COMPUTE]
        assert len(computed) == len(set(computed)) == (0 if policy == "none" else 8)
        assert sum(node.kind == ISSUE for node in recomputed) == 2 * exchanges
        assert not any(node.name.endswith("counts") for node in nodes)  # sizes are never exchanged again


def test_split_backward_leaves_all_weights_of_heavy_segments():
    lists = NodeLists([moe_program("a"), moe_program("b")], RecomputePolicy())
    halves = [node.name for node in lists.input_grads if node.phase == "I" and node.kind == COMPUTE]
    assert halves == ["b.experts", "b.attention", "a.experts", "a.attention"]


def test_every_second_block_is_recomputed():
    lists = NodeLists([moe_program("a"), moe_program("b"), moe_program("c")], RecomputePolicy("selective", every=2))
    assert {node.name[0] for node in lists.backward if node.phase == "R"} == {"a", "c"}


# The order of a pair


def test_a_pair_starts_with_the_backward_and_alternates():
    lists = NodeLists([moe_program()], RecomputePolicy())
    order = [(turn.chunk, str(turn.node)) for turn in interleave(lists.forward, lists.backward)]
    issues = [(of, text) for of, text in order if text.startswith("issue")]
    assert issues == [
        (1, "issue B b.combine"),
        (0, "issue F b.dispatch"),
        (1, "issue B b.dispatch"),
        (0, "issue F b.combine"),
    ]
    for i, (of, text) in enumerate(order):  # during every all-to-all the other direction computes
        if text.startswith("issue"):
            wait = order.index((of, text.replace("issue", "wait")))
            assert any(o != of and t.startswith("compute") for o, t in order[i:wait])


def test_a_pair_sends_first_what_is_needed_sooner():
    """The recomputed combine is needed later than the backward's, with little computation in between."""
    lists = NodeLists([moe_program()], RecomputePolicy("full"))
    order = [(turn.chunk, str(turn.node)) for turn in interleave(lists.forward, lists.backward)]
    at = order.index((1, "issue B b.combine"))
    assert order[at + 1 : at + 3] == [(0, "issue F b.combine"), (1, "wait B b.combine")]


@pytest.mark.parametrize("forward, backward", [(1, 3), (3, 1), (0, 2), (2, 0), (0, 0)])
def test_pair_of_unequal_stages_keeps_both_orders(forward, backward):
    dense = Program("d", (Segment("all", first_tensor, ("x",), ("out",)),))
    forward_nodes = NodeLists([moe_program(str(i)) for i in range(forward)] or [dense], RecomputePolicy()).forward
    backward_nodes = NodeLists(
        [moe_program(str(i)) for i in range(backward)] or [dense], RecomputePolicy("full")
    ).backward
    order = interleave(forward_nodes, backward_nodes)
    assert [turn.node for turn in order if turn.chunk == 0] == forward_nodes
    assert [turn.node for turn in order if turn.chunk == 1] == backward_nodes
    assert sum(len(slot) for slot in split_after_issues(backward_nodes)) == len(backward_nodes)


class RecordingChunk:
    """A fake chunk that records the nodes that a loop runs."""

    place = "nowhere"

    def __init__(self):
        self.nodes = []

    def run(self, node):
        self.nodes.append(str(node))

    def has_weights(self, node):
        return True


def test_weights_fill_a_gap_and_carried_ones_the_next_microbatch():
    lists = NodeLists([moe_program()], RecomputePolicy())
    loop, chunk = NodeLoop(max_deferred=1), RecordingChunk()
    loop.run(in_order(lists.backward), lambda: chunk)
    gap = chunk.nodes.index("wait B b.dispatch")
    assert chunk.nodes[gap - 2 : gap] == ["issue B b.dispatch", "compute W b.experts"]
    loop.run_overdue(chunk)
    assert len(loop.deferred) == 1  # the attention's
    following = RecordingChunk()
    loop.run(in_order(lists.forward), lambda: following)
    assert chunk.nodes[-1] == "compute W b.attention" and not loop.deferred


def test_without_overlap_nothing_is_in_flight():
    lists = NodeLists([moe_program()], RecomputePolicy("full"))
    loop, chunk = NodeLoop(overlap=False), RecordingChunk()
    loop.run(in_order(lists.backward), lambda: chunk)
    for i, text in enumerate(chunk.nodes):
        if text.startswith("issue"):
            assert chunk.nodes[i + 1] == text.replace("issue", "wait")
    assert not any(text.startswith("compute W") for text in chunk.nodes)
    loop.run_overdue(chunk)
    assert chunk.nodes[-2:] == ["compute W b.experts", "compute W b.attention"]


# One microbatch


def chunk_gradients(policy, split, dropout=0.3, dtype=torch.float64, overlap=True, context=None):
    """Run one microbatch by segments; return loss, balancing losses, gradients, and a random number."""
    torch.manual_seed(3)
    part = toy_moe.Part(dropout=dropout).to(dtype)
    toy_moe.fill_(part)
    lists = NodeLists(part.segment_programs(), policy)
    tokens, labels = toy_moe.batch(1, rank=0)
    toy_moe.runs.clear()
    chunk = Chunk(lists, NoExchange(), tokens, labels, forward_context=context)
    loop = NodeLoop(overlap)
    loop.run(in_order(lists.forward), lambda: chunk)
    torch.rand(5)  # recomputation must not see it
    output = chunk.output
    output.backward()
    chunk.start_backward(None)
    loop.run(in_order(lists.input_grads if split else lists.backward), lambda: chunk)
    loop.run_deferred(lambda _: True)
    after = torch.rand(1).item()
    return output.item(), sum(map(float, chunk.losses)), {n: p.grad for n, p in part.named_parameters()}, after


def plain_gradients(dropout=0.3, dtype=torch.float64):
    """Return the same as `chunk_gradients`, by plain autograd."""
    torch.manual_seed(3)
    part = toy_moe.Part(dropout=dropout).to(dtype)
    toy_moe.fill_(part)
    tokens, labels = toy_moe.batch(1, rank=0)
    loss, balancing_loss = toy_moe.plain_forward(part, tokens, labels)
    torch.rand(5)
    (loss + balancing_loss).backward()
    return loss.item(), balancing_loss.item(), {n: p.grad for n, p in part.named_parameters()}, torch.rand(1).item()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_equal_plain_autograd_with_dropout(policy, split):
    """Sums in another order differ by 1e-12 in float64. The generator's state afterwards is as without recompute."""
    loss, balancing_loss, grads, after = plain_gradients()
    got = chunk_gradients(POLICIES[policy], split)
    assert abs(got[0] - loss) < 1e-12 and abs(got[1] - balancing_loss) < 1e-12 and got[3] == after
    for name, grad in grads.items():
        torch.testing.assert_close(got[2][name], grad, rtol=1e-12, atol=1e-12, msg=name)
    recomputed_share = {"none": 0, "selective 2": 0.5}.get(policy, 1)
    for (layer, segment), count in toy_moe.runs.items():
        expected = 1 + (recomputed_share if recomputed_share != 0.5 else layer % 2 == 0) * (segment != "choose")
        assert count == expected, (layer, segment)


def test_random_state_is_restored_only_if_preserved():
    expected = plain_gradients()[2]
    got = chunk_gradients(RecomputePolicy("full", preserve_rng_state=False), split=False)[2]
    assert any(not torch.allclose(got[name], grad) for name, grad in expected.items())


class ProductCounter(TorchDispatchMode):
    """Count the matrix products that are computed; products returned from saved values do not reach this mode."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op in SAVED
        return op(*args, **(kwargs or {}))


def test_selective_recompute_skips_saved_operators():
    products_of = {}
    for policy in ("none", "selective", "full_keep_comm"):
        with ProductCounter() as products:
            chunk_gradients(POLICIES[policy], split=False)
        products_of[policy] = products.count
    assert products_of["none"] == products_of["selective"] < products_of["full_keep_comm"]


def test_recomputation_uses_the_same_autocast():
    results = []
    for policy in ("none", "full"):
        context = torch.autocast("cpu", torch.bfloat16)
        results.append(chunk_gradients(POLICIES[policy], False, dtype=torch.float32, context=context)[2])
    for name, grad in results[0].items():
        assert grad is not None and torch.equal(grad, results[1][name]), name


def test_notes_refuse_tensors_with_a_graph():
    part = toy_moe.Part([0])
    lists = NodeLists(part.segment_programs(), RecomputePolicy())
    notes = Chunk(lists, NoExchange(), torch.zeros(1, 2, dtype=torch.long)).blocks[0].notes
    with pytest.raises(AssertionError, match="without its graph"):
        notes.once("scores", lambda: torch.ones(1, requires_grad=True))


def test_without_gradients_no_values_are_retained():
    part = toy_moe.Part().double()
    toy_moe.fill_(part)
    lists = NodeLists(part.segment_programs(), RecomputePolicy("full"))
    tokens, labels = toy_moe.batch(1, rank=0)
    with torch.no_grad():
        chunk = Chunk(lists, NoExchange(), tokens, labels)
        NodeLoop().run(in_order(lists.forward), lambda: chunk)
    assert torch.allclose(chunk.output, toy_moe.plain_forward(part, tokens, labels)[0])
    assert not any(block.graphs or block.rng_states or block.values for block in chunk.blocks)


def test_a_wrong_number_of_outputs_is_reported():
    program = Program("b", (Segment("two", lambda meta, x: (x, x), ("x",), ("out",)),))
    chunk = Chunk(
        NodeLists([program], RecomputePolicy()), NoExchange(), torch.zeros(1), location="stage 1, microbatch 2"
    )
    with pytest.raises(AssertionError, match="two gave 2 tensors for out") as caught:
        NodeLoop().run(in_order(chunk.lists.forward), lambda: chunk)
    assert "in segment b.two (compute, forward) of stage 1, microbatch 2" in caught.value.__notes__


# Split backward
