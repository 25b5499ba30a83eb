"""Train one job under ten plans and by transformers' Trainer, and hold the losses of their steps together.

    python scripts/convergence.py [--only NAME ...] [--precision float32 bfloat16]       trains the unfinished runs
    python scripts/convergence.py --write                  makes the tables of docs/convergence.md of the finished ones
    python scripts/convergence.py --folder outputs/wide -- --model.overrides='{dim = 384, n_layers = 6, ...}'

Each run is an ordinary job in a separate folder and resumes exactly: stop the script at any time and start it again.
Options after -- are the job's, for all runs. The measure for rounding alone is a second run of one device: it computes
the head and the loss in four chunks of tokens in place of one.
"""

import argparse
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
from compare_plans import TP, method, recompute, schedule
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torchtitan.commands.command_parser import whole_number  # noqa: E402
from torchtitan.config import manager  # noqa: E402
from torchtitan.metrics.curves import smoothed  # noqa: E402
from torchtitan.metrics.json_lines import METRICS, read_records  # noqa: E402
from torchtitan.metrics.plot import STYLE, save_picture  # noqa: E402

JOB = ROOT / "train_configs/convergence_debug.toml"
PAGE, PICTURE = ROOT / "docs/convergence.md", ROOT / "docs/convergence.png"
MARKS = 100, 500, 1000, 2000
"""Steps up to which the largest gap is reported."""
RATE = 5e-4
"""Peak learning rate. At the shipped job's 3e-3, training is chaotic: rounding alone changes losses by 0.1."""
ONE, ROUNDING, TRAINER = "one device", "one device, loss in 4 chunks", "transformers' Trainer"
REPLICAS = {"parallelism.data_parallel_replicate_degree": 2}
WHOLE_SEQUENCES = {"parallelism.disable_sequence_parallel": "true"}


@dataclass(frozen=True)
class Run:
    """A run of the job. `shares`: parts that a step's rows are divided into, by ranks or passes of accumulation."""

    ranks: int = 1
    shares: int = 1
    options: dict[str, object] = field(default_factory=dict)


RUNS = {
    ONE: Run(),
    ROUNDING: Run(options={"training.loss_chunks": 4}),
    TRAINER: Run(),
    "FSDP 2": Run(2, 2),
    "TP 2, sequence parallel": Run(2, 1, TP),
    "PP 2, 1F1B": Run(2, 1, schedule("1F1B")),
    "CP 2, ring": Run(2, 1, method("ring")),
    "FSDP 2 x TP 2": Run(4, 2, TP),
    "full recompute, 2 passes": Run(1, 2, recompute("full")),
    "HSDP 2 x 2": Run(4, 4, REPLICAS),
    "TP 2": Run(2, 1, TP | WHOLE_SEQUENCES),
    "CP 2, all-gather": Run(2, 1, method("allgather")),
    "compiled": Run(1, 1, {"compile.enable": "true"}),
}
IN_BFLOAT16 = (ONE, ROUNDING, TRAINER, "FSDP 2", "TP 2, sequence parallel")


@dataclass(frozen=True)
class Curve:
    """What a run has logged: the loss of each step, and the validation loss after the last one, if that is done."""

    losses: dict[int, float]
    validation_loss: float | None

    @classmethod
    def read(cls, folder: Path) -> "Curve":
        records = read_records(folder / METRICS) if (folder / METRICS).exists() else []
        losses = {record["step"]: record["loss"] for record in records if "loss" in record}
        at_end = [r["validation_loss"] for r in records if "validation_loss" in r and r["step"] == max(losses)]
        return cls(losses, at_end[-1] if at_end else None)

    def is_finished(self, steps: int) -> bool:
        return steps in self.losses and self.validation_loss is not None

    def gaps(self, reference: "Curve") -> dict[int, float]:
        """Return the largest gap to the losses of a reference up to each step that both have."""
        largest, result = 0.0, {}
        for step in sorted(self.losses.keys() & reference.losses.keys()):
            largest = max(largest, abs(self.losses[step] - reference.losses[step]))
            result[step] = largest
        return result


def folder_of(root: Path, precision: str, name: str) -> Path:
    return root / precision / "".join(c if c.isalnum() else "_" for c in name)


def job_arguments(name: str, folder: Path, precision: str, steps: int, extra: list[str]) -> list[str]:
    """Return the command line of the job of a run."""
    rows = manager.load(["--job.config_file", str(JOB), *extra]).training.global_batch_size
    options = {
        "job.config_file": JOB,
        "job.dump_folder": folder,
        "training.steps": steps,
        "optimizer.lr": RATE,
        "training.mixed_precision_param": precision,
        "training.local_batch_size": rows // RUNS[name].shares,
        "checkpoint.interval": 500,
        "checkpoint.keep_latest_k": 2,
        "metrics.log_freq": 1,
        "metrics.plot": "false",
    }
    return [*(f"--{key}={value}" for key, value in (options | RUNS[name].options).items()), *extra]


def train(name: str, folder: Path, arguments: list[str]) -> None:
    """Make a run, or the rest of it, with one thread for each rank. Raises SystemExit if it fails."""
    program = ["-m", "torchtitan.launch", str(RUNS[name].ranks)]
    if name == TRAINER:
        program = [str(ROOT / "scripts/convergence_trainer.py")]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a") as log:
        command, environment = [sys.executable, *program, *arguments], os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
    print(f"{folder}: {'finished' if not code else f'ended with {code}, see {log.name}'}", flush=True)
    if code:
        raise SystemExit(1)


def number(value: float) -> str:
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return "0" if not value else f"{mantissa}e{int(exponent)}"


def table(curves: dict[str, Curve], steps: int) -> str:
    """Format the gaps of all runs of a precision to the one on one device as a Markdown table."""
    marks, reference = [mark for mark in MARKS if mark < steps] + [steps], curves[ONE]
    heads = [f"to step {mark:,}" for mark in marks]
    lines = [" | ".join(["| run", *heads, "validation loss", "its gap |"]), "|---" * (len(marks) + 3) + "|"]
    for name, curve in curves.items():
        gaps, loss = curve.gaps(reference), curve.validation_loss
        cells = [number(gaps[mark]) if mark in gaps else "" for mark in marks]
        end = ["", ""]
        if loss is not None and reference.validation_loss is not None:
            end = [f"{loss:.6f}", number(abs(loss - reference.validation_loss))]
        if name == ONE:
            cells, end[1] = [""] * len(marks), ""
        lines.append(f"| {' | '.join([name, *cells, *end])} |")
    return "\n".join(lines)


def draw(curves: dict[str, dict[str, Curve]], path: Path) -> None:
    """Draw the smoothed losses of all runs over one another, and below them their largest gaps so far."""
    colors = matplotlib.colormaps["turbo"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 7), dpi=80, layout="constrained")
        panels = figure.subplots(2, len(curves), sharex=True, sharey="row", squeeze=False)
        for (upper, lower), (precision, of_precision) in zip(panels.T, curves.items(), strict=True):
            for place, (name, curve) in enumerate(of_precision.items()):
                color = {ONE: "black", ROUNDING: "#9ca3af"}.get(name, colors(place / len(RUNS)))
                dash = {ROUNDING: "--", TRAINER: "-."}.get(name, "-")
                steps = sorted(curve.losses)
                losses = smoothed([curve.losses[step] for step in steps])
                upper.plot(steps, losses, dash, color=color, linewidth=1.2)
                if name != ONE:
                    gaps = curve.gaps(of_precision[ONE])
                    lower.plot(gaps.keys(), gaps.values(), dash, color=color, linewidth=1.2, label=name)
            upper.set_title(f"{precision}: loss of {len(of_precision)} runs, smoothed", loc="left", fontsize=10)
            lower.set_title("largest gap to one device so far", loc="left", fontsize=10)
            lower.set_yscale("log")
            lower.set_xlabel("step")
        labels = {label: line for line, label in zip(*panels[1, 0].get_legend_handles_labels(), strict=True)}
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", frameon=False, ncols=4)
        save_picture(figure, path)


def write_page(blocks: dict[str, str]) -> None:
    """Write each table between the marks of its precision."""
    text = PAGE.read_text()
    for precision, block in blocks.items():
        head, begin, after = text.partition(f"<!-- {precision} -->\n")
        _, end, tail = after.partition(f"<!-- /{precision} -->")
        assert begin and end, f"{PAGE} needs marks for {precision}"
        text = f"{head}{begin}{block}\n{end}{tail}"
    PAGE.write_text(text)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--precision", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--steps", type=whole_number(1), default=2000)
    parser.add_argument("--at-once", type=whole_number(1), default=2, help="runs at the same time (2)")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/convergence")
    parser.add_argument("--write", action="store_true", help="write the page and its picture from the finished runs")
    parser.add_argument("--limit", type=float, help="exit with 1 if a loss differs by more from one device's")
    parser.add_argument("extra", nargs="*", help="options of the job, after --")
    return parser.parse_args()


def largest_gap(curves: dict[str, Curve]) -> float:
    """Return the largest difference of any loss, also of validation, from one device's; infinity if steps lack."""
    reference, gaps = curves[ONE], [0.0]
    for curve in curves.values():
        if curve.losses.keys() != reference.losses.keys() or curve.validation_loss is None:
            return math.inf
        gaps += [*curve.gaps(reference).values(), abs(curve.validation_loss - reference.validation_loss)]
    return max(gaps)


def main() -> int:
    options = parsed_arguments()
    root = options.folder.resolve()
    chosen = {ONE, *options.only}  # the others are held against one device
    names = {
        precision: [name for name in RUNS if name in chosen and (precision == "float32" or name in IN_BFLOAT16)]
        for precision in options.precision
    }
    folders = {(name, precision): folder_of(root, precision, name) for precision in names for name in names[precision]}
    if not options.write:
        with ThreadPoolExecutor(options.at_once) as pool:
            waiting = [
                pool.submit(train, name, folder, job_arguments(name, folder, precision, options.steps, options.extra))
                for (name, precision), folder in folders.items()
                if not Curve.read(folder).is_finished(options.steps)
            ]
        for run in waiting:
            run.result()
    read = {precision: {name: Curve.read(folders[name, precision]) for name in names[precision]} for precision in names}
    curves = {
        precision: {name: curve for name, curve in of_precision.items() if curve.is_finished(options.steps)}
        for precision, of_precision in read.items()
        if of_precision[ONE].is_finished(options.steps)
    }
    if not curves:
        raise SystemExit(f"{root}: the run on one device is not finished, to which the others are compared")
    blocks = {precision: table(of_precision, options.steps) for precision, of_precision in curves.items()}
    print("\n\n".join(f"{precision}\n{block}" for precision, block in blocks.items()))
    draw(curves, PICTURE if options.write else root / PICTURE.name)
    if options.write:
        write_page(blocks)
    return int(options.limit is not None and max(map(largest_gap, curves.values())) > options.limit)


if __name__ == "__main__":
    sys.exit(main())
