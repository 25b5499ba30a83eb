"""Loaders over small documents, and the samples that they give over all ranks."""

import gzip
import json
from itertools import islice

import numpy as np

from torchtitan.datasets import open_source
from torchtitan.datasets.loader import Loader, LoaderOptions, WeightedSource, WorkerOptions, build_loader
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer("bytes")
SEQ_LEN = 16


def loader(dataset_path=None, dataset="text", sources=(), **options) -> Loader:
    """Build a loader of one dataset, or of `sources` as (dataset, dataset_path, weight). `slices`: of each of them."""
    sources, slices = sources or [(dataset, dataset_path, 1.0)], options.pop("slices", None)
    opened = [
        WeightedSource(name, open_source(name, str(path), RecordReader(), slices=slices), weight)
        for name, path, weight in sources
    ]
    state, tokenizer = options.pop("state", None), options.pop("tokenizer", TOKENIZER)
    workers = WorkerOptions(**{name: options.pop(name) for name in WorkerOptions._fields if name in options})
    samples = LoaderOptions(**(dict(seq_len=SEQ_LEN, local_batch_size=2) | options))
    return build_loader(opened, tokenizer, samples, workers, state)


def write_documents(path, count=150, seed=0):
    rng = np.random.default_rng(seed)
    texts = ["".join(map(chr, rng.integers(97, 123, rng.integers(1, 14)))) for _ in range(count)]
    texts[3] = ""
    content = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def rows(batch):
    """Return a batch as a list of samples: (tokens, labels, positions, document_ids), each a list."""
    names = ("tokens", "labels", "positions", "document_ids")
    return list(zip(*(batch[name].tolist() for name in names), strict=True))


def interleave(lists):
    """Interleave the samples of the ranks into global order."""
    return [row for samples in zip(*lists, strict=True) for row in samples]


def global_samples(count, dp_size=1, **options):
    """Return the first `count` samples in global order, read by `dp_size` ranks."""
    per_rank = []
    for rank in range(dp_size):
        rank_loader = loader(dp_rank=rank, dp_size=dp_size, **options)
        batches = islice(rank_loader, -(-count // (dp_size * options.get("local_batch_size", 2))))
        per_rank.append([row for batch in batches for row in rows(batch)])
        rank_loader.close()
    return interleave(per_rank)[:count]
