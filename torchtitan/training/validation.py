"""Evaluate a run on its held-out data, and generate continuations of a few validation prompts.

All ranks generate all continuations together, so these do not depend on the parallel plan. There is no KV cache, as the
model under training has none: each token costs a forward pass over all prompts.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from torchtitan.assembly.data import JobDatasets
from torchtitan.config.sections.training import DataLoader
from torchtitan.datasets.conversations import end_of_turn_ids
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.guards.steps import WITHOUT_LABELS, NothingToLearn
from torchtitan.job import ResolvedJob
from torchtitan.losses.objective import IGNORE_INDEX, Batch
from torchtitan.metrics.json_lines import JsonLinesWriter
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process import distributed
from torchtitan.process.heartbeat import Progress
from torchtitan.training.batches import BatchPreparer

logger = logging.getLogger(__name__)

FILE = "generated.jsonl"
LOGGED_PROMPTS = 2
"""Number of prompts with continuations in the log."""
NextLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Choose = Callable[[torch.Tensor], torch.Tensor]


class Prompt(NamedTuple):
    """The token ids of a prompt, and its continuation in the data."""

    ids: list[int]
    continuation: list[int]


class Validator:
    """Evaluate the model on the held-out data during a run, and write continuations of a few of its prompts.

    All ranks call all methods together. `writes`: this rank writes generated.jsonl. `resumed_step`: the step that the
    run resumed from, if any. `every`: steps between validations.
    """

    def __init__(
        self,
        job: ResolvedJob,
        tokenizer: Tokenizer,
        model: ParallelModel,
        preparer: BatchPreparer,
        progress: Progress,
        writes: bool,
        resumed_step: int | None,
        every: int,
    ) -> None:
        self.model, self.preparer, self.progress, self.every = model, preparer, progress, every
        self.held_out = JobDatasets(job).held_out(tokenizer, preparer.dp_rank, preparer.objective)
        self.generations = Generations(job, tokenizer, writes, resumed_step)
        self.has_run = False
        """The first evaluation may compile."""
        if self.held_out is not None:
            self._refuse_without_labels()

    def _refuse_without_labels(self) -> None:
        """Raise `NothingToLearn`, on all ranks, if no token of the held-out data has a label: its loss would be 0, the
        best that there can be. The first batch tells, as a rule; only if it has none are the others read.
        """
        assert self.held_out is not None
        for count in (min(1, self.held_out.batches), self.held_out.batches):
            batches, failure = self.preparer.fetch(iter(self.held_out), count)
            if self.preparer.agree(batches, failure, False, "validation data")[0]:
                return
        raise NothingToLearn(f"the validation data have no token to validate with: {WITHOUT_LABELS}")

    def evaluate(self, step: int, stop: bool, phase: str = "validate") -> dict[str, float] | None:
        """Return the loss and the task's metrics, equal on all ranks; None if any rank called it with `stop`.

        Raises DataError, or PeerStopped on the ranks that have data while another has none. `phase`: as reported to
        the launcher.
        """
        assert self.held_out is not None, "the caller checks this"
        # fetch all before the first forward, which communicates
        batches, failure = self.preparer.fetch(iter(self.held_out), self.held_out.batches)
        valid_tokens, stopping = self.preparer.agree(batches, failure, stop, "validation data")
        if stopping:
            return None
        if not valid_tokens:
            raise NothingToLearn(f"the validation data have no token to validate with: {WITHOUT_LABELS}")
        watched = partial(self.progress.track, batches, phase, step)
        totals = self.model.evaluate(lambda: map(self.preparer.to_device, watched()))
        losses = {
            f"loss{name}": (self.model.sum_over_ranks(total) / valid_tokens).item() for name, total in totals.items()
        }
        results = losses | self.preparer.task_metrics(self.model.parts)
        self.has_run = True
        # rank 0's numbers on all ranks, so that all make the same decisions
        return dict(zip(results, distributed.broadcast_floats(*results.values()), strict=True))

    def generate(self, step: int, phase: str = "validate") -> None:
        """Write the continuations by the model after `step`."""
        self.generations.write(self.model, step, self.progress, phase)

    def go_back(self, step: int) -> None:
        self.generations.go_back(step)

    def close(self) -> None:
        if self.held_out is not None:
            self.held_out.close()
        self.generations.close()


class Generations:
    """Continuations of a run's prompts, in generated.jsonl. `resumed`: the step resumed from, if any."""

    def __init__(self, job: ResolvedJob, vocabulary: Tokenizer, writes: bool, resumed: int | None) -> None:
        config = job.config
        self.vocabulary, self.end_ids = vocabulary, end_of_turn_ids(vocabulary) | job.model.end_ids()
        self.context, self.max_new_tokens = job.data.seq_len("validation"), config.validation.generated_tokens
        self.multiple = job.layout.tp if job.layout.sequence_parallel else 1
        self.path = Path(config.job.dump_folder, FILE)
        self.prompts: list[Prompt] = []
        """Of the first validation samples or pairs under any plan; fewer if the data has fewer."""
        if count := config.validation.generated:
            options = {"training.dataloader": DataLoader(pin_memory=False), "validation.local_batch_size": 1}
            loader = JobDatasets(job.on_one_rank().with_options(options)).validation_loader(vocabulary, 0)
            self.prompts = [prompt_of(batch, end_of_turn_ids(vocabulary)) for batch in islice(loader, count)]
            loader.close()
        self.file = JsonLinesWriter(self.path, resumed) if writes and (self.prompts or self.path.exists()) else None

    def write(self, model: ParallelModel, step: int, progress: Progress, phase: str = "validate") -> None:
        """Generate and write the continuations after `step`. Every rank calls it."""
        if not self.prompts:
            return

        def choose(logits: torch.Tensor) -> torch.Tensor:
            progress.enter(phase, step)
            return most_probable(logits)

        progress.enter(phase, step)
        answers = self.answers(model, [prompt.ids for prompt in self.prompts], self.max_new_tokens, choose)
        decode = self.vocabulary.decode
        for number, (prompt, answer) in enumerate(zip(self.prompts, answers, strict=True)):
            texts = {"prompt": decode(prompt.ids), "wanted": decode(prompt.continuation), "generated": decode(answer)}
            if self.file is not None:
                self.file.write({"step": step, "number": number, **texts})
            if number < LOGGED_PROMPTS:  # %r: generated control characters must not reach the terminal
                logger.info("generated  %r -> %r", texts["prompt"][-60:], texts["generated"])

    def answers(
        self,
        model: ParallelModel,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        choose: Choose,
        keeps_end: bool = False,
    ) -> list[list[int]]:
        """Return the continuations of prompts by the model, see `generate`. Every rank calls it."""

        def next_logits(tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
            return model.next_token_logits(tokens.to(model.device), last.to(model.device))

        model.train(False)
        answers = generate(
            next_logits,
            prompts,
            choose=choose,
            max_new_tokens=max_new_tokens,
            context=self.context,
            multiple=self.multiple,
            vocab_size=self.vocabulary.vocab_size,
            end_ids=self.end_ids,
            keeps_end=keeps_end,
        )
        model.train()
        return answers

    def go_back(self, step: int) -> None:
        """Move the continuations of later steps to another file."""
        if self.file is not None:
            self.file.close()
            self.file = JsonLinesWriter(self.path, step)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def prompt_of(batch: Batch, end_ids: Collection[int]) -> Prompt:
    """Return the prompt of the first record in a batch of tokens, labels and document_ids [B, S].

    It is the text before the first answer, or the first half of a record that is trained on from its start.
    """
    documents = batch["document_ids"][0]
    in_record = documents == documents[(batch["labels"][0] != IGNORE_INDEX).int().argmax()]  # padding may precede it
    ids, labels = (batch[name][0][in_record].tolist() for name in ("tokens", "labels"))
    first = next((i for i, label in enumerate(labels) if label != IGNORE_INDEX), 0)
    first = first or max(0, len(ids) // 2 - 1)
    stop = next((i for i in range(first, len(ids)) if labels[i] == IGNORE_INDEX or labels[i] in end_ids), len(ids))
    return Prompt(ids[: first + 1], labels[first:stop])


def most_probable(logits: torch.Tensor) -> torch.Tensor:
    """Return the most probable tokens [B] of logits [B, V]."""
    return logits.argmax(-1)


def chooser(temperature: float, seed: int) -> Choose:
    """Return the choice of the most probable token, or for a `temperature` above 0 a draw by the seed."""
    if not temperature:
        return most_probable
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: torch.Tensor) -> torch.Tensor:
        probabilities = (logits.float().cpu() / temperature).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

    return draw


def generate(
    next_logits: NextLogits,
    prompts: Sequence[Sequence[int]],
    *,
    choose: Choose = most_probable,
    max_new_tokens: int,
    context: int,
    multiple: int,
    vocab_size: int,
    end_ids: Collection[int],
    keeps_end: bool = False,
) -> list[list[int]]:
    """Return the continuations of the prompts.

    Each ends before one of `end_ids` (with it, if `keeps_end`), after `max_new_tokens` tokens, or with `context` tokens
    including the prompt.

    `next_logits`: tokens [B, S] and last [B] -> logits [B, V]; S and `context` are multiples of `multiple`. `choose`:
    logits [B, V] -> tokens [B]. All ranks take rank 0's choices, because sums of reductions may differ in their last
    bits.
    """
    rows = [list(prompt) for prompt in prompts]
    longest = min(context, max(map(len, rows)) + max_new_tokens)
    tokens = torch.zeros(len(rows), -(-longest // multiple) * multiple, dtype=torch.int64)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    going = {number for number, ids in enumerate(rows) if len(ids) < context}
    for _ in range(max_new_tokens):
        if not going:
            break
        last = torch.tensor([len(ids) - 1 for ids in rows])
        logits = next_logits(tokens, last)[:, :vocab_size]
        choices = distributed.broadcast_floats(*choose(logits.float()).tolist())
        for number in sorted(going):
            choice, ids = int(choices[number]), rows[number]
            if keeps_end or choice not in end_ids:
                tokens[number, len(ids)] = choice
                ids.append(choice)
            if choice in end_ids or len(ids) == context:
                going.remove(number)
    return [ids[len(prompt) :] for ids, prompt in zip(rows, prompts, strict=True)]
