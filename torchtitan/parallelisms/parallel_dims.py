"""Degrees of parallelism, validated, and the one DeviceMesh that they name.

Axes, outermost first: pp, dp_replicate, dp_shard, cp, tp. Neighbouring ranks talk most, so tensor parallel is
innermost (inside a node) and pipeline outermost. Only axes longer than 1 are on the mesh, and dp_shard always.
"""

from dataclasses import dataclass
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.parallelisms.degrees import check_borrowing, lenders, shards_of_ranks

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


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
        object.__setattr__(self, "dp_shard", shards_of_ranks(self.world_size, self.dp_shard, **other_degrees))
        check_borrowing(self.ep, self.dp_shard, self.cp, self.tp)

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def all_degrees(self) -> dict[str, int]:
        """Return the degrees of the mesh's axes, and that of expert parallel, which borrows from these."""
        return self.degrees | {"ep": self.ep}

    @property
    def dp(self) -> int:
        """Data-parallel degree: how many ranks read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that share parameters and sum gradients inside a replica: those of dp_shard, and those of cp, which see
        other tokens of the same samples.
        """
        return self.dp_shard * self.cp

    @property
    def lenders(self) -> int:
        """The ranks with different tokens of one replica and stage, from which expert parallel borrows."""
        return lenders(self.dp_shard, self.cp, self.tp)

    @property
    def readers(self) -> int:
        """Number of ranks that read the same samples and share the work on them."""
        return self.pp * self.cp * self.tp

    def build_mesh(self, device_type: str) -> DeviceMesh:
        axes = {axis: size for axis, size in self.degrees.items() if size > 1 or axis == "dp_shard"}
        assert prod(axes.values()) == self.world_size
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def build_expert_mesh(self, device_type: str) -> DeviceMesh | None:
        """The same ranks as experts see them: pp, dp_replicate, efsdp, ep, the last two instead of dp_shard, cp and tp.
        None without expert parallel. All ranks call this together.
        """
        if self.ep == 1:
            return None
        axes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "efsdp": self.lenders // self.ep, "ep": self.ep}
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def expert_dp_mesh(self, expert_mesh: DeviceMesh) -> DeviceMesh:
        """The mesh for fully_shard of the experts."""
        return expert_mesh["dp_replicate", "efsdp"] if self.dp_replicate > 1 else expert_mesh["efsdp"]

    def counts_group(self, expert_mesh: DeviceMesh) -> dist.ProcessGroup:
        """The ranks of this rank's axis ep in a second group, for messages that shall not queue behind the first one's
        tokens. All ranks call this together.
        """
        backend = dist.get_default_backend_for_device(expert_mesh.device_type)
        ranks = expert_mesh.mesh.view(-1, self.ep).tolist()
        return dist.new_subgroups_by_enumeration(ranks, backend=backend, group_desc="expert_counts")[0]

    def stage_groups(self, mesh: DeviceMesh) -> list[dist.ProcessGroup]:
        """Sums over these groups, one after the other, are over all ranks that have the same layers and, with sequence
        parallel, different tokens. They are those in which FSDP and tensor parallel talk, so nothing is set up for it.
        """
        dp_mesh = self.dp_mesh(mesh)
        groups = [dp_mesh.get_group(axis) for axis in range(dp_mesh.ndim)]
        groups += [mesh["tp"].get_group()] if self.tp > 1 else []
        return [group for group in groups if group.size() > 1]

    def dp_rank(self, mesh: DeviceMesh) -> int:
        """This rank's place among those that read different samples."""
        return self.rank_in(mesh, "dp_replicate") * self.dp_shard + self.rank_in(mesh, "dp_shard")

    def rank_in(self, mesh: DeviceMesh, axis: str) -> int:
        """This rank's place along an axis; 0 where the axis has one place."""
        return mesh[axis].get_local_rank() if self.degrees[axis] > 1 else 0

    def dp_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The mesh for fully_shard: dp_shard and cp as one axis, after dp_replicate where there are replicas."""
        # flattening again gives the same mesh; slicing a flattened axis out of the root is deprecated
        shard = mesh["dp_shard", "cp"]._flatten("fsdp") if self.cp > 1 else mesh["dp_shard"]
        return DeviceMesh._concatenate([mesh["dp_replicate"], shard]) if self.dp_replicate > 1 else shard

    def describe(self) -> str:
        longer = [f"{axis} {size}" for axis, size in self.degrees.items() if size > 1]
        longer += [f"ep {self.ep} (of {self.lenders} ranks)"] if self.ep > 1 else []
        return " x ".join(longer) or "one rank"
