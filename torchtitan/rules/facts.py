"""What the rules look at: a job, where it is to run, and what follows from both. Each is worked out once."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Literal

from torchtitan.config import JobConfig
from torchtitan.datasets.tokenizer import Tokenizer, build_tokenizer
from torchtitan.lr_shapes import LRSchedule
from torchtitan.models import SIZES
from torchtitan.options import Fault, show
from torchtitan.parallelisms.schedule_actions import ScheduleTableError, Table, load_schedule_csv

Device = Literal["cpu", "cuda"]


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the rules look at: the job, where it is to run, and what follows from both."""

    config: JobConfig
    world_size: int
    device: Device

    def fault(self, key: str, allowed: str, remedy: str, given: str = "") -> Fault:
        """A fault of the job's option `key`, with its value unless `given` says it better."""
        value: Any = self.config
        for part in key.split("."):
            value = getattr(value, part)
        files = " + ".join(self.config.job.config_file) or "the job"
        return Fault(files, key, given or show(value), allowed, remedy)

    @cached_property
    def shard(self) -> int | None:
        """Data-parallel shards, with -1 worked out; None where the degrees do not fit the ranks."""
        degree, others = self.config.parallelism.data_parallel_shard_degree, math.prod(self.other_degrees.values())
        if degree == -1:
            return self.world_size // others if self.world_size % others == 0 else None
        return degree if degree * others == self.world_size else None

    @cached_property
    def other_degrees(self) -> dict[str, int]:
        degrees = self.config.parallelism
        return {
            "data_parallel_replicate_degree": degrees.data_parallel_replicate_degree,
            "context_parallel_degree": degrees.context_parallel_degree,
            "tensor_parallel_degree": degrees.tensor_parallel_degree,
            "pipeline_parallel_degree": degrees.pipeline_parallel_degree,
        }

    @property
    def replicas(self) -> int:
        return self.config.parallelism.data_parallel_replicate_degree

    @property
    def tp(self) -> int:
        return self.config.parallelism.tensor_parallel_degree

    @property
    def cp(self) -> int:
        return self.config.parallelism.context_parallel_degree

    @property
    def pp(self) -> int:
        return self.config.parallelism.pipeline_parallel_degree

    @property
    def ep(self) -> int:
        return self.config.parallelism.expert_parallel_degree

    @cached_property
    def lenders(self) -> int | None:
        """Ranks with different tokens in a replica and stage, from which expert parallel borrows."""
        return self.shard and self.shard * self.cp * self.tp

    @cached_property
    def fsdp_shards(self) -> int | None:
        """Ranks over which fully_shard spreads parameters; the ranks of a sequence are among them."""
        return self.shard and self.shard * self.cp

    @cached_property
    def microbatches(self) -> int | None:
        """Of a local batch in the pipeline; None where it does not divide."""
        local, size = self.config.training.local_batch_size, self.config.parallelism.pipeline_parallel_microbatch_size
        return local // size if local % size == 0 else None

    @cached_property
    def schedule_table(self) -> Table | ScheduleTableError | None:
        """The job's own schedule, or what is wrong with it; None where there is none, or nothing to judge it by."""
        degrees = self.config.parallelism
        if self.pp == 1 or degrees.pipeline_parallel_schedule_csv is None or self.microbatches is None:
            return None
        named = degrees.module_fqns_per_model_part
        num_stages = None if named is None else len(named)
        try:
            return load_schedule_csv(degrees.pipeline_parallel_schedule_csv, self.pp, num_stages, self.microbatches)
        except ScheduleTableError as error:
            return error

    @property
    def sequence_parallel(self) -> bool:
        return self.tp > 1 and not self.config.parallelism.disable_sequence_parallel

    @property
    def compiles_model(self) -> bool:
        return self.config.compile.enable and "model" in self.config.compile.components

    @cached_property
    def samples(self) -> int | None:
        """Samples of a forward pass over all data-parallel ranks."""
        dp = self.shard and self.shard * self.replicas
        return dp and dp * self.config.training.local_batch_size

    @cached_property
    def args(self) -> Any | None:
        """The model's sizes; None where name, flavor or overrides are wrong."""
        sizes = SIZES.get(self.config.model.name, {}).get(self.config.model.flavor)
        try:
            args = sizes and dataclasses.replace(sizes, **self.config.model.overrides)
            return args if args and args.num_parameters else None
        except (TypeError, ValueError, OverflowError):
            return None

    @property
    def expert_layers(self) -> int:
        """Layers with experts, those of multi-token prediction among them; 0 where the model's sizes are wrong."""
        if not hasattr(self.args, "n_experts"):
            return 0
        dense, depths = (getattr(self.args, name, 0) for name in ("n_dense_layers", "n_mtp_layers"))
        return self.args.n_layers - dense + depths

    @property
    def experts(self) -> int:
        """Of a layer; 0 where no layer of the model has any."""
        return self.args.n_experts if self.expert_layers else 0

    @cached_property
    def tokenizer(self) -> Tokenizer | OSError | ValueError:
        try:
            return build_tokenizer(self.config.model.tokenizer_path)
        except (OSError, ValueError) as error:  # beside TokenizerError, those of names that no file can have
            return error

    @cached_property
    def schedule(self) -> LRSchedule:
        """Raises ScheduleError."""
        shape = dataclasses.asdict(self.config.lr_scheduler)
        return LRSchedule(**shape | {"total_steps": shape["total_steps"] or self.config.training.steps})


Rule = Callable[[Facts], Iterator[Fault]]
