"""`torchtitan preview --job.config_file job.toml`: what the model will see first.

Decoded samples with the borders of their documents, the positions that each document gets, and the labels that do
not count. Takes the job's options as well, so a change can be looked at before it is trained on.
"""

import argparse
import sys
from itertools import groupby

from torchtitan import config_manager
from torchtitan.config import JobConfig
from torchtitan.datasets.loader import Batch, build_loader
from torchtitan.datasets.packing import IGNORE
from torchtitan.datasets.tokenizer import Tokenizer, build_tokenizer

HEAD, SPECIAL, MASKED, FAINT = "\033[1;36m", "\033[33m", "\033[1;31m", "\033[2m"
# Text of strangers must not reach the terminal as commands.
CONTROLS = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"} | {c: "\ufffd" for c in range(127, 160)}


def main(argv: list[str]) -> int:
    options, rest = parse(argv)
    config = config_manager.load(rest)
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    batch = first_batch(config, tokenizer, options.samples)
    view = View(tokenizer, options.tokens, colour=sys.stdout.isatty() and not config.metrics.disable_color_printing)
    lines = [
        line for i in range(options.samples) for line in view.sample(i, {k: v[i].tolist() for k, v in batch.items()})
    ]
    encoding = sys.stdout.encoding or "utf-8"
    print("\n".join([about(config), *lines]).encode(encoding, "replace").decode(encoding))
    return 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of the preview, and what is left for the job."""
    parser = argparse.ArgumentParser(
        prog="torchtitan preview",
        description="Show what the model will see first.",
        epilog="Takes all options of a job as well: --job.config_file job.toml --section.key value ...",
        allow_abbrev=False,
    )
    parser.add_argument("--samples", type=int, default=2, help="how many samples (default 2)")
    parser.add_argument("--tokens", type=int, default=200, help="how much of each sample, in tokens (default 200)")
    options, rest = parser.parse_known_args(argv)
    for name in ("samples", "tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    return options, rest


def first_batch(config: JobConfig, tokenizer: Tokenizer, samples: int) -> Batch:
    """The first global samples. They are the same for any number of ranks, so one rank is asked for all of them."""
    training = config.training
    loader = build_loader(
        dataset=training.dataset,
        dataset_path=training.dataset_path,
        text_field=training.text_field,
        tokenizer=tokenizer,
        seq_len=training.seq_len,
        local_batch_size=samples,
        global_batch_size=samples,
        dp_rank=0,
        dp_size=1,
        seed=config.debug.seed,
        shuffle=training.shuffle,
        document_mask=training.document_mask,
        on_bad_data=training.on_bad_data,
        num_workers=0,
        persistent_workers=False,
        pin_memory=False,
        prefetch_factor=None,
    )
    return next(iter(loader))


def about(config: JobConfig) -> str:
    training = config.training
    attention = "inside each document" if training.document_mask else "over the whole sample"
    return (
        f"dataset {training.dataset}{f' ({training.dataset_path})' if training.dataset_path else ''}, tokenizer "
        f"{config.model.tokenizer_path}, seq_len {training.seq_len}, seed {config.debug.seed}; attention {attention}"
    )


class View:
    def __init__(self, tokenizer: Tokenizer, tokens: int, colour: bool) -> None:
        self.tokenizer, self.tokens, self.colour = tokenizer, tokens, colour

    def sample(self, number: int, sample: dict[str, list[int]]) -> list[str]:
        """The lines of one sample."""
        tokens, labels, documents = sample["tokens"], sample["labels"], sample["document_ids"]
        head = f"sample {number}: {len(tokens)} tokens, {_count(documents[-1] + 1, 'document')}"
        lines = ["", self._paint(HEAD, f"{head}, {_count(labels.count(IGNORE), 'label')} not counted")]
        start = 0
        for document, group in groupby(documents):
            stop = start + len(list(group))
            positions = f"positions {sample['positions'][start]}-{sample['positions'][stop - 1]}"
            begun = "" if tokens[start] == self.tokenizer.bos_id else ", begun in an earlier sample"
            border = f"--- document {document}: tokens {start}-{stop - 1}, {positions}{begun} "
            lines.append(self._paint(HEAD, border.ljust(100, "-")))
            lines.append(self._piece(tokens[start:stop], labels[start:stop], self.tokens // (documents[-1] + 1)))
            start = stop
        return lines

    def _piece(self, tokens: list[int], labels: list[int], limit: int) -> str:
        """Text of a document. If it is too long its middle is left out: the borders are what one wants to see."""
        limit = max(limit, 8)
        if len(tokens) <= limit:
            return self._text(tokens, labels)
        tail = limit // 4
        head = limit - tail
        left_out = self._paint(FAINT, f"\n... {_count(len(tokens) - limit, 'more token')} ...\n")
        return self._text(tokens[:head], labels[:head]) + left_out + self._text(tokens[-tail:], labels[-tail:])

    def _text(self, tokens: list[int], labels: list[int]) -> str:
        """Decoded, with a sign for every token that is no text and for every label that does not count."""
        signs = {self.tokenizer.bos_id: "<begin>", self.tokenizer.eos_id: "<end>"}
        text, run = "", []
        for token, label in zip(tokens, labels, strict=True):
            sign = self._paint(SPECIAL, signs[token]) if token in signs else ""
            sign += self._paint(MASKED, "<not counted>") if label == IGNORE else ""
            run += [] if token in signs else [token]
            if sign:
                text, run = text + self._decode(run) + sign, []
        return text + self._decode(run)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens).translate(CONTROLS)

    def _paint(self, colour: str, text: str) -> str:
        return f"{colour}{text}\033[0m" if self.colour else text


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
