"""Files that come with the package: jobs that can be called by name, and a small tokenizer."""

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
_INSTALLED = (_PACKAGE / "train_configs").exists()  # a wheel has copies; a checkout has them next to the package

JOBS = (_PACKAGE if _INSTALLED else _PACKAGE.parent) / "train_configs"
TOKENIZER = (_PACKAGE if _INSTALLED else _PACKAGE.parent / "tests") / "assets/tokenizer/tiktoken.model"
"""A small tokenizer with 2,048 tokens, for `model.tokenizer_path = "debug"`."""

MODEL, RECORDS = "./base_model", "./records.jsonl"
"""Placeholders in fine-tuning jobs for the user's model folder and records."""


def jobs() -> dict[str, Path]:
    """Return the paths of the shipped jobs by name, sorted."""
    return {path.stem: path for path in sorted(JOBS.glob("*.toml"))}


def job_file(name: str, path: str | None = None) -> str:
    """Return the file of the shipped job `name` if no file exists at `path` (default: `name`), else `path`."""
    file = name if path is None else path
    shipped = jobs().get(name)
    return str(shipped) if shipped and not Path(file).exists() else file
