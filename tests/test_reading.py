"""Records that are read as the job says: by a format of its choice, under their own names, in a prompt of its own."""

import json

import pytest

from tests.support import jobs
from tests.support.judged import lines
from torchtitan.build import parts
from torchtitan.build.data import data_sources
from torchtitan.commands import chat, preview
from torchtitan.config import manager
from torchtitan.core.constraints import LimitError
from torchtitan.core.errors import JobError
from torchtitan.datasets import open_hub_dataset
from torchtitan.datasets.encoding import encode
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import Chat, DataError
from torchtitan.datasets.sources_text import open_text_files
from torchtitan.datasets.tokenizer import build_tokenizer

BYTES = build_tokenizer("bytes")
QUESTIONS = {"instruction": "question", "input": "context", "output": "reply"}
MINE = {"format": "Q: {instruction} ({input})\nA:", "no_input_format": "Q: {instruction}\nA:", "separator": " "}
ASKED = {"question": "{input} or {instruction}?", "context": "{system}", "reply": "{0}"}
"""Whose texts look like places."""


def halves(document):
    """What is read, and what is learned."""
    ids, trained = encode(BYTES, document)
    return BYTES.decode(ids[~trained]), BYTES.decode(ids[trained])


def mine(record, template=MINE, fields=QUESTIONS):
    return halves(
        RecordReader(format_name="alpaca", fields=fields, template=template).document(record, "a.jsonl:3", "3")
    )


def test_a_prompt_of_ones_own():
    """Filled at once: what a record says is text, whatever it looks like."""
    assert mine(ASKED) == ("Q: {input} or {instruction}? ({system})\nA: ", "{0}")
    assert mine(ASKED | {"context": ""}) == ("Q: {input} or {instruction}?\nA: ", "{0}")
    assert mine(ASKED | {"context": None}) == mine(ASKED | {"context": ""})
    # a format alone is that of every record, and stands for the format
    record = {"instruction": "a", "output": "b"}
    assert halves(RecordReader(template={"format": "<{input}|{instruction}>"}).document(record, "", "")) == (
        "<|a>",
        "b",
    )


def test_what_the_system_says_stands_ahead_or_in_its_place():
    record = ASKED | {"context": "", "system": "Be kind."}
    assert mine(record, MINE | {"system_format": "[{system}] "})[0] == "[Be kind.] Q: {input} or {instruction}?\nA: "
    assert mine(record)[0].startswith("Be kind.\n\nQ: ")
    assert mine(record, {"format": "{system}: {instruction}"})[0] == "Be kind.: {input} or {instruction}?"
    del record["system"]
    assert mine(record, MINE | {"system_prompt": "Hi."})[0].startswith("Hi.\n\nQ: ")
    # a column of that name is no part of Stanford's prompt, unless it is named
    alpaca = {"instruction": "a", "output": "b", "system": "Be kind."}
    assert "kind" not in halves(RecordReader().document(alpaca, "", ""))[0]
    named = RecordReader(format_name="alpaca", fields={"system": "system"})
    assert halves(named.document(alpaca, "", ""))[0].startswith("Be kind.\n\nBelow is")


FORMS = {  # a format with names of its own, a record of it, and the one that it is read as
    "prompt_completion": (
        {"prompt": "p", "completion": "c"},
        {"p": "a", "c": "b", "text": "no"},
        {"prompt": "a", "completion": "b"},
    ),
    "input_output": (
        {"segments": "s"},
        {"s": [{"text": "a", "label": True}]},
        {"segments": [dict(text="a", label=True)]},
    ),
    "completion": ({"text": "body"}, {"body": "a", "text": "no", "prompt": "b", "completion": "c"}, {"text": "a"}),
    "chat": (
        {"messages": "talk", "role": "who", "content": "said"},
        {"talk": [{"who": "user", "said": "a", "role": 5}, {"who": "assistant", "said": "b", "train": False}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": False}]},
    ),
    "sharegpt": (
        {"conversations": "talk", "role": "who", "content": "said"},
        {"talk": [{"who": "human", "said": "a"}, {"who": "gpt", "said": "b"}], "messages": []},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ),
    "preference": (
        {"prompt": "q", "chosen": "good", "rejected": "bad", "content": "said"},
        {"q": "a", "good": [{"role": "assistant", "said": "b"}], "bad": [{"role": "assistant", "said": "c"}]},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_fields_have_the_names_that_the_job_gives_them(form):
    fields, record, usual = FORMS[form]
    found = RecordReader(format_name=form, fields=fields).document(record, "a", "a")
    wanted = RecordReader().document(usual, "a", "a")
    if form == "preference":  # whose other form is of texts
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        assert found.content.chosen.content == Chat(said)
    elif form == "sharegpt":
        assert [m["content"] for m in found.content.messages] == [m["content"] for m in wanted.content.messages]
        assert [m["role"] for m in wanted.content.messages] == ["user", "assistant"]
    else:
        assert found.content == wanted.content
    assert found.format_name == form


def test_a_separator_stands_between_prompt_and_completion():
    reading = RecordReader(format_name="prompt_completion", template={"separator": "\n"})
    assert halves(reading.document({"prompt": "a", "completion": "b"}, "", "")) == ("a\n", "b")


def test_a_default_for_what_the_system_says():
    reading, said = RecordReader("messages", system="Be kind."), {"role": "user", "content": "a"}
    own = {"role": "system", "content": "Be short."}
    kind = {"role": "system", "content": "Be kind."}
    assert reading.document({"messages": [said]}, "", "").content == Chat([kind, said])
    assert reading.document({"messages": [own, said]}, "", "").content == Chat([own, said])
    assert reading.document({"messages": "text"}, "", "").content == "text"
    pair = reading.document({"prompt": [said], "chosen": "b", "rejected": "c"}, "", "").content
    assert pair.chosen.content.messages[0] == pair.rejected.content.messages[0] == kind


MISSING = [
    (
        dict(format_name="alpaca", fields={"instruction": "question"}),
        {"instruction": "a", "output": "b"},
        "a.jsonl:3: no field 'question', which format alpaca needs; the fields there are: 'instruction', 'output'; set",
    ),
    (
        dict(format_name="alpaca", fields={"input": "context"}),
        {"instruction": "a", "output": "b"},
        "no field 'context', whi",
    ),
    (
        dict(format_name="chat"),
        {},
        "no field 'messages', which format chat needs; the fields there are: none; set training.f",
    ),
    (
        dict(format_name="chat"),
        {"messages": "a"},
        "field 'messages' of format chat holds str, not a list of messages {role",
    ),
    (
        dict(format_name="input_output"),
        {"segments": "a"},
        "of format input_output holds str, not a list of segments {text",
    ),
    (
        dict(format_name="chat", fields={"role": "who"}),
        {"messages": [{"role": "user", "content": "a"}]},
        "a.jsonl:3: message 0 of field 'messages' has no 'who'; there are: 'role', 'content'; set training.fields",
    ),
    (
        dict(format_name="chat", fields={"role": "who"}),
        {"messages": [5]},
        "message 0 of field 'messages' has no 'who'; there",
    ),
    (
        dict(format_name="alpaca", fields={"output": "reply"}),
        {"instruction": "a", "reply": 5},
        "a.jsonl:3: field 'reply' of format alpaca holds int, not text",
    ),
    (
        dict(format_name="preference", fields={"chosen": "good"}),
        {"prompt": "a", "good": None, "rejected": "b"},
        "a.jsonl:3: field 'good' holds nothing (null), beside str as prompt",
    ),
]


@pytest.mark.parametrize("how, record, message", MISSING, ids=range(len(MISSING)))
def test_a_record_that_is_not_so_is_named_with_its_fields(how, record, message):
    with pytest.raises(DataError) as error:
        RecordReader(**how).document(record, "a.jsonl:3", "3")
    assert message in str(error.value)


WRONG = [
    (dict(format_name="alpacca"), "training.format: given 'alpacca'; allowed: one of preference, chat"),
    (dict(fields={"input": "a"}), "training.fields: given 'input'; allowed: unset without training.format"),
    (
        dict(format_name="chat", fields={"inpt": "a"}),
        "given 'inpt'; allowed: fields of format chat: messages, role, content",
    ),
    (
        dict(format_name="chat", template=MINE),
        "'format'; allowed: unset with format chat, which has no prompt of its own",
    ),
    (
        dict(format_name="prompt_completion", template=MINE),
        "'format'; allowed: separator alone with format prompt_completion",
    ),
    (
        dict(template={"formt": "a"}),
        "formt = 'a'; allowed: parts that are known: format, no_input_format, system_format",
    ),
    (
        dict(template={"format": "a"}),
        "format = 'a'; allowed: text with {instruction}; places are {instruction}, {input}",
    ),
    (dict(template={"format": "{instruction} {question}"}), "allowed: text with {instruction}; places are"),
    (dict(template={"system_format": "a"}), "system_format = 'a'; allowed: text with {system}"),
]


@pytest.mark.parametrize("how, message", WRONG, ids=range(len(WRONG)))
def test_what_is_not_known_is_refused(how, message):
    with pytest.raises(LimitError) as error:
        RecordReader(**how)
    assert message in str(error.value)


ROWS = [ASKED, ASKED | {"context": "", "reply": "b"}]
READING = RecordReader(format_name="alpaca", fields=QUESTIONS, template=MINE)


def write(path, rows=ROWS):
    """By what its name ends with."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        lines = [list(rows[0]), *(row.values() for row in rows)]
        path.write_text("".join(";".join(f'"{cell}"' for cell in line) + "\n" for line in lines))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "arrow"])
def test_tables_have_formats_as_lines_have(tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow.parquet")
    path = write(tmp_path / f"rows.{suffix}")
    wanted = [READING.document(row, "", "").content for row in ROWS]
    assert [document.content for document in open_text_files(str(path), READING).documents()] == wanted
    # and are told by their fields, where these have the usual names
    told = write(tmp_path / f"told.{suffix}", [{"prompt": "a", "completion": "b", "more": "c"}])
    (document,) = open_text_files(str(told), RecordReader()).documents()
    assert document.format_name == "prompt_completion"
    other = RecordReader(format_name="alpaca", fields=QUESTIONS | {"output": "answer"})
    with pytest.raises(DataError, match=r"'answer', which format alpaca needs.*context.*set training.fields"):
        for item in open_text_files(str(path), other).documents():
            raise item


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_record_that_may_be_meant_in_two_ways_is_refused(tmp_path, suffix):
    """As sets of instructions that have the whole text beside its parts; where all text is learned, that is meant."""
    path = write(tmp_path / f"rows{suffix}", [{"instruction": "a", "output": "b", "text": "a: b"}])

    def read(**how):
        items = [item for item in open_text_files(str(path), RecordReader(**how)).documents()]
        if isinstance(items[0], DataError):
            raise items[0]
        return items[0].text

    with pytest.raises(
        DataError, match="'text' and, of format alpaca, 'instruction' and 'output'; set training.format"
    ):
        read(refuse_ambiguous=True)
    assert read() == read(format_name="completion", refuse_ambiguous=True) == "a: b"
    assert read(format_name="alpaca", refuse_ambiguous=True).endswith("\nb")
    with pytest.raises(DataError, match="'chosen', which format preference .* choose another task.kind"):
        read(refuse_ambiguous=True, pairs=True)


UNCLEAR = [  # records of which one at a time is learned, and what is said of them
    ({"text": "a: b", "chosen": "b", "rejected": "c"}, "'chosen' and 'rejected'; learn it with task.kind dpo, ipo or"),
    ({"instruction": "a", "output": "b", "system": ""}, r"'system', which the .* to { system = \"system\" }$"),
]


@pytest.mark.parametrize("record, message", UNCLEAR)
def test_what_is_unclear_of_others(record, message):
    with pytest.raises(DataError, match=message):
        RecordReader(refuse_ambiguous=True).document(record, "", "")


def test_pairs_are_pairs_whatever_else_they_have():
    reading = RecordReader(refuse_ambiguous=True, pairs=True, fields={"chosen": "good"})
    assert reading.document({"text": "a: b", "prompt": "a", "good": "b", "rejected": "c"}, "", "").text == "abac"
    with pytest.raises(LimitError, match="'alpaca'; allowed: preference, or unset, as pairs"):
        RecordReader(refuse_ambiguous=True, pairs=True, format_name="alpaca")
    with pytest.raises(LimitError, match="training.template: .* unset with format preference, which has no prompt"):
        RecordReader(refuse_ambiguous=True, pairs=True, template={"separator": " "})


def test_sets_of_the_hub_are_read_so_too(tmp_path):
    pytest.importorskip("datasets")
    write(tmp_path / "train.jsonl")
    wanted = [READING.document(row, "", "").content for row in ROWS]
    assert [
        item.content for item in open_hub_dataset("huggingface", "train", str(tmp_path), READING).documents()
    ] == wanted
    (item,) = open_hub_dataset("huggingface", "train", str(tmp_path), RecordReader()).documents()
    assert "no field 'text'; the fields there are: 'question', 'context', 'reply'" in str(item)


def words(folder, path, **options):
    settings = dict(task__kind="sft", training__format="alpaca", training__seq_len=200, training__local_batch_size=2)
    settings |= dict(training__global_batch_size=2, training__template=toml(MINE), training__fields=toml(QUESTIONS))
    return jobs.arguments(folder, path, **settings | options)


def toml(table):
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + "}"


def test_a_job_reads_shows_keeps_and_asks_so(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl")
    argv = words(tmp_path / "run", path)
    config = manager.load(argv)
    other = manager.load(words(tmp_path / "run", path, training__template=toml(MINE | {"separator": ""})))
    (source,), (changed,) = data_sources(config, "training"), data_sources(other, "training")
    assert source.source.fingerprint["template"] == MINE  # a cache and a position of its own
    assert changed.source.folder != source.source.folder
    assert preview.main([*argv, "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Q: {input} or {instruction}?" in shown
    (tmp_path / "kept.toml").write_text(manager.to_toml(config))
    kept = manager.load(["--job.config_file", str(tmp_path / "kept.toml")])
    assert kept.training.template == MINE and kept.training.fields == QUESTIONS and kept.training.format == "alpaca"
    (tmp_path / "rows.jsonl").unlink()  # chat needs no data to know how to ask
    assert chat.form_of(kept, parts.tokenizer(kept)) == "alpaca"
    asked = chat.first_reading(kept).question_document("alpaca", "Why?")
    assert encode(BYTES, asked).ids.tolist()[:-1] == [BYTES.bos_id, *b"Q: Why?\nA: "]


def test_sources_say_how_they_are_read_or_follow_the_job(tmp_path):
    write(tmp_path / "rows.jsonl")
    write(tmp_path / "pairs.jsonl", [{"prompt": "a", "completion": "b"}])
    sources = [{"dataset": "text", "dataset_path": str(tmp_path / "rows.jsonl")}]
    sources += [{"dataset": "text", "dataset_path": str(tmp_path / "pairs.jsonl"), "format": "prompt_completion"}]
    shown = "[" + ", ".join(toml(source) for source in sources) + "]"
    argv = [word for word in words(tmp_path, "x") if not word.startswith("--training.dataset")]
    opened = data_sources(manager.load([*argv, f"--training.sources={shown}"]), "training")
    assert [weighted.source.header["documents"] for weighted in opened] == [2, 1]


REFUSED = [
    (["--training.format=alpacca"], "training.format: given 'alpacca'; allowed: one of preference"),
    (["--training.dataset=python_stdlib", "--training.format=chat"], 'training.format: given "chat"; allowed: unset'),
    (["--data.default_system=a", "--training.dataset=python_stdlib"], 'data.default_system: given "a"; allowed: unset'),
    (
        ["--training.format=chat", "--training.text_field=a"],
        'training.text_field: given "a"; allowed: unset with train',
    ),
    (
        ['--training.sources=[{dataset = "python_stdlib", format = "chat"}]'],
        'training.sources[0].format: given "chat"; allowed: unset with dataset "python_stdlib", which has no records',
    ),
    (
        ['--training.sources=[{dataset = "text", dataset_path = "FILE", fields = {a = "b"}}]'],
        "training.sources[0].fields: given 'a'; allowed: unset without training.format",
    ),
    (
        ['--training.sources=[{dataset = "text", dataset_path = "FILE", format = "chat", text_field = "a"}]'],
        'training.sources[0].text_field: given "a"; allowed: unset beside format',
    ),
]


@pytest.mark.parametrize("argv, message", REFUSED, ids=range(len(REFUSED)))
def test_check_refuses_what_cannot_be_meant(argv, message, tmp_path):
    path = str(write(tmp_path / "rows.jsonl"))
    given = [word.replace("FILE", path) for word in argv]
    if not any("sources" in word or "training.dataset=" in word for word in given):
        given = ["--training.dataset=text", f"--training.dataset_path={path}", *given]
    assert any(message in line for line in lines(*given)), lines(*given)


def test_a_command_refuses_it_too(tmp_path):
    path = write(tmp_path / "rows.jsonl")
    with pytest.raises(JobError, match="training.format: given 'chatt'; allowed: one of"):
        preview.main(words(tmp_path, path, training__format="chatt"))


def test_a_special_token_in_a_prompt_is_refused():
    """It would be read in pieces."""
    from_text = ["--training.dataset=text", "--training.dataset_path=tests"]
    given = toml({"format": "<|begin_of_text|>{instruction}", "no_input_format": "{instruction}"})
    faults = lines(*from_text, f"--training.template={given}")
    (fault,) = (each for each in faults if each.startswith("training.template: given {"))
    assert "text without <|begin_of_text|>, which a prompt would have in pieces" in fault
    assert "for turns write messages, with data.chat_template" in fault
    plain = toml({"format": "<|im_start|>{instruction}", "no_input_format": "{instruction}"})
    assert not any("template" in each for each in lines(*from_text, f"--training.template={plain}"))
