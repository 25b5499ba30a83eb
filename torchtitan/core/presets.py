"""What comes with the package: jobs that can be called by name, and a tokenizer to begin with."""

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
_INSTALLED = (_PACKAGE / "train_configs").exists()  # a wheel brings copies; a checkout has them beside the package

JOBS = (_PACKAGE if _INSTALLED else _PACKAGE.parent) / "train_configs"
TOKENIZER = (_PACKAGE if _INSTALLED else _PACKAGE.parent / "tests") / "assets/tokenizer/tiktoken.model"
"""2,048 tokens of Python's library; `model.tokenizer_path = "debug"`."""

MODEL, RECORDS = "./base_model", "./records.jsonl"
"""What stands in fine-tuning jobs for the folder of a model and for records, which are the user's."""


def jobs() -> dict[str, Path]:
    """The shipped jobs by name, sorted."""
    return {path.stem: path for path in sorted(JOBS.glob("*.toml"))}


def job_file(name: str, beside: str | None = None) -> str:
    """The file of a shipped job, where nothing else has this name, looked for as `beside`; any other name as it is."""
    place = name if beside is None else beside
    shipped = jobs().get(name)
    return str(shipped) if shipped and not Path(place).exists() else place
