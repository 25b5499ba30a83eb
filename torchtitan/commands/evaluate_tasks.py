"""Tasks of lm-eval for a model: `torchtitan evaluate FOLDER --tasks TASKS`.

lm-eval makes requests of a task's data and numbers of the answers; what answers is here, and needs nothing of it.
Texts begin as documents do in training: with the tokenizer's first token, where it has one.
"""

import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtitan.adapters.neurocache.generation import ENDLESS, reading
from torchtitan.build import parts
from torchtitan.commands.generate import refuse_without_next_words, sample
from torchtitan.commands.task_files import greedy_of, tasks_in, without_effect
from torchtitan.commands.time_bound import at_most, unhurried
from torchtitan.config.job import JobConfig
from torchtitan.core.errors import JobError
from torchtitan.core.progress_bar import progress_bar
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.datasets.tokenizer.base import text_of
from torchtitan.losses.loglikelihood import Likelihood, Request, likelihoods, windows
from torchtitan.models.decoder import Decoder
from torchtitan.process.distributed import device_type
from torchtitan.training import inference_model

SEED = 1234
"""lm-eval's own, of the examples that stand before a question."""
DRAWS = 100
"""From which it takes the standard error of what is no mean."""
OPENING, COUNTING, OF_DOCUMENT = 300.0, 60.0, 1.0
"""Seconds for reading data, for templates, filters and figures together, and more of these for each document."""


class Asked(Protocol):
    """A request of lm-eval."""

    args: tuple[Any, ...]


class Answers:
    """What lm-eval asks of a model in evaluation, on one device, that reads `seq_len` tokens at once, `rows` requests
    in a batch.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, seq_len: int, rows: int):
        self.model, self.tokenizer, self.seq_len, self.rows = model, tokenizer, seq_len, rows
        self.context = seq_len
        if model.memory is not None:
            self.context = ENDLESS
            self.rows = 1 if model.memory.options.scope == "global" else rows  # which would find one another's
        self.first = tokenizer.begin or [tokenizer.eos_id]

    def loglikelihood(self, requests: Sequence[Asked]) -> list[tuple[float, bool]]:
        """Of args (context, continuation): the logarithm of the continuation's probability, and whether it is what the
        model would write.
        """
        return [
            (found.log, found.greedy)
            for found in self._likelihoods([self._pair(*request.args) for request in requests])
        ]

    def loglikelihood_rolling(self, requests: Sequence[Asked]) -> list[float]:
        """Of args (text,): the logarithm of its probability, in windows where it is longer than the context."""
        owners, pieces = [], []
        for number, request in enumerate(requests):
            for piece in windows(self.tokenizer.encode(request.args[0]), self.first[0], self.context):
                owners.append(number)
                pieces.append(piece)
        sums = [0.0] * len(requests)
        for number, found in zip(owners, self._likelihoods(pieces), strict=True):
            sums[number] += found.log
        return sums

    def generate_until(self, requests: Sequence[Asked]) -> list[str]:
        """Of args (context, generation_kwargs): the likeliest tokens, up to the first of the texts that end them."""
        with (
            reading(self.model, self.seq_len) as (reader, context),
            progress_bar("answering", len(requests), " texts") as bar,
        ):
            texts = []
            for request in requests:
                texts.append(self._written(reader, context, *request.args))
                bar.update()
        return texts

    def refuse_long(self, options: object, where: str) -> tuple[int, list[str]]:
        """Of `generation_kwargs`, as `greedy_of`. JobError where no token of the question would be read."""
        most, until = greedy_of(options, where)
        if most >= self.context:
            raise JobError(
                f"{where}: max_gen_toks: given {most}; allowed: less than the context, {self.context}; write it into "
                "the task's generation_kwargs, or give --training.seq_len"
            )
        return most, until

    def _written(self, reader: Any, context: int, text: str, options: object) -> str:
        most, until = self.refuse_long(options, "a task")
        prompt = self._begun(self.tokenizer.encode(text))[-(context - most) :]
        how: dict[str, Any] = dict(max_new_tokens=most, context=context, temperature=0, top_k=0, seed=0)
        said = ""
        for piece in text_of(sample(reader, prompt, self.tokenizer, **how), prompt, self.tokenizer):
            said += piece
            if any(end in said for end in until):
                break
        for end in until:
            said = said.split(end)[0]
        return said

    def _pair(self, context: str, continuation: str) -> Request:
        """Blanks between the two belong to the second, as words of a text have theirs before them."""
        bare = context.rstrip()
        given = self.tokenizer.encode(bare)
        whole = self.tokenizer.encode(bare + context[len(bare) :] + continuation)
        if continuation and len(whole) <= len(given):  # it would be certain, whatever the model finds
            raise JobError(
                f"an answer, {continuation!r}, given behind {bare[-20:]!r}, which together have no token of the "
                "answer's own; allowed: answers that begin a word; see target_delimiter"
            )
        return self._begun(given), whole[len(given) :]

    def _begun(self, ids: list[int]) -> list[int]:
        return self.tokenizer.begin + ids or self.first

    def _likelihoods(self, requests: list[Request]) -> list[Likelihood]:
        found: list[Likelihood] = [Likelihood(0.0, True)] * len(requests)
        how = dict(seq_len=self.seq_len, context=self.context, rows=self.rows)
        with progress_bar("answering", len(requests), " requests") as bar:
            for number, answer in likelihoods(self.model, requests, **how):
                found[number] = answer
                bar.update()
        return found


def evaluate_tasks(config: JobConfig, place: Path, path: Path, limit: int) -> dict[str, Any]:
    """Figures of the model that `place` holds: of the tasks of `path`, `limit` documents of each (0: all)."""
    refuse_without_next_words(config)
    if importlib.util.find_spec("lm_eval") is None:
        raise JobError("--tasks needs the package lm_eval; install it with: pip install 'torchtitan-toml[eval]'")
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder, _sandboxed():
        told = tasks_in(path)
        for name, task in told.items():
            if useless := without_effect(task):
                print(f"{name}: without effect here: {', '.join(useless)}", file=sys.stderr)
        tasks = _opened(told, folder)
        model, _ = inference_model.filled_model(config, place, torch.device(device_type()))
        assert isinstance(model, Decoder)
        rows = config.validation.local_batch_size
        answers = Answers(model, parts.tokenizer(config), config.training.seq_len, rows)
        for name, task in told.items():
            if task.get("output_type", "generate_until") == "generate_until":
                answers.refuse_long(task.get("generation_kwargs") or {}, name)
        return {"of": str(place), "seq_len": answers.seq_len, "tasks": _counted(answers, tasks, limit)}


def _opened(tasks: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """As lm-eval's own, which keeps what it makes of their data in `folder`."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager, opened = TaskManager(include_defaults=False), dict[str, Any]()
    for name, task in tasks.items():
        kept = {"dataset_kwargs": task["dataset_kwargs"] | {"cache_dir": folder}}
        try:
            with at_most(OPENING):
                opened |= manager.load([{"num_fewshot": 0} | task | kept])["tasks"]
        except Exception as error:  # what lm-eval and its readers of data raise has no common base
            what = f"{type(error).__name__}: {error}"
            raise JobError(f"{name}: lm-eval does not open it: {what}; mend its YAML or its data") from None
        opened[name].set_fewshot_seed(SEED)
    return opened


def _counted(answers: Answers, tasks: dict[str, Any], limit: int) -> dict[str, dict[str, Any]]:
    """By task, its number of documents and each figure, with a standard error where lm-eval has one."""
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate

    os.environ["DISABLE_MULTIPROC"] = "1"  # it would draw in processes that it makes by fork, beside torch's threads

    class Model(Answers, LM):
        def __init__(self) -> None:
            LM.__init__(self)
            self.__dict__ |= vars(answers)

        def loglikelihood(self, requests: Sequence[Asked]) -> list[tuple[float, bool]]:
            with unhurried():
                return super().loglikelihood(requests)

        def loglikelihood_rolling(self, requests: Sequence[Asked]) -> list[float]:
            with unhurried():
                return super().loglikelihood_rolling(requests)

        def generate_until(self, requests: Sequence[Asked]) -> list[str]:
            with unhurried():
                return super().generate_until(requests)

    logging.getLogger("lm_eval").setLevel(logging.WARNING)  # which says of what documents the answer is no choice
    try:
        how: dict[str, Any] = dict(limit=limit or None, log_samples=False, bootstrap_iters=DRAWS)
        documents = sum(min(limit or len(task.eval_docs), len(task.eval_docs)) for task in tasks.values())
        with at_most(COUNTING + OF_DOCUMENT * documents):
            found = evaluate(Model(), {"tasks": tasks}, **how)
    except Exception as error:  # what lm-eval, templates, filters and metrics raise has no common base
        if isinstance(error, (JobError, RuntimeError)) and not isinstance(error, RecursionError):  # of the model
            raise
        what = f"a template, a filter or a metric of {', '.join(tasks)} fails: {type(error).__name__}: {error}"
        raise JobError(f"{what}; mend it, or the document that lacks what it asks for") from None
    counts = found["n-samples"]
    figures = {}
    for name, row in found["results"].items():
        own = {key: value for key, value in row.items() if "," in key and isinstance(value, int | float)}
        figures[name] = {"documents": counts[name]["effective"]} | own
    return figures


@contextmanager
def _sandboxed() -> Iterator[None]:
    """lm-eval's templates with nothing in reach but the document."""
    from lm_eval import utils

    before = utils.env
    sandbox = ImmutableSandboxedEnvironment(
        loader=before.loader, undefined=before.undefined, keep_trailing_newline=before.keep_trailing_newline
    )
    sandbox.filters.update(before.filters)
    utils.env = sandbox
    try:
        yield
    finally:
        utils.env = before


def tasks_table(found: dict[str, Any]) -> str:
    """In lines, a row for each figure."""
    lines = [f"{'task':>24} {'documents':>10} {'figure':>24} {'filter':>12} {'value':>10} {'± 1 s.e.':>10}"]
    for name, row in found["tasks"].items():
        for key, value in row.items():
            figure, _, kind = key.partition(",")
            if kind and not figure.endswith("_stderr"):
                error = row.get(f"{figure}_stderr,{kind}")
                shown = "" if error is None else f"{error:.4f}"
                lines.append(f"{name:>24} {row['documents']:>10,} {figure:>24} {kind:>12} {value:>10.4f} {shown:>10}")
    return "\n".join(lines)
