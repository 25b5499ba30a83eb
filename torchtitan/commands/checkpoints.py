"""`torchtitan checkpoints FOLDER [--verify]`: what a run has saved, in what state it is, what a resume would take.

Where the job says by what (checkpoint.best_metric), also which is the best. Looks at names, sizes and manifests, and
with --verify at the content of every file. Needs no torch.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan.checkpoint import layout
from torchtitan.checkpoint.best_metric import best_of, metric_of
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
    whole = [step for good, step, *_ in rows if good]
    if (best := best_told(folder)) is not None:
        print(f"the best is {best}")
    how = "looked at whole" if options.verify else "by names, sizes and manifest; --verify reads the content"
    print(f"a resume takes {f'step {whole[0]}' if whole else 'none of them'} ({how})")
    return 0 if whole else NOTHING_TO_TAKE


def best_told(folder: Path) -> str | None:
    """By what the job of the newest one tells it, in words; None where it tells none."""
    complete, _ = layout.complete_steps(folder)
    with suppress(CheckpointError):
        metric = metric_of(layout.read_state(complete[0])["trainer"]) if complete else None
        if metric is not None and (best := best_of(complete, metric)) is not None:
            return f"step {layout.step_of(best.folder.name)}, with a {metric.name} of {best.value:.4g}"
    return None


def find(folder: Path) -> Path:
    """The folder that holds the steps: the one given, or the one in it. Raises `JobError`."""
    if not folder.is_dir():
        raise JobError(f"{folder}: no such folder; give a run's dump_folder, or the folder of its checkpoints")
    inside = [folder, *sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())]
    found = next((path for path in inside if layout.step_folders(path)), None)
    if found is None:
        raise JobError(f"{folder}: no step-* folders in it or one below; has the run saved, and is its disk mounted?")
    return found


def _row(step: int, folder: Path, verify: bool) -> tuple[bool, str, str, str, str]:
    """Whether a resume could take it; step, size, state and plan in words."""
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
