"""Find the layer whose input is the best key of a Neurocache; makes a table of docs/neurocache.md.

An untrained cache is placed before each layer. A hit is a token for which one of the retrieved entries was followed by
the token to predict. The script reports the hit rate over held-out documents and over their hard tokens (the model's
own loss exceeds 3 nats). The layer with the best rate should store.

Without a run, a model is first trained on synthetic documents of motifs of 8 letters. Half of the motifs repeat one of
the last 4; the others come from the document's inventory of 64, last seen about 1,000 letters ago and so outside a
segment of 96. `--steps` sets the steps of this training; `--quick` makes few.
"""

import argparse
import copy
import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torchtitan.assembly import parts  # noqa: E402
from torchtitan.assembly.data import JobDatasets  # noqa: E402
from torchtitan.commands.evaluate import of_documents  # noqa: E402
from torchtitan.commands.generate import find_checkpoint  # noqa: E402
from torchtitan.config.sections.model import Adapter  # noqa: E402
from torchtitan.core.random_draws import initialize  # noqa: E402
from torchtitan.datasets.segments import HeldOutSegments  # noqa: E402
from torchtitan.losses.objective import SummedCrossEntropy, cross_entropies  # noqa: E402
from torchtitan.plugins.neurocache.adapter import Neurocache  # noqa: E402
from torchtitan.plugins.neurocache.cache import HitStatistics, PairComparison  # noqa: E402
from torchtitan.plugins.neurocache.options import NeurocacheOptions as Cache  # noqa: E402
from torchtitan.training import inference_model  # noqa: E402

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-"
HARD = 3.0
ENTRIES = 16384


def motifs(seed: int, length: int = 3072) -> str:
    """Return a synthetic document."""
    draws = random.Random(seed)
    inventory = ["".join(draws.choices(LETTERS, k=8)) for _ in range(64)]
    document: list[str] = []
    while len(document) * 8 < length:
        document.append(draws.choice(document[-4:]) if document and draws.random() < 0.5 else draws.choice(inventory))
    return "".join(document)


def write_motifs(folder: Path, train: int, held_out: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, seeds in (("train", range(train)), ("held_out", range(train, train + held_out))):
        lines = [json.dumps({"text": motifs(seed)}) for seed in seeds]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


class LastLookups(HitStatistics):
    """Keeps the lookups of the last batch, by the layer that read."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[int, PairComparison] = {}

    def note(self, reader: int, lookup: PairComparison) -> None:
        self.last[reader] = lookup


@torch.no_grad()
def hit_rates(model: Any, plan: Any, batches: Iterable[dict[str, torch.Tensor]], topk: int, r: int) -> list[dict]:
    """Measure hit rates of a plain decoder on batches of documents, a row per layer. `r`: untrained compression."""
    layers, cached_model = model.args.n_layers, copy.deepcopy(model)
    layer_map = {str(layer): layer for layer in range(layers)}
    cache = Cache(cache_size=ENTRIES, compression=r, topk=topk, window=1, context=1, cache_dtype="float32")
    # only the last layer attends to the cache, so no stored state changes
    cache = dataclasses.replace(cache, retrieval_map=layer_map, attention_layers=[layers - 1], track_hits=True)
    installed = Neurocache(Adapter(kind="neurocache", neurocache=cache))
    installed.install(cached_model, plan)
    initialize(cached_model, 0, cached_model.init_rule, names=installed.added_parameters)
    cached_model.loss = SummedCrossEntropy(1)
    cached_model.train()
    cached_model.memory.hits = recorder = LastLookups()
    sums = torch.zeros(layers, 3, 2, dtype=torch.float64)
    for batch in batches:
        labels = batch["labels"]
        logits = model(batch["tokens"], positions=batch["positions"]).flatten(0, 1)
        hard = (cross_entropies(logits, labels.flatten()) > HARD).view_as(labels)
        inputs = {name: batch[name] for name in ("tokens", "positions", "begins", "filled")}
        cached_model(**inputs, labels=labels)
        for layer, lookup in recorder.last.items():
            is_counted = lookup.is_counted
            pairs = [(lookup.hit & is_counted, is_counted), (lookup.hit & is_counted & hard, is_counted & hard)]
            pairs.append((lookup.same & is_counted[..., None], lookup.exists & is_counted[..., None]))
            sums[layer] += torch.tensor([[part.sum(), total.sum()] for part, total in pairs])
        cached_model.memory.commit()
    names = ("hit", "hit_hard", "same")
    rates = sums[..., 0] / sums[..., 1].clamp(min=1)
    return [{"layer": n, "compression": r} | dict(zip(names, row, strict=True)) for n, row in enumerate(rates.tolist())]


def probe(run: Path, topk: int, compressions: Iterable[int], samples: int) -> list[dict]:
    """Measure hit rates of a run's newest checkpoint on its validation documents."""
    job, checkpoint = find_checkpoint(run, None, [])
    job = of_documents(job)
    model, _ = inference_model.load_model(job, checkpoint, torch.device("cpu"))
    seq_len, rows = job.data.seq_len("validation"), job.config.validation.local_batch_size
    documents = JobDatasets(job).documents("validation")
    plan, rates = parts.model_spec(job.model).plan, []
    for r in compressions:
        batches = HeldOutSegments(documents, 0, seq_len=seq_len, rows=rows, rank=0, ranks=1)
        rates += hit_rates(model, plan, islice(batches, max(1, samples // rows)), topk, r)
    return rates


def rate_table(all_rates: list[dict]) -> str:
    """Format rates as a Markdown table with a row per layer."""
    rs = sorted({row["compression"] for row in all_rates})
    lines = ["| input of layer | same token | " + " | ".join(f"hit, r = {r} | hard, r = {r}" for r in rs) + " |"]
    lines.append("|---" * (2 + 2 * len(rs)) + "|")
    for layer in sorted({row["layer"] for row in all_rates}):
        rows = [row for row in all_rates if row["layer"] == layer]
        rates = " | ".join(f"{row['hit']:.3f} | {row['hit_hard']:.3f}" for row in rows)
        lines.append(f"| {layer} | {rows[0]['same']:.2f} | {rates} |")
    return "\n".join(lines)


def train_on_motifs(folder: Path, steps: int) -> None:
    write_motifs(folder, 600, 16)
    settings = {
        "job.dump_folder": folder / "run",
        "model.name": "llama3",
        "model.overrides": "{dim=96, n_layers=4, n_heads=4, n_kv_heads=4, vocab_size=260, multiple_of=32}",
        "model.tokenizer_path": "bytes",
        "task.kind": "documents",
        "training.dataset": "text",
        "training.dataset_path": folder / "train.jsonl",
        "training.local_batch_size": 16,
        "training.seq_len": 96,
        "training.steps": steps,
        "training.mixed_precision_param": "float32",
        "validation.dataset": "text",
        "validation.dataset_path": folder / "held_out.jsonl",
        "validation.local_batch_size": 16,
        "activation_checkpoint.mode": "none",
        "optimizer.lr": 3e-3,
        "optimizer.weight_decay": 0.0,
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.warmup_steps": max(1, steps // 20),
        "metrics.log_freq": 50,
        "metrics.plot": "false",
        "checkpoint.enable": "true",
        "checkpoint.interval": 500,
    }
    command = [sys.executable, "-m", "torchtitan", "train", *(f"--{name}={value}" for name, value in settings.items())]
    subprocess.run(command, cwd=ROOT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "run", nargs="?", type=Path, help="a run's folder; by default a model is trained on synthetic documents"
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--samples", type=int, default=512, help="segments to evaluate")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/probe_neurocache")
    options = parser.parse_args()
    run = options.run
    if run is None:
        train_on_motifs(options.folder.resolve(), 2 if options.quick else options.steps)
        run = options.folder.resolve() / "run"
    print(rate_table(probe(run, 8, (1, 4), 32 if options.quick else options.samples)))


if __name__ == "__main__":
    main()
