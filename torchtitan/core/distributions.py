"""The installed distribution of this package, and PyTorch's torchtitan, whose package has the same name."""

from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

NAME, PYTORCHS = "torchtitan-toml", "torchtitan"
PACKAGE = Path(__file__).resolve().parent.parent


def describe_versions() -> str:
    """Return the versions of this distribution and of torch, and of PyTorch's torchtitan if it is installed too."""
    versions = f"{NAME} {_version(NAME)} (not PyTorch's torchtitan), torch {_version('torch')}"
    other = _version(PYTORCHS)
    return versions if other == _MISSING else f"{versions}; PyTorch's torchtitan {other} is installed here too"


_MISSING = "(not installed)"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return _MISSING


def describe_overwritten() -> str:
    """Describe PyTorch's torchtitan in this environment if its files lie among ours; "" without it.

    Both distributions install a package of this name, and the later one has overwritten files of the earlier.
    """
    try:
        other = distribution(PYTORCHS)
    except PackageNotFoundError:
        return ""
    for file in other.files or ():
        if (
            file.suffix == ".py"
            and file.parts[0] == PACKAGE.name
            and Path(str(other.locate_file(file))).resolve().is_relative_to(PACKAGE)
        ):
            return (
                f"{PACKAGE} holds files of two distributions, PyTorch's torchtitan {other.version} and {NAME}: each "
                f"has overwritten files of the other; install one of them in another environment (pip uninstall "
                f"{PYTORCHS} {NAME}, then pip install {NAME})"
            )
    return ""


def require_one() -> None:
    """Raise ImportError if files of PyTorch's torchtitan lie among ours."""
    if problem := describe_overwritten():
        raise ImportError(problem)
