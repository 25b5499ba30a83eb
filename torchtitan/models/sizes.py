"""What sizes of any family have to be, in one wording. No torch. All raise JobError."""

from typing import Any

from torchtitan.errors import JobError


def check_positive(args: Any, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 1:
            raise JobError(f"{name} = {getattr(args, name)}: must be at least 1")


def check_not_negative(args: Any, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 0:
            raise JobError(f"{name} = {getattr(args, name)}: must not be negative")


def check_turned(args: Any, name: str) -> None:
    """Of a width that rotary embeddings turn."""
    if getattr(args, name) % 2:
        raise JobError(f"{name} = {getattr(args, name)}: must be even, as rotary embeddings turn pairs")


def check_shares(args: Any, *names: str) -> None:
    """Of what is dropped."""
    for name in names:
        if not 0 <= getattr(args, name) < 1:
            raise JobError(f"{name} = {getattr(args, name)}: must be at least 0 and less than 1")


def check_whole_heads(args: Any) -> None:
    """Where heads add up to the model's width."""
    if args.dim % args.n_heads:
        raise JobError(f"dim = {args.dim} with n_heads = {args.n_heads}: dim must be a multiple of n_heads")


def check_grouped_heads(args: Any) -> None:
    if args.num_kv_heads < 1 or args.n_heads % args.num_kv_heads:
        raise JobError(
            f"n_kv_heads = {args.n_kv_heads} with n_heads = {args.n_heads}: every key/value head serves the same "
            f"number of query heads, so n_kv_heads must divide n_heads"
        )
