"""`torchtitan chat FOLDER`: talk with what a run has learned, in the form of its records.

Questions come line by line, typed or through a pipe, and answers appear as they are made. FOLDER is as for `torchtitan
generate`. The model reads ids such as it was trained on: a job whose records have a prompt of their own is asked in
the form of the first (alpaca, prompt_completion), each question by itself, any other by its chat template. An answer
ends where the template, or the document, ends. Keys and values of the conversation are kept.
"""

import argparse
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import torch

from torchtitan.adapters.neurocache.generation import reader_of
from torchtitan.build import parts
from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.generate import (
    CONTROLS,
    find_checkpoint,
    refuse_without_next_words,
    sample,
)
from torchtitan.config.job import JobConfig, sources_of
from torchtitan.core.errors import JobError
from torchtitan.datasets import open_source
from torchtitan.datasets.encoding import encode, end_of_turn_ids, prompt_ids
from torchtitan.datasets.formats import QUESTION_FORMATS
from torchtitan.datasets.record_format import RecordReader, record_reader
from torchtitan.datasets.sources import DataError, Document
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.datasets.tokenizer.base import text_of
from torchtitan.losses.tasks import task_of
from torchtitan.process.distributed import device_type
from torchtitan.training import inference_model

CHAT = "chat"
AS_IT_IS = RecordReader()
NEW = "/new"
HELP = f"{NEW} begins another conversation; an empty line or the end of the input leaves."


def main(argv: list[str]) -> int:
    options, words = parse_command("chat", argv)
    if options.system is not None and options.format not in (None, CHAT):
        raise JobError(f"--system: format {options.format} has no place for it")
    sys.stdout.reconfigure(errors="replace")  # what the terminal has no character for
    config, place = find_checkpoint(Path(options.folder), options.config, words, options.best)
    refuse_without_next_words(config)
    tokenizer = parts.tokenizer(config)
    form = options.format or form_of(config, tokenizer)
    if options.system is not None and form != CHAT:
        raise JobError(
            f"--system: the job's records are of the form {form}, which has no place for it; drop it, or give "
            "--data.chat_template"
        )
    model: Any
    model, _ = inference_model.filled_model(config, place, torch.device(device_type()))
    typed = sys.stdin.isatty()
    print(f"{config.model.name} {config.model.flavor}, {place.name}, asked as {form}", file=sys.stderr)
    if typed:
        print(HELP, file=sys.stderr)
    reader, context = reader_of(model, config.training.seq_len)
    if form == CHAT and options.system is None:
        options.system = config.data.default_system
    talk = Talk(reader, tokenizer, form, context, options, first_reading(config))
    for line in lines(typed):
        if line == NEW or options.apart:
            talk.begin()
        if line != NEW:
            for piece in talk.answer(line):
                print(piece.translate(CONTROLS), end="", flush=True)
            print(flush=True)
    return 0


def form_of(config: JobConfig, tokenizer: Tokenizer) -> str:
    """In which form the job's model is asked: that of the records it has learned, whose prompt is their own even beside
    a chat template. JobError where it has not learned answers, as far as can be seen.
    """
    templated = tokenizer.chat_template is not None
    remedy = f"give --format {' or '.join(QUESTION_FORMATS[1:])}, or --data.chat_template"
    source, reading = next(iter(sources_of(config, "training").values())), first_reading(config)
    if reading.format_name in QUESTION_FORMATS[1:]:
        return reading.format_name
    if templated and not glob(source.dataset_path or ""):  # gone, or not on this machine: nothing is fetched to ask
        return CHAT
    try:
        first = next(iter(open_source(source.dataset, source.dataset_path, reading).documents()), None)
    except (DataError, OSError) as error:
        if templated:
            return CHAT
        raise JobError(f"no chat template, and the data that would tell a form are gone: {error}; {remedy}") from None
    form = first.format_name if isinstance(first, Document) else None
    if form in QUESTION_FORMATS[1:]:
        return form
    if not templated:
        raise JobError(f"no chat template, and the job's records have no questions that could be asked; {remedy}")
    return CHAT


def first_reading(config: JobConfig) -> RecordReader:
    """Of the job's first source, whose prompt questions are put in."""
    first = next(iter(sources_of(config, "training").values()))
    task = task_of(config)
    return record_reader(first, config.data.default_system, task.whole_records, task.rows_per_sample > 1)


def lines(typed: bool) -> Iterator[str]:
    """What is asked: typed lines up to an empty one, or all of the input that are not empty."""
    while True:
        if typed:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        text = line.strip()
        if not line or (typed and not text):
            return
        if text:
            yield text


class Talk:
    """A conversation with a model, in one of QUESTION_FORMATS."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        form: str,
        context: int,
        options: argparse.Namespace,
        reading: RecordReader = AS_IT_IS,
    ) -> None:
        self.model, self.tokenizer, self.form, self.context, self.options = model, tokenizer, form, context, options
        self.reading = reading
        self.ends = end_of_turn_ids(tokenizer) if form == CHAT else frozenset({tokenizer.eos_id})
        self.begin()

    def begin(self) -> None:
        """Forget what was said."""
        system = self.options.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> Iterator[str]:
        """The pieces of an answer, as they come."""
        self.messages.append({"role": "user", "content": text})
        prompt = self._prompt(text)
        tokens = sample(
            self.model,
            prompt,
            self.tokenizer,
            max_new_tokens=self.options.max_new_tokens,
            context=self.context,
            temperature=self.options.temperature,
            top_k=self.options.top_k,
            seed=self.options.seed,
            ends=self.ends,
        )
        said = ""
        for piece in text_of(tokens, prompt, self.tokenizer):
            said += piece
            yield piece
        self.messages.append({"role": "assistant", "content": said})

    def _prompt(self, text: str) -> list[int]:
        """The ids of what was said; if the context has no room for them, without the oldest questions and answers."""
        if self.form != CHAT:
            return encode(self.tokenizer, self.reading.question_document(self.form, text)).ids.tolist()[
                :-1
            ]  # without the end
        while True:
            ids = prompt_ids(self.tokenizer, self.messages, "the conversation")
            oldest = next(i for i, message in enumerate(self.messages) if message["role"] == "user")
            if len(ids) < self.context or oldest + 2 >= len(self.messages):
                return ids
            del self.messages[oldest : oldest + 2]
            print("(the oldest question is forgotten: the context is full)", file=sys.stderr)
