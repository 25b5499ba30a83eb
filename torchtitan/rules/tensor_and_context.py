"""Rules on what is cut inside a layer: heads, widths and vocabulary by tensor parallel, the sequence by both."""

import math
from collections.abc import Iterator

from torchtitan.options import Fault
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
    }
    return {name: size for name, size in sizes.items() if size}


def uneven(facts: Facts) -> list[str]:
    """Sizes that keep the model from being split so: what else depends on the degree can be judged when it is right."""
    return [name for name, size in _split_sizes(facts).items() if size % facts.tp]


def sizes_divide_over_tensor_parallel(facts: Facts) -> Iterator[Fault]:
    """Each rank has whole heads, and as many columns and rows as any other, where DTensor would deal unevenly."""
    args, tp, sizes, wrong = facts.args, facts.tp, _split_sizes(facts), uneven(facts)
    if wrong:
        told = ", ".join(f"{name} {size}" for name, size in sizes.items())
        remedy = "write one of these"
        if wrong == ["vocab_size"]:
            remedy += f", or fill it up: model.overrides = {{vocab_size = {-(-args.vocab_size // tp) * tp}}}"
        yield facts.fault(
            "parallelism.tensor_parallel_degree",
            f"what divides {told}, as ranks do not get uneven shares: {divisors(math.gcd(*sizes.values()))}",
            remedy,
            given=f"{tp}, which does not divide {' and '.join(f'{name} {sizes[name]}' for name in wrong)}",
        )


def sequence_divides(facts: Facts) -> Iterator[Fault]:
    """The shares are equally long; where work is levelled, each is a piece of the head and one of the tail. A degree
    that the model does not allow asks for nothing: the sequence would only be fitted to it in vain.
    """
    if _deals_heads_unevenly(facts):
        return
    needs, degrees = {}, facts.config.parallelism
    levelled = (
        degrees.context_parallel_load_balancer == "headtail" and degrees.context_parallel_rotate_method != "ulysses"
    )
    if facts.cp > 1 and levelled:
        needs[f"2 x context_parallel {facts.cp} (a head and a tail each)"] = 2 * facts.cp
    elif facts.cp > 1:
        needs[f"context_parallel {facts.cp}"] = facts.cp
    if facts.sequence_parallel and not uneven(facts):
        over = f"context_parallel {facts.cp} x " * (facts.cp > 1) + f"tensor_parallel {facts.tp}"
        needs[f"{over} (sequence parallel)"] = facts.cp * facts.tp
    if not needs:
        return
    multiple, training, validation = math.lcm(*needs.values()), facts.config.training, facts.config.validation
    lengths = {"training.seq_len": training.seq_len}
    lengths |= {"validation.seq_len": validation.seq_len} if validation.enable and validation.seq_len else {}
    for key, length in lengths.items():
        if length % multiple:
            allowed = f"a multiple of {' and of '.join(needs)}" + f", so of {multiple}" * (len(needs) > 1)
            below = length // multiple * multiple
            yield facts.fault(key, allowed, "write " + f"{below} or " * bool(below) + str(below + multiple))


def _deals_heads_unevenly(facts: Facts) -> bool:
    """Ulysses deals out the heads that tensor parallel has left on a rank."""
    args, cp, method = facts.args, facts.cp, facts.config.parallelism.context_parallel_rotate_method
    if cp == 1 or method != "ulysses" or args is None or args.n_heads % facts.tp:
        return False
    return args.n_heads // facts.tp % cp != 0


def heads_divide_over_context_parallel(facts: Facts) -> Iterator[Fault]:
    if _deals_heads_unevenly(facts):
        args, heads = facts.args, facts.args.n_heads // facts.tp
        of = f" (n_heads {args.n_heads} / tensor_parallel {facts.tp})" * (facts.tp > 1)
        allowed = f'with "ulysses" what divides the {heads} query heads of a rank{of}: {divisors(heads)}'
        remedy = 'write one of these, or parallelism.context_parallel_rotate_method = "allgather"'
        yield facts.fault("parallelism.context_parallel_degree", allowed, remedy)


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


def async_tensor_parallel(facts: Facts) -> Iterator[Fault]:
    """The compiler fuses the collectives of sequence parallel into matrix products, by memory that GPUs share."""
    if not facts.config.parallelism.enable_async_tensor_parallel or facts.tp == 1:
        return
    needs = {
        "GPUs": facts.device == "cuda",
        "a compiled model (compile.enable)": facts.compiles_model,
        "sequence parallel (no disable_sequence_parallel)": facts.sequence_parallel,
    }
    if not all(needs.values()):
        missing = " and ".join(name for name, there in needs.items() if not there)
        allowed = f"true only with {', '.join(needs)}"
        yield facts.fault("parallelism.enable_async_tensor_parallel", allowed, f"add {missing}, or leave it out")


def divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
