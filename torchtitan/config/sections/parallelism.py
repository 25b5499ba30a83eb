"""The plan."""

from typing import Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT, DegreeOrRest, NonNegative, Place, Positive


@dataclass(config=STRICT, kw_only=True)
class Parallelism:
    """Degrees of data, tensor, context, expert and pipeline parallelism."""

    data_parallel_replicate_degree: Positive = 1
    """Copies of the (sharded) model. Alone this is DDP; with a shard degree it is HSDP."""
    data_parallel_shard_degree: DegreeOrRest = -1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2). -1: all remaining ranks."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free the gathered parameters of a block after its forward. default: always, except with pipeline parallel."""
    fsdp_prefetch: NonNegative = 0
    """Blocks whose parameters are gathered in advance, in forward and backward. 0: FSDP2's implicit prefetch; at least
    1 with expert parallel, where the host waits in each block."""
    tensor_parallel_degree: Positive = 1
    """Ranks over which each weight matrix is split."""
    disable_sequence_parallel: bool = False
    """Keep whole sequences between blocks on every tensor-parallel rank instead of a part of each: uses more memory and
    as much traffic, and allows sequences of any length."""
    disable_loss_parallel: bool = False
    """Gather the logits for the loss instead of keeping the vocabulary sharded over tensor-parallel ranks."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel collectives with matrix products."""
    pipeline_parallel_degree: Positive = 1
    """Ranks over which the layers are split."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names of each pipeline stage. Unset: split by cost."""
    pipeline_parallel_first_stage_less_layers: NonNegative = 1
    """Layers by which the first stage, which has the embedding, is shorter."""
    pipeline_parallel_last_stage_less_layers: NonNegative = 1
    """Layers by which the last stage, which has the output head, is shorter."""
    pipeline_parallel_layers_per_stage: Positive | None = None
    """Layers of a stage; determines the number of stages per rank."""
    pipeline_parallel_schedule: str = "1F1B"
    """Schedule of the pipeline, by torch's name."""
    pipeline_parallel_schedule_csv: Place | None = None
    """CSV file with a custom schedule."""
    pipeline_parallel_microbatch_size: Positive = 1
    """Samples (or pairs) in a pipeline microbatch."""
    pipeline_parallel_expert_parallel_overlap: bool = False
    """Overlap the expert-parallel all-to-alls of one microbatch with the computation of another. Made for DualPipeV; in
    other schedules weight gradients fill the gaps."""
    context_parallel_degree: Positive = 1
    """Ranks over which the sequence is split."""
    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """Balancing of causal attention's work over context-parallel ranks."""
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ring", "ulysses"] = "allgather"
    """Exchange of keys and values between context-parallel ranks."""
    expert_parallel_degree: Positive = 1
    """Ranks over which the experts are distributed."""
