"""Errors of the user, the text of messages, and constraints between options that rules and runs share. No torch.

Commands report a JobError in a line and end with an exit code. Errors of the machine are in machine_errors.py, the ends
of a run in training/ends.py. What is left is a bug and keeps its traceback.

A constraint raises a LimitError for values that do not fit. parallelisms/degrees.py has those of the degrees.
"""

import textwrap

LONGEST_LINE = 200
"""Maximum number of characters in a line of a message."""
FLOAT8_MULTIPLE = 16
"""Sides of matrices that a GPU multiplies in float8 are multiples of this. Here for rules, which need no torch."""


class JobError(ValueError):
    """A job, file, dataset, checkpoint or argument of the user cannot work.

    The message names the given value, the allowed values and the remedy.
    """


def format_bytes(size: float, largest: float = 0) -> str:
    """Format a number of bytes in GiB, MiB, KiB or bytes: the largest unit with a value of at least 0.1.

    `largest`: the largest number of a table, which has its unit throughout.
    """
    for unit, digits, power in (("GiB", 2, 30), ("MiB", 1, 20), ("KiB", 1, 10)):
        if max(size, largest) >= 0.1 * 2**power:
            return f"{size / 2**power:.{digits}f} {unit}"
    return f"{size:.0f} bytes"


def wrap_lines(text: object) -> str:
    """Wrap lines longer than LONGEST_LINE and indent their continuation. A long path stays in one piece."""
    fold = textwrap.TextWrapper(
        LONGEST_LINE, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    return "\n".join(line if len(line) <= LONGEST_LINE else fold.fill(line) for line in str(text).splitlines())


# Constraints between options


class LimitError(JobError):
    """Options that contradict each other, by their names in the job."""

    def __init__(self, option: str, value: object, allowed: str, remedy: str) -> None:
        self.option, self.given, self.allowed, self.remedy = option, str(value), allowed, remedy
        super().__init__(f"{option}: given {value}; allowed: {allowed}; {remedy}")


def check_global_batch(global_batch_size: int, local_batch_size: int, dp: int) -> None:
    """Check that the global batch is a whole number of forward passes over all data-parallel ranks; -1 means one."""
    key, samples = "training.global_batch_size", local_batch_size * dp
    if global_batch_size == 0:
        raise LimitError(key, global_batch_size, "at least 1, or -1 for one forward pass a step", "write -1")
    if global_batch_size > 0 and global_batch_size % samples:
        allowed = f"a multiple of local_batch_size {local_batch_size} x {dp} data-parallel ranks = {samples}"
        below = global_batch_size // samples * samples
        remedy = f"write {below} or {below + samples}" if below else f"write {samples} or fewer samples a rank"
        raise LimitError(key, global_batch_size, allowed, remedy)


def check_measured_saves(interval: int, freq: int) -> None:
    """Check that each checkpoint falls on a validation, which measures it. Both are in steps."""
    if interval % freq:
        below = interval // freq * freq
        allowed = f"a multiple of the {freq} steps between validations (validation.freq) with checkpoint.best_metric"
        near = f"{below} or {below + freq}" if below else str(freq)
        raise LimitError("checkpoint.interval", f"{interval} steps", allowed, f"write {near}")


def check_prefetch(num_workers: int, prefetch_factor: int | None) -> None:
    if num_workers == 0 and prefetch_factor is not None:
        raise _without_workers("prefetch_factor", prefetch_factor, "unset")


def check_persistence(num_workers: int, persistent_workers: bool) -> None:
    if num_workers == 0 and persistent_workers:
        raise _without_workers("persistent_workers", "true", "false")


def _without_workers(name: str, value: object, allowed: str) -> LimitError:
    remedy = "set training.dataloader.num_workers, or leave it out"
    return LimitError(f"training.dataloader.{name}", value, f"{allowed} without workers", remedy)


def check_pinned(pin_memory: bool | None, device: str) -> None:
    if pin_memory and device != "cuda":
        raise LimitError("training.dataloader.pin_memory", "true", "false without a GPU", "it speeds copies to one")


def check_snapshots(enabled: bool, device: str) -> None:
    if enabled and device != "cuda":
        remedy = "leave it out: it records CUDA's allocator"
        raise LimitError("profiling.enable_memory_snapshot", "true", "false without a GPU", remedy)


def check_window(freq: int, active: int, warmup: int) -> None:
    """Check that the profiler's warmup and trace fit into the steps from one trace to the next."""
    window = warmup + active
    if freq < window:
        allowed = f"at least profiler_warmup {warmup} + profiler_active {active} = {window}"
        raise LimitError("profiling.profile_freq", freq, allowed, f"write {window} or more")
