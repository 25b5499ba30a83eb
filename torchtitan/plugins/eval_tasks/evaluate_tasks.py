"""Evaluate a model on lm-eval tasks: `torchtitan evaluate FOLDER --tasks TASKS`, of task files or by lm-eval's names.

lm-eval turns a task's data into requests and the answers into metrics. This module answers the requests and does not
depend on lm-eval for that. Texts begin as documents do in training: with the tokenizer's first token, if it has one.

Templates and regular expressions of task files run under a time limit, because even a short one can run for years.

Continuations are scored by their log-likelihood, as lm-eval requests them, in batches of similar length. A request is a
prompt and a continuation, both as token ids. A model with a memory reads requests of any length in segments, each from
an empty cache. For other models a request that exceeds the context is truncated on the left.
"""

import importlib.util
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torch import nn

from torchtitan.commands.generate import require_causal_decoder, sample
from torchtitan.core.errors import JobError
from torchtitan.core.progress_bar import progress_bar
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.datasets.tokenizer.base import decode_stream
from torchtitan.job import ResolvedJob
from torchtitan.losses.objective import IGNORE_INDEX, Objective, cross_entropies
from torchtitan.models.decoder import Decoder
from torchtitan.models.kv_cache import context_of, incremental_reader
from torchtitan.plugins.eval_tasks.named_tasks import is_names, open_named_tasks
from torchtitan.plugins.eval_tasks.task_files import greedy_of, tasks_in, without_effect
from torchtitan.process.distributed import device_type
from torchtitan.training import inference_model

Request = tuple[list[int], list[int]]
"""Ids of the prompt, at least one, and of the continuation."""


class Likelihood(NamedTuple):
    """The log-probability of a continuation, and whether greedy decoding would produce it."""

    log: float
    greedy: bool


class LossByRequest(Objective):
    """Summed cross-entropy that also accumulates, for each request, its loss and its non-greedy tokens.

    `nats` and `mismatches` are float64 [requests]; the batch gives each token's request as `requests` [B, S].
    """

    targets = ("labels", "requests")

    def __init__(self, logits_width: int, num_requests: int, device: torch.device):
        super().__init__(num_chunks=0)
        self.logits_width = logits_width
        self.nats = torch.zeros(num_requests, dtype=torch.float64, device=device)
        self.mismatches = torch.zeros_like(self.nats)

    def rows(self, hidden: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return hidden states [N, D], labels [N] and request numbers [N] of the continuation tokens."""
        valid = batch["labels"] != IGNORE_INDEX
        return hidden[valid], batch["labels"][valid], batch["requests"][valid]

    def compute_loss(self, head: nn.Module, hidden: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        labels, requests = targets
        logits = head(hidden)
        losses = cross_entropies(logits, labels)
        self.nats.index_add_(0, requests, losses.double())
        self.mismatches.index_add_(0, requests, (logits.argmax(-1) != labels).double())
        return losses.sum()


@torch.no_grad()
def likelihoods(
    model: nn.Module, requests: Sequence[Request], *, seq_len: int, context: int, rows: int
) -> Iterator[tuple[int, Likelihood]]:
    """Yield the index of each request with its likelihood, the longest requests first.

    The model must be in evaluation mode on one device. It reads `seq_len` tokens at a time, at most `context` tokens of
    a request, and `rows` requests in a batch. Raises JobError for a continuation longer than the context.
    """
    for _, continuation in requests:
        if len(continuation) > context:
            remedy = "use a longer context (--training.seq_len) if the model has one, or shorter texts"
            raise JobError(f"a continuation has {len(continuation)} tokens; allowed: {context}; {remedy}")
    order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
    for first in range(0, len(order), rows):
        numbers = order[first : first + rows]
        results = _batch(model, [requests[i] for i in numbers], seq_len, context)
        yield from zip(numbers, results, strict=True)


def _batch(model: Any, requests: Sequence[Request], seq_len: int, context: int) -> list[Likelihood]:
    device = next(model.parameters()).device
    texts = [(prompt + continuation)[-context - 1 :] for prompt, continuation in requests]
    lengths = torch.tensor([max(1, len(ids) - 1) for ids in texts], device=device)  # of the inputs
    width = int(lengths.max())
    tokens = torch.zeros(len(texts), width, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    for row, (ids, (_, continuation)) in enumerate(zip(texts, requests, strict=True)):
        if continuation:  # an empty continuation has probability 1 and needs no forward
            tokens[row, : len(ids) - 1] = torch.tensor(ids[:-1])
            labels[row, len(ids) - 1 - len(continuation) : len(ids) - 1] = torch.tensor(continuation)
    numbers = torch.arange(len(texts))[:, None].expand_as(tokens)
    batch = {"tokens": tokens, "labels": labels, "requests": numbers}
    before, objective = model.loss, LossByRequest(model.args.vocab_size, len(texts), device)
    model.loss = objective
    if model.memory is not None:
        model.memory.clear()
    try:
        for start in range(0, width, seq_len):
            part = {name: tensor[:, start : start + seq_len].to(device) for name, tensor in batch.items()}
            begins = torch.full_like(lengths, start == 0, dtype=torch.bool)
            model(**part, begins=begins, filled=(lengths - start).clamp(0, part["tokens"].shape[1]))
            if model.memory is not None:
                model.memory.commit()
    finally:
        model.loss = before
    pairs = zip(objective.nats.tolist(), objective.mismatches.tolist(), strict=True)
    return [Likelihood(-nats, mismatches == 0) for nats, mismatches in pairs]


def split_into_requests(ids: list[int], first: int, context: int) -> Iterator[Request]:
    """Split a text that starts with the token `first` into requests; their continuations cover each token once.

    Each has `context` tokens; later ones overlap their predecessors only as far as needed to be full.
    """
    text = [first, *ids]
    for start in range(0, len(ids), context):
        end = min(start + context, len(ids))
        yield text[max(0, end - context) : start + 1], ids[start:end]


SEED = 1234
"""lm-eval's default seed for choosing the few-shot examples."""
DRAWS = 100
"""Bootstrap samples for the standard error of metrics that are not means."""
MODEL_CLASS = "torchtitan.plugins.eval_tasks.lm_eval_model:EvalModel"
"""Imported by name where it is needed, as it imports lm_eval."""
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


def evaluate_tasks(job: ResolvedJob, place: Path, tasks: str, limit: int) -> dict[str, Any]:
    """Return the metrics of the model in `place` on `limit` documents of each task (0: all).

    `tasks`: a task file or a folder of them; or names of lm-eval's own tasks, separated by commas.
    """
    require_causal_decoder(job.model)
    require_lm_eval("--tasks")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder, _sandboxed():
        opened = open_named_tasks(tasks.split(",")) if is_names(tasks) else _open_task_files(Path(tasks), folder)
        answers = answers_of(job, place, torch.device(device_type()), job.config.validation.local_batch_size)
        for name, task in opened["tasks"].items():
            task.set_fewshot_seed(SEED)
            if task.OUTPUT_TYPE == "generate_until":
                answers.generation_limits(task.config.generation_kwargs or {}, name)
        return {"of": str(place), "seq_len": answers.seq_len, "tasks": _measure(answers, opened, limit)}


def require_lm_eval(feature: str) -> None:
    """Raise JobError if lm-eval, which `feature` needs, is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise JobError(f"{feature} needs the package lm_eval; install it with: pip install 'torchtitan-toml[eval]'")


def answers_of(job: ResolvedJob, place: Path, device: torch.device, rows: int) -> Answers:
    """Return the answers of the model in `place`, which reads `rows` requests in a batch."""
    model, _ = inference_model.load_model(job, place, device)
    assert isinstance(model, Decoder)
    return Answers(model, job.tokenizer(), job.data.seq_len("training"), rows, job.model.end_ids(place))


def _open_task_files(path: Path, folder: str) -> dict[str, Any]:
    """Load the tasks of a file or folder with lm-eval, which caches their data in `folder`."""
    from lm_eval.tasks import TaskManager

    tasks = tasks_in(path)
    manager, opened = TaskManager(include_defaults=False), dict[str, Any]()
    for name, task in tasks.items():
        if unused_keys := without_effect(task):
            print(f"{name}: without effect here: {', '.join(unused_keys)}", file=sys.stderr)
        data_kwargs = {"dataset_kwargs": task["dataset_kwargs"] | {"cache_dir": folder}}
        try:
            with time_limit(OPENING):
                opened |= manager.load([{"num_fewshot": 0} | task | data_kwargs])["tasks"]
        except Exception as error:  # exceptions of lm-eval and its data readers have no common base
            error_text = f"{type(error).__name__}: {error}"
            raise JobError(f"{name}: lm-eval does not open it: {error_text}; mend its YAML or its data") from None
    return {"tasks": opened}


def _measure(answers: Answers, opened: dict[str, Any], limit: int) -> dict[str, dict[str, Any]]:
    """Return for each task, and each group of tasks that has metrics, its documents and metrics.

    A metric has a standard error if lm-eval computes one.
    """
    from lm_eval.evaluator import evaluate

    model = resolve_name(MODEL_CLASS)(answers)
    os.environ["DISABLE_MULTIPROC"] = "1"  # its bootstrap would fork next to the threads of torch
    # hides its messages on answers that are not among the choices
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    tasks = opened["tasks"]
    try:
        kwargs: dict[str, Any] = dict(limit=limit or None, log_samples=False, bootstrap_iters=DRAWS)
        documents = sum(min(limit or len(task.eval_docs), len(task.eval_docs)) for task in tasks.values())
        with time_limit(COUNTING + OF_DOCUMENT * documents):
            results = evaluate(model, opened, **kwargs)
    except Exception as error:  # exceptions of lm-eval, templates and metrics have no common base
        # an error of the model
        if isinstance(error, (JobError, RuntimeError)) and not isinstance(error, RecursionError):
            raise
        error_text = f"a template, a filter or a metric of {', '.join(tasks)} fails: {type(error).__name__}: {error}"
        raise JobError(f"{error_text}; correct it, or the document without a field that it needs") from None
    counts = {name: count["effective"] for name, count in results["n-samples"].items()}
    for name, group in opened.get("groups", {}).items():
        counts[name] = sum(counts[task.task_name] for task in group.get_all_tasks())
    figures = {}
    for name, row in results["results"].items():
        values = {key: value for key, value in row.items() if "," in key and isinstance(value, int | float)}
        if values:  # a group may have none
            figures[name] = {"documents": counts[name]} | values
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
