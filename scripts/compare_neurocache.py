"""Compare a frozen base model with LoRA, with a Neurocache, and with both, on long documents.

All are trained for the same number of steps. The script measures the loss on held-out documents by a token's position
in its document, and makes the table and the figure of docs/neurocache.md.

Documents are the .txt files in the folders train and held_out of `--documents FOLDER`. By default a document is the
concatenated modules of a Python package's folder, and other packages are held out. The base is a Llama with 4 layers of
width 256, the debug tokenizer's 2,048 tokens and segments of 128 tokens, on one thread in float32. It demonstrates the
mechanism; the figures do not carry over to useful models. The base is trained on shuffled pieces of the documents,
because its few rows would otherwise read few documents. scripts/probe_neurocache.py chooses the layer that stores. Each
adapter is trained `--repeats` times with different seeds. A stopped run resumes. `--quick` makes few steps; `--write`
writes tables and figure into docs/.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import mean

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.probe_neurocache import probe, rate_table  # noqa: E402
from torchtitan.checkpoint.layout import step_folders  # noqa: E402
from torchtitan.metrics.plot import STYLE  # noqa: E402

PAGE, PICTURE = ROOT / "docs/neurocache.md", ROOT / "docs/neurocache_places.png"
BEGIN, END = "<!-- places -->", "<!-- /places -->"
TRAINED_ON = ("sympy", "torch", "pandas", "numpy", "fontTools", "pygments", "setuptools", "mypy", "matplotlib")
HELD_OUT = ("networkx", "mpmath", "peft")
LEAST, MOST, MOST_HELD_OUT = 90_000, 200_000, 70_000
"""Minimum and maximum bytes of a document. Training uses every second folder, validation every third."""
PIECE = 2000
"""Characters of a piece, which the base reads as a document."""
SIZES = (0, 4096, 16384)
LORA = {"adapter.rank": 16, "adapter.alpha": 32.0, "adapter.target": '["*feed_forward*"]'}
COLORS = {"base": "#6b7280", "LoRA": "#1d4ed8", "cache": "#d9480f", "cache + LoRA": "#15803d"}


def documents(packages: tuple[str, ...], most: int) -> Iterator[tuple[str, str]]:
    """Yield names and texts, the same on every machine with the same packages."""
    site = Path(matplotlib.__file__).parents[1]
    for package in packages:
        folders = sorted({file.parent for file in (site / package).rglob("*.py")})
        for folder in folders:
            name = folder.relative_to(site).as_posix()
            if {"tests", "test", "testing"} & set(name.split("/")):
                continue
            text = "\n".join(file.read_text(errors="replace") for file in sorted(folder.glob("*.py")))
            if len(text) >= LEAST:
                yield name.replace("/", "."), text[:most]


def write_documents(folder: Path) -> None:
    for part, packages, most, nth in (("train", TRAINED_ON, MOST, 2), ("held_out", HELD_OUT, MOST_HELD_OUT, 3)):
        if (folder / part).exists():
            continue
        unfinished = folder / f"{part}.begun"  # renamed once it is complete
        unfinished.mkdir(parents=True, exist_ok=True)
        for name, text in islice(documents(packages, most), 0, None, nth):
            (unfinished / f"{name}.txt").write_text(text)
        unfinished.rename(folder / part)


def write_pieces(texts: Path, out: Path) -> None:
    """Cut all documents of `texts` into pieces and write a line of JSON for each."""
    unfinished = out.with_suffix(".begun")  # renamed once it is complete
    with unfinished.open("w") as lines:
        for file in sorted(texts.glob("*.txt")):
            text = file.read_text(errors="replace")
            for at in range(0, len(text), PIECE):
                print(json.dumps({"text": text[at : at + PIECE]}), file=lines)
    unfinished.rename(out)


@contextmanager
def timed(folder: Path, stage: str) -> Iterator[None]:
    """Add the block's seconds to the stage's total in seconds.json, over all starts of this script."""
    start, out = time.perf_counter(), folder / "seconds.json"
    try:
        yield
    finally:
        totals = json.loads(out.read_text()) if out.exists() else {}
        totals[stage] = totals.get(stage, 0.0) + time.perf_counter() - start
        out.write_text(json.dumps(totals))


def job_arguments(folder: Path, run: str, steps: int, options: dict[str, object]) -> list[str]:
    """Return the arguments of a training job."""
    sizes = "dim = 256, n_layers = 4, n_heads = 4, n_kv_heads = 4, vocab_size = 2048, multiple_of = 32"
    settings = {
        "job.dump_folder": folder / run,
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "model.tokenizer_path": "debug",
        "model.overrides": f"{{{sizes}}}",
        "task.kind": "documents",
        "training.dataset": "text",
        "training.dataset_path": folder / "train",
        "training.local_batch_size": 4,
        "training.global_batch_size": 8,
        "training.seq_len": 128,
        "training.steps": steps,
        "training.mixed_precision_param": "float32",
        "data.cache_dir": folder / "tokens",
        "optimizer.lr": 3e-3,
        "optimizer.weight_decay": 0.0,
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.warmup_steps": min(100, max(1, steps // 10)),
        "activation_checkpoint.mode": "none",
        "validation.dataset": "text",
        "validation.dataset_path": folder / "held_out",
        "validation.local_batch_size": 4,
        "metrics.log_freq": 10,
        "metrics.plot": False,
        "checkpoint.enable": True,
        "checkpoint.interval": 200,
        "checkpoint.keep_latest_k": 2,
    }
    return [f"--{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in (settings | options).items()]


def adapters(layer: int, steps: int) -> dict[str, dict[str, object]]:
    """Return options of each adapter by its name. Caches store the input of `layer`."""
    upper = list(range(layer, 4))
    cache = {
        "adapter.kind": "neurocache",
        "adapter.neurocache.cache_size": 4096,
        "adapter.neurocache.compression": 2,
        "adapter.neurocache.topk": 8,
        "adapter.neurocache.cache_dtype": "float32",
        "adapter.neurocache.retrieval_map": f'{{"{layer}" = {layer}}}',
        "adapter.neurocache.init": "pca",
        "adapter.neurocache.track_hits": True,
    }
    lora = LORA | {"adapter.layers": upper}
    return {
        "LoRA": lora | {"adapter.kind": "lora"},
        "cache": cache,
        "cache + LoRA": cache | lora | {"adapter.neurocache.beside": "lora"},
    }


def torchtitan(*argv: object) -> None:
    subprocess.run([sys.executable, "-m", "torchtitan", *map(str, argv)], cwd=ROOT, check=True)


def evaluate(run: Path, sizes: tuple[int, ...], samples: int) -> list[dict]:
    """Evaluate a run for each cache size, or once without a cache. Results are reused until there is a newer step."""
    size_option, out = ["--cache-sizes", ",".join(map(str, sizes))] if sizes else [], run / "places.json"
    (_, newest), *_ = step_folders(run / "checkpoint")  # the mtime of the run's folder changes at every start
    if not out.exists() or out.stat().st_mtime < newest.stat().st_mtime:
        torchtitan("evaluate", run, "--samples", samples, *size_option, "--out", out)
    return json.loads(out.read_text())["runs"]


Results = dict[str, list[list[dict]]]
"""Results by name: for each repeat a list with a row per cache size."""


def spread(values: list[float], digits: int) -> str:
    """Format the mean and half the range of the values."""
    around = f" ± {(max(values) - min(values)) / 2:.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{around}"


def table(results: Results) -> str:
    places = list(results["base"][0][0]["by_position"])
    lines = [f"| | entries | {' | '.join(places)} | all | perplexity |", "|---" * (len(places) + 4) + "|"]
    for name, repeats in results.items():
        for runs in zip(*repeats, strict=True):
            losses = [spread([run["by_position"][place]["loss"] for run in runs], 3) for place in places]
            size = f"{runs[0]['cache_size']:,}" if "cache_size" in runs[0] else ""
            overall = f"{spread([run['loss'] for run in runs], 3)} | {spread([run['perplexity'] for run in runs], 2)}"
            lines.append(f"| {name} | {size} | {' | '.join(losses)} | {overall} |")
    return "\n".join(lines)


def draw(results: Results, path: Path) -> None:
    places = list(results["base"][0][0]["by_position"])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
        axes = figure.subplots()
        for name, repeats in results.items():
            rows = list(zip(*repeats, strict=True))
            shown = rows if len(rows) == 1 else [rows[0], rows[-2], rows[-1]]
            for number, runs in enumerate(shown):
                size = f", {runs[0]['cache_size']:,} entries" if "cache_size" in runs[0] else ""
                style = ("-", "--", ":")[len(shown) - 1 - number]
                losses = [[run["by_position"][place]["loss"] for place in places] for run in runs]
                means = [mean(values) for values in zip(*losses, strict=True)]
                axes.plot(places, means, style, marker="o", color=COLORS[name], label=name + size)
                least, most = ([pick(values) for values in zip(*losses, strict=True)] for pick in (min, max))
                axes.fill_between(places, least, most, color=COLORS[name], alpha=0.15, linewidth=0)
        axes.set_title("held-out documents: loss by place in the document", loc="left")
        axes.set_xlabel("tokens ahead in the document")
        axes.set_ylabel("nats per token")
        axes.legend(frameon=False)
        figure.savefig(path, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--documents", type=Path, help="a folder with train/*.txt and held_out/*.txt")
    parser.add_argument("--base-steps", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=250, help="steps of each adapter")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each adapter, with different seeds")
    parser.add_argument("--samples", type=int, default=1000, help="segments to evaluate, in whole documents")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/compare_neurocache")
    options = parser.parse_args()
    if options.quick:
        options.base_steps, options.steps, options.samples = 4, 2, 8
    folder = options.folder.resolve()
    texts = options.documents.resolve() if options.documents else folder
    results, tables = compare(folder, texts, options)
    stage_seconds = json.loads((folder / "seconds.json").read_text())
    minutes = ", ".join(f"{stage} {seconds / 60:.0f}" for stage, seconds in stage_seconds.items())
    load = os.getloadavg()[2]
    tables += f"\n\nMinutes of this run: {minutes}; the load average at its end was {load:.1f}."
    print(tables)
    draw(results, PICTURE if options.write else folder / PICTURE.name)
    if options.write:
        head, _, tail = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{tables}\n{END}{tail.partition(END)[2]}")


def compare(folder: Path, texts: Path, options: argparse.Namespace) -> tuple[Results, str]:
    """Train and evaluate all models on the documents of `texts`; return the results and their tables as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    if texts == folder:
        write_documents(folder)
    if not (pieces := folder / "pieces.jsonl").exists():
        write_pieces(texts / "train", pieces)
    data_options = {"training.dataset_path": texts / "train", "validation.dataset_path": texts / "held_out"}
    with timed(folder, "base"):
        base_options = {"training.dataset_path": pieces, "training.local_batch_size": 8}
        torchtitan("train", *job_arguments(folder, "base", options.base_steps, data_options | base_options))
    with timed(folder, "measuring"):
        results = {"base": [evaluate(folder / "base", (), options.samples)]}
        rates = probe(folder / "base", topk=8, compressions=(1, 2), samples=min(options.samples, 200))
    print(rates_markdown := rate_table(rates), flush=True)
    layer = max((row["hit_hard"], row["layer"]) for row in rates if row["compression"] == 2)[1]
    for seed in range(options.repeats):
        for name, adapter_options in adapters(layer, options.steps).items():
            run = f"{name.replace(' + ', '_')}_{seed}"
            start_options = data_options | {"checkpoint.initial_load_path": folder / "base", "debug.seed": seed}
            with timed(folder, name):
                torchtitan("train", *job_arguments(folder, run, options.steps, adapter_options | start_options))
            with timed(folder, "measuring"):
                row = evaluate(folder / run, SIZES if "cache" in name else (), options.samples)
            results.setdefault(name, []).append(row)
            (folder / "places.json").write_text(json.dumps(results))
    return results, f"{rates_markdown}\n\n{table(results)}"


if __name__ == "__main__":
    main()
