"""Evaluate a model on lm-eval tasks: `torchtitan evaluate FOLDER --tasks TASKS`.

lm-eval turns a task's data into requests and the answers into metrics. This module answers the requests and does not
depend on lm-eval for that. Texts begin as documents do in training: with the tokenizer's first token, if it has one.

Templates and regular expressions of task files run under a time limit, because even a short one can run for years.
"""

import importlib.util
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtitan.commands.generate import require_causal_decoder, sample
from torchtitan.core.errors import JobError
from torchtitan.core.progress_bar import progress_bar
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.datasets.tokenizer.base import decode_stream
from torchtitan.job import ResolvedJob
from torchtitan.models.decoder import Decoder
from torchtitan.models.decoding import context_of, incremental_reader
from torchtitan.plugins.eval_tasks.likelihoods import Likelihood, Request, likelihoods, split_into_requests
from torchtitan.plugins.eval_tasks.task_files import greedy_of, tasks_in, without_effect
from torchtitan.process.distributed import device_type
from torchtitan.training import inference_model

SEED = 1234
"""lm-eval's default seed for choosing the few-shot examples."""
DRAWS = 100
"""Bootstrap samples for the standard error of metrics that are not means."""
OPENING, COUNTING, OF_DOCUMENT = 300.0, 60.0, 1.0
"""Time limits in seconds: to read the data; for templates, filters and metrics; and in addition for each document."""


class EvalRequest(Protocol):
    """A request of lm-eval."""

    args: tuple[Any, ...]


class Answers:
    """The model interface that lm-eval calls, on one device.

    The model reads `seq_len` tokens at once, with `rows` requests in a batch. `ends`: tokens that end a text, besides
    the tokenizer's.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, seq_len: int, rows: int, ends: Collection[int] = ()):
        self.ends = ends
        self.model, self.tokenizer, self.seq_len = model, tokenizer, seq_len
        self.context = context_of(model, seq_len)
        # requests in a batch would else read each other's entries
        self.rows = 1 if model.memory is not None and model.memory.rows_share_state else rows
        self.first = tokenizer.begin_ids or [tokenizer.eos_id]

    def loglikelihood(self, requests: Sequence[EvalRequest]) -> list[tuple[float, bool]]:
        """Return (log-likelihood of the continuation, True if greedy decoding would produce it) per request.

        The args of a request are (context, continuation).
        """
        return [
            (answer.log, answer.greedy)
            for answer in self._likelihoods([self._pair(*request.args) for request in requests])
        ]

    def loglikelihood_rolling(self, requests: Sequence[EvalRequest]) -> list[float]:
        """Return the log-likelihood of each text, in windows if it is longer than the context. Args are (text,)."""
        owners, pieces = [], []
        for number, request in enumerate(requests):
            for piece in split_into_requests(self.tokenizer.encode(request.args[0]), self.first[0], self.context):
                owners.append(number)
                pieces.append(piece)
        sums = [0.0] * len(requests)
        for number, answer in zip(owners, self._likelihoods(pieces), strict=True):
            sums[number] += answer.log
        return sums

    def generate_until(self, requests: Sequence[EvalRequest]) -> list[str]:
        """Return greedy continuations up to the first stop string. Args are (context, generation_kwargs)."""
        with (
            incremental_reader(self.model, self.seq_len) as (reader, context),
            progress_bar("answering", len(requests), " texts") as bar,
        ):
            texts = []
            for request in requests:
                texts.append(self._generate(reader, context, *request.args))
                bar.update()
        return texts

    def generation_limits(self, options: object, where: str) -> tuple[int, list[str]]:
        """Return the most new tokens and the stop strings. Raises JobError if no token of the prompt would fit."""
        most, until = greedy_of(options, where)
        if most >= self.context:
            raise JobError(
                f"{where}: max_gen_toks: given {most}; allowed: less than the context, {self.context}; write it into "
                "the task's generation_kwargs, or give --training.seq_len"
            )
        return most, until

    def _generate(self, reader: Any, context: int, text: str, options: object) -> str:
        most, until = self.generation_limits(options, "a task")
        prompt = self._with_begin_token(self.tokenizer.encode(text))[-(context - most) :]
        kwargs: dict[str, Any] = dict(max_new_tokens=most, context=context, temperature=0, top_k=0, seed=0)
        kwargs["ends"] = self.ends
        continuation = ""
        for piece in decode_stream(sample(reader, prompt, self.tokenizer, **kwargs), prompt, self.tokenizer):
            continuation += piece
            if any(end in continuation for end in until):
                break
        for end in until:
            continuation = continuation.split(end)[0]
        return continuation

    def _pair(self, context: str, continuation: str) -> Request:
        """Tokenize a context and its continuation. Blanks between them belong to the continuation."""
        bare = context.rstrip()
        context_ids = self.tokenizer.encode(bare)
        full_ids = self.tokenizer.encode(bare + context[len(bare) :] + continuation)
        if continuation and len(full_ids) <= len(context_ids):  # with no new token its probability is 1
            raise JobError(
                f"an answer, {continuation!r}, given after {bare[-20:]!r}, which together have no token of the "
                "answer's own; allowed: answers that begin a word; see target_delimiter"
            )
        return self._with_begin_token(context_ids), full_ids[len(context_ids) :]

    def _with_begin_token(self, ids: list[int]) -> list[int]:
        return self.tokenizer.begin_ids + ids or self.first

    def _likelihoods(self, requests: list[Request]) -> list[Likelihood]:
        answers: list[Likelihood] = [Likelihood(0.0, True)] * len(requests)
        kwargs = dict(seq_len=self.seq_len, context=self.context, rows=self.rows)
        with progress_bar("answering", len(requests), " requests") as bar:
            for number, answer in likelihoods(self.model, requests, **kwargs):
                answers[number] = answer
                bar.update()
        return answers


def evaluate_tasks(job: ResolvedJob, place: Path, path: Path, limit: int) -> dict[str, Any]:
    """Return the metrics of the model in `place` on the tasks of `path`, on `limit` documents of each (0: all)."""
    require_causal_decoder(job.model)
    if importlib.util.find_spec("lm_eval") is None:
        raise JobError("--tasks needs the package lm_eval; install it with: pip install 'torchtitan-toml[eval]'")
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder, _sandboxed():
        tasks_by_name = tasks_in(path)
        for name, task in tasks_by_name.items():
            if unused_keys := without_effect(task):
                print(f"{name}: without effect here: {', '.join(unused_keys)}", file=sys.stderr)
        tasks = _open_tasks(tasks_by_name, folder)
        model, _ = inference_model.load_model(job, place, torch.device(device_type()))
        assert isinstance(model, Decoder)
        rows, seq_len = job.config.validation.local_batch_size, job.data.seq_len("training")
        answers = Answers(model, job.tokenizer(), seq_len, rows, job.model.end_ids(place))
        for name, task in tasks_by_name.items():
            if task.get("output_type", "generate_until") == "generate_until":
                answers.generation_limits(task.get("generation_kwargs") or {}, name)
        return {"of": str(place), "seq_len": answers.seq_len, "tasks": _measure(answers, tasks, limit)}


def _open_tasks(tasks: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """Load the tasks with lm-eval, which caches their data in `folder`."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager, opened = TaskManager(include_defaults=False), dict[str, Any]()
    for name, task in tasks.items():
        data_kwargs = {"dataset_kwargs": task["dataset_kwargs"] | {"cache_dir": folder}}
        try:
            with time_limit(OPENING):
                opened |= manager.load([{"num_fewshot": 0} | task | data_kwargs])["tasks"]
        except Exception as error:  # exceptions of lm-eval and its data readers have no common base
            error_text = f"{type(error).__name__}: {error}"
            raise JobError(f"{name}: lm-eval does not open it: {error_text}; mend its YAML or its data") from None
        opened[name].set_fewshot_seed(SEED)
    return opened


def _measure(answers: Answers, tasks: dict[str, Any], limit: int) -> dict[str, dict[str, Any]]:
    """Return per task the number of documents and each metric, with a standard error if lm-eval has one."""
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate

    os.environ["DISABLE_MULTIPROC"] = "1"  # its bootstrap would fork next to the threads of torch

    class EvalModel(Answers, LM):
        def __init__(self) -> None:
            LM.__init__(self)
            self.__dict__ |= vars(answers)

        def loglikelihood(self, requests: Sequence[EvalRequest]) -> list[tuple[float, bool]]:
            with without_time_limit():
                return super().loglikelihood(requests)

        def loglikelihood_rolling(self, requests: Sequence[EvalRequest]) -> list[float]:
            with without_time_limit():
                return super().loglikelihood_rolling(requests)

        def generate_until(self, requests: Sequence[EvalRequest]) -> list[str]:
            with without_time_limit():
                return super().generate_until(requests)

    # hides its messages on answers that are not among the choices
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    try:
        kwargs: dict[str, Any] = dict(limit=limit or None, log_samples=False, bootstrap_iters=DRAWS)
        documents = sum(min(limit or len(task.eval_docs), len(task.eval_docs)) for task in tasks.values())
        with time_limit(COUNTING + OF_DOCUMENT * documents):
            results = evaluate(EvalModel(), {"tasks": tasks}, **kwargs)
    except Exception as error:  # exceptions of lm-eval, templates and metrics have no common base
        # an error of the model
        if isinstance(error, (JobError, RuntimeError)) and not isinstance(error, RecursionError):
            raise
        error_text = f"a template, a filter or a metric of {', '.join(tasks)} fails: {type(error).__name__}: {error}"
        raise JobError(f"{error_text}; correct it, or the document without a field that it needs") from None
    counts = results["n-samples"]
    figures = {}
    for name, row in results["results"].items():
        values = {key: value for key, value in row.items() if "," in key and isinstance(value, int | float)}
        figures[name] = {"documents": counts[name]["effective"]} | values
    return figures


@contextmanager
def _sandboxed() -> Iterator[None]:
    """Render lm-eval's templates in a sandbox, where they can access only the document."""
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


def tasks_table(results: dict[str, Any]) -> str:
    """Format the results, one row per metric."""
    lines = [f"{'task':>24} {'documents':>10} {'figure':>24} {'filter':>12} {'value':>10} {'± 1 s.e.':>10}"]
    for name, row in results["tasks"].items():
        for key, value in row.items():
            figure, _, kind = key.partition(",")
            if kind and not figure.endswith("_stderr"):
                error = row.get(f"{figure}_stderr,{kind}")
                shown = "" if error is None else f"{error:.4f}"
                lines.append(f"{name:>24} {row['documents']:>10,} {figure:>24} {kind:>12} {value:>10.4f} {shown:>10}")
    return "\n".join(lines)


class TimeLimitExceeded(Exception):
    """Raised when code exceeds its time limit."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitExceeded after `seconds`, also inside a regular expression, which checks for signals.

    There is no limit outside of the main thread, because only that one receives signals. An outer limit continues
    afterwards with the time that it had left.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeLimitExceeded(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def without_time_limit() -> Iterator[None]:
    """Suspend the surrounding time limit."""
    remaining = 0.0
    if threading.current_thread() is threading.main_thread():
        remaining, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, remaining)
