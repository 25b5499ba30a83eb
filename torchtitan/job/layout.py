"""The distribution of a job over its ranks, and the rows of its batches.

Options count samples. For losses that compare two answers, a sample is a pair. Batches, data positions and packs count
rows; a pair has two.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from torchtitan.config.sections.model import Compile, Parallelism
from torchtitan.config.sections.training import Task, Training, Validation
from torchtitan.core.errors import JobError, LimitError
from torchtitan.losses.tasks import rows_per_sample
from torchtitan.parallelisms import degrees
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.parallelisms.pipeline.cut import check_stages, choose_num_stages, num_microbatches, split_layers

Section = Literal["training", "validation"]
_split_layers = cache(split_layers)


@dataclass(frozen=True)
class JobLayout:
    """Degrees, rows and microbatches of a job with these sections on `world_size` ranks."""

    parallelism: Parallelism
    training: Training
    validation: Validation
    task: Task
    compile: Compile
    world_size: int

    # Degrees

    @cached_property
    def dims(self) -> ParallelDims:
        """The degrees, with -1 resolved. Raises LimitError if they do not fit the ranks."""
        return ParallelDims(
            world_size=self.world_size,
            dp_replicate=self.replicas,
            dp_shard=self.parallelism.data_parallel_shard_degree,
            cp=self.cp,
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
        )

    @property
    def replicas(self) -> int:
        return self.parallelism.data_parallel_replicate_degree

    @cached_property
    def shards(self) -> int:
        """Data-parallel shards. Raises LimitError if the degrees do not fit the ranks."""
        degree = self.parallelism.data_parallel_shard_degree
        return degrees.resolve_shard_degree(
            self.world_size, degree, dp_replicate=self.replicas, cp=self.cp, tp=self.tp, pp=self.pp
        )

    @property
    def fsdp_shards(self) -> int:
        """Ranks over which fully_shard spreads parameters; the ranks of a sequence are among them."""
        return self.shards * self.cp

    @property
    def expert_pool(self) -> int:
        """Ranks with different tokens in a replica and stage, from which expert parallel borrows."""
        return degrees.expert_pool_size(self.shards, self.cp, self.tp)

    @property
    def tp(self) -> int:
        return self.parallelism.tensor_parallel_degree

    @property
    def cp(self) -> int:
        return self.parallelism.context_parallel_degree

    @property
    def pp(self) -> int:
        return self.parallelism.pipeline_parallel_degree

    @property
    def ep(self) -> int:
        return self.parallelism.expert_parallel_degree

    @property
    def sequence_parallel(self) -> bool:
        return self.tp > 1 and not self.parallelism.disable_sequence_parallel

    @property
    def vocabulary_shards(self) -> int:
        """Ranks over which the logits are split."""
        return 1 if self.parallelism.disable_loss_parallel else self.tp

    def sequence_needs(self, split: bool) -> dict[str, int]:
        """Return the required divisors of a sequence's length, by reason. `split`: sequence parallel also splits it."""
        options = self.parallelism
        headtail = options.context_parallel_load_balancer == "headtail"
        levelled = degrees.is_load_balanced(options.context_parallel_rotate_method, headtail)
        return degrees.sequence_multiples(self.cp, self.tp, load_balanced=levelled, sequence_parallel=split)

    # Pipeline

    @property
    def end_costs(self) -> tuple[int, int]:
        """Layers that the first and last stage of a pipeline have less than others."""
        options = self.parallelism
        return options.pipeline_parallel_first_stage_less_layers, options.pipeline_parallel_last_stage_less_layers

    def num_stages(self, n_layers: int, schedule: str = "") -> int:
        """Return the number of stages over all ranks with the job's schedule or another one.

        Raises JobError if a model of `n_layers` layers cannot be cut so for it.
        """
        options = self.parallelism
        schedule, parts = schedule or options.pipeline_parallel_schedule, options.module_fqns_per_model_part
        if parts is not None:
            check_stages(schedule, self.pp, len(parts))
            return len(parts)
        return choose_num_stages(
            schedule, self.pp, n_layers, options.pipeline_parallel_layers_per_stage, *self.end_costs
        )

    def layers_by_stage(self, n_layers: int, num_stages: int | None = None) -> list[int]:
        """Return the number of layers of each stage. `num_stages`: if the schedule is from a file."""
        parts = self.parallelism.module_fqns_per_model_part
        if parts is not None:
            return [sum(name.startswith("layers.") for name in part) for part in parts]
        return _split_layers(n_layers, num_stages or self.num_stages(n_layers), *self.end_costs)

    # Compilation

    @property
    def compiles_model(self) -> bool:
        return self.compile.enable and "model" in self.compile.components

    @property
    def compiles_loss(self) -> bool:
        return self.compile.enable and "loss" in self.compile.components

    def fixed_by(self) -> list[str]:
        """Return the job's options that require all batches to have one shape."""
        reasons = {
            "parallelism.pipeline_parallel_degree": self.pp > 1,
            "compile.enable": self.compile.enable,
            "parallelism.expert_parallel_degree": self.ep > 1,
        }
        return [option for option, applies in reasons.items() if applies]

    # Batches

    @property
    def rows_per_sample(self) -> int:
        return rows_per_sample(self.task.kind)

    def batch_rows(self, section: Section = "training") -> int:
        """Return the rows of a data-parallel rank's batch."""
        part = self.training if section == "training" else self.validation
        return part.local_batch_size * self.rows_per_sample

    @property
    def microbatch_rows(self) -> int:
        return self.parallelism.pipeline_parallel_microbatch_size * self.rows_per_sample

    @property
    def microbatches(self) -> int:
        """Pipeline microbatches of a local batch. Raises LimitError if their size does not divide it."""
        local, size = self.training.local_batch_size, self.parallelism.pipeline_parallel_microbatch_size
        try:
            return num_microbatches(local, size)
        except JobError as error:
            key, allowed = "parallelism.pipeline_parallel_microbatch_size", "a divisor of training.local_batch_size"
            raise LimitError(key, size, allowed, str(error)) from None

    @property
    def samples_per_pass(self) -> int:
        """Samples (or pairs) of a forward pass over all data-parallel ranks."""
        return self.training.local_batch_size * self.shards * self.replicas

    @property
    def samples(self) -> int:
        """Samples (or pairs) of an optimizer step over all ranks."""
        size = self.training.global_batch_size
        return size if size > 0 else self.samples_per_pass

    @property
    def rows(self) -> int:
        """Rows of an optimizer step over all ranks."""
        return self.samples * self.rows_per_sample

    @property
    def batches_per_step(self) -> int:
        """Batches that each rank reads in an optimizer step."""
        return self.samples // (self.training.local_batch_size * self.dims.dp)

    def sample_count(self, samples: int) -> str:
        """Format a number of samples: "16 samples", or "16 pairs (32 answers)"."""
        per_sample = self.rows_per_sample
        name = ("pair" if per_sample == 2 else "sample") + "s" * (samples != 1)
        return f"{samples:,} {name}" + (f" ({samples * per_sample:,} answers)" if per_sample == 2 else "")

    def notice(self) -> str:
        """Return a hint that batch sizes count pairs, as older versions counted answers; empty without pairs."""
        if self.rows_per_sample == 1:
            return ""
        return (
            "batch sizes count pairs, not answers: a job that was written when they counted answers needs half of each"
        )
