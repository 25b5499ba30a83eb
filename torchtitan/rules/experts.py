"""Rules on experts: whose ranks they borrow, and what they exclude."""

from collections.abc import Iterator
from typing import Any

from torchtitan.config.options import Fault
from torchtitan.parallelisms.degrees import check_borrowing, check_experts
from torchtitan.rules.attention import uneven
from torchtitan.rules.facts import Facts

KEY = "parallelism.expert_parallel_degree"
OVERLAP = "parallelism.pipeline_parallel_expert_parallel_overlap"


def experts_divide_over_expert_parallel(facts: Facts) -> Iterator[Fault]:
    if facts.ep == 1 or facts.args is None:
        return
    experts = facts.experts
    if not experts:
        other = f"choose a model with experts; {facts.config.model.name} has none"
        if hasattr(facts.args, "n_dense_layers"):
            other = f"lower n_dense_layers in model.overrides; all {facts.args.n_layers} layers are dense"
        yield facts.fault(KEY, "1 for a model without experts", f"leave it out, or {other}")
        return
    yield from facts.judged(check_experts, facts.ep, experts, facts.lenders)


def expert_parallel_borrows(facts: Facts) -> Iterator[Fault]:
    if facts.ep == 1 or facts.shard is None or not facts.experts:
        return
    if facts.experts % facts.ep == 0 and not uneven(facts):
        yield from facts.judged(check_borrowing, facts.ep, facts.shard, facts.cp, facts.tp, facts.experts)
    if facts.tp > 1 and not facts.sequence_parallel:
        why = "tensor-parallel ranks would all send the same tokens"
        yield facts.fault("parallelism.disable_sequence_parallel", f"false with {KEY} and tensor parallel", why)


def experts_divide_over_what_is_left(facts: Facts) -> Iterator[Fault]:
    """FSDP shards a rank's experts evenly: whole ones, or a part of each."""
    if facts.ep == 1 or facts.shard is None or not facts.experts or uneven(facts):
        return
    args, lenders = facts.args, facts.lenders
    assert lenders is not None  # as there are shards
    if lenders % facts.ep or args.n_experts % facts.ep:
        return
    left, here = lenders // facts.ep, args.n_experts // facts.ep
    if here % left and (args.dim % left or args.expert_dim % left):
        allowed = f"a degree that leaves {lenders} / {facts.ep} = {left} ranks, which divide the {here} experts of "
        allowed += f"each, or dim {args.dim} and expert_dim {args.expert_dim}"
        fits = [ep for ep in range(1, lenders + 1) if _fits(ep, lenders, args)]
        yield facts.fault(KEY, allowed, f"write {_one_of(', '.join(map(str, fits)))}")


def _one_of(numbers: str) -> str:
    return f"one of {numbers}" if "," in numbers else numbers


def _fits(ep: int, lenders: int, args: Any) -> bool:
    if lenders % ep or args.n_experts % ep:
        return False
    left, here = lenders // ep, args.n_experts // ep
    return ep == 1 or here % left == 0 or (args.dim % left == 0 and args.expert_dim % left == 0)


def overlap_needs_a_pipeline_and_experts(facts: Facts) -> Iterator[Fault]:
    if facts.config.parallelism.pipeline_parallel_expert_parallel_overlap and (facts.ep == 1 or facts.pp == 1):
        allowed = "true with expert_parallel_degree > 1 and pipeline_parallel_degree > 1, whose all-to-alls it hides"
        yield facts.fault(OVERLAP, allowed, "leave it out")


def communication_is_kept_with_overlap(facts: Facts) -> Iterator[Fault]:
    config = facts.config
    overlap = config.parallelism.pipeline_parallel_expert_parallel_overlap
    if config.activation_checkpoint.mode == "full_keep_comm" and not overlap:
        yield facts.fault("activation_checkpoint.mode", f"with {OVERLAP} only", 'write "full", or set it')


def experts_that_travel_are_compiled_in_parts(facts: Facts) -> Iterator[Fault]:
    """The host reads how many tokens go where, so nothing that spans a block goes with it."""
    if facts.ep == 1 or not facts.compiles_model:
        return
    recompute = facts.config.activation_checkpoint
    if facts.config.parallelism.pipeline_parallel_expert_parallel_overlap:
        why = "it takes gradients of inputs and of weights apart, which a compiled part hands back at once"
        yield facts.fault(OVERLAP, "false with a compiled model", f"{why}; set compile.enable = false")
    if recompute.mode == "selective" and recompute.selective_ac_option == "op":
        why = "the operators of what is compiled cannot be chosen from outside"
        allowed = f"every how many layers, with a compiled model and {KEY}"
        yield facts.fault("activation_checkpoint.selective_ac_option", allowed, f'{why}; write "2", or another mode')
