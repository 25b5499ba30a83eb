"""Records as files and as prepared shards."""

import gzip
import json

import numpy as np

from torchtitan.commands import prepare


def segments(*pairs):
    return [{"text": content, "label": label} for content, label in pairs]


def records(count=120, seed=0):
    """Return conversations of uneven length.

    Trained text is in capitals, so the ids show the mask. Every seventh record has no trained text.
    """
    rng = np.random.default_rng(seed)

    def random_letters(first):
        return "".join(map(chr, rng.integers(first, first + 26, rng.integers(1, 12))))

    return [
        segments(
            *(
                (random_letters(65 if answer else 97), bool(answer))
                for _ in range(1 + i % 3)
                for answer in (0, i % 7 > 0)
            )
        )
        for i in range(count)
    ]


def write(path, values):
    content = "".join(json.dumps({"text": value}) + "\n" for value in values).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def make_shards(path, output, workers=1):
    options = ["--dataset_path", str(path), "--tokenizer_path", "bytes", "--workers", str(workers)]
    assert prepare.main([*options, "--output", str(output)]) == 0
