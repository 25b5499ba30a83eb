"""Rules on what is cut inside a layer: heads, widths and vocabulary by tensor parallel, the sequence by both.

Rules on who attends to whom in training.
"""

from collections.abc import Iterator

from torchtitan.config.options import Fault
from torchtitan.core.constraints import LimitError
from torchtitan.losses.tasks import TASKS
from torchtitan.parallelisms import degrees
from torchtitan.rules.facts import Facts

RINGS = ("ring", "alltoall")
"""Ways of context parallel that pass keys and values on from rank to rank."""


def _split_sizes(facts: Facts) -> dict[str, int]:
    """What tensor parallel deals out; nothing where that is not known."""
    args = facts.args
    if facts.tp == 1 or args is None:
        return {}
    sizes = {
        "n_heads": args.n_heads,
        "n_kv_heads": args.num_kv_heads,
        "feed-forward width": getattr(args, "ffn_dim", 0),  # where every layer has experts there is none
        "vocab_size": args.vocab_size,
        "n_classes": getattr(args, "n_classes", 0),
    }
    return {name: size for name, size in sizes.items() if size}


def uneven(facts: Facts) -> list[str]:
    """Sizes that keep the model from being split so: what else depends on the degree can be judged when it is right."""
    return degrees.uneven(facts.tp, _split_sizes(facts))


def sizes_divide_over_tensor_parallel(facts: Facts) -> Iterator[Fault]:
    yield from facts.judged(degrees.check_split, facts.tp, _split_sizes(facts))


def sequence_divides(facts: Facts) -> Iterator[Fault]:
    """A degree that the model does not allow asks for nothing: the sequence would only be fitted to it in vain."""
    if _heads_limit(facts):
        return
    needs = facts.needs_of_a_sequence(split=facts.sequence_parallel and not uneven(facts))
    for key, length in facts.lengths.items():
        yield from facts.judged(degrees.check_sequence, key, length, needs)


def _heads_limit(facts: Facts) -> LimitError | None:
    """Of the heads that ulysses deals out, where it cannot."""
    args, method = facts.args, facts.config.parallelism.context_parallel_rotate_method
    if facts.cp == 1 or method != "ulysses" or args is None or args.n_heads % facts.tp:
        return None
    of = f" (n_heads {args.n_heads} / tensor_parallel {facts.tp})" * (facts.tp > 1)
    try:
        degrees.check_dealt_heads(facts.cp, args.n_heads // facts.tp, of)
    except LimitError as error:
        return error
    return None


def heads_divide_over_context_parallel(facts: Facts) -> Iterator[Fault]:
    if error := _heads_limit(facts):
        yield facts.refused(error)


def dropped_attention_has_whole_rows(facts: Facts) -> Iterator[Fault]:
    if facts.cp > 1 and getattr(facts.args, "attention_dropout", False):
        yield from facts.judged(degrees.check_dropped, facts.config.parallelism.context_parallel_rotate_method)


def ring_is_not_compiled(facts: Facts) -> Iterator[Fault]:
    method = facts.config.parallelism.context_parallel_rotate_method
    if facts.cp > 1 and method in RINGS and facts.compiles_model:
        allowed = '"allgather" or "ulysses" with a compiled model, whose graph has no messages between two ranks'
        remedy = 'write "allgather", or compile.enable = false'
        yield facts.fault("parallelism.context_parallel_rotate_method", allowed, remedy)


def rings_have_their_own_attention(facts: Facts) -> Iterator[Fault]:
    method = facts.config.parallelism.context_parallel_rotate_method
    if facts.cp > 1 and method in RINGS and facts.config.model.attention_backend == "flex":
        allowed = f'"auto" or "sdpa" with context_parallel_rotate_method = "{method}", which joins attention of pieces'
        yield facts.fault("model.attention_backend", allowed, 'write "auto"')


def rings_carry_no_window(facts: Facts) -> Iterator[Fault]:
    """What travels round is attended to piece by piece, and a window would cut through the pieces."""
    method, window = facts.config.parallelism.context_parallel_rotate_method, getattr(facts.args, "sliding_window", 0)
    if facts.cp > 1 and method in RINGS and window:
        allowed = f'"allgather" or "ulysses" with a sliding window (of {window} tokens)'
        remedy = 'write "allgather", or model.overrides = {sliding_window = 0}'
        yield facts.fault("parallelism.context_parallel_rotate_method", allowed, remedy)


def async_tensor_parallel(facts: Facts) -> Iterator[Fault]:
    if facts.config.parallelism.enable_async_tensor_parallel and facts.tp > 1:
        yield from facts.judged(degrees.check_async, facts.device, facts.compiles_model, facts.sequence_parallel)


KEY = "model.s2_group_size"


def groups_are_parts_of_a_sequence(facts: Facts) -> Iterator[Fault]:
    size, longest = facts.config.model.s2_group_size, facts.config.training.seq_len
    if size >= longest:
        allowed = f"less than training.seq_len = {longest}, of which groups are parts"
        yield facts.fault(KEY, allowed, f"write {longest // 8 * 2 or 2}, or 0 for attention to all of it")
    elif size % 2:
        yield facts.fault(KEY, "an even number, by half of which groups are shifted", f"write {max(size - 1, 2)}")


def groups_fit_the_model(facts: Facts) -> Iterator[Fault]:
    """Groups hide of plainly causal attention what lies in others."""
    args, name = facts.args, facts.config.model.name
    if not facts.config.model.s2_group_size or args is None:
        return
    others = {"sliding_window": "a sliding window", "attention_dropout": "attention_dropout"}
    others = {key: what for key, what in others.items() if getattr(args, key, 0)}
    for key, what in others.items():
        remedy = f"write 0, or model.overrides = {{{key} = 0}}"
        yield facts.fault(KEY, f"0 for a model with {what} ({getattr(args, key)})", remedy)
    if not getattr(args, "causal", True):
        yield facts.fault(KEY, f"0 for {name}, whose tokens see those behind them", "write 0, or train a decoder")
    if args.n_heads % 2:
        allowed = f"0 for a model with n_heads = {args.n_heads}, an odd number, of which half attend in shifted groups"
        yield facts.fault(KEY, allowed, "write 0")


def groups_are_of_training_alone(facts: Facts) -> Iterator[Fault]:
    """What evaluation says of the model, seeing everything, is not to be set beside what training does."""
    kind = facts.config.task.kind
    if not facts.config.model.s2_group_size or kind not in TASKS:
        return
    if TASKS[kind].in_lanes or TASKS[kind].together > 1:
        why = "reads again what a cache has kept" if TASKS[kind].in_lanes else "sets answers beside a reference"
        yield facts.fault(KEY, f'0 with task.kind = "{kind}", which {why} as evaluation sees them', "write 0")


def groups_have_all_keys(facts: Facts) -> Iterator[Fault]:
    if facts.cp > 1 and facts.config.model.s2_group_size:
        yield from facts.judged(degrees.check_shifted, facts.config.parallelism.context_parallel_rotate_method)
