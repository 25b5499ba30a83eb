"""Tests of `torchtitan chat`: prompts have the ids of training, and a small task is learned and answered."""

import io
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from tests.support import jobs
from tests.support.chat_templates import CHATML, LLAMA3, folder_with, messages, unmarked
from tests.support.pool import run_ranks
from tests.support.remembering import remembering
from tests.support.scripted_models import Scripted
from torchtitan import cli
from torchtitan.commands import chat
from torchtitan.commands.command_lines import parse_command
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.datasets.conversations import end_of_turn_ids
from torchtitan.datasets.encoding import encode, prompt_ids
from torchtitan.datasets.formats import to_document
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.datasets.tokenizer.chat_templates import NAMED
from torchtitan.job import ResolvedJob
from torchtitan.training import inference_model

TURNS = [("system", "Be brief"), ("user", "Hi <|eot_id|>"), ("assistant", "Ho"), ("user", "And?"), ("assistant", "Bye")]
TALK = [{"role": role, "content": content} for role, content in TURNS]


def tokenizers(folder):
    """Build tokenizers with every kind of chat template, by name."""
    by_name = {name: build_tokenizer(folder_with(folder / name, NAMED[name])) for name in ("chatml", "llama3")}
    by_name["unmarked"] = build_tokenizer(folder_with(folder / "unmarked", unmarked(CHATML)))
    by_name["unmarked llama3"] = build_tokenizer(folder_with(folder / "unmarked3", unmarked(LLAMA3)))
    by_name["llama2"] = build_tokenizer("tests/assets/tokenizer/sentencepiece.model", "llama2")
    return by_name | {"alpaca": build_tokenizer("bytes", "alpaca")}


def test_prompt_ids_equal_those_of_training(tmp_path):
    for name, tokenizer in tokenizers(tmp_path).items():
        for length in (2, 4):
            ids, trained = encode(tokenizer, to_document(TALK[: length + 1], "messages", "", ""))
            prompt = prompt_ids(tokenizer, TALK[:length], "")
            answer = ids[len(prompt) :]
            assert prompt == ids[: len(prompt)].tolist(), name
            assert trained[len(prompt)] and not trained[len(prompt) - 1], name
            assert set(answer[trained[len(prompt) :]].tolist()) & end_of_turn_ids(tokenizer), name


def test_tokens_that_end_an_answer(tmp_path):
    by_name = tokenizers(tmp_path)
    special = by_name["chatml"].special_tokens
    assert (
        end_of_turn_ids(by_name["chatml"])
        == {special["<|im_end|>"], special["<|end_of_text|>"]}
        == end_of_turn_ids(by_name["unmarked"])
    )
    assert (
        end_of_turn_ids(by_name["llama2"])
        == {by_name["llama2"].eos_id}
        == end_of_turn_ids(build_tokenizer(by_name["llama2"]._path))
    )
    assert end_of_turn_ids(build_tokenizer("bytes", "{{ raise_exception('never') }}")) == {257}


def test_a_template_that_changes_earlier_text_is_refused(tmp_path):
    template = unmarked(CHATML).replace("{%- for m", "{{ add_generation_prompt }}{%- for m")
    with pytest.raises(DataError, match="the text up to message 2 is not the beginning of"):
        prompt_ids(build_tokenizer(folder_with(tmp_path / "t", template)), TALK[:4], "it")


# The command


def options(**changed):
    arguments = [f"--{name}={value}" for name, value in changed.items() if value is not True]
    return parse_command(
        "chat", ["folder", *arguments, *(f"--{name}" for name, value in changed.items() if value is True)]
    )[0]


class Echo(Scripted):
    """A model that answers every question with "bcd" and an end token."""

    def __init__(self):
        super().__init__(torch.zeros(1))

    def forward(self, ids):
        self.inputs.append(ids[0].tolist())
        logits = torch.zeros(1, 1, 258)
        ended = len(self.inputs) % 4 == 0
        logits[0, 0, 257 if ended else 97 + len(self.inputs) % 4] = 9.0
        return logits


def test_a_conversation_drops_its_oldest_questions_when_the_context_is_full(capsys):
    tokenizer = build_tokenizer("bytes", "alpaca")
    model = Echo()
    talk = chat.Talk(model, tokenizer, chat.CHAT, 200, options(system="S"))
    assert "".join(talk.answer("one")) == "bcd"
    assert tokenizer.decode(model.inputs[0]) == "S\n\n### Instruction:\none\n\n### Response:\n"
    assert "".join(talk.answer("two")) == "bcd"
    assert tokenizer.decode(model.inputs[4]).endswith(
        "one\n\n### Response:\nbcd\n\n### Instruction:\ntwo\n\n### Response:\n"
    )
    assert "".join(talk.answer("x" * 90)) == "bcd"
    read = tokenizer.decode(model.inputs[8])
    assert "one" not in read and "two" in read and read.startswith("S\n\n")
    assert "the oldest question is forgotten" in capsys.readouterr().err
    talk.begin()
    assert [message["role"] for message in talk.messages] == ["system"]


def test_bad_options_are_refused(capsys):
    for arguments, message in (
        (["--temperature", "-1"], "--temperature: given '-1'; allowed: a number >= 0"),
        (["--system=x", "--format=alpaca"], "--system: format alpaca has no place for it"),
        (["--format=nothing"], "--format: given 'nothing'; allowed: chat, "),
    ):
        assert cli.main(["chat", "folder", *arguments]) == 2
        assert message in capsys.readouterr().err


def fake_checkpoint(monkeypatch, *arguments):
    """Let chat find a job with these arguments, without weights."""
    config = manager.load([*arguments, "--model.tokenizer_path=bytes"])
    job_and_checkpoint = ResolvedJob(config), Path("checkpoint")
    monkeypatch.setattr("torchtitan.commands.generate.find_checkpoint", lambda *_: job_and_checkpoint)


def test_a_classifier_is_refused(monkeypatch):
    fake_checkpoint(monkeypatch, "--model.name=gpt2", "--model.flavor=debugmodel", "--model.overrides={n_classes = 2}")
    with pytest.raises(JobError, match="this gpt2 distinguishes 2 classes; give a causal language model"):
        chat.main(["folder", "--format=alpaca"])


def test_a_system_message_is_refused_where_records_have_no_place_for_it(monkeypatch, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"instruction": "a", "output": "b"}) + "\n")
    fake_checkpoint(monkeypatch, "--training.dataset=text", f"--training.dataset_path={tmp_path / 'rows.jsonl'}")
    with pytest.raises(JobError, match="--system: the job's records are of the form alpaca, which has no place for it"):
        chat.main(["folder", "--system=x"])


def test_chat_with_a_cache_reads_prompts_longer_than_a_segment(monkeypatch, capsys):
    model, _ = remembering(sizes=dict(vocab_size=260))
    fake_checkpoint(monkeypatch, "--training.seq_len=8")
    monkeypatch.setattr(inference_model, "load_model", lambda *_: (model.eval(), None))
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is longer than a segment?\n"))
    assert chat.main(["folder", "--format=alpaca", "--max_new_tokens=4"]) == 0
    assert model.memory.stores[False, 0].counts.tolist()[0] > 8


# A synthetic task: repeat a word, or reverse it


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ m.content + '=' }}{% else %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


def job_of_made_task(folder, steps):
    """Return the arguments of a job that learns the task from 3,000 random questions (1,152 differ)."""
    generator = random.Random(0)
    rows = [
        {"messages": messages([("user", question), ("assistant", answer)])}
        for question, answer in random_questions(generator, 3000)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.jinja").write_text(TEMPLATE)
    sizes = "{dim=64, n_layers=2, n_heads=4, n_kv_heads=4, vocab_size=258, multiple_of=16}"
    settings = dict(task__kind="sft", model__overrides=sizes, data__chat_template=folder / "mine.jinja")
    settings |= dict(training__seq_len=128, training__steps=steps, optimizer__lr=4e-3, optimizer__weight_decay=0.0)
    settings |= dict(checkpoint__enable=True, metrics__log_freq=50)
    return jobs.arguments(folder / "run", folder / "rows.jsonl", **settings)


def random_questions(generator, count):
    """Return pairs of a question, a word to repeat (+) or to reverse (-), and its answer."""
    questions = []
    for _ in range(count):
        text = "".join(generator.choice("abcdefgh") for _ in range(generator.randrange(2, 4)))
        backwards = generator.random() < 0.5
        questions.append((("-" if backwards else "+") + text, text[::-1] if backwards else text))
    return questions


def share_answered(folder, capsys, monkeypatch, count=40):
    """Return the share of right answers to questions that chat reads from a pipe."""
    questions = random_questions(random.Random(1), count)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(question + "\n\n" for question, _ in questions)))
    capsys.readouterr()
    assert chat.main([str(folder), "--apart", "--max_new_tokens=8"]) == 0
    out, err = capsys.readouterr()
    assert "asked as chat" in err
    answers = out.split("\n")[:-1]
    assert len(answers) == count
    return sum(answer == expected for answer, (_, expected) in zip(answers, questions, strict=True)) / count


def test_a_made_task_is_learned_and_answered(tmp_path, capsys, monkeypatch):
    """The run saves the chat template, so its file may be deleted before chat starts."""
    run_ranks(1, jobs.train, job_of_made_task(tmp_path, steps=1))
    (tmp_path / "mine.jinja").unlink()
    assert share_answered(tmp_path / "run", capsys, monkeypatch, count=10) == 0
    run_ranks(1, jobs.train, job_of_made_task(tmp_path, steps=320))
    (tmp_path / "mine.jinja").unlink()
    assert share_answered(tmp_path / "run", capsys, monkeypatch) >= 0.9
    # without a template, records of messages give no format to ask in
    with pytest.raises(JobError, match="no questions that could be asked; give --format prompt_completion or alpaca"):
        chat.form_of(
            ResolvedJob(manager.load(jobs.arguments(tmp_path, tmp_path / "rows.jsonl"))).data, build_tokenizer("bytes")
        )


def test_the_chat_format_follows_the_records_of_the_job(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"instruction": "a", "output": "b"}) + "\n")
    config = manager.load(jobs.arguments(tmp_path, rows))
    bare = build_tokenizer("bytes")
    templated = build_tokenizer("bytes", "alpaca")
    # instruction records have their own prompt format, so a chat template does not matter
    assert chat.form_of(ResolvedJob(config).data, bare) == chat.form_of(ResolvedJob(config).data, templated) == "alpaca"
    model = Echo()
    assert "".join(chat.Talk(model, bare, "alpaca", 300, options()).answer("Why?")) == "bcd"
    ids, trained = encode(bare, RecordReader().document({"instruction": "Why?", "output": "b"}, "", ""))
    assert model.inputs[0] == ids[~trained].tolist()
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    assert chat.form_of(ResolvedJob(config).data, templated) == "chat"
    rows.write_text("{")
    assert chat.form_of(ResolvedJob(config).data, templated) == "chat"
    rows.unlink()
    assert chat.form_of(ResolvedJob(config).data, templated) == "chat"
    with pytest.raises(JobError, match="the data that would tell a form are gone: .*rows.jsonl: no such file"):
        chat.form_of(ResolvedJob(config).data, bare)
