"""Rules on the degrees of parallelism, on batches, and on the sizes that tensor, context and expert parallel split."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torchtitan.config.options import Fault
from torchtitan.config.sections.model import Parallelism
from torchtitan.core.errors import LimitError, check_global_batch
from torchtitan.parallelisms import degrees
from torchtitan.parallelisms.degrees import NEEDS_DEGREE, check_expert_degree, check_num_experts, splits_features
from torchtitan.rules.facts import Facts, Rule


def degrees_fit_the_ranks(facts: Facts) -> Iterator[Fault]:
    yield from facts.judged(lambda: facts.layout.shards)


def model_allows_the_plan(facts: Facts) -> Iterator[Fault]:
    """Apply the limits of the model family itself."""
    args, layout = facts.model.args, facts.layout
    if hasattr(args, "limits"):
        limits = args.limits(facts.config.model.overrides, tp=layout.tp, cp=layout.cp, pp=layout.pp)
        yield from map(facts.refused, limits)


def batch_divides(facts: Facts) -> Iterator[Fault]:
    global_batch, local = facts.config.training.global_batch_size, facts.config.training.local_batch_size
    ranks = facts.layout.shards * facts.layout.replicas if global_batch else 1
    yield from facts.judged(check_global_batch, global_batch, local, ranks)


def needs_its_degree(facts: Facts) -> Iterator[Fault]:
    degrees, defaults = facts.config.parallelism, Parallelism()
    for degree, names in NEEDS_DEGREE.items():
        if getattr(degrees, degree) > 1:
            continue
        for name in names:
            if getattr(degrees, name) != getattr(defaults, name):
                allowed = f"its default while parallelism.{degree} = 1"
                yield facts.fault(f"parallelism.{name}", allowed, "leave it out")


def needs_shards(facts: Facts) -> Iterator[Fault]:
    """Refuse FSDP options on a single shard.

    `excluded_by_a_pipeline` refuses prefetch and "always" in a pipeline on any number of shards.
    """
    degrees, layout = facts.config.parallelism, facts.layout
    if layout.fsdp_shards != 1 or facts.config.training.enable_cpu_offload:
        return
    ranks = f"{layout.world_size} rank{'s' * (layout.world_size > 1)}"
    where, remedy = f"where nothing is sharded, as here on {ranks}", "leave it out, or start more ranks"
    if degrees.fsdp_prefetch and layout.pp == 1:
        yield facts.fault("parallelism.fsdp_prefetch", f"0 {where}", remedy)
    if degrees.fsdp_reshard_after_forward != "default" and (
        layout.pp == 1 or degrees.fsdp_reshard_after_forward == "never"
    ):
        yield facts.fault("parallelism.fsdp_reshard_after_forward", f'"default" {where}', remedy)


def second_shards_divide(facts: Facts) -> Iterator[Fault]:
    """Refuse a second copy of the parameters in groups that do not divide the shards, or of tensor-parallel weights."""
    key, size = "parallelism.fsdp_reshard_after_forward", facts.config.parallelism.fsdp_reshard_after_forward
    if not isinstance(size, int) or facts.layout.pp > 1 or (shards := facts.layout.fsdp_shards) == 1:
        return
    if facts.layout.tp > 1:
        reason = "FSDP2 cannot shard a tensor-parallel weight a second time (torch 2.13)"
        yield facts.fault(key, '"always" or "never" with tensor parallel', f'{reason}; write "always"')
    elif facts.layout.ep == 1 and facts.model.experts and splits_features(facts.model.experts, shards):
        allowed = f'"always" or "never" with {facts.model.experts} experts over {shards} shards'
        reason = "a second copy is sharded by experts, of which each rank's part would be padded"
        yield facts.fault(key, allowed, f'{reason}; write "always"')
    elif shards % size or size == shards:
        sizes = [str(n) for n in range(2, shards) if shards % n == 0]
        numbers = f", or a divisor of the {shards} shards: {', '.join(sizes)}" if sizes else ""
        yield facts.fault(key, f'"always" or "never"{numbers}', 'write "always" to gather among all shards')


QUANTIZED = ("fsdp_quantized_gather", "fsdp_quantized_reduce")


def routers_are_gathered_exactly(facts: Facts) -> Iterator[Fault]:
    if facts.config.parallelism.fsdp_quantized_gather != "none" and facts.model.experts:
        reason = "routers would choose other experts with rounded weights"
        yield facts.fault(f"parallelism.{QUANTIZED[0]}", '"none" for a model with experts', f"{reason}; leave it out")


def quantized_messages_have_shards(facts: Facts) -> Iterator[Fault]:
    for name in QUANTIZED:
        if getattr(facts.config.parallelism, name) != "none" and facts.layout.fsdp_shards == 1:
            remedy = "leave it out, or start more ranks"
            yield facts.fault(f"parallelism.{name}", '"none" where nothing is sharded', remedy)


def quantized_messages_suit_frozen_weights(facts: Facts) -> Iterator[Fault]:
    """Refuse lossy collectives where frozen weights would change in silence."""
    config = facts.config
    for name in QUANTIZED:
        if getattr(config.parallelism, name) != "none" and (config.adapter.kind != "none" or config.training.unfrozen):
            reason = "frozen weights would be trained against in int8 and exported exact"
            reason = reason if name == QUANTIZED[0] else "an adapter has few gradients"
            allowed = '"none" with an adapter or training.unfrozen'
            yield facts.fault(f"parallelism.{name}", allowed, f"{reason}; leave it out")


def batch_fits_the_memory(facts: Facts) -> Iterator[Fault]:
    """Refuse a batch with more token ids, labels, positions and document ids than the host memory holds."""
    training = facts.config.training
    bytes_of_a_sample = 4 * 8 * training.seq_len * facts.layout.rows_per_sample
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    if training.local_batch_size * bytes_of_a_sample > memory:
        key = "local_batch_size" if training.local_batch_size > 1 else "seq_len"
        allowed = f"a batch of token ids that fits into this machine's {memory / 2**30:.0f} GiB"
        most = int(memory // (bytes_of_a_sample if key == "local_batch_size" else bytes_of_a_sample / training.seq_len))
        yield facts.fault(f"training.{key}", allowed, f"write much less than {most:,}")


def _split_sizes(facts: Facts) -> dict[str, int]:
    """Return the model sizes that tensor parallel splits; empty without it."""
    return degrees.split_sizes(facts.model.args) if facts.layout.tp > 1 else {}


def uneven(facts: Facts) -> list[str]:
    """Return the sizes that the tensor-parallel degree does not divide. Other rules on that degree wait for these."""
    return degrees.indivisible_sizes(facts.layout.tp, _split_sizes(facts))


def sizes_divide_over_tensor_parallel(facts: Facts) -> Iterator[Fault]:
    yield from facts.judged(degrees.check_even_split, facts.layout.tp, _split_sizes(facts))


def sequence_divides(facts: Facts) -> Iterator[Fault]:
    """Require that sequence lengths suit the degrees. Degrees that do not suit the model are left to other rules."""
    split = facts.layout.sequence_parallel
    with suppress(LimitError):  # without sizes, the degrees are taken to suit them
        if any(heads_divide_over_context_parallel(facts)):
            return
        split = split and not uneven(facts)
    for key, length in facts.data.lengths.items():
        yield from facts.judged(degrees.check_sequence_length, key, length, facts.layout.sequence_needs(split))


def heads_divide_over_context_parallel(facts: Facts) -> Iterator[Fault]:
    """Require that ulysses can distribute the heads over the context-parallel ranks."""
    layout, method = facts.layout, facts.config.parallelism.context_parallel_rotate_method
    if layout.cp == 1 or method != "ulysses" or (heads := facts.model.args.n_heads) % layout.tp:
        return
    detail = f" (n_heads {heads} / tensor_parallel {layout.tp})" * (layout.tp > 1)
    yield from facts.judged(degrees.check_ulysses_heads, layout.cp, heads // layout.tp, detail)


def dropped_attention_has_whole_rows(facts: Facts) -> Iterator[Fault]:
    if facts.layout.cp > 1 and getattr(facts.model.args, "attention_dropout", False):
        yield from facts.judged(
            degrees.check_attention_dropout, facts.config.parallelism.context_parallel_rotate_method
        )


def ring_is_not_compiled(facts: Facts) -> Iterator[Fault]:
    method = facts.config.parallelism.context_parallel_rotate_method
    if facts.layout.cp > 1 and method in degrees.RINGS and facts.layout.compiles_model:
        allowed = '"allgather" or "ulysses" with a compiled model, as its graph cannot send between two ranks'
        remedy = 'write "allgather", or compile.enable = false'
        yield facts.fault("parallelism.context_parallel_rotate_method", allowed, remedy)


def rings_have_their_own_attention(facts: Facts) -> Iterator[Fault]:
    method = facts.config.parallelism.context_parallel_rotate_method
    if facts.layout.cp > 1 and method in degrees.RINGS and facts.config.model.attention_backend == "flex":
        allowed = (
            f'"auto" or "sdpa" with context_parallel_rotate_method = "{method}", which merges the attention of chunks'
        )
        yield facts.fault("model.attention_backend", allowed, 'write "auto"')


def capped_scores_have_one_kernel(facts: Facts) -> Iterator[Fault]:
    args, backend = facts.model.args, facts.config.model.attention_backend
    if (cap := getattr(args, "score_cap", 0)) and backend != "auto":
        allowed = f'"auto" with attention scores capped at {cap:g}, which no kernel of torch computes'
        yield facts.fault("model.attention_backend", allowed, 'write "auto"' + _or_without(args, "score_cap"))


def rings_carry_no_window(facts: Facts) -> Iterator[Fault]:
    """Refuse a sliding window, or chunks, with ring attention, which attends to one rank's keys at a time."""
    method = facts.config.parallelism.context_parallel_rotate_method
    if facts.layout.cp == 1 or method not in degrees.RINGS:
        return
    for size, name in (("sliding_window", "a sliding window"), ("chunk_size", "attention within chunks")):
        if tokens := getattr(facts.model.args, size, 0):
            allowed = f'"allgather" or "ulysses" with {name} (of {tokens} tokens)'
            remedy = 'write "allgather"' + _or_without(facts.model.args, size)
            yield facts.fault("parallelism.context_parallel_rotate_method", allowed, remedy)


def _or_without(args: Any, size: str) -> str:
    """Return the end of a remedy that sets a size of the model to 0; empty if the model needs it."""
    return f", or model.overrides = {{{size} = 0}}" if size in getattr(args, "may_be_zero", ()) else ""


def async_tensor_parallel(facts: Facts) -> Iterator[Fault]:
    layout = facts.layout
    if facts.config.parallelism.enable_async_tensor_parallel and layout.tp > 1:
        yield from facts.judged(
            degrees.check_async_tensor_parallel, facts.job.device_type, layout.compiles_model, layout.sequence_parallel
        )
        if facts.config.training.float8 != "none":
            reason = "it fuses gathers with bfloat16 products, but rounding comes between; leave one of the two out"
            yield facts.fault("parallelism.enable_async_tensor_parallel", "false with training.float8", reason)
        if facts.config.qat.weight_dtype != "none":
            reason = "it fuses gathers with products, but rounding comes between; leave one of the two out"
            yield facts.fault("parallelism.enable_async_tensor_parallel", "false with qat.weight_dtype", reason)


S2_KEY = "model.s2_group_size"


def groups_are_parts_of_a_sequence(facts: Facts) -> Iterator[Fault]:
    size, longest = facts.config.model.s2_group_size, facts.config.training.seq_len
    if size >= longest:
        allowed = f"less than training.seq_len = {longest}, as a group is a part of the sequence"
        yield facts.fault(S2_KEY, allowed, f"write {longest // 8 * 2 or 2}, or 0 for full attention")
    elif size % 2:
        yield facts.fault(S2_KEY, "an even number, as groups are shifted by half a group", f"write {max(size - 1, 2)}")


def groups_fit_the_model(facts: Facts) -> Iterator[Fault]:
    """Refuse S2 groups in a model without plain causal attention, or with an odd number of heads."""
    if not facts.config.model.s2_group_size:
        return
    args, name = facts.model.args, facts.config.model.name
    obstacles = {"sliding_window": "a sliding window", "attention_dropout": "attention_dropout"}
    obstacles |= {"chunk_size": "attention within chunks"}
    obstacles |= {"score_cap": "capped attention scores", "n_state_layers": "layers with a state"}
    obstacles = {key: f"{text} ({getattr(args, key)})" for key, text in obstacles.items() if getattr(args, key, 0)}
    if obstacles:
        remedy = "write 0" + "".join(_or_without(args, key) for key in obstacles if len(obstacles) == 1)
        yield facts.fault(S2_KEY, f"0 for a model with {' and '.join(obstacles.values())}", remedy)
    if not getattr(args, "causal", True):
        yield facts.fault(S2_KEY, f"0 for {name}, which has bidirectional attention", "write 0, or train a decoder")
    if args.n_heads % 2:
        allowed = f"0 for a model with n_heads = {args.n_heads}, an odd number: half of the heads use shifted groups"
        yield facts.fault(S2_KEY, allowed, "write 0")


def groups_are_of_training_alone(facts: Facts) -> Iterator[Fault]:
    """Refuse S2 groups in tasks that reuse values from evaluation mode, which has full attention."""
    if not facts.config.model.s2_group_size:
        return
    kind, task = facts.config.task.kind, facts.model.spec
    if task.streams_documents or task.rows_per_sample > 1:
        reason = "replays cached documents" if task.streams_documents else "compares answers with a reference"
        yield facts.fault(
            S2_KEY, f'0 with task.kind = "{kind}", which {reason} in evaluation mode, without groups', "write 0"
        )


def groups_have_all_keys(facts: Facts) -> Iterator[Fault]:
    if facts.layout.cp > 1 and facts.config.model.s2_group_size:
        yield from facts.judged(degrees.check_s2_attention, facts.config.parallelism.context_parallel_rotate_method)


EXPERT_DEGREE = "parallelism.expert_parallel_degree"
OVERLAP = "parallelism.pipeline_parallel_expert_parallel_overlap"


def experts_divide_over_expert_parallel(facts: Facts) -> Iterator[Fault]:
    if facts.layout.ep == 1:
        return
    args, pool = facts.model.args, None
    if not facts.model.experts:
        other = f"choose a model with experts; {facts.config.model.name} has none"
        if hasattr(args, "n_dense_layers"):
            other = f"lower n_dense_layers in model.overrides; all {args.n_layers} layers are dense"
        yield facts.fault(EXPERT_DEGREE, "1 for a model without experts", f"leave it out, or {other}")
        return
    with suppress(LimitError):  # the check takes an unknown number too
        pool = facts.layout.expert_pool
    yield from facts.judged(check_num_experts, facts.layout.ep, facts.model.experts, pool)


def expert_parallel_borrows(facts: Facts) -> Iterator[Fault]:
    layout = facts.layout
    if layout.ep == 1 or not (experts := facts.model.experts):
        return
    shards = layout.shards
    if experts % layout.ep == 0 and not uneven(facts):
        yield from facts.judged(check_expert_degree, layout.ep, shards, layout.cp, layout.tp, experts)
    if layout.tp > 1 and not layout.sequence_parallel:
        reason = "tensor-parallel ranks would all send the same tokens"
        yield facts.fault(
            "parallelism.disable_sequence_parallel", f"false with {EXPERT_DEGREE} and tensor parallel", reason
        )


def experts_divide_over_what_is_left(facts: Facts) -> Iterator[Fault]:
    """Require that FSDP can shard a rank's experts evenly: by experts, or within each expert."""
    ep = facts.layout.ep
    if ep == 1 or not facts.model.experts or uneven(facts):
        return
    args, pool = facts.model.args, facts.layout.expert_pool
    if pool % ep or args.n_experts % ep:
        return
    ranks, local_experts = pool // ep, args.n_experts // ep
    if local_experts % ranks and (args.dim % ranks or args.expert_dim % ranks):
        allowed = f"a degree that leaves {pool} / {ep} = {ranks} ranks that divide the {local_experts} experts of "
        allowed += f"each, or dim {args.dim} and expert_dim {args.expert_dim}"
        fits = [ep for ep in range(1, pool + 1) if _fits(ep, pool, args)]
        yield facts.fault(EXPERT_DEGREE, allowed, f"write {_one_of(', '.join(map(str, fits)))}")


def _one_of(numbers: str) -> str:
    return f"one of {numbers}" if "," in numbers else numbers


def _fits(ep: int, pool: int, args: Any) -> bool:
    if pool % ep or args.n_experts % ep:
        return False
    ranks, local_experts = pool // ep, args.n_experts // ep
    return ep == 1 or local_experts % ranks == 0 or (args.dim % ranks == 0 and args.expert_dim % ranks == 0)


def overlap_needs_a_pipeline_and_experts(facts: Facts) -> Iterator[Fault]:
    layout = facts.layout
    if facts.config.parallelism.pipeline_parallel_expert_parallel_overlap and (layout.ep == 1 or layout.pp == 1):
        allowed = "true with expert_parallel_degree > 1 and pipeline_parallel_degree > 1, as it hides all-to-alls"
        yield facts.fault(OVERLAP, allowed, "leave it out")


def communication_is_kept_with_overlap(facts: Facts) -> Iterator[Fault]:
    config = facts.config
    overlap = config.parallelism.pipeline_parallel_expert_parallel_overlap
    if config.activation_checkpoint.mode == "full_keep_comm" and not overlap:
        yield facts.fault(
            "activation_checkpoint.mode", f'"full_keep_comm" only with {OVERLAP}', 'write "full", or set it'
        )


def experts_that_travel_are_compiled_in_parts(facts: Facts) -> Iterator[Fault]:
    """Refuse features that span a compiled block: the host reads the token counts of the all-to-all in its middle."""
    if facts.layout.ep == 1 or not facts.layout.compiles_model:
        return
    recompute = facts.config.activation_checkpoint
    if facts.config.parallelism.pipeline_parallel_expert_parallel_overlap:
        reason = "it computes the gradients of inputs and weights separately, a compiled block both at once"
        yield facts.fault(OVERLAP, "false with a compiled model", f"{reason}; set compile.enable = false")
    if recompute.mode == "selective" and recompute.selective_ac_option == "op":
        reason = "operators inside a compiled block cannot be selected"
        allowed = f"a number n (every n-th layer) with a compiled model and {EXPERT_DEGREE}"
        yield facts.fault("activation_checkpoint.selective_ac_option", allowed, f'{reason}; write "2", or another mode')


RULES: tuple[Rule, ...] = (
    degrees_fit_the_ranks,
    needs_shards,
    second_shards_divide,
    routers_are_gathered_exactly,
    quantized_messages_have_shards,
    quantized_messages_suit_frozen_weights,
    batch_divides,
    batch_fits_the_memory,
    sizes_divide_over_tensor_parallel,
    sequence_divides,
    heads_divide_over_context_parallel,
    dropped_attention_has_whole_rows,
    groups_are_parts_of_a_sequence,
    groups_fit_the_model,
    groups_are_of_training_alone,
    groups_have_all_keys,
    ring_is_not_compiled,
    rings_carry_no_window,
    capped_scores_have_one_kernel,
    rings_have_their_own_attention,
    async_tensor_parallel,
    experts_divide_over_expert_parallel,
    expert_parallel_borrows,
    experts_divide_over_what_is_left,
    experts_that_travel_are_compiled_in_parts,
    communication_is_kept_with_overlap,
    model_allows_the_plan,
)
WITHOUT_EFFECT: tuple[Rule, ...] = (
    needs_its_degree,
    overlap_needs_a_pipeline_and_experts,
)
