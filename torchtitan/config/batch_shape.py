"""The number of rows in the batches of a job, and their length. Imports no torch.

Options count samples. For losses that compare two answers, a sample is a pair. Batches, data positions and packs count
rows; a pair has two.
"""

import math
from typing import Literal

from torchtitan.config.job import JobConfig
from torchtitan.losses.tasks import TASKS, task_of
from torchtitan.parallelisms import degrees

Section = Literal["training", "validation"]
ROUNDING = {"cpu": 8, "cuda": 64}
"""Lengths of batches are multiples of this by default: kernels are slow for others, and each new length costs memory
of the allocator's."""


def rows_per_sample(config: JobConfig) -> int:
    """Return 2 for a task that learns pairs, else 1; also 1 for an unknown task."""
    task = TASKS.get(config.task.kind)
    return 1 if task is None else task.rows_per_sample


def batch_rows(config: JobConfig, section: Section = "training") -> int:
    """Return the rows of a data-parallel rank's batch."""
    return int(getattr(config, section).local_batch_size * rows_per_sample(config))


def microbatch_rows(config: JobConfig) -> int:
    return config.parallelism.pipeline_parallel_microbatch_size * rows_per_sample(config)


def sample_count(config: JobConfig, samples: int) -> str:
    """Format a number of samples: "16 samples", or "16 pairs (32 answers)"."""
    per_sample = rows_per_sample(config)
    name = ("pair" if per_sample == 2 else "sample") + "s" * (samples != 1)
    return f"{samples:,} {name}" + (f" ({samples * per_sample:,} answers)" if per_sample == 2 else "")


def notice(config: JobConfig) -> str:
    """Return a hint that batch sizes count pairs, as older versions counted answers; empty for tasks without pairs."""
    if rows_per_sample(config) == 1:
        return ""
    return "batch sizes count pairs, not answers: a job that was written when they counted answers needs half of each"


# Lengths


def is_packed(config: JobConfig) -> bool:
    """Return True if several records share a sample. Default: True for tasks on tokens, False for classes."""
    task = task_of(config.task.kind)
    if not task.whole_records or task.rows_per_sample > 1:
        return False
    return (config.data.packing or ("off" if task.labels == "classes" else "best_fit")) == "best_fit"


def sequence_needs(config: JobConfig, split: bool) -> dict[str, int]:
    """Return the required divisors of a sequence's length, by reason. `split`: True if sequence parallel splits it."""
    options = config.parallelism
    headtail = options.context_parallel_load_balancer == "headtail"
    levelled = degrees.is_load_balanced(options.context_parallel_rotate_method, headtail)
    cp, tp = options.context_parallel_degree, options.tensor_parallel_degree
    return degrees.sequence_multiples(cp, tp, load_balanced=levelled, sequence_parallel=split)


def split_by_tensor_parallel(config: JobConfig) -> bool:
    options = config.parallelism
    return options.tensor_parallel_degree > 1 and not options.disable_sequence_parallel


def fixed_by(config: JobConfig) -> list[str]:
    """Return the job's options that require all batches to have one shape."""
    options = config.parallelism
    reasons = {
        "parallelism.pipeline_parallel_degree": options.pipeline_parallel_degree > 1,
        "compile.enable": config.compile.enable,
        "parallelism.expert_parallel_degree": options.expert_parallel_degree > 1,
    }
    return [option for option, applies in reasons.items() if applies]


def keeps_full_length(config: JobConfig, has_experts: bool) -> str:
    """Return why unpacked samples are padded to training.seq_len, as a clause; empty if they are not."""
    if config.data.pad_to is not None:
        return "as data.pad_to says" if config.data.pad_to == "seq_len" else ""
    if options := fixed_by(config):
        return f"as {' and '.join(options)} want{'s' * (len(options) == 1)} all batches of one shape"
    if config.data.padding == "left":
        return 'as data.padding = "left" puts it before the text'
    return "as the balance of experts counts it, so that each batch's own length would change it" * has_experts


def padding_multiple(config: JobConfig, device: str, has_experts: bool) -> int:
    """Return the multiple to which batch lengths are rounded up; 0 if all batches have training.seq_len tokens."""
    pad_to = config.data.pad_to
    if not task_of(config.task.kind).whole_records or is_packed(config) or keeps_full_length(config, has_experts):
        return 0
    if pad_to is None:
        return math.lcm(ROUNDING[device], *sequence_needs(config, split_by_tensor_parallel(config)).values())
    return 1 if pad_to == "batch" else int(pad_to.partition(":")[2])


def padding_in_words(config: JobConfig, share: float, longest: int, has_experts: bool) -> str:
    """Describe the padding of samples to training.seq_len tokens, and how to avoid it.

    `share`: padding as a fraction of all tokens. `longest`: tokens of the longest sample.
    """
    needed = math.lcm(ROUNDING["cpu"], *sequence_needs(config, split_by_tensor_parallel(config)).values())
    length = -(-longest // needed) * needed
    ways = [f"write training.seq_len = {length}, which the longest needs"] * (length < config.training.seq_len)
    if config.data.pad_to == "seq_len" and not fixed_by(config):
        ways.append("leave data.pad_to out")
    if task_of(config.task.kind).rows_per_sample == 1:
        ways.append('pack the records (data.packing = "best_fit")')
    if "compile.enable" in fixed_by(config):
        ways.append("leave compile.enable out")
    remedy = " or ".join(ways) or "another plan would pad each batch to its longest sample"
    reason = keeps_full_length(config, has_experts)
    return f"{100 * share:.1f} % of the tokens are padding up to training.seq_len, {reason}; {remedy}"
