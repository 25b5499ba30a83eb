"""Compare full training by AdamW, LoRA, a warm start followed by ReLoRA, and optimizers with less state.

All train on the same text for the same number of steps. Loss, time and state of each make the table and the picture of
docs/low_rank.md.

The 9m preset with the debug tokenizer's 2,048 tokens on Python's library, one thread, float32: a demonstration of the
mechanism, without evidence for larger models. Learning rates: 2e-3, and twice that with adapters, by the paper's rule
of thumb; GaLore's scale is 1, so that its matrices have the same rate. `--quick` makes few steps; `--write` writes the
table and the picture to docs/.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torchtitan.checkpoint.layout import OPTIMIZER, newest_complete, read_manifest  # noqa: E402
from torchtitan.metrics.json_lines import read_records  # noqa: E402
from torchtitan.metrics.plot import STYLE  # noqa: E402

PAGE, PICTURE = ROOT / "docs/low_rank.md", ROOT / "docs/relora_9m.png"
BEGIN, END = "<!-- relora -->", "<!-- /relora -->"
ADAPTER = {"adapter.kind": "lora", "adapter.rank": 16, "adapter.train_dense_rest": True}
COLORS = {
    "full": "#6b7280",
    "LoRA": "#d9480f",
    "warm start, ReLoRA": "#1d4ed8",
    "AdamW, 8 bits": "#9ca3af",
    "GaLore": "#15803d",
    "GaLore, 8 bits": "#86efac",
    "APOLLO": "#a21caf",
    "Muon": "#b45309",
}


def jobs(steps: int) -> dict[str, list[dict[str, object]]]:
    """Return, for each curve, the options of its jobs, which run one after the other."""
    third, cosine = steps // 3, {"lr_scheduler.decay_type": "cosine", "lr_scheduler.warmup_steps": steps // 15}
    full = cosine | {"optimizer.lr": 2e-3}
    relora = ADAPTER | {"optimizer.lr": 4e-3, "lr_scheduler.decay_type": "relora_cosine"}
    relora |= {"adapter.relora.every": third // 2, "adapter.relora.reset": "magnitude"}
    relora |= {"lr_scheduler.warmup_steps": steps // 30, "lr_scheduler.restart_warmup_steps": max(1, steps // 60)}
    low = f"rank = 32, update_gap = {steps // 6}, scale = 1.0"
    other_optimizers = {
        "AdamW, 8 bits": ("AdamW8bit", "{}"),
        "GaLore": ("GaLore", f"{{{low}}}"),
        "GaLore, 8 bits": ("GaLore", f'{{{low}, inner = "adamw_8bit"}}'),
        "APOLLO": ("APOLLO", f"{{{low}}}"),
        "Muon": ("Muon", "{}"),
    }
    return {
        "full": [full | {"training.steps": steps}],
        "LoRA": [cosine | ADAPTER | {"optimizer.lr": 4e-3, "training.steps": steps}],
        "warm start, ReLoRA": [
            full | {"training.steps": third, "lr_scheduler.total_steps": steps},
            relora | {"training.steps": 3 * third},
        ],
    } | {
        name: [full | {"training.steps": steps, "optimizer.name": kind, "optimizer.options": options}]
        for name, (kind, options) in other_optimizers.items()
    }


def command_arguments(folder: Path, options: dict[str, object], start: Path | None) -> list[str]:
    """Return the arguments of a job; `start` is the folder of the run that it continues from."""
    settings = {
        "job.dump_folder": folder,
        "model.name": "llama2",
        "model.flavor": "9m",
        "model.tokenizer_path": "debug",
        "model.overrides": "{vocab_size = 2048}",
        "training.local_batch_size": 4,
        "training.seq_len": 128,
        "training.mixed_precision_param": "float32",
        "optimizer.beta2": 0.999,
        "optimizer.weight_decay": 0.0,
        "activation_checkpoint.mode": "none",
        "validation.enable": True,
        "validation.freq": 50,
        "validation.steps": 8,
        "metrics.log_freq": 5,
        "metrics.plot": False,
        "checkpoint.enable": True,
    }
    if start is not None:
        settings |= {"checkpoint.initial_load_path": start, "checkpoint.initial_load_counters": True}
    return [f"--{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in (settings | options).items()]


def state_bytes(folder: Path) -> int:
    """Return the bytes of the optimizer's state in the last checkpoint."""
    newest, _ = newest_complete(folder / "checkpoint")
    assert newest is not None
    entries = read_manifest(newest).tensors.items()
    return sum(
        math.prod(entry.shape) * getattr(torch, entry.dtype.removeprefix("torch.")).itemsize
        for name, entry in entries
        if name.startswith(OPTIMIZER)
    )


def table(curves: dict[str, list[dict]], states: dict[str, int]) -> str:
    """Format losses, step times and state sizes as a Markdown table."""
    lines = ["| | held-out loss | step, to full's | optimizer state |", "|---|---|---|---|"]
    seconds = {
        name: statistics.median(row["step_seconds"] for row in rows if "loss" in row and "marked" not in row)
        for name, rows in curves.items()
    }
    for name, rows in curves.items():
        held_out = [row["validation_loss"] for row in rows if "validation_loss" in row][-1]
        lines.append(
            f"| {name} | {held_out:.3f} | {seconds[name] / seconds['full']:.2f} | {states[name] / 1e6:.2f} MB |"
        )
    return "\n".join(lines)


def draw(curves: dict[str, list[dict]], path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
        axes = figure.subplots()
        for name, rows in curves.items():
            steps = [row for row in rows if "loss" in row]
            held_out = [row for row in rows if "validation_loss" in row]
            color = COLORS[name]
            axes.plot([r["step"] for r in steps], [r["loss"] for r in steps], color=color, linewidth=0.8, alpha=0.4)
            axes.plot(
                [r["step"] for r in held_out],
                [r["validation_loss"] for r in held_out],
                color=color,
                marker="o",
                label=name,
            )
        axes.set_title("9m preset on Python's library: held-out loss (dots), training loss", loc="left")
        axes.set_xlabel("step")
        axes.legend(frameon=False)
        figure.savefig(path, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("outputs/compare_relora"))
    options = parser.parse_args()
    curves: dict[str, list[dict]] = {}
    states = {}
    for name, parts in jobs(12 if options.quick else 300).items():
        curves[name], start = [], None
        for number, part in enumerate(parts):
            folder = (options.folder / f"{name.replace(', ', '_').replace(' ', '_')}_{number}").resolve()
            command = [sys.executable, "-m", "torchtitan", "train", *command_arguments(folder, part, start)]
            subprocess.run(command, cwd=ROOT, check=True)
            curves[name] += read_records(folder / "metrics.jsonl")
            start = folder
        states[name] = state_bytes(start)
    print(rows := table(curves, states))
    draw(curves, PICTURE if options.write else options.folder / PICTURE.name)
    if options.write:
        head, _, after = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{rows}\n{END}{after.partition(END)[2]}")
    (options.folder / "curves.json").write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
