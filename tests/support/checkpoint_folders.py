"""Folders of checkpoints that hold little: a step, its manifest and the names in it."""

from pathlib import Path

from torchtitan.checkpoint import folders, layout
from torchtitan.checkpoint.layout import FileEntry, Manifest, TensorEntry


def manifest_of(files: dict[str, bytes], step: int, **changes) -> Manifest:
    values = {
        "format": layout.FORMAT,
        "kind": "full",
        "step": step,
        "world_size": 1,
        "versions": {"torch": "0"},
        "files": {name: FileEntry(len(data), layout.hashlib.sha256(data).hexdigest()) for name, data in files.items()},
        "tensors": {"model.w": TensorEntry("float32", [2, 3])},
    }
    return Manifest(**{**values, **changes})


def make_step(root: Path, step: int, **changes) -> Path:
    """Publish a complete checkpoint folder without torch."""
    target = root / layout.step_name(step)
    files = {"state.json": b"{}", ".metadata": b"index", "__0_0.distcp": b"payload"}
    temporary = folders.create_temporary(target)
    for name, data in files.items():
        (temporary / name).write_bytes(data)
    folders.write_file(temporary / layout.MANIFEST, layout.manifest_text(manifest_of(files, step, **changes)))
    folders.publish(temporary, target)
    return target


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())
