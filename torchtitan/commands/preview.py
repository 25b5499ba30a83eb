"""`torchtitan preview --job.config_file job.toml`: print the first training samples.

Samples are decoded, with document borders, the positions of each document, and the loss mask: tokens without a loss are
faint on a terminal and enclosed in [- and -] elsewhere. Padding is labelled and does not count as a document.
The job's options can be given too, to see their effect on the data before training.
"""

import sys
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import torch

from torchtitan.assembly.data import JobDatasets, unread_lines
from torchtitan.commands.check import end_token_line
from torchtitan.commands.command_lines import parse_command
from torchtitan.config.sections.training import DataLoader
from torchtitan.datasets.loader import Batch
from torchtitan.datasets.samples import IGNORE
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.process.distributed import device_type
from torchtitan.rules.loading import load_valid, without_resume
from torchtitan.training.batches import batch_preparer

HEAD, SPECIAL, MASKED, FAINT = "\033[1;36m", "\033[33m", "\033[2;31m", "\033[2m"
# Text of strangers must not reach the terminal as commands.
CONTROLS = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"} | {c: "\ufffd" for c in range(127, 160)}


def main(argv: list[str]) -> int:
    options, job_args = parse_command("preview", argv)
    # weights are not read, and training may run on another machine
    facts = load_valid(job_args, None, None, lambda fault: not fault.key.startswith("checkpoint."), without_resume)
    config, job = facts.config, facts.job.on_ranks(facts.job.world_size, device_type())
    tokenizer = job.tokenizer()
    batch = first_batch(job, tokenizer, options.samples)
    view = View(
        tokenizer,
        options.tokens,
        options.ids,
        colour=sys.stdout.isatty() and not config.metrics.disable_color_printing,
        labels=job.model.spec.labels,
        classes=config.task.labels,
        packs=job.model.spec.whole_records,
    )
    lines = [
        line
        for i in range(len(batch["tokens"]))
        for line in view.sample(i, {k: v[i].tolist() for k, v in batch.items()})
    ]
    encoding = sys.stdout.encoding or "utf-8"
    head = [about(job), *filter(None, [end_token_line(facts)])]
    head += unread_lines([weighted.source for weighted in JobDatasets(job).open_sources("training")], tokenizer)
    print("\n".join([*head, *lines]).encode(encoding, "replace").decode(encoding))
    return 0


def first_batch(job: ResolvedJob, tokenizer: Tokenizer, samples: int) -> Batch:
    """Return the first global samples, read by one rank: they are the same for any number of ranks.

    Raises DataError for data that the trainer would refuse, with the same message.
    """
    training = job.config.training
    size, step = samples, max(training.global_batch_size, training.local_batch_size)
    if job.config.data.group_by_length:  # samples are sorted within the steps of the job
        size = -(-samples // step) * step
    options = {"training.local_batch_size": size, "training.dataloader": DataLoader(pin_memory=False)}
    one_rank_job = job.on_one_rank().with_options(options)
    batches = iter(JobDatasets(one_rank_job).training_loader(tokenizer, 0))
    preparer = batch_preparer(one_rank_job, tokenizer, 0, torch.device("cpu"), draws=False)
    fetched, error = preparer.fetch(batches, 1, step=0)
    if error is not None:
        raise error
    return {name: tensor[: samples * job.layout.rows_per_sample] for name, tensor in fetched[0].items()}


def about(job: ResolvedJob) -> str:
    config = job.config
    attention = "inside each document" if job.data.isolates_documents else "over the whole sample"
    return (
        f"data {job.data.describe_sources('training')}, tokenizer "
        f"{config.model.tokenizer_path}, seq_len {config.training.seq_len}, seed {config.debug.seed}; "
        f"attention {attention}"
    )


class View:
    """Formats samples for the terminal.

    `labels`: kind of labels of the task (Task.labels). `classes`: class names for classification. `packs`: True if
    samples consist of whole records plus padding.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokens: int,
        ids: bool,
        colour: bool,
        labels: str = "next",
        classes: Sequence[str] = (),
        packs: bool = False,
    ) -> None:
        self.tokenizer, self.tokens, self.ids, self.colour = tokenizer, tokens, ids, colour
        self.labels, self.classes, self.packs = labels, classes, packs

    def sample(self, number: int, sample: dict[str, list[int]]) -> list[str]:
        """Return the lines of one sample."""
        tokens, labels, documents = sample["tokens"], sample["labels"], sample["document_ids"]
        padding = self._padding(tokens, labels, documents)
        count = documents[-1] + 1 - (padding is not None)
        head = f"sample {number}: {len(tokens)} tokens, {_count(count, 'document')}"
        trained = [label != IGNORE for label in labels]
        lines = ["", self._paint(HEAD, f"{head}, {sum(trained)} of {len(labels)} labels trained")]
        # a token is the label of the previous or the same position, or the whole sample has one label
        always = [True] * len(tokens)
        has_loss = {"next": [False, *trained[:-1]], "same": trained, "classes": always, "ends": trained}[self.labels]
        start = 0
        for document, group in groupby(documents):
            stop = start + len(list(group))
            if document == padding:
                border = f"--- padding: tokens {start}-{stop - 1}, masked in attention and loss "
                lines.append(self._paint(FAINT, border.ljust(100, "-")))
                start = stop
                continue
            positions = f"positions {sample['positions'][start]}-{sample['positions'][stop - 1]}"
            starts_here = self.packs or self.tokenizer.bos_id in (
                tokens[start],
                None,
            )  # a template may begin without a token
            begun = "" if starts_here else ", begun in an earlier sample"
            class_text = self._class(labels[start:stop])
            begun = class_text if self.labels == "classes" else begun
            border = f"--- document {document}: tokens {start}-{stop - 1}, {positions}{begun} "
            lines.append(self._paint(HEAD, border.ljust(100, "-")))
            limit = max(self.tokens // count, 8)
            lines.append(self._piece(tokens[start:stop], has_loss[start:stop], limit))
            if self.ids:
                lines.append(self._paint(FAINT, " ".join(["ids", *map(str, tokens[start : min(stop, start + limit)])])))
            start = stop
        return lines

    def _padding(self, tokens: list[int], labels: list[int], documents: list[int]) -> int | None:
        """Return the document that is padding, or None.

        Padding is at one end of a packed sample and has only end-of-text tokens, without a loss. A record always has
        other tokens too.
        """
        if not self.packs:
            return None
        for document in (documents[0], documents[-1]):
            indices = [i for i, other in enumerate(documents) if other == document]
            if all(tokens[i] == self.tokenizer.eos_id and labels[i] == IGNORE for i in indices):
                return document
        return None

    def _class(self, labels: list[int]) -> str:
        """Describe the class of a record by its only label with a loss."""
        number = next((label for label in labels if label != IGNORE), None)
        if number is None:
            return ", padding"
        return f", class {number}" + (f" ({self.classes[number].translate(CONTROLS)})" if self.classes else "")

    def _piece(self, tokens: list[int], has_loss: list[bool], limit: int) -> str:
        """Return the text of a document; above `limit` tokens without its middle, as the borders matter most."""
        if len(tokens) <= limit:
            return self._text(tokens, has_loss)
        tail = limit // 4
        head = limit - tail
        left_out = self._paint(FAINT, f"\n... {_count(len(tokens) - limit, 'more token')} ...\n")
        return self._text(tokens[:head], has_loss[:head]) + left_out + self._text(tokens[-tail:], has_loss[-tail:])

    def _text(self, tokens: list[int], has_loss: list[bool]) -> str:
        """Decode tokens, with names for special tokens and marks around tokens without a loss."""
        signs: dict[int | None, str] = {number: name for name, number in self.tokenizer.special_tokens.items()}
        signs |= {self.tokenizer.bos_id: "<begin>", self.tokenizer.eos_id: "<end>"}
        text = ""
        for in_loss, run in groupby(zip(tokens, has_loss, strict=True), key=itemgetter(1)):
            shown = ""
            for sign, same in groupby((token for token, _ in run), key=signs.get):
                ids = list(same)
                part = self._decode(ids) if sign is None else sign * len(ids)
                shown += self._paint(SPECIAL if sign else "" if in_loss else MASKED, part)
            text += shown if in_loss or self.colour else f"[-{shown}-]"
        return text

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens).translate(CONTROLS)

    def _paint(self, colour: str, text: str) -> str:
        return f"{colour}{text}\033[0m" if self.colour and colour else text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
