"""`torchtitan chat`: prompts are those of training, and a made task is learned and answered."""

import io
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from tests.support import jobs
from tests.support.pool import run_ranks
from tests.support.remembering import remembering
from tests.test_generate import Scripted
from tests.test_templates import CHATML, LLAMA3, folder_with, messages, unmarked
from torchtitan import cli
from torchtitan.commands import chat
from torchtitan.commands.command_lines import parse_command
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.datasets.encoding import encode, end_of_turn_ids, prompt_ids
from torchtitan.datasets.formats import to_document
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.datasets.tokenizer.chat_templates import NAMED
from torchtitan.training import inference_model

SAID = [("system", "Be brief"), ("user", "Hi <|eot_id|>"), ("assistant", "Ho"), ("user", "And?"), ("assistant", "Bye")]
TALK = [{"role": role, "content": content} for role, content in SAID]


def tokenizers(folder):
    found = {name: build_tokenizer(folder_with(folder / name, NAMED[name])) for name in ("chatml", "llama3")}
    found["unmarked"] = build_tokenizer(folder_with(folder / "unmarked", unmarked(CHATML)))
    found["unmarked llama3"] = build_tokenizer(folder_with(folder / "unmarked3", unmarked(LLAMA3)))
    found["llama2"] = build_tokenizer("tests/assets/tokenizer/sentencepiece.model", "llama2")
    return found | {"alpaca": build_tokenizer("bytes", "alpaca")}


def test_a_prompt_has_the_ids_that_it_was_trained_with(tmp_path):
    for name, tokenizer in tokenizers(tmp_path).items():
        for asked in (2, 4):
            ids, trained = encode(tokenizer, to_document(TALK[: asked + 1], "messages", "", ""))
            prompt = prompt_ids(tokenizer, TALK[:asked], "")
            answer = ids[len(prompt) :]
            assert prompt == ids[: len(prompt)].tolist(), name
            assert trained[len(prompt)] and not trained[len(prompt) - 1], name
            assert set(answer[trained[len(prompt) :]].tolist()) & end_of_turn_ids(tokenizer), name


def test_what_ends_an_answer(tmp_path):
    of = tokenizers(tmp_path)
    special = of["chatml"].special_tokens
    assert (
        end_of_turn_ids(of["chatml"])
        == {special["<|im_end|>"], special["<|end_of_text|>"]}
        == end_of_turn_ids(of["unmarked"])
    )
    assert (
        end_of_turn_ids(of["llama2"]) == {of["llama2"].eos_id} == end_of_turn_ids(build_tokenizer(of["llama2"]._path))
    )
    assert end_of_turn_ids(build_tokenizer("bytes", "{{ raise_exception('never') }}")) == {257}


def test_a_prompt_that_does_not_go_on_from_the_conversation(tmp_path):
    odd = unmarked(CHATML).replace("{%- for m", "{{ add_generation_prompt }}{%- for m")
    with pytest.raises(DataError, match="the text up to message 2 is not how the whole text begins"):
        prompt_ids(build_tokenizer(folder_with(tmp_path / "t", odd)), TALK[:4], "it")


# The command


def options(**changed):
    words = [f"--{name}={value}" for name, value in changed.items() if value is not True]
    return parse_command(
        "chat", ["folder", *words, *(f"--{name}" for name, value in changed.items() if value is True)]
    )[0]


class Echo(Scripted):
    """Says the next letter of the alphabet after each, from the last question on, and ends after three."""

    def __init__(self):
        super().__init__(torch.zeros(1))

    def forward(self, ids):
        self.seen.append(ids[0].tolist())
        logits = torch.zeros(1, 1, 258)
        ended = len(self.seen) % 4 == 0
        logits[0, 0, 257 if ended else 97 + len(self.seen) % 4] = 9.0
        return logits


def test_a_conversation_goes_on_and_forgets_its_oldest_questions(capsys):
    tokenizer = build_tokenizer("bytes", "alpaca")
    model = Echo()
    talk = chat.Talk(model, tokenizer, chat.CHAT, 200, options(system="S"))
    assert "".join(talk.answer("one")) == "bcd"
    assert tokenizer.decode(model.seen[0]) == "S\n\n### Instruction:\none\n\n### Response:\n"
    assert "".join(talk.answer("two")) == "bcd"
    assert tokenizer.decode(model.seen[4]).endswith(
        "one\n\n### Response:\nbcd\n\n### Instruction:\ntwo\n\n### Response:\n"
    )
    assert "".join(talk.answer("x" * 90)) == "bcd"
    read = tokenizer.decode(model.seen[8])
    assert "one" not in read and "two" in read and read.startswith("S\n\n")
    assert "the oldest question is forgotten" in capsys.readouterr().err
    talk.begin()
    assert [message["role"] for message in talk.messages] == ["system"]


def test_refusals(capsys):
    for words, message in (
        (["--temperature", "-1"], "--temperature: given '-1'; allowed: a number >= 0"),
        (["--system=x", "--format=alpaca"], "--system: format alpaca has no place for it"),
        (["--format=nothing"], "--format: given 'nothing'; allowed: chat, "),
    ):
        assert cli.main(["chat", "folder", *words]) == 2
        assert message in capsys.readouterr().err


def opened(monkeypatch, *words):
    """chat finds this job, without weights."""
    found = manager.load([*words, "--model.tokenizer_path=bytes"]), Path("checkpoint")
    monkeypatch.setattr(chat, "find_checkpoint", lambda *_: found)


def test_a_model_without_next_words_is_refused(monkeypatch):
    opened(monkeypatch, "--model.name=gpt2", "--model.flavor=debugmodel", "--model.overrides={n_classes = 2}")
    with pytest.raises(JobError, match="this gpt2 tells 2 classes apart; give a decoder of words"):
        chat.main(["folder", "--format=alpaca"])


def test_nothing_is_said_before_where_records_have_no_place_for_it(monkeypatch, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"instruction": "a", "output": "b"}) + "\n")
    opened(monkeypatch, "--training.dataset=text", f"--training.dataset_path={tmp_path / 'rows.jsonl'}")
    with pytest.raises(JobError, match="--system: the job's records are of the form alpaca, which has no place for it"):
        chat.main(["folder", "--system=x"])


def test_a_cache_is_written_and_read(monkeypatch, capsys):
    model, _ = remembering(sizes=dict(vocab_size=260))
    opened(monkeypatch, "--training.seq_len=8")
    monkeypatch.setattr(inference_model, "filled_model", lambda *_: (model.eval(), None))
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is longer than a segment?\n"))
    assert chat.main(["folder", "--format=alpaca", "--max_new_tokens=4"]) == 0
    assert model.memory.stores[False, 0].counts.tolist()[0] > 8


# A made task: say it again, or say it backwards


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ m.content + '=' }}{% else %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


def made_task(folder, steps):
    """The words of a job that learns it from 3,000 questions of the 1,152 there are."""
    words = random.Random(0)
    rows = [{"messages": messages([("user", asked), ("assistant", told)])} for asked, told in pairs(words, 3000)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.jinja").write_text(TEMPLATE)
    sizes = "{dim=64, n_layers=2, n_heads=4, n_kv_heads=4, vocab_size=258, multiple_of=16}"
    settings = dict(task__kind="sft", model__overrides=sizes, data__chat_template=folder / "mine.jinja")
    settings |= dict(training__seq_len=128, training__steps=steps, optimizer__lr=4e-3, optimizer__weight_decay=0.0)
    settings |= dict(checkpoint__enable=True, metrics__log_freq=50)
    return jobs.arguments(folder / "run", folder / "rows.jsonl", **settings)


def pairs(words, count):
    """Questions with a word to say again (+) or backwards (-), and their answers."""
    found = []
    for _ in range(count):
        text = "".join(words.choice("abcdefgh") for _ in range(words.randrange(2, 4)))
        backwards = words.random() < 0.5
        found.append((("-" if backwards else "+") + text, text[::-1] if backwards else text))
    return found


def share_answered(folder, capsys, monkeypatch, count=40):
    """Of questions that come through a pipe."""
    asked = pairs(random.Random(1), count)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(question + "\n\n" for question, _ in asked)))
    capsys.readouterr()
    assert chat.main([str(folder), "--apart", "--max_new_tokens=8"]) == 0
    out, err = capsys.readouterr()
    assert "asked as chat" in err
    answers = out.split("\n")[:-1]
    assert len(answers) == count
    return sum(answer == wanted for answer, (_, wanted) in zip(answers, asked, strict=True)) / count


def test_a_made_task_is_learned_and_answered(tmp_path, capsys, monkeypatch):
    """The template is with the run: the file may go."""
    run_ranks(1, jobs.train, made_task(tmp_path, steps=1))
    (tmp_path / "mine.jinja").unlink()
    assert share_answered(tmp_path / "run", capsys, monkeypatch, count=10) == 0
    run_ranks(1, jobs.train, made_task(tmp_path, steps=320))
    (tmp_path / "mine.jinja").unlink()
    assert share_answered(tmp_path / "run", capsys, monkeypatch) >= 0.9
    # in the form of its records, where there is no template, and not at all where these ask nothing
    with pytest.raises(JobError, match="no questions that could be asked; give --format prompt_completion or alpaca"):
        chat.form_of(manager.load(jobs.arguments(tmp_path, tmp_path / "rows.jsonl")), build_tokenizer("bytes"))


def test_the_form_of_a_jobs_records(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"instruction": "a", "output": "b"}) + "\n")
    config = manager.load(jobs.arguments(tmp_path, rows))
    bare = build_tokenizer("bytes")
    templated = build_tokenizer("bytes", "alpaca")
    # a template says nothing of such records, whose prompt is another
    assert chat.form_of(config, bare) == chat.form_of(config, templated) == "alpaca"
    model = Echo()
    assert "".join(chat.Talk(model, bare, "alpaca", 300, options()).answer("Why?")) == "bcd"
    ids, trained = encode(bare, RecordReader().document({"instruction": "Why?", "output": "b"}, "", ""))
    assert model.seen[0] == ids[~trained].tolist()
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    assert chat.form_of(config, templated) == "chat"
    rows.write_text("{")
    assert chat.form_of(config, templated) == "chat"
    rows.unlink()
    assert chat.form_of(config, templated) == "chat"
    with pytest.raises(JobError, match="the data that would tell a form are gone: .*rows.jsonl: no such file"):
        chat.form_of(config, bare)
