"""What comes with the package: jobs that can be called by name, and a tokenizer to begin with."""

from pathlib import Path

_PACKAGE = Path(__file__).parent
_INSTALLED = (_PACKAGE / "train_configs").exists()  # a wheel brings copies; a checkout has them beside the package

JOBS = (_PACKAGE if _INSTALLED else _PACKAGE.parent) / "train_configs"
TOKENIZER = (_PACKAGE if _INSTALLED else _PACKAGE.parent / "tests") / "assets/tokenizer/tiktoken.model"
"""2,048 tokens of Python's library; `model.tokenizer_path = "debug"`."""


def jobs() -> dict[str, Path]:
    """The shipped jobs by name, sorted."""
    return {path.stem: path for path in sorted(JOBS.glob("*.toml"))}


def job_file(name: str) -> str:
    """The file of a shipped job, where nothing else has this name; any other name as it is."""
    shipped = jobs().get(name)
    return str(shipped) if shipped and not Path(name).exists() else name
