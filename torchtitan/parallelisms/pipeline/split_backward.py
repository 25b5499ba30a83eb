"""Split the backward of one graph (zero bubble, arXiv:2401.10241): input gradients now, weight gradients later.

The first half visits only nodes between the outputs and the inputs. At nodes where a path to a weight branches off (a
matrix product, for example), it records the incoming gradient. The second half starts from these, so nothing is
computed twice. Weights are the leaves of the graph that are not inputs, so they need not be listed. Unlike torch's
split backward, this uses only public names of autograd.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = tuple[torch.Tensor | None, ...]


class WeightGradients:
    """The second half of a backward. It holds the graph's saved tensors until `run`, which is called once.

    `free`: outputs that depend on weights but no input, with gradients of their shapes.
    """

    def __init__(self, free: list[tuple[GradientEdge, torch.Tensor]], groups: list["WeightGroup"]):
        self._free = free
        # Groups with several starts run first: their paths may pass through the start of another group, and a group
        # with one start frees the saved tensors.
        self._groups = sorted(groups, key=lambda group: -len(group.gradients))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def run(self) -> None:
        """Accumulate the gradients in the weights' `grad`."""
        free, groups = self._free, self._groups
        self._free, self._groups = [], []
        if free and groups:
            weights = [weight for group in groups for weight in group.weights]
            torch.autograd.backward(*map(list, zip(*free, strict=True)), inputs=weights, retain_graph=True)
        for group in groups:
            group.run()


@dataclass
class WeightGroup:
    """Weights that share start nodes, and the gradients recorded at these nodes."""

    weights: list[torch.Tensor]
    starts: set[Node]
    gradients: dict[Node, Grads] = field(default_factory=dict)

    def run(self) -> None:
        edges = [(GradientEdge(node, i), g) for node, grads in self.gradients.items() for i, g in enumerate(grads)]
        edges = [(edge, grad) for edge, grad in edges if grad is not None]
        several = len(self.gradients) > 1
        hooks = []
        if several:  # a path from one start may pass through another, which already has its complete gradient
            hooks = [node.register_prehook(lambda _, grads=grads: grads) for node, grads in self.gradients.items()]
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
    """Accumulate gradients in the `grad` of the leaves `inputs`, and return an object that does so for the weights.

    outputs: edges of one graph, from get_gradient_edge; the tensors may have been freed. grads: their gradients, of the
    outputs' shapes.
    """
    inputs = [tensor for tensor in inputs if tensor.requires_grad]
    leaf_nodes = {get_gradient_edge(tensor).node for tensor in inputs}
    roots = [output.node for output in outputs]
    users, weights = _walk(roots, leaf_nodes)
    between, _ = _ancestors(leaf_nodes, users, set())  # all nodes between outputs and inputs
    groups: list[WeightGroup] = []
    for leaf, weight in weights.items():
        group = WeightGroup([weight], _ancestors({leaf}, users, between)[1])
        meets = [other for other in groups if not group.starts.isdisjoint(other.starts)]
        groups = [other for other in groups if group.starts.isdisjoint(other.starts)]
        for other in meets:
            group = WeightGroup(other.weights + group.weights, other.starts | group.starts)
        groups.append(group)
    hooks = []
    for group in groups:
        for node in group.starts:
            hooks.append(node.register_prehook(partial(group.gradients.__setitem__, node)))
    bound, free = [], []  # outputs that depend on an input; outputs that depend on weights only
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
    """Walk the graph from `roots`. Return the users of each node, and the weights by leaf node."""
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
    """Return (`nodes` and all nodes that lead to them, nodes of `stop` that were reached). The search from `nodes`
    towards the outputs does not go beyond `stop`.
    """
    reached, ends, waiting = set(), set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node in stop:
            ends.add(node)
        elif node not in reached:
            reached.add(node)
            waiting.extend(users.get(node, ()))
    return reached, ends
