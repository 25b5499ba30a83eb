"""Packages of outside the project, as an installer would leave them."""

from pathlib import Path


def install(folder: Path, name: str, entries: str, **modules: str) -> Path:
    """Write a package as an installer would into a folder of sys.path."""
    code, about = folder / name.replace("-", "_"), folder / f"{name.replace('-', '_')}-1.0.dist-info"
    code.mkdir(parents=True)
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entries)
    for module, text in {"__init__": "", **modules}.items():
        (code / f"{module}.py").write_text(text)
    return folder
