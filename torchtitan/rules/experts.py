"""Rules on experts: whose ranks they borrow, and what they exclude."""

import math
from collections.abc import Iterator
from typing import Any

from torchtitan.options import Fault
from torchtitan.rules.facts import Facts
from torchtitan.rules.tensor_and_context import divisors

KEY = "parallelism.expert_parallel_degree"


def experts_divide_over_expert_parallel(facts: Facts) -> Iterator[Fault]:
    if facts.ep == 1 or facts.args is None:
        return
    experts = getattr(facts.args, "n_experts", 0)
    if not experts:
        remedy = f"leave it out, or choose a model with experts; {facts.config.model.name} has none"
        yield facts.fault(KEY, "1 for a model without experts", remedy)
    elif experts % facts.ep:
        allowed = f"what divides the {experts} experts and the ranks that it borrows"
        yield facts.fault(KEY, allowed, f"write one of {divisors(math.gcd(experts, facts.lenders or experts))}")


def expert_parallel_borrows(facts: Facts) -> Iterator[Fault]:
    if facts.ep == 1 or facts.shard is None:
        return
    experts = getattr(facts.args, "n_experts", facts.ep)
    if facts.lenders % facts.ep and experts % facts.ep == 0:
        product = f"data_parallel_shard {facts.shard} x context_parallel {facts.cp} x tensor_parallel {facts.tp}"
        allowed = f"what divides {product} = {facts.lenders}, the ranks that it borrows"
        fits = divisors(math.gcd(experts, facts.lenders))
        yield facts.fault(KEY, allowed, f"write one of {fits}, or lend it a multiple of {facts.ep} ranks")
    if facts.tp > 1 and not facts.sequence_parallel:
        why = "tensor-parallel ranks would all send the same tokens"
        yield facts.fault("parallelism.disable_sequence_parallel", f"false with {KEY} and tensor parallel", why)


def experts_divide_over_what_is_left(facts: Facts) -> Iterator[Fault]:
    """FSDP shards a rank's experts evenly: whole ones, or a part of each."""
    args = facts.args
    if facts.ep == 1 or facts.shard is None or not getattr(args, "n_experts", 0):
        return
    lenders = facts.lenders
    if lenders % facts.ep or args.n_experts % facts.ep:
        return
    left, here = lenders // facts.ep, args.n_experts // facts.ep
    if here % left and (args.dim % left or args.expert_dim % left):
        allowed = f"a degree that leaves {lenders} / {facts.ep} = {left} ranks, which divide the {here} experts of "
        allowed += f"each, or dim {args.dim} and expert_dim {args.expert_dim}"
        fits = [ep for ep in range(1, lenders + 1) if _fits(ep, lenders, args)]
        yield facts.fault(KEY, allowed, f"write one of {', '.join(map(str, fits))}")


def _fits(ep: int, lenders: int, args: Any) -> bool:
    if lenders % ep or args.n_experts % ep:
        return False
    left, here = lenders // ep, args.n_experts // ep
    return ep == 1 or here % left == 0 or (args.dim % left == 0 and args.expert_dim % left == 0)


def tensor_parallel_knows_both_kinds_of_layers(facts: Facts) -> Iterator[Fault]:
    """The plan names modules of dense layers and of layers with experts, and each has to be there."""
    dense = getattr(facts.args, "n_dense_layers", None)
    if facts.tp > 1 and dense is not None and not 0 < dense < facts.args.n_layers:
        allowed = f"n_dense_layers between 1 and {facts.args.n_layers - 1} with tensor parallel"
        remedy = "change it, or write parallelism.tensor_parallel_degree = 1"
        yield facts.fault("model.overrides", allowed, remedy, f"n_dense_layers = {dense}")


def overlap_needs_a_pipeline_and_experts(facts: Facts) -> Iterator[Fault]:
    config, key = facts.config, "parallelism.pipeline_parallel_expert_parallel_overlap"
    overlap = config.parallelism.pipeline_parallel_expert_parallel_overlap
    if overlap and (facts.ep == 1 or facts.pp == 1):
        allowed = "true with expert_parallel_degree > 1 and pipeline_parallel_degree > 1, whose all-to-alls it hides"
        yield facts.fault(key, allowed, "leave it out")
    if config.activation_checkpoint.mode == "full_keep_comm" and not overlap:
        yield facts.fault("activation_checkpoint.mode", f"with {key} only", 'write "full", or set it')


def experts_that_travel_are_not_compiled(facts: Facts) -> Iterator[Fault]:
    if facts.ep > 1 and facts.compiles_model:
        why = "the host reads how many tokens go where, which would break the graph"
        yield facts.fault("compile.enable", f"false with {KEY}, or without the component model", why)
