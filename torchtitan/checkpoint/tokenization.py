"""The rules of tokenization with which a run began. Imports no torch."""

from pathlib import Path

from torchtitan.checkpoint.layout import newest_complete, read_state
from torchtitan.config.job import JobConfig
from torchtitan.core.files import TOKENIZATION_VERSION

VERSION_WITHOUT_RECORD = 2
"""Version of runs whose job does not record it."""


def tokenization_version(config: JobConfig) -> int:
    """Return data.tokenization_version, or if it is unset, that of the run's newest checkpoint; a new run has none.

    A checkpoint that cannot be read is reported when it is loaded."""
    is_new = not config.checkpoint.enable or config.job.clean_start == "always"
    if config.data.tokenization_version is not None or is_new:
        return config.data.tokenization_version or TOKENIZATION_VERSION
    try:
        newest, _ = newest_complete(Path(config.job.dump_folder, config.checkpoint.folder))
        job = None if newest is None else read_state(newest)["trainer"].get("job", {})
    except (OSError, ValueError, KeyError):  # CheckpointError, or an invalid folder name
        return TOKENIZATION_VERSION
    return (
        TOKENIZATION_VERSION if job is None else job.get("data", {}).get("tokenization_version", VERSION_WITHOUT_RECORD)
    )
