"""The degrees of parallelism: their divisibility rules, and the validated degrees with their DeviceMesh.

A rule returns derived values, if there are any, and raises a LimitError with the message otherwise.

Axes, outermost first: pp, dp_replicate, dp_shard, cp, tp. Tensor parallel communicates most, so it is innermost (ranks
of one node); the pipeline is outermost. The mesh has the axes longer than 1, and always dp_shard.

Torch is imported where a mesh is built, so that checking a job and parallelizing a model share the rules.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from torchtitan.core.errors import LimitError
from torchtitan.torch_internals.meshes import concatenated, flattened

DEGREES, SEQ_LEN = "parallelism.", "training.seq_len (or validation.seq_len)"
NEEDS_DEGREE = {
    "tensor_parallel_degree": (
        "disable_sequence_parallel",
        "disable_loss_parallel",
        "enable_async_tensor_parallel",
    ),
    "context_parallel_degree": ("context_parallel_load_balancer", "context_parallel_rotate_method"),
    "pipeline_parallel_degree": (
        "module_fqns_per_model_part",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_schedule",
        "pipeline_parallel_schedule_csv",
        "pipeline_parallel_microbatch_size",
    ),
}
"""Options that do nothing while their degree is 1."""
RINGS = ("alltoall", "ring")
"""Methods of context parallel that pass keys and values from rank to rank, and merge the results over each part."""


def resolve_shard_degree(world_size: int, dp_shard: int, *, dp_replicate: int, cp: int, tp: int, pp: int) -> int:
    """Return the number of data-parallel shards; -1 means all ranks that the other degrees leave."""
    key, ranks = DEGREES + "data_parallel_shard_degree", f"{world_size} rank{'s' * (world_size > 1)}"
    other_degrees = {"data_parallel_replicate": dp_replicate, "context_parallel": cp}
    other_degrees |= {"tensor_parallel": tp, "pipeline_parallel": pp}
    product, longer = math.prod(other_degrees.values()), [f"{name} {n}" for name, n in other_degrees.items() if n > 1]
    if dp_shard == 0:
        raise LimitError(key, 0, "at least 1, or -1 for the ranks that are left", "write -1")
    if dp_shard == -1 and world_size % product:
        allowed = f"ranks that can be divided by {' x '.join(longer)}" + f" = {product}" * (len(longer) > 1)
        raise LimitError(key, ranks, allowed, f"start a multiple of {product} ranks, or lower a degree")
    if dp_shard != -1 and dp_shard * product != world_size:
        arithmetic = " x ".join([f"data_parallel_shard {dp_shard}", *longer]) + f" = {dp_shard * product}"
        remedy = f"start {dp_shard * product} ranks, or write -1 to shard over those that are left"
        raise LimitError(key, arithmetic, f"degrees that multiply to the number of ranks, {world_size}", remedy)
    return world_size // product if dp_shard == -1 else dp_shard


def expert_shards(dp_shard: int, cp: int, tp: int, ep: int) -> float:
    """Return the number of ranks over which FSDP spreads a rank's experts."""
    return expert_pool_size(dp_shard, cp, tp if ep > 1 else 1) / ep


def expert_pool_size(dp_shard: int, cp: int, tp: int) -> int:
    """Return the number of ranks with different tokens in one replica and stage, which expert parallel can use."""
    return dp_shard * cp * tp


def splits_features(experts: int, shards: int) -> bool:
    """Return True if FSDP shards stacks of this many experts along their features and not by experts.

    Every shard is padded to the largest. By experts they would take more than a quarter of memory in addition.
    """
    return -(-experts // shards) * shards > 1.25 * experts


def check_num_experts(ep: int, experts: int, pool_size: int | None = None) -> None:
    """Check that the experts divide evenly over ep ranks. `pool_size`: the number of usable ranks, if known."""
    if experts % ep:
        allowed = f"a divisor of the {experts} experts and the ranks that it borrows"
        fits = math.gcd(experts, pool_size or experts)
        remedy = f"write one of {_listed(experts)}, and lend it a multiple of as many ranks"
        remedy = f"write one of {_listed(fits)}" if fits > 1 else remedy
        raise LimitError(DEGREES + "expert_parallel_degree", ep, allowed, remedy)


def check_expert_degree(ep: int, dp_shard: int, cp: int, tp: int, experts: int = 0) -> None:
    """Check that ep divides the number of usable ranks. `experts`: their number in a layer, if known."""
    pool_size = expert_pool_size(dp_shard, cp, tp)
    if pool_size % ep:
        product = f"data_parallel_shard {dp_shard} x context_parallel {cp} x tensor_parallel {tp}"
        allowed = f"a divisor of {product} = {pool_size}, the ranks that it borrows"
        fits = _listed(math.gcd(experts, pool_size))
        fits = f"one of {fits}" if "," in fits else fits
        remedy = f"write {fits}, or lend it a multiple of {ep} ranks"
        raise LimitError(DEGREES + "expert_parallel_degree", ep, allowed, remedy)


def check_even_split(tp: int, sizes: Mapping[str, int]) -> None:
    """Check that all sizes are divisible by tp: full heads, and equal shards on all ranks (DTensor would allow uneven
    ones).
    """
    if indivisible := indivisible_sizes(tp, sizes):
        other_sizes = ", ".join(f"{name} {size}" for name, size in sizes.items() if name not in indivisible)
        divided = ("these" if len(indivisible) > 1 else "it") + f" and {other_sizes}" * bool(other_sizes)
        remedy = "write one of these"
        if indivisible == ["vocab_size"]:
            remedy += f", or fill it up: model.overrides = {{vocab_size = {-(-sizes['vocab_size'] // tp) * tp}}}"
        raise LimitError(
            DEGREES + "tensor_parallel_degree",
            f"{tp}, which does not divide {' and '.join(f'{name} {sizes[name]}' for name in indivisible)}",
            f"a divisor of {divided}: {_listed(math.gcd(*sizes.values()))}",
            remedy,
        )


def split_sizes(args: Any) -> dict[str, int]:
    """Return the sizes of a model, by their names in messages, that tensor parallel splits."""
    sizes = {
        "n_heads": args.n_heads,
        "n_kv_heads": args.num_kv_heads,
        "global_kv_heads": getattr(args, "global_kv_heads", 0),
        "delta_key_heads": getattr(args, "delta_key_heads", 0),
        "ssm_heads": getattr(args, "ssm_heads", 0),
        "feed-forward width": getattr(args, "ffn_dim", 0),  # 0 if every layer has experts
        "vocab_size": args.vocab_size,
        "n_classes": getattr(args, "n_classes", 0),
    }
    return {name: size for name, size in sizes.items() if size}


def indivisible_sizes(tp: int, sizes: Mapping[str, int]) -> list[str]:
    """Return the names of the sizes that are not divisible by tp."""
    return [name for name, size in sizes.items() if size % tp]


def is_load_balanced(method: str, load_balance: bool) -> bool:
    """Return True if the head-tail layout balances the load. Ulysses needs no balancing: all ranks have equal work."""
    return load_balance and method != "ulysses"


def sequence_multiples(cp: int, tp: int, *, load_balanced: bool, sequence_parallel: bool) -> dict[str, int]:
    """Return the numbers that a sequence's length must be a multiple of, by their descriptions for messages."""
    needs = {}
    if cp > 1 and load_balanced:
        needs[f"2 x context_parallel {cp} (a head and a tail each)"] = 2 * cp
    elif cp > 1:
        needs[f"context_parallel {cp}"] = cp
    if tp > 1 and sequence_parallel:
        over = f"context_parallel {cp} x " * (cp > 1) + f"tensor_parallel {tp}"
        needs[f"{over} (sequence parallel)"] = cp * tp
    return needs


def check_sequence_length(option: str, length: int, needs: Mapping[str, int]) -> None:
    """Check that a sequence's length is a multiple of all `needs` (sequence_multiples). `option`: for the message."""
    multiple = math.lcm(*needs.values())
    if length % multiple:
        allowed = f"a multiple of {' and of '.join(needs)}" + f", so of {multiple}" * (len(needs) > 1)
        below = length // multiple * multiple
        raise LimitError(option, length, allowed, "write " + f"{below} or " * bool(below) + str(below + multiple))


def check_ulysses_heads(cp: int, heads: int, total_heads: str = "") -> None:
    """Check that cp divides the query heads of a tensor-parallel rank, which Ulysses distributes.

    `total_heads`: text for the message that gives the total number of heads.
    """
    if heads % cp:
        allowed = f'with "ulysses" a divisor of the {heads} query heads of a rank{total_heads}: {_listed(heads)}'
        remedy = f'write one of these, or {DEGREES}context_parallel_rotate_method = "allgather"'
        raise LimitError(DEGREES + "context_parallel_degree", cp, allowed, remedy)


def check_attention_dropout(method: str) -> None:
    """Check the context-parallel method of a model with attention dropout.

    Dropout depends on head, query and key, so it needs full rows of probabilities under the original heads. The ring
    methods have parts of rows, and Ulysses redistributes heads.
    """
    if method != "allgather":
        allowed = '"allgather" for a model with attention_dropout, which needs whole rows of probabilities'
        key, remedy = DEGREES + "context_parallel_rotate_method", 'write "allgather", or attention_dropout = 0.0'
        raise LimitError(key, f'"{method}"', allowed, f"{remedy} in model.overrides")


def check_s2_attention(method: str) -> None:
    """Check the context-parallel method of shifted sparse attention (S2).

    The head's index decides which tokens it sees. The ring methods replace the model's kernel, and Ulysses
    redistributes heads.
    """
    if method != "allgather":
        allowed = '"allgather" with model.s2_group_size, under which heads attend in groups by their numbers'
        key, remedy = DEGREES + "context_parallel_rotate_method", 'write "allgather", or model.s2_group_size = 0'
        raise LimitError(key, f'"{method}"', allowed, remedy)


def check_async_tensor_parallel(device: str, compiled: bool, sequence_parallel: bool) -> None:
    """Check the requirements of async tensor parallel.

    The compiler overlaps the collectives of sequence parallel with matrix products, through memory shared by the GPUs.
    """
    needs = {
        "GPUs": device == "cuda",
        "a compiled model (compile.enable)": compiled,
        "sequence parallel (no disable_sequence_parallel)": sequence_parallel,
    }
    if missing := [name for name, is_met in needs.items() if not is_met]:
        allowed, key = f"true only with {', '.join(needs)}", DEGREES + "enable_async_tensor_parallel"
        raise LimitError(key, "true", allowed, f"add {' and '.join(missing)}, or leave it out")


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _listed(number: int) -> str:
    return ", ".join(map(str, divisors(number)))


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
AXIS_OPTIONS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
}
"""Axis, or expert parallel, -> its option in the section parallelism."""


@dataclass(frozen=True)
class ParallelDims:
    world_size: int
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        other_degrees = dict(dp_replicate=self.dp_replicate, cp=self.cp, tp=self.tp, pp=self.pp)
        object.__setattr__(self, "dp_shard", resolve_shard_degree(self.world_size, self.dp_shard, **other_degrees))
        check_expert_degree(self.ep, self.dp_shard, self.cp, self.tp)

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def all_degrees(self) -> dict[str, int]:
        """Return the degrees of the mesh's axes and of expert parallel, which uses ranks of these axes."""
        return self.degrees | {"ep": self.ep}

    @property
    def dp(self) -> int:
        """Return the data-parallel degree: the number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Return the number of ranks over which FSDP shards parameters and reduces gradients: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def expert_pool_size(self) -> int:
        """Return the number of ranks in one replica and stage that expert parallel can use."""
        return expert_pool_size(self.dp_shard, self.cp, self.tp)

    @property
    def model_parallel_size(self) -> int:
        """Return the number of ranks that read the same samples and share the work on them."""
        return self.pp * self.cp * self.tp

    def build_mesh(self, device_type: str) -> "DeviceMesh":
        from torch.distributed.device_mesh import init_device_mesh

        axes = {axis: size for axis, size in self.degrees.items() if size > 1 or axis == "dp_shard"}
        assert prod(axes.values()) == self.world_size
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def build_expert_mesh(self, device_type: str) -> "DeviceMesh | None":
        """Return the mesh for experts: the same ranks with axes pp, dp_replicate, efsdp and ep.

        efsdp and ep replace dp_shard, cp and tp. Returns None without expert parallel. It is a collective call.
        """
        from torch.distributed.device_mesh import init_device_mesh

        if self.ep == 1:
            return None
        axes = {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "efsdp": self.expert_pool_size // self.ep,
            "ep": self.ep,
        }
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def expert_dp_mesh(self, expert_mesh: "DeviceMesh") -> "DeviceMesh":
        """Return the mesh for fully_shard of the experts."""
        return expert_mesh["dp_replicate", "efsdp"] if self.dp_replicate > 1 else expert_mesh["efsdp"]

    def build_counts_group(self, expert_mesh: "DeviceMesh") -> "ProcessGroup":
        """Create a second process group of this rank's ep axis, so that counts do not queue after the tokens of the
        first group. It is a collective call.
        """
        from torch import distributed as dist

        backend = dist.get_default_backend_for_device(expert_mesh.device_type)
        ranks = expert_mesh.mesh.view(-1, self.ep).tolist()
        return dist.new_subgroups_by_enumeration(ranks, backend=backend, group_desc="expert_counts")[0]

    def stage_groups(self, mesh: "DeviceMesh") -> "list[ProcessGroup]":
        """Return groups to all-reduce over, one after the other, to sum over all ranks with the same layers.

        With sequence parallel these ranks have different tokens. FSDP and tensor parallel use the same groups, so no
        new communicators are created.
        """
        dp_mesh = self.dp_mesh(mesh)
        groups = [dp_mesh.get_group(axis) for axis in range(dp_mesh.ndim)]
        groups += [mesh["tp"].get_group()] if self.tp > 1 else []
        return [group for group in groups if group.size() > 1]

    def dp_rank(self, mesh: "DeviceMesh") -> int:
        """Return this rank's index among the ranks that read different samples."""
        return self.axis_rank(mesh, "dp_replicate") * self.dp_shard + self.axis_rank(mesh, "dp_shard")

    def axis_rank(self, mesh: "DeviceMesh", axis: str) -> int:
        """Return this rank's index along an axis; 0 if the degree is 1."""
        return mesh[axis].get_local_rank() if self.degrees[axis] > 1 else 0

    def dp_mesh(self, mesh: "DeviceMesh") -> "DeviceMesh":
        """Return the mesh for fully_shard: dp_shard and cp as one axis, after dp_replicate if that is above 1."""

        # flattening repeatedly gives the same mesh; slicing a flattened axis out of the root is deprecated
        shard = flattened(mesh["dp_shard", "cp"], "fsdp") if self.cp > 1 else mesh["dp_shard"]
        return concatenated([mesh["dp_replicate"], shard]) if self.dp_replicate > 1 else shard

    def describe(self) -> str:
        longer = [f"{axis} {size}" for axis, size in self.degrees.items() if size > 1]
        longer += [f"ep {self.ep} (of {self.expert_pool_size} ranks)"] if self.ep > 1 else []
        return " x ".join(longer) or "one rank"
