"""The plan."""

from typing import Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT, DegreeOrRest, NonNegative, Place, Positive


@dataclass(config=STRICT, kw_only=True)
class Parallelism:
    """Degrees of data, tensor, context, expert and pipeline parallelism."""

    data_parallel_replicate_degree: Positive = 1
    """Copies of the (sharded) model. Alone it is DDP; with a shard degree it is HSDP."""
    data_parallel_shard_degree: DegreeOrRest = -1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2). -1: all that are left."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free the gathered parameters of a block after its forward. default: always, unless pipeline parallel."""
    fsdp_prefetch: NonNegative = 0
    """Blocks whose parameters are gathered ahead in forward and backward. 0 leaves it to FSDP2 (implicit prefetch);
    with expert parallel, whose host waits in each block, it is 1 at least."""
    tensor_parallel_degree: Positive = 1
    """Ranks over which each weight matrix is split."""
    disable_sequence_parallel: bool = False
    """Keep whole sequences between the blocks of tensor-parallel ranks, instead of a share each: more memory, as much
    traffic; sequences of any length."""
    disable_loss_parallel: bool = False
    """Gather the logits instead of keeping the vocabulary split over tensor-parallel ranks in the loss."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel collectives with matrix products."""
    pipeline_parallel_degree: Positive = 1
    """Ranks over which the layers are cut."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names of each pipeline stage. Unset: cut by cost."""
    pipeline_parallel_first_stage_less_layers: NonNegative = 1
    """Layers fewer on the first stage, which has the embedding."""
    pipeline_parallel_last_stage_less_layers: NonNegative = 1
    """Layers fewer on the last stage, which has the output head."""
    pipeline_parallel_layers_per_stage: Positive | None = None
    """Layers of a stage; decides the number of stages per rank."""
    pipeline_parallel_schedule: str = "1F1B"
    """Schedule of the pipeline, by torch's name."""
    pipeline_parallel_schedule_csv: Place | None = None
    """A schedule of your own, from a CSV file."""
    pipeline_parallel_microbatch_size: Positive = 1
    """Samples (or pairs) in a pipeline microbatch."""
    pipeline_parallel_expert_parallel_overlap: bool = False
    """Overlap expert parallelism's all-to-alls of one microbatch with the computation of another: made for DualPipeV,
    whose pairs it interleaves; in other schedules gradients of weights fill the gaps."""
    context_parallel_degree: Positive = 1
    """Ranks over which the sequence is split."""
    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """How causal attention's work is levelled over context-parallel ranks."""
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ring", "ulysses"] = "allgather"
    """How keys and values reach the other ranks."""
    expert_parallel_degree: Positive = 1
    """Ranks over which the experts are split."""
