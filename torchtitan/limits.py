"""What options ask of one another, each said once: parts of a run and the rules judge by the same functions. No torch.

Each raises a LimitError, with the words of a fault, for values that do not fit. Of the degrees of parallelism:
parallelisms/degrees.py.
"""

from torchtitan.errors import JobError


class LimitError(JobError):
    """Options that do not fit each other, in the job's words."""

    def __init__(self, option: str, given: object, allowed: str, remedy: str) -> None:
        self.option, self.given, self.allowed, self.remedy = option, str(given), allowed, remedy
        super().__init__(f"{option}: given {given}; allowed: {allowed}; {remedy}")


def check_global_batch(asked: int, local_batch_size: int, dp: int) -> None:
    """Whole forward passes over all data-parallel ranks; -1 for one."""
    key, samples = "training.global_batch_size", local_batch_size * dp
    if asked == 0:
        raise LimitError(key, asked, "at least 1, or -1 for one forward pass a step", "write -1")
    if asked > 0 and asked % samples:
        allowed = f"a multiple of local_batch_size {local_batch_size} x {dp} data-parallel ranks = {samples}"
        below = asked // samples * samples
        remedy = f"write {below} or {below + samples}" if below else f"write {samples} or fewer samples a rank"
        raise LimitError(key, asked, allowed, remedy)


def check_measured_saves(interval: int, freq: int) -> None:
    """Both in steps: each checkpoint falls on a validation, which says how good it is."""
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


def _without_workers(name: str, given: object, allowed: str) -> LimitError:
    remedy = "set training.dataloader.num_workers, or leave it out"
    return LimitError(f"training.dataloader.{name}", given, f"{allowed} without workers", remedy)


def check_pinned(pin_memory: bool | None, device: str) -> None:
    if pin_memory and device != "cuda":
        raise LimitError("training.dataloader.pin_memory", "true", "false without a GPU", "it speeds copies to one")


def check_snapshots(enabled: bool, device: str) -> None:
    if enabled and device != "cuda":
        why = "it records CUDA's allocator"
        raise LimitError("profiling.enable_memory_snapshot", "true", "false without a GPU", why)


def check_window(freq: int, active: int, warmup: int) -> None:
    """Of the profiler: the steps between two traces have room for one."""
    window = warmup + active
    if freq < window:
        allowed = f"at least profiler_warmup {warmup} + profiler_active {active} = {window}"
        raise LimitError("profiling.profile_freq", freq, allowed, f"write {window} or more")
