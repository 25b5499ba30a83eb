"""Train as torchtitan.train does, and print the line of the package at which the host waits for the GPU, each time.

    python scripts/gpu_waits.py --job.config_file=JOB.toml [OPTIONS OF THE JOB]

Waits of the start are printed too: a line that appears once a step or more often is the one to look at.
"""

import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from torchtitan import launch
from torchtitan.process.ranks import started_as_rank

PACKAGE = str(Path(__file__).resolve().parent.parent / "torchtitan")


def show_warning(message: Warning | str, *args: Any) -> None:
    """Print torch's warnings about synchronizing operations with the innermost line of the package."""
    if "synchronizing" in str(message):
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
        place = f"{Path(frames[-1].filename).relative_to(PACKAGE)}:{frames[-1].lineno}" if frames else "elsewhere:0"
        print(f"host wait at {place}", flush=True)


if __name__ == "__main__":
    if started_as_rank():
        from torchtitan import train

        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
            warnings.simplefilter("always")
            warnings.showwarning = show_warning
        sys.exit(train.main(sys.argv[1:]))
    launch.PROGRAM = (sys.executable, __file__)
    sys.exit(launch.main(["1", *sys.argv[1:]]))
