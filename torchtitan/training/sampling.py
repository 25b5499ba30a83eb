"""Continuations of texts by the model of an engine, and batches to train on them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan.job import ResolvedJob
from torchtitan.losses.objective import IGNORE_INDEX
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process import distributed
from torchtitan.training.batches import Batch
from torchtitan.training.caller_batches import EngineError, are_equal, checksum_of, with_square
from torchtitan.training.validation import Generations, chooser


@dataclass(frozen=True)
class Sample:
    """A continuation of a prompt, as the tokens that were drawn: encoding its text again may give others."""

    prompt_ids: list[int]
    ids: list[int]
    """With the end token, if it has `ended`."""
    text: str
    ended: bool
    """False if it was cut off, at the largest number of tokens or at training.seq_len."""


def check_prompts(job: ResolvedJob, prompts: Sequence[str], max_new_tokens: int, temperature: float) -> None:
    """Raise EngineError unless a job's model can continue these texts."""
    task, layout = job.model.spec, job.layout
    if layout.pp > 1 or layout.cp > 1:
        raise EngineError("generate: pipeline and context parallel are not supported; generate by another plan")
    if task.labels != "next" or task.streams_documents:
        raise EngineError(f"generate: a model of task.kind = {job.config.task.kind} does not continue texts")
    if isinstance(prompts, str) or not prompts or not all(isinstance(one, str) and one for one in prompts):
        raise EngineError("generate: prompts: allowed: a list of texts, none of them empty")
    if max_new_tokens < 1 or not 0 <= temperature < float("inf"):
        settings = f"max_new_tokens = {max_new_tokens}, temperature = {temperature}"
        raise EngineError(f"generate: given {settings}; allowed: at least 1, and 0 or more")


def draw_samples(
    job: ResolvedJob,
    model: ParallelModel,
    generations: Generations,
    prompts: Sequence[str],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[Sample]:
    """Return a continuation of each prompt. Raises EngineError on all ranks if one has a fault, or other arguments."""
    failure: EngineError | None = None
    ids: list[list[int]] = []
    try:
        check_prompts(job, prompts, max_new_tokens, temperature)
        ids = [generations.vocabulary.encode(prompt, bos=True) for prompt in prompts]
        if (longest := max(map(len, ids))) >= generations.context:
            raise EngineError(f"generate: a prompt of {longest} tokens; allowed: fewer than {generations.context}")
    except EngineError as error:
        failure = error
    checksum = checksum_of((ids, max_new_tokens, temperature, seed))
    failed, *checksums = distributed.sum_ints(failure is not None, *with_square(checksum))
    if failure is not None:
        raise failure
    if failed or not are_equal(checksums):
        raise EngineError(
            "generate: ranks pass other prompts, max_new_tokens, temperature or seed; all ranks generate all texts "
            "together: pass the same, and train on this rank's part of the samples"
        )
    answers = generations.answers(model, ids, max_new_tokens, chooser(temperature, seed), keeps_end=True)
    samples = []
    for prompt_ids, answer in zip(ids, answers, strict=True):
        ended = bool(answer) and answer[-1] in generations.end_ids
        samples.append(Sample(prompt_ids, answer, generations.vocabulary.decode(answer[: len(answer) - ended]), ended))
    return samples


def batch_of(samples: Sequence[Sample], rows: int, seq_len: int) -> Batch:
    """Return tokens and labels [B, S] of samples, with labels on their continuations. Raises EngineError if B differs
    from `rows`.
    """
    if len(samples) != rows:
        raise EngineError(
            f"batch_of: given {len(samples)} samples; allowed: {rows} (training.local_batch_size), this rank's part of "
            "them: samples[engine.dp_rank :: engine.dp_size]"
        )
    tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    for row, sample in enumerate(samples):
        ids = torch.tensor(sample.prompt_ids + sample.ids)
        first = len(sample.prompt_ids) - 1
        tokens[row, : len(ids) - 1] = ids[:-1]
        labels[row, first : len(ids) - 1] = ids[first + 1 :]
    return {"tokens": tokens, "labels": labels}
