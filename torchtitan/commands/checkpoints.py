"""`torchtitan checkpoints FOLDER [--verify]`: list a run's checkpoints, their state, and the one a resume would load.

If the job sets checkpoint.best_metric, also name the best one. Reads names, sizes and manifests, and with --verify the
content of every file. Needs no torch.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan.checkpoint import layout
from torchtitan.checkpoint.folders import best_of, metric_of
from torchtitan.checkpoint.layout import CheckpointError
from torchtitan.commands.command_lines import parse_command
from torchtitan.core.errors import JobError

NOTHING_TO_TAKE = 3


def main(argv: list[str]) -> int:
    options, _ = parse_command("checkpoints", argv)
    folder = find(Path(options.folder))
    rows = [_row(step, path, options.verify) for step, path in layout.step_folders(folder)]
    print(_table([("step", "size", "state", "plan"), *(row[1:] for row in rows)]))
    leftovers = sorted(path.name for path in folder.iterdir() if path.name.startswith((".tmp-", ".aside-")))
    for name in leftovers:
        print(f"{name}: {'left by a save that did not finish' if name.startswith('.tmp-') else 'moved aside'}")
    usable_steps = [step for good, step, *_ in rows if good]
    if (best := best_told(folder)) is not None:
        print(f"the best is {best}")
    extent = "looked at whole" if options.verify else "by names, sizes and manifest; --verify reads the content"
    print(f"a resume takes {f'step {usable_steps[0]}' if usable_steps else 'none of them'} ({extent})")
    return 0 if usable_steps else NOTHING_TO_TAKE


def best_told(folder: Path) -> str | None:
    """Describe the best checkpoint by the newest checkpoint's metric, or return None if its job sets no metric."""
    complete, _ = layout.complete_steps(folder)
    with suppress(CheckpointError):
        metric = metric_of(layout.read_state(complete[0])["trainer"]) if complete else None
        if metric is not None and (best := best_of(complete, metric)) is not None:
            return f"step {layout.step_of(best.folder.name)}, with a {metric.name} of {best.value:.4g}"
    return None


def find(folder: Path) -> Path:
    """Return the folder with the step folders: `folder` or one directly inside. Raises JobError if there is none."""
    if not folder.is_dir():
        raise JobError(f"{folder}: no such folder; give a run's dump_folder, or the folder of its checkpoints")
    inside = [folder, *sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())]
    match = next((path for path in inside if layout.step_folders(path)), None)
    if match is None:
        raise JobError(f"{folder}: no step-* folders in it or one below; has the run saved, and is its disk mounted?")
    return match


def _row(step: int, folder: Path, verify: bool) -> tuple[bool, str, str, str, str]:
    """Return True if a resume can load the checkpoint; then its step, size, state and parallelism as text."""
    try:
        manifest = layout.check_complete(folder)
        if manifest.step != step:
            raise CheckpointError("its manifest belongs to another step")
        if verify and (damaged := layout.damaged_files(folder, manifest, sorted(manifest.files), bar=True)):
            raise CheckpointError(f"damaged: {', '.join(damaged)}")
        trainer = layout.read_state(folder)["trainer"]
    except CheckpointError as error:
        return False, str(step), "-", f"not usable: {error}", "-"
    size = sum(entry.size for entry in manifest.files.values())
    ranks = f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}"
    state = "sound" if verify else "complete"
    return True, str(step), f"{size / 1e6:,.1f} MB", state, ", ".join([ranks, *_degrees(trainer)])


def _degrees(trainer: dict[str, Any]) -> Iterable[str]:
    degrees = trainer.get("degrees", {})
    return (f"{axis} {degree}" for axis, degree in degrees.items() if isinstance(degree, int) and degree > 1)


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*(f"{c:<{w}}" for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows)
