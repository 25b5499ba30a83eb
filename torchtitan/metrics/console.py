"""Format the console lines of a run, durations and quantities."""

import math
from collections.abc import Mapping

from torchtitan.metrics.json_lines import Record

BOLD, DIM, GREEN, CYAN, BLUE = "1", "2", "32", "36", "34"


def training_line(
    record: Record, total_steps: int, seconds_left: float | None, color: bool = False, log_lr: bool = True
) -> str:
    """Return the line of one logged step. Columns keep their positions over the run."""

    def paint(text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if color else text

    parts = [
        paint(_step(record["step"], total_steps), BOLD),
        paint(f"loss {record['loss']:8.4f}", GREEN),
        f"grad {'-' if record['grad_norm'] is None else format(record['grad_norm'], '.3f'):>7}",
    ]
    if "reward_accuracy" in record:
        parts.append(f"reward accuracy {record['reward_accuracy']:.3f}")
    if log_lr:
        parts.append(f"lr {record['lr']:.2e}")
    parts.append(paint(f"{record['tokens_per_second']:>9,.0f} tok/s", CYAN))
    if "mfu" in record:
        parts.append(paint(f"mfu {100 * record['mfu']:4.1f}%", CYAN))
    parts.append(paint(f"{record['memory_gib']:6.2f} GiB", BLUE))
    if record["step"] < total_steps:
        remaining = "   -   " if seconds_left is None else f"{duration(seconds_left):>7}"
        parts.append(paint(f"{remaining} left", DIM))
    if "marked" in record:
        parts.append(paint(f"({', '.join(record['marked'])})", DIM))
    return "  ".join(parts)


def validation_line(
    step: int, total_steps: int, loss: float, color: bool = False, measured: Mapping[str, float] | None = None
) -> str:
    metrics_text = "".join(f"  {name} {value:.4f}" for name, value in (measured or {}).items())
    line = f"{_step(step, total_steps)}  validation loss {loss:.4f}{metrics_text}"
    return f"\033[{BOLD}m{line}\033[0m" if color else line


def duration(seconds: float) -> str:
    """Format seconds as 0:07, 12:34 or 5h 03m."""
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}h {minute:02}m" if hours else f"{minute}:{second:02}"


def quantity(value: float) -> str:
    """Format a number for a unit to follow, like "8.03 G"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g} {prefix}"
    return f"{value:.4g} "


def aligned(places: Mapping[str, object]) -> str:
    width = max(map(len, places), default=0)
    return "".join(f"\n  {name:<{width}}  {place}" for name, place in places.items())


def _step(step: int, total_steps: int) -> str:
    return f"step {step:>{len(str(total_steps))}}/{total_steps}"
