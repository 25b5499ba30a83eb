"""The validated degrees of parallelism and their DeviceMesh.

Axes, outermost first: pp, dp_replicate, dp_shard, cp, tp. Tensor parallel communicates most, so it is innermost (ranks
of one node); the pipeline is outermost. The mesh has the axes longer than 1, and always dp_shard.

Torch is imported where a mesh is built, as a job's degrees are judged without it.
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from torchtitan.parallelisms.degrees import check_expert_degree, expert_pool_size, resolve_shard_degree
from torchtitan.torch_internals.meshes import concatenated, flattened

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

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
