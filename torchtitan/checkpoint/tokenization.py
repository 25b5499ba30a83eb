"""The rules of tokenization with which a run began. Imports no torch."""

from pathlib import Path
from typing import Any

from torchtitan.checkpoint.layout import newest_complete, read_state
from torchtitan.core.files import TOKENIZATION_VERSION

VERSION_WITHOUT_RECORD = 2
"""Version of runs whose job does not record it."""


def tokenization_version(data: Any, options: Any, run: Any) -> int:
    """Return data.tokenization_version of a job with these sections [data], [checkpoint] and [job]. If it is unset,
    that of the run's newest checkpoint; a new run has none.

    A checkpoint that cannot be read is reported when it is loaded."""
    is_new = not options.enable or run.clean_start == "always"
    if data.tokenization_version is not None or is_new:
        return data.tokenization_version or TOKENIZATION_VERSION
    try:
        newest, _ = newest_complete(Path(run.dump_folder, options.folder))
        job = None if newest is None else read_state(newest)["trainer"].get("job", {})
    except (OSError, ValueError, KeyError):  # CheckpointError, or an invalid folder name
        return TOKENIZATION_VERSION
    return (
        TOKENIZATION_VERSION if job is None else job.get("data", {}).get("tokenization_version", VERSION_WITHOUT_RECORD)
    )
