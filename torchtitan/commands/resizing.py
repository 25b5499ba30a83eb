"""A vocabulary of another size, for `torchtitan convert`: rows of tokens that are added, and rows that no token has, up
to a multiple. New rows are the mean of the known ones.

Which rows no token has is told by the tokenizer: nothing here writes their tokens, and generation_config.json says to
others that they are not to be written. Which tokens are new is said in config.json until a run has trained them.
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
from torchtitan.datasets.tokenizer.hf_files import extended, lacking
from torchtitan.models.hf.config import CONFIG, UNTRAINED, untrained
from torchtitan.models.hf.export import GENERATION, Source

AT_ONCE = 2**14
"""Rows that are added up in double precision at once."""
SUPPRESSED = "suppress_tokens"
"""Of generation_config.json: what transformers never writes."""


@dataclass(frozen=True)
class Resizing:
    """`known`: rows of tokens that were there; `tokens`: how many there are now; `args`: sizes with as many rows as are
    written.
    """

    known: int
    tokens: int
    args: Any
    vocabulary: Tokenizer

    def source(self, source: Source) -> Source:
        """The folder as if it had had as many rows."""
        return Source(source.config | {"vocab_size": self.args.vocab_size}, source.generation)

    def beside(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Files beside the weights, which say what of the rows is new and what is nobody's."""
        config, generation = (json.loads(files[name]) for name in (CONFIG, GENERATION))
        rows = self.args.vocab_size
        new = sorted({*untrained(config), *range(self.known, self.tokens)} & {*range(self.tokens)})
        hidden = [each for each in generation.get(SUPPRESSED) or [] if each < self.known] + [*range(self.tokens, rows)]
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
    """Of the model of these sizes with its tokenizer. JobError where that is not known, or cannot have these tokens."""
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
        known = min(before.vocab_size, args.vocab_size)
        yield Resizing(known, after.vocab_size, replace(args, vocab_size=rows), after)


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
        known, rows = value[: self.to.known], self.to.args.vocab_size
        mean = sum(part.double().sum(0) for part in known.split(AT_ONCE)) / len(known)
        made = mean.to(value.dtype).expand(rows, *value.shape[1:]).clone()
        made[: len(known)] = known
        spare = value[self.to.tokens : rows]  # which had no token, and have none now
        made[self.to.tokens : self.to.tokens + len(spare)] = spare
        return made
