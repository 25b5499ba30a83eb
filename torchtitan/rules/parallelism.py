"""Rules on the degrees of parallelism, on batches, and on the sizes that tensor, context and expert parallel split."""

import math
import os
from collections.abc import Iterator
from typing import Any

from torchtitan.config.batch_shape import rows_per_sample
from torchtitan.config.options import Fault
from torchtitan.config.sections.model import Parallelism
from torchtitan.core.constraints import LimitError, check_global_batch
from torchtitan.parallelisms import degrees
from torchtitan.parallelisms.degrees import NEEDS_DEGREE, check_expert_degree, check_num_experts
from torchtitan.rules.facts import Facts, Rule


def degrees_fit_the_ranks(facts: Facts) -> Iterator[Fault]:
    if isinstance(facts.shard_or_error, LimitError):
        yield facts.refused(facts.shard_or_error)


def model_allows_the_plan(facts: Facts) -> Iterator[Fault]:
    """Apply the limits of the model family itself."""
    if hasattr(facts.args, "limits"):
        limits = facts.args.limits(facts.config.model.overrides, tp=facts.tp, cp=facts.cp, pp=facts.pp)
        yield from map(facts.refused, limits)


def batch_divides(facts: Facts) -> Iterator[Fault]:
    global_batch, local = facts.config.training.global_batch_size, facts.config.training.local_batch_size
    if global_batch == 0 or facts.samples:
        yield from facts.judged(check_global_batch, global_batch, local, (facts.samples or local) // local)


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
    degrees = facts.config.parallelism
    if facts.fsdp_shards != 1 or facts.config.training.enable_cpu_offload:
        return
    ranks = f"{facts.world_size} rank{'s' * (facts.world_size > 1)}"
    where, remedy = f"where nothing is sharded, as here on {ranks}", "leave it out, or start more ranks"
    if degrees.fsdp_prefetch and facts.pp == 1:
        yield facts.fault("parallelism.fsdp_prefetch", f"0 {where}", remedy)
    if degrees.fsdp_reshard_after_forward != "default" and (
        facts.pp == 1 or degrees.fsdp_reshard_after_forward == "never"
    ):
        yield facts.fault("parallelism.fsdp_reshard_after_forward", f'"default" {where}', remedy)


def second_shards_divide(facts: Facts) -> Iterator[Fault]:
    """Refuse a second copy of the parameters in groups that do not divide the shards, or of tensor-parallel weights."""
    key, size = "parallelism.fsdp_reshard_after_forward", facts.config.parallelism.fsdp_reshard_after_forward
    if not isinstance(size, int) or facts.pp > 1 or facts.fsdp_shards in (None, 1):
        return
    if facts.tp > 1:
        reason = "FSDP2 cannot shard a tensor-parallel weight a second time (torch 2.13)"
        yield facts.fault(key, '"always" or "never" with tensor parallel', f'{reason}; write "always"')
    elif facts.fsdp_shards % size or size == facts.fsdp_shards:
        sizes = [str(n) for n in range(2, facts.fsdp_shards) if facts.fsdp_shards % n == 0]
        numbers = f", or what divides the {facts.fsdp_shards} shards: {', '.join(sizes)}" if sizes else ""
        yield facts.fault(key, f'"always" or "never"{numbers}', 'write "always" to gather among all shards')


QUANTIZED = ("fsdp_quantized_gather", "fsdp_quantized_reduce")


def quantized_messages_suit_the_job(facts: Facts) -> Iterator[Fault]:
    """Refuse lossy collectives without shards, and where frozen weights or routing would change in silence."""
    config = facts.config
    if facts.experts and config.parallelism.fsdp_quantized_gather != "none":
        reason = "routers would choose other experts with rounded weights"
        yield facts.fault(f"parallelism.{QUANTIZED[0]}", '"none" for a model with experts', f"{reason}; leave it out")
    for name in QUANTIZED:
        key = f"parallelism.{name}"
        if getattr(config.parallelism, name) == "none":
            continue
        if facts.fsdp_shards == 1:
            yield facts.fault(key, '"none" where nothing is sharded', "leave it out, or start more ranks")
        if config.adapter.kind != "none" or config.training.unfrozen:
            reason = "frozen weights would be trained against in int8 and exported exact"
            reason = reason if name == QUANTIZED[0] else "an adapter has few gradients"
            yield facts.fault(key, '"none" with an adapter or training.unfrozen', f"{reason}; leave it out")


def batch_fits_the_memory(facts: Facts) -> Iterator[Fault]:
    """Refuse a batch with more token ids, labels, positions and document ids than the host memory holds."""
    training = facts.config.training
    bytes_of_a_sample = 4 * 8 * training.seq_len * rows_per_sample(facts.config)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    if training.local_batch_size * bytes_of_a_sample > memory:
        key = "local_batch_size" if training.local_batch_size > 1 else "seq_len"
        allowed = f"a batch of token ids that fits into this machine's {memory / 2**30:.0f} GiB"
        most = int(memory // (bytes_of_a_sample if key == "local_batch_size" else bytes_of_a_sample / training.seq_len))
        yield facts.fault(f"training.{key}", allowed, f"write much less than {most:,}")


RINGS = ("ring", "alltoall")
"""Context-parallel methods that pass keys and values from rank to rank."""


def _split_sizes(facts: Facts) -> dict[str, int]:
    """Return the model sizes that tensor parallel splits; empty without it, or if the model is wrong."""
    args = facts.args
    if facts.tp == 1 or args is None:
        return {}
    sizes = {
        "n_heads": args.n_heads,
        "n_kv_heads": args.num_kv_heads,
        "feed-forward width": getattr(args, "ffn_dim", 0),  # 0 if every layer has experts
        "vocab_size": args.vocab_size,
        "n_classes": getattr(args, "n_classes", 0),
    }
    return {name: size for name, size in sizes.items() if size}


def uneven(facts: Facts) -> list[str]:
    """Return the sizes that the tensor-parallel degree does not divide. Other rules on that degree wait for these."""
    return degrees.indivisible_sizes(facts.tp, _split_sizes(facts))


def sizes_divide_over_tensor_parallel(facts: Facts) -> Iterator[Fault]:
    yield from facts.judged(degrees.check_even_split, facts.tp, _split_sizes(facts))


def sequence_divides(facts: Facts) -> Iterator[Fault]:
    """Require that sequence lengths suit the degrees. Degrees that do not suit the model are left to other rules."""
    if _heads_limit(facts):
        return
    needs = facts.needs_of_a_sequence(split=facts.sequence_parallel and not uneven(facts))
    for key, length in facts.lengths.items():
        yield from facts.judged(degrees.check_sequence_length, key, length, needs)


def _heads_limit(facts: Facts) -> LimitError | None:
    """Return the error if ulysses cannot distribute the heads over the context-parallel ranks."""
    args, method = facts.args, facts.config.parallelism.context_parallel_rotate_method
    if facts.cp == 1 or method != "ulysses" or args is None or args.n_heads % facts.tp:
        return None
    detail = f" (n_heads {args.n_heads} / tensor_parallel {facts.tp})" * (facts.tp > 1)
    try:
        degrees.check_ulysses_heads(facts.cp, args.n_heads // facts.tp, detail)
    except LimitError as error:
        return error
    return None


def heads_divide_over_context_parallel(facts: Facts) -> Iterator[Fault]:
    if error := _heads_limit(facts):
        yield facts.refused(error)


def dropped_attention_has_whole_rows(facts: Facts) -> Iterator[Fault]:
    if facts.cp > 1 and getattr(facts.args, "attention_dropout", False):
        yield from facts.judged(
            degrees.check_attention_dropout, facts.config.parallelism.context_parallel_rotate_method
        )


def ring_is_not_compiled(facts: Facts) -> Iterator[Fault]:
    method = facts.config.parallelism.context_parallel_rotate_method
    if facts.cp > 1 and method in RINGS and facts.compiles_model:
        allowed = '"allgather" or "ulysses" with a compiled model, as its graph cannot send between two ranks'
        remedy = 'write "allgather", or compile.enable = false'
        yield facts.fault("parallelism.context_parallel_rotate_method", allowed, remedy)


def rings_have_their_own_attention(facts: Facts) -> Iterator[Fault]:
    method = facts.config.parallelism.context_parallel_rotate_method
    if facts.cp > 1 and method in RINGS and facts.config.model.attention_backend == "flex":
        allowed = (
            f'"auto" or "sdpa" with context_parallel_rotate_method = "{method}", which merges the attention of chunks'
        )
        yield facts.fault("model.attention_backend", allowed, 'write "auto"')


def rings_carry_no_window(facts: Facts) -> Iterator[Fault]:
    """Refuse a sliding window with ring attention, which attends to one chunk of keys at a time."""
    method, window = facts.config.parallelism.context_parallel_rotate_method, getattr(facts.args, "sliding_window", 0)
    if facts.cp > 1 and method in RINGS and window:
        allowed = f'"allgather" or "ulysses" with a sliding window (of {window} tokens)'
        remedy = 'write "allgather"' + _or_without(facts.args, "sliding_window")
        yield facts.fault("parallelism.context_parallel_rotate_method", allowed, remedy)


def _or_without(args: Any, size: str) -> str:
    """Return the end of a remedy that sets a size of the model to 0; empty if the model needs it."""
    return f", or model.overrides = {{{size} = 0}}" if size in getattr(args, "may_be_zero", ()) else ""


def async_tensor_parallel(facts: Facts) -> Iterator[Fault]:
    if facts.config.parallelism.enable_async_tensor_parallel and facts.tp > 1:
        yield from facts.judged(
            degrees.check_async_tensor_parallel, facts.device, facts.compiles_model, facts.sequence_parallel
        )
        if facts.config.training.float8 != "none":
            reason = "it fuses gathers with bfloat16 products, but rounding comes between; leave one of the two out"
            yield facts.fault("parallelism.enable_async_tensor_parallel", "false with training.float8", reason)


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
    args, name = facts.args, facts.config.model.name
    if not facts.config.model.s2_group_size or args is None:
        return
    obstacles = {"sliding_window": "a sliding window", "attention_dropout": "attention_dropout"}
    obstacles = {key: description for key, description in obstacles.items() if getattr(args, key, 0)}
    for key, description in obstacles.items():
        remedy = "write 0" + _or_without(args, key)
        yield facts.fault(S2_KEY, f"0 for a model with {description} ({getattr(args, key)})", remedy)
    if not getattr(args, "causal", True):
        yield facts.fault(S2_KEY, f"0 for {name}, which has bidirectional attention", "write 0, or train a decoder")
    if args.n_heads % 2:
        allowed = f"0 for a model with n_heads = {args.n_heads}, an odd number: half of the heads use shifted groups"
        yield facts.fault(S2_KEY, allowed, "write 0")


def groups_are_of_training_alone(facts: Facts) -> Iterator[Fault]:
    """Refuse S2 groups in tasks that reuse values from evaluation mode, which has full attention."""
    kind = facts.config.task.kind
    if not facts.config.model.s2_group_size or facts.task is None:
        return
    if facts.task.streams_documents or facts.task.rows_per_sample > 1:
        reason = "replays cached documents" if facts.task.streams_documents else "compares answers with a reference"
        yield facts.fault(
            S2_KEY, f'0 with task.kind = "{kind}", which {reason} in evaluation mode, without groups', "write 0"
        )


def groups_have_all_keys(facts: Facts) -> Iterator[Fault]:
    if facts.cp > 1 and facts.config.model.s2_group_size:
        yield from facts.judged(degrees.check_s2_attention, facts.config.parallelism.context_parallel_rotate_method)


EXPERT_DEGREE = "parallelism.expert_parallel_degree"
OVERLAP = "parallelism.pipeline_parallel_expert_parallel_overlap"


def experts_divide_over_expert_parallel(facts: Facts) -> Iterator[Fault]:
    if facts.ep == 1 or facts.args is None:
        return
    experts = facts.experts
    if not experts:
        other = f"choose a model with experts; {facts.config.model.name} has none"
        if hasattr(facts.args, "n_dense_layers"):
            other = f"lower n_dense_layers in model.overrides; all {facts.args.n_layers} layers are dense"
        yield facts.fault(EXPERT_DEGREE, "1 for a model without experts", f"leave it out, or {other}")
        return
    yield from facts.judged(check_num_experts, facts.ep, experts, facts.lenders)


def expert_parallel_borrows(facts: Facts) -> Iterator[Fault]:
    if facts.ep == 1 or facts.shard is None or not facts.experts:
        return
    if facts.experts % facts.ep == 0 and not uneven(facts):
        yield from facts.judged(check_expert_degree, facts.ep, facts.shard, facts.cp, facts.tp, facts.experts)
    if facts.tp > 1 and not facts.sequence_parallel:
        reason = "tensor-parallel ranks would all send the same tokens"
        yield facts.fault(
            "parallelism.disable_sequence_parallel", f"false with {EXPERT_DEGREE} and tensor parallel", reason
        )


def experts_divide_over_what_is_left(facts: Facts) -> Iterator[Fault]:
    """Require that FSDP can shard a rank's experts evenly: by experts, or within each expert."""
    if facts.ep == 1 or facts.shard is None or not facts.experts or uneven(facts):
        return
    args, lenders = facts.args, facts.lenders
    assert lenders is not None  # facts.shard is set
    if lenders % facts.ep or args.n_experts % facts.ep:
        return
    ranks, local_experts = lenders // facts.ep, args.n_experts // facts.ep
    if local_experts % ranks and (args.dim % ranks or args.expert_dim % ranks):
        allowed = (
            f"a degree that leaves {lenders} / {facts.ep} = {ranks} ranks that divide the {local_experts} experts of "
        )
        allowed += f"each, or dim {args.dim} and expert_dim {args.expert_dim}"
        fits = [ep for ep in range(1, lenders + 1) if _fits(ep, lenders, args)]
        yield facts.fault(EXPERT_DEGREE, allowed, f"write {_one_of(', '.join(map(str, fits)))}")


def _one_of(numbers: str) -> str:
    return f"one of {numbers}" if "," in numbers else numbers


def _fits(ep: int, lenders: int, args: Any) -> bool:
    if lenders % ep or args.n_experts % ep:
        return False
    ranks, local_experts = lenders // ep, args.n_experts // ep
    return ep == 1 or local_experts % ranks == 0 or (args.dim % ranks == 0 and args.expert_dim % ranks == 0)


def overlap_needs_a_pipeline_and_experts(facts: Facts) -> Iterator[Fault]:
    if facts.config.parallelism.pipeline_parallel_expert_parallel_overlap and (facts.ep == 1 or facts.pp == 1):
        allowed = "true with expert_parallel_degree > 1 and pipeline_parallel_degree > 1, as it hides all-to-alls"
        yield facts.fault(OVERLAP, allowed, "leave it out")


def communication_is_kept_with_overlap(facts: Facts) -> Iterator[Fault]:
    config = facts.config
    overlap = config.parallelism.pipeline_parallel_expert_parallel_overlap
    if config.activation_checkpoint.mode == "full_keep_comm" and not overlap:
        yield facts.fault("activation_checkpoint.mode", f"with {OVERLAP} only", 'write "full", or set it')


def experts_that_travel_are_compiled_in_parts(facts: Facts) -> Iterator[Fault]:
    """Refuse features that span a compiled block: the host reads the token counts of the all-to-all in its middle."""
    if facts.ep == 1 or not facts.compiles_model:
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
    quantized_messages_suit_the_job,
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
