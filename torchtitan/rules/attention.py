"""Rules on who attends to whom in training."""

from collections.abc import Iterator

from torchtitan.config.options import Fault
from torchtitan.parallelisms import degrees
from torchtitan.rules.facts import Facts
from torchtitan.tasks import TASKS

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
