"""Backward of one graph in two halves: gradients of its inputs now, those of its weights later.

The first half walks only nodes between outputs and inputs. Where the paths of the weights leave them (at a matrix
product, say) it notes the gradient that arrived; the second half starts there, so nothing is computed twice. Only
public names of torch's autograd are used. Weights need not be named: they are the leaves of the graph that are no
inputs.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = tuple[torch.Tensor | None, ...]


class WeightGradients:
    """The weight gradients that are left of a backward. It holds the graph's saved tensors until it is run, once.
    `free`: outputs that depend on weights alone, with gradients of their shapes.
    """

    def __init__(self, free: list[tuple[GradientEdge, torch.Tensor]], groups: list["Group"]):
        self._free = free
        # Groups of several starts first: their paths may lead through the start of another group, which, run by itself,
        # frees what it saved.
        self._groups = sorted(groups, key=lambda group: -len(group.arrived))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def run(self) -> None:
        """Add the gradients to the weights' `grad`."""
        free, groups = self._free, self._groups
        self._free, self._groups = [], []
        if free and groups:
            weights = [weight for group in groups for weight in group.weights]
            torch.autograd.backward(*map(list, zip(*free, strict=True)), inputs=weights, retain_graph=True)
        for group in groups:
            group.run()


@dataclass
class Group:
    """Weights that have a start in common, and the gradients that arrived at their starts."""

    weights: list[torch.Tensor]
    starts: set[Node]
    arrived: dict[Node, Grads] = field(default_factory=dict)

    def run(self) -> None:
        edges = [(GradientEdge(node, i), g) for node, grads in self.arrived.items() for i, g in enumerate(grads)]
        edges = [(edge, grad) for edge, grad in edges if grad is not None]
        several = len(self.arrived) > 1
        hooks = []
        if several:  # a path from one start may lead through another, which has its whole gradient already
            hooks = [node.register_prehook(lambda _, grads=grads: grads) for node, grads in self.arrived.items()]
        try:
            if edges:
                starts, grads = map(list, zip(*edges, strict=True))
                torch.autograd.backward(starts, grads, inputs=self.weights, retain_graph=several)
        finally:
            for hook in hooks:
                hook.remove()


def backward_inputs(
    outputs: Sequence[GradientEdge], grads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> WeightGradients:
    """Add the gradients of the leaves `inputs` to their `grad`; what is returned does the same for the weights.

    outputs: of one graph (get_gradient_edge of a tensor, which need not live any more); grads: theirs, of the
    outputs' shapes.
    """
    inputs = [tensor for tensor in inputs if tensor.requires_grad]
    leaf_nodes = {get_gradient_edge(tensor).node for tensor in inputs}
    roots = [output.node for output in outputs]
    users, weights = _walk(roots, leaf_nodes)
    between, _ = _ancestors(leaf_nodes, users, set())  # every node above an input
    groups: list[Group] = []
    for leaf, weight in weights.items():
        group = Group([weight], _ancestors({leaf}, users, between)[1])
        meets = [other for other in groups if not group.starts.isdisjoint(other.starts)]
        groups = [other for other in groups if group.starts.isdisjoint(other.starts)]
        for other in meets:
            group = Group(other.weights + group.weights, other.starts | group.starts)
        groups.append(group)
    hooks = []
    for group in groups:
        for node in group.starts:
            hooks.append(node.register_prehook(partial(group.arrived.__setitem__, node)))
    bound, free = [], []  # outputs that depend on an input, and those on weights alone
    for root, output, grad in zip(roots, outputs, grads, strict=True):
        (bound if root in between else free).append((output, grad))
    try:
        if bound:
            torch.autograd.backward(*map(list, zip(*bound, strict=True)), inputs=inputs, retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
    return WeightGradients(free, groups)


def _walk(roots: list[Node], leaf_nodes: set[Node]) -> tuple[dict[Node, list[Node]], dict[Node, torch.Tensor]]:
    """The graph below `roots`: of every node those that use it, and the weights by their leaf nodes."""
    users: dict[Node, list[Node]] = defaultdict(list)
    weights: dict[Node, torch.Tensor] = {}
    visited, waiting = set(roots), list(dict.fromkeys(roots))
    while waiting:
        node = waiting.pop()
        if node not in leaf_nodes and (variable := getattr(node, "variable", None)) is not None:
            weights[node] = variable
        for below, _ in node.next_functions:
            if below is not None:
                users[below].append(node)
                if below not in visited:
                    visited.add(below)
                    waiting.append(below)
    return users, weights


def _ancestors(nodes: set[Node], users: dict[Node, list[Node]], stop: set[Node]) -> tuple[set[Node], set[Node]]:
    """(all nodes from which one of `nodes` is reached, and these; those of `stop` at which the way up ended)."""
    reached, ends, waiting = set(), set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node in stop:
            ends.add(node)
        elif node not in reached:
            reached.add(node)
            waiting.extend(users.get(node, ()))
    return reached, ends
