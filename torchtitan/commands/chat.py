"""`torchtitan chat FOLDER`: chat with a run's model, with prompts formatted as in training.

Questions are read line by line, typed or through a pipe, and answers are streamed. FOLDER is as for `torchtitan
generate`. If the training records have a prompt format (alpaca, prompt_completion), each question is formatted like the
first record, without history. All other jobs use their chat template. An answer ends with the template's turn or the
document. The KV cache is kept during a conversation.
"""

import argparse
import sys
from collections.abc import Collection, Iterator
from glob import glob
from typing import Any

import torch

from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.generate import CONTROLS, find_decoder, sample, sampling_of
from torchtitan.core.errors import JobError
from torchtitan.datasets import open_source
from torchtitan.datasets.conversations import end_of_turn_ids
from torchtitan.datasets.encoding import encode, prompt_ids
from torchtitan.datasets.formats import QUESTION_FORMATS
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import DataError, Document
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.datasets.tokenizer.base import decode_stream
from torchtitan.job.data import JobData
from torchtitan.models.kv_cache import reader_for, store_for_single_rows
from torchtitan.process.distributed import device_type
from torchtitan.training import inference_model

CHAT = "chat"
AS_IT_IS = RecordReader()
NEW = "/new"
HELP = f"{NEW} begins another conversation; an empty line or the end of the input leaves."


def main(argv: list[str]) -> int:
    options, job_args = parse_command("chat", argv)
    if options.system is not None and options.format not in (None, CHAT):
        raise JobError(f"--system: format {options.format} has no place for it")
    sys.stdout.reconfigure(errors="replace")  # for characters that the terminal cannot show
    job, step_folder = find_decoder(options, job_args)
    config, tokenizer = job.config, job.tokenizer()
    form = options.format or form_of(job.data, tokenizer)
    if options.system is not None and form != CHAT:
        raise JobError(
            f"--system: the job's records are of the form {form}, which has no place for it; drop it, or give "
            "--data.chat_template"
        )
    model: Any = inference_model.load_model(job, step_folder, torch.device(device_type()))[0]
    store_for_single_rows(model)
    typed = sys.stdin.isatty()
    print(f"{config.model.name} {config.model.flavor}, {step_folder.name}, asked as {form}", file=sys.stderr)
    if typed:
        print(HELP, file=sys.stderr)
    reader, context = reader_for(model, config.training.seq_len)
    if form == CHAT and options.system is None:
        options.system = config.data.default_system
    ends = job.model.end_ids(step_folder)
    sampling = sampling_of(options, job.model, step_folder)
    talk = Talk(reader, tokenizer, form, context, options, first_reading(job.data), ends, sampling)
    for line in lines(typed):
        if line == NEW or options.apart:
            talk.begin()
        if line != NEW:
            for piece in talk.answer(line):
                print(piece.translate(CONTROLS), end="", flush=True)
            print(flush=True)
    return 0


def form_of(data: JobData, tokenizer: Tokenizer) -> str:
    """Return the prompt format of the job: the format of its first training record, else its chat template.

    Raises JobError if there is neither, or if the data to tell it are missing.
    """
    templated = tokenizer.chat_template is not None
    remedy = f"give --format {' or '.join(QUESTION_FORMATS[1:])}, or --data.chat_template"
    source, reading = next(iter(data.sources("training").values())), first_reading(data)
    if reading.format_name in QUESTION_FORMATS[1:]:
        return reading.format_name
    if templated and not glob(source.dataset_path or ""):  # no local data, and nothing is downloaded for this
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


def first_reading(data: JobData) -> RecordReader:
    """Return the record reader of the job's first source, which formats the questions."""
    return data.reader(next(iter(data.sources("training").values())))


def lines(typed: bool) -> Iterator[str]:
    """Yield the questions: typed lines up to an empty one, or all lines of piped input that are not empty."""
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
        ends: Collection[int] = (),
        sampling: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.form, self.context, self.options = model, tokenizer, form, context, options
        self.reading, self.sampling = reading, options.sampling if sampling is None else sampling
        self.ends = end_of_turn_ids(tokenizer).union(ends) if form == CHAT else {tokenizer.eos_id, *ends}
        self.begin()

    def begin(self) -> None:
        """Start a new conversation."""
        system = self.options.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> Iterator[str]:
        """Yield the pieces of an answer as they are generated."""
        self.messages.append({"role": "user", "content": text})
        prompt = self._prompt(text)
        tokens = sample(
            self.model,
            prompt,
            self.tokenizer,
            max_new_tokens=self.options.max_new_tokens,
            context=self.context,
            seed=self.options.seed,
            **self.sampling,
            ends=self.ends,
        )
        answer_text = ""
        for piece in decode_stream(tokens, prompt, self.tokenizer):
            answer_text += piece
            yield piece
        self.messages.append({"role": "assistant", "content": answer_text})

    def _prompt(self, text: str) -> list[int]:
        """Return the conversation's token ids, without the oldest questions and answers if the context is full."""
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
