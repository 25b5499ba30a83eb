"""Degrees of parallelism, validated, and the one DeviceMesh that they name.

Axes, outermost first: pp, dp_replicate, dp_shard, cp, tp. Neighbouring ranks talk most, so tensor parallel is
innermost (inside a node) and pipeline outermost. Only axes longer than 1 are on the mesh, and dp_shard always.
"""

from dataclasses import dataclass
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelDims:
    world_size: int
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        others = self.dp_replicate * self.cp * self.tp * self.pp
        if self.dp_shard == -1:
            if self.world_size % others:
                raise ValueError(
                    f"{self.world_size} ranks cannot be divided into dp_replicate {self.dp_replicate} x cp {self.cp} x "
                    f"tp {self.tp} x pp {self.pp} = {others}; use a multiple of {others} ranks or smaller degrees"
                )
            object.__setattr__(self, "dp_shard", self.world_size // others)
        if others * self.dp_shard != self.world_size:
            raise ValueError(
                f"pp {self.pp} x dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard} x cp {self.cp} x "
                f"tp {self.tp} = {others * self.dp_shard}, but there are {self.world_size} ranks; "
                "data_parallel_shard_degree = -1 takes what is left over"
            )

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def dp(self) -> int:
        """Data-parallel degree: how many ranks read different samples."""
        return self.dp_replicate * self.dp_shard

    def build_mesh(self, device_type: str) -> DeviceMesh:
        axes = {axis: size for axis, size in self.degrees.items() if size > 1 or axis == "dp_shard"}
        assert prod(axes.values()) == self.world_size
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def dp_rank(self, mesh: DeviceMesh) -> int:
        """This rank's place among those that read different samples."""
        replicate = mesh["dp_replicate"].get_local_rank() if self.dp_replicate > 1 else 0
        return replicate * self.dp_shard + mesh["dp_shard"].get_local_rank()

    def dp_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The mesh for fully_shard: [dp_shard], or [dp_replicate, dp_shard] where there are replicas."""
        return mesh["dp_replicate", "dp_shard"] if self.dp_replicate > 1 else mesh["dp_shard"]

    def describe(self) -> str:
        longer = [f"{axis} {size}" for axis, size in self.degrees.items() if size > 1]
        return " x ".join(longer) or "one rank"
