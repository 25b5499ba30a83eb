"""Resize a model's vocabulary for `torchtitan convert`: add rows for new tokens, and pad to a multiple.

New rows are the mean of the existing ones. Padding rows have no token in the tokenizer. They are never
generated here, and generation_config.json suppresses them for other programs. config.json lists the new tokens until a
run has trained them.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from torchtitan.build import parts
from torchtitan.checkpoint.weight_sources import Weights
from torchtitan.commands.job_of import names_its_tokenizer
from torchtitan.config.job import JobConfig
from torchtitan.core.errors import JobError
from torchtitan.datasets.tokenizer import Tokenizer, build_tokenizer
from torchtitan.datasets.tokenizer.hf_json import extended, lacking
from torchtitan.models.hf.config import CONFIG, UNTRAINED, untrained
from torchtitan.models.hf.save import GENERATION, Source

AT_ONCE = 2**14
"""Rows per chunk when summing in double precision."""
SUPPRESSED = "suppress_tokens"
"""Key of generation_config.json: tokens that transformers never generates."""


@dataclass(frozen=True)
class Resizing:
    """A change of the vocabulary's size.

    `known`: number of rows of existing tokens. `tokens`: number of tokens afterwards. `args`: model sizes with the new
    number of rows.
    """

    known: int
    tokens: int
    args: Any
    vocabulary: Tokenizer

    def source(self, source: Source) -> Source:
        """Return the source with the new number of rows in its config."""
        return Source(source.config | {"vocab_size": self.args.vocab_size}, source.generation)

    def beside(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the files next to the weights, with the new rows and the rows without a token marked."""
        config, generation = (json.loads(files[name]) for name in (CONFIG, GENERATION))
        rows = self.args.vocab_size
        new = sorted({*untrained(config), *range(self.known, self.tokens)} & {*range(self.tokens)})
        hidden = [token_id for token_id in generation.get(SUPPRESSED) or [] if token_id < self.known] + [
            *range(self.tokens, rows)
        ]
        for content, key, ids in ((config, UNTRAINED, new), (generation, SUPPRESSED, hidden)):
            content.pop(key, None)
            content |= {key: ids} if ids else {}
        texts = {
            name: json.dumps(content, indent=2) + "\n" for name, content in ((CONFIG, config), (GENERATION, generation))
        }
        return {**files, **{name: text.encode() for name, text in texts.items()}}


@contextmanager
def resizing(
    config: JobConfig, args: Any, tokens: Sequence[str], eos: str | None, multiple: int | None
) -> Iterator[Resizing]:
    """Yield the resizing of the job's model. Raises JobError if its tokenizer is unknown or cannot take the tokens."""
    if not names_its_tokenizer(config):
        raise JobError("which tokens the model has is not known: --model.tokenizer_path says which is its tokenizer")
    before = parts.tokenizer(config)
    new = lacking(before, tokens)
    for token in sorted(set(tokens) - set(new)):
        print(f"{token!r} is there already, as number {before.special_tokens[token]}", file=sys.stderr)
    with TemporaryDirectory(prefix="torchtitan-") as folder:
        for name, content in extended(before, new, eos).items():
            Path(folder, name).write_bytes(content)
        after = build_tokenizer(folder)
        rows = max(args.vocab_size, after.vocab_size)
        if multiple is not None:
            rows = -(-after.vocab_size // multiple) * multiple
        num_known = min(before.vocab_size, args.vocab_size)
        yield Resizing(num_known, after.vocab_size, replace(args, vocab_size=rows), after)


class Resized(Weights):
    """Weights with the rows of a vocabulary of another size."""

    def __init__(self, weights: Weights, config: JobConfig, args: Any, to: Resizing):
        shapes = parts.model_spec(config).hf.shapes
        other = shapes(replace(args, vocab_size=args.vocab_size + 1))
        self.weights, self.to, self.step = weights, to, weights.step
        self.by_token = {name for name, shape in shapes(args).items() if other[name] != shape}

    def dtype(self, name: str) -> torch.dtype:
        return self.weights.dtype(name)

    def whole(self, name: str) -> torch.Tensor:
        value = self.weights.whole(name)
        if name not in self.by_token:
            return value
        trained_rows, rows = value[: self.to.known], self.to.args.vocab_size
        mean = sum(part.double().sum(0) for part in trained_rows.split(AT_ONCE)) / len(trained_rows)
        resized = mean.to(value.dtype).expand(rows, *value.shape[1:]).clone()
        resized[: len(trained_rows)] = trained_rows
        spare = value[self.to.tokens : rows]  # rows without a token before and after
        resized[self.to.tokens : self.to.tokens + len(spare)] = spare
        return resized
