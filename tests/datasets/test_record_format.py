"""Tests of the options that say how records are read: training.format, training.fields and training.template."""

import json
import re

import pytest

from tests.support import jobs
from tests.support.judged import lines
from torchtitan.assembly.data import JobDatasets
from torchtitan.commands import chat, preview
from torchtitan.config import manager
from torchtitan.config.options import ConfigError
from torchtitan.core.errors import JobError, LimitError
from torchtitan.datasets import open_hub_dataset
from torchtitan.datasets.encoding import encode
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import Chat, DataError
from torchtitan.datasets.sources.files import open_text_files
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.job import ResolvedJob

BYTES = build_tokenizer("bytes")
FIELDS = {"instruction": "question", "input": "context", "output": "reply"}
TEMPLATE = {"format": "Q: {instruction} ({input})\nA:", "no_input_format": "Q: {instruction}\nA:", "separator": " "}
RECORD = {"question": "{input} or {instruction}?", "context": "{system}", "reply": "{0}"}
"""A record with texts that look like placeholders of a template."""


def prompt_and_answer(document):
    """Return the text of a document without loss, and its text with loss."""
    ids, trained = encode(BYTES, document)
    return BYTES.decode(ids[~trained]), BYTES.decode(ids[trained])


def read_record(record, template=TEMPLATE, fields=FIELDS):
    return prompt_and_answer(
        RecordReader(format_name="alpaca", fields=fields, template=template).document(record, "a.jsonl:3", "3")
    )


def test_a_prompt_template_of_the_job():
    """Placeholders are filled in one pass, so that a placeholder in a record's text stays text."""
    assert read_record(RECORD) == ("Q: {input} or {instruction}? ({system})\nA: ", "{0}")
    assert read_record(RECORD | {"context": ""}) == ("Q: {input} or {instruction}?\nA: ", "{0}")
    assert read_record(RECORD | {"context": None}) == read_record(RECORD | {"context": ""})
    # a template with nothing but a format selects the alpaca format, for records without an input too
    record = {"instruction": "a", "output": "b"}
    assert prompt_and_answer(RecordReader(template={"format": "<{input}|{instruction}>"}).document(record, "", "")) == (
        "<|a>",
        "b",
    )


def test_the_system_message_precedes_the_prompt_or_fills_its_placeholder():
    record = RECORD | {"context": "", "system": "Be kind."}
    assert (
        read_record(record, TEMPLATE | {"system_format": "[{system}] "})[0]
        == "[Be kind.] Q: {input} or {instruction}?\nA: "
    )
    assert read_record(record)[0].startswith("Be kind.\n\nQ: ")
    assert read_record(record, {"format": "{system}: {instruction}"})[0] == "Be kind.: {input} or {instruction}?"
    del record["system"]
    assert read_record(record, TEMPLATE | {"system_prompt": "Hi."})[0].startswith("Hi.\n\nQ: ")
    # a column of that name is no part of Stanford's prompt, unless it is named: a job that names neither is refused
    alpaca = {"instruction": "a", "output": "b", "system": "Be kind."}
    with pytest.raises(DataError, match="'system', which the prompt of format alpaca has no place for"):
        RecordReader().document(alpaca, "", "")
    assert "kind" not in prompt_and_answer(RecordReader(format_name="alpaca").document(alpaca, "", ""))[0]
    assert "kind" not in prompt_and_answer(RecordReader().document(alpaca | {"system": ""}, "", ""))[0]
    with_system_field = RecordReader(format_name="alpaca", fields={"system": "system"})
    assert prompt_and_answer(with_system_field.document(alpaca, "", ""))[0].startswith("Be kind.\n\nBelow is")


FORMS = {  # field names of the job, a record with these names, the equal record with the usual names
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
def test_fields_are_renamed_as_the_job_says(form):
    fields, record, usual = FORMS[form]
    document = RecordReader(format_name=form, fields=fields).document(record, "a", "a")
    expected = RecordReader().document(usual, "a", "a")
    if form == "preference":  # the usual record has texts where this one has messages
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        assert document.content.chosen.content == Chat(messages)
    elif form == "sharegpt":
        assert [m["content"] for m in document.content.messages] == [m["content"] for m in expected.content.messages]
        assert [m["role"] for m in expected.content.messages] == ["user", "assistant"]
    else:
        assert document.content == expected.content
    assert document.format_name == form


def test_a_separator_stands_between_prompt_and_completion():
    reader = RecordReader(format_name="prompt_completion", template={"separator": "\n"})
    assert prompt_and_answer(reader.document({"prompt": "a", "completion": "b"}, "", "")) == ("a\n", "b")


def test_a_default_system_message():
    reader, question = RecordReader("messages", system="Be kind."), {"role": "user", "content": "a"}
    system_message = {"role": "system", "content": "Be short."}
    default_message = {"role": "system", "content": "Be kind."}
    assert reader.document({"messages": [question]}, "", "").content == Chat([default_message, question])
    assert reader.document({"messages": [system_message, question]}, "", "").content == Chat([system_message, question])
    assert reader.document({"messages": "text"}, "", "").content == "text"
    pair = reader.document({"prompt": [question], "chosen": "b", "rejected": "c"}, "", "").content
    assert pair.chosen.content.messages[0] == pair.rejected.content.messages[0] == default_message


def test_a_system_message_is_left_out():
    """Only the first message; a default one takes its place. Its text need not be in the sample then."""
    question, later = {"role": "user", "content": "a"}, {"role": "system", "content": "Later."}
    messages = [{"role": "system", "content": "Be short."}, question, later]
    reader = RecordReader("messages", drops_system=True)
    assert reader.document({"messages": messages}, "", "").content == Chat([question, later])
    assert reader.document({"messages": [question]}, "", "").content == Chat([question])
    default = {"role": "system", "content": "Be kind."}
    assert RecordReader("messages", drops_system=True, system="Be kind.").document(
        {"messages": messages[:2]}, "", ""
    ).content == Chat([default, question])
    pair = reader.document({"prompt": messages[:2], "chosen": "b", "rejected": "c"}, "", "").content
    assert [message["role"] for message in pair.rejected.content.messages] == ["user", "assistant"]
    assert reader.fingerprint != RecordReader("messages").fingerprint


MISSING = [
    (
        dict(format_name="alpaca", fields={"instruction": "question"}),
        {"instruction": "a", "output": "b"},
        "a.jsonl:3: no field 'question', which format alpaca needs; the record's fields: 'instruction', 'output'; set",
    ),
    (
        dict(format_name="alpaca", fields={"input": "context"}),
        {"instruction": "a", "output": "b"},
        "no field 'context', whi",
    ),
    (
        dict(format_name="chat"),
        {},
        "no field 'messages', which format chat needs; the record's fields: none; set training.f",
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
        "a.jsonl:3: field 'good' holds nothing (null), with str as prompt",
    ),
]


@pytest.mark.parametrize("options, record, message", MISSING, ids=range(len(MISSING)))
def test_a_record_of_another_format_is_reported_with_its_fields(options, record, message):
    with pytest.raises(DataError) as error:
        RecordReader(**options).document(record, "a.jsonl:3", "3")
    assert message in str(error.value)


WRONG = [
    (dict(format_name="alpacca"), "training.format: given 'alpacca'; allowed: one of preference, chat"),
    (dict(fields={"input": "a"}), "training.fields: given 'input'; allowed: unset without training.format"),
    (
        dict(format_name="chat", fields={"inpt": "a"}),
        "given 'inpt'; allowed: fields of format chat: messages, role, content",
    ),
    (
        dict(format_name="chat", template=TEMPLATE),
        "'format'; allowed: unset with format chat, which does not use a prompt template",
    ),
    (
        dict(format_name="prompt_completion", template=TEMPLATE),
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


@pytest.mark.parametrize("options, message", WRONG, ids=range(len(WRONG)))
def test_unknown_formats_fields_and_template_parts_are_refused(options, message):
    with pytest.raises(LimitError) as error:
        RecordReader(**options)
    assert message in str(error.value)


ROWS = [RECORD, RECORD | {"context": "", "reply": "b"}]
READER = RecordReader(format_name="alpaca", fields=FIELDS, template=TEMPLATE)


def write(path, rows=ROWS):
    """Write rows in the format that the suffix of the path names."""
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
def test_files_of_every_type_are_read_by_format(tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow.parquet")
    path = write(tmp_path / f"rows.{suffix}")
    expected = [READER.document(row, "", "").content for row in ROWS]
    assert [document.content for document in open_text_files(str(path), READER).documents()] == expected
    # usual field names select the format
    usual_fields = write(tmp_path / f"told.{suffix}", [{"prompt": "a", "completion": "b", "more": "c"}])
    (document,) = open_text_files(str(usual_fields), RecordReader()).documents()
    assert document.format_name == "prompt_completion"
    other = RecordReader(format_name="alpaca", fields=FIELDS | {"output": "answer"})
    with pytest.raises(DataError, match=r"'answer', which format alpaca needs.*context.*set training.fields"):
        for item in open_text_files(str(path), other).documents():
            raise item


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_record_that_fits_two_formats_is_refused(tmp_path, suffix):
    """Some instruction datasets hold the full text in addition to its parts; pretraining reads that text."""
    path = write(tmp_path / f"rows{suffix}", [{"instruction": "a", "output": "b", "text": "a: b"}])

    def read(**options):
        items = [item for item in open_text_files(str(path), RecordReader(**options)).documents()]
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


UNCLEAR = [  # records with a column that the chosen format ignores, and the message
    ({"text": "a: b", "chosen": "b", "rejected": "c"}, "'chosen' and 'rejected'; learn it by task.kind dpo, orpo or"),
    (
        {"instruction": "a", "output": "b", "system": "Be kind."},
        r"'system', which the .*training.fields = { system = \"system\" }$",
    ),
]


@pytest.mark.parametrize("record, message", UNCLEAR)
def test_records_with_unused_columns_are_refused(record, message):
    with pytest.raises(DataError, match=message):
        RecordReader(refuse_ambiguous=True).document(record, "", "")


def test_a_task_of_pairs_reads_pairs_from_ambiguous_records():
    reader = RecordReader(refuse_ambiguous=True, pairs=True, fields={"chosen": "good"})
    assert reader.document({"text": "a: b", "prompt": "a", "good": "b", "rejected": "c"}, "", "").text == "abac"
    with pytest.raises(LimitError, match="'alpaca'; allowed: preference, or unset, as pairs"):
        RecordReader(refuse_ambiguous=True, pairs=True, format_name="alpaca")
    with pytest.raises(
        LimitError, match="training.template: .* unset with format preference, which does not use a prompt"
    ):
        RecordReader(refuse_ambiguous=True, pairs=True, template={"separator": " "})


def test_hub_datasets_are_read_by_format(tmp_path):
    pytest.importorskip("datasets")
    write(tmp_path / "train.jsonl")
    expected = [READER.document(row, "", "").content for row in ROWS]
    assert [
        item.content for item in open_hub_dataset("huggingface", "train", str(tmp_path), READER).documents()
    ] == expected
    (item,) = open_hub_dataset("huggingface", "train", str(tmp_path), RecordReader()).documents()
    assert "no field 'text'; the record's fields: 'question', 'context', 'reply'" in str(item)


def arguments(folder, path, **options):
    """Return the arguments of a fine-tuning job with a prompt template and renamed fields."""
    settings = dict(task__kind="sft", training__format="alpaca", training__seq_len=200, training__local_batch_size=2)
    settings |= dict(training__global_batch_size=2, training__template=toml(TEMPLATE), training__fields=toml(FIELDS))
    return jobs.arguments(folder, path, **settings | options)


def toml(table):
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + "}"


def test_template_and_fields_of_a_job_reach_preview_saved_job_and_chat(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl")
    argv = arguments(tmp_path / "run", path)
    config = manager.load(argv)
    other = manager.load(arguments(tmp_path / "run", path, training__template=toml(TEMPLATE | {"separator": ""})))
    (source,), (changed,) = (
        JobDatasets(ResolvedJob(config)).open_sources("training"),
        JobDatasets(ResolvedJob(other)).open_sources("training"),
    )
    assert source.source.fingerprint["template"] == TEMPLATE  # so another template has another cache and position
    assert changed.source.folder != source.source.folder
    assert preview.main([*argv, "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Q: {input} or {instruction}?" in shown
    (tmp_path / "kept.toml").write_text(manager.to_toml(config))
    saved = manager.load(["--job.config_file", str(tmp_path / "kept.toml")])
    assert saved.training.template == TEMPLATE and saved.training.fields == FIELDS and saved.training.format == "alpaca"
    (tmp_path / "rows.jsonl").unlink()  # chat needs no data to know how to ask
    assert chat.form_of(ResolvedJob(saved).data, ResolvedJob(saved).tokenizer()) == "alpaca"
    question = chat.first_reading(ResolvedJob(saved).data).question_document("alpaca", "Why?")
    assert encode(BYTES, question).ids.tolist()[:-1] == [BYTES.bos_id, *b"Q: Why?\nA: "]


def test_a_source_has_its_own_format_or_that_of_the_job(tmp_path):
    write(tmp_path / "rows.jsonl")
    write(tmp_path / "pairs.jsonl", [{"prompt": "a", "completion": "b"}])
    sources = [{"dataset": "text", "dataset_path": str(tmp_path / "rows.jsonl")}]
    sources += [{"dataset": "text", "dataset_path": str(tmp_path / "pairs.jsonl"), "format": "prompt_completion"}]
    shown = "[" + ", ".join(toml(source) for source in sources) + "]"
    argv = [argument for argument in arguments(tmp_path, "x") if not argument.startswith("--training.dataset")]
    opened = JobDatasets(ResolvedJob(manager.load([*argv, f"--training.sources={shown}"]))).open_sources("training")
    assert [weighted.source.header["documents"] for weighted in opened] == [2, 1]


REFUSED = [
    (["--training.format=alpacca"], "training.format: given 'alpacca'; allowed: one of preference"),
    (["--training.dataset=python_stdlib", "--training.format=chat"], 'training.format: given "chat"; allowed: unset'),
    (["--data.default_system=a", "--training.dataset=python_stdlib"], 'data.default_system: given "a"; allowed: unset'),
    (["--data.drop_system", "--training.dataset=python_stdlib"], "data.drop_system: given true; allowed: unset"),
    (
        ["--training.format=chat", "--training.text_field=a"],
        'training.text_field: given "a"; allowed: unset with train',
    ),
    (
        ['--training.sources=[{dataset = "python_stdlib", format = "chat"}]'],
        'training.sources[0].format: given "chat"; allowed: unset with dataset "python_stdlib", which has no records',
    ),
    (
        ['--training.sources=[{dataset = "python_stdlib", slice = "[:9]"}]'],
        'training.sources[0].slice: given "[:9]"; allowed: unset with dataset "python_stdlib", which has no records',
    ),
    (
        ['--training.sources=[{dataset = "text", dataset_path = "FILE", fields = {a = "b"}}]'],
        "training.sources[0].fields: given 'a'; allowed: unset without training.format",
    ),
    (
        ['--training.sources=[{dataset = "text", dataset_path = "FILE", format = "chat", text_field = "a"}]'],
        'training.sources[0].text_field: given "a"; allowed: unset with format',
    ),
]


@pytest.mark.parametrize("argv, message", REFUSED, ids=range(len(REFUSED)))
def test_check_refuses_reading_options_that_contradict(argv, message, tmp_path):
    path = str(write(tmp_path / "rows.jsonl"))
    arguments = [argument.replace("FILE", path) for argument in argv]
    if not any("sources" in argument or "training.dataset=" in argument for argument in arguments):
        arguments = ["--training.dataset=text", f"--training.dataset_path={path}", *arguments]
    assert any(message in line for line in lines(*arguments)), lines(*arguments)


@pytest.mark.parametrize("slices", ["train[:9]", "[1:200%]", "[9]", "[:9] + [10:]"])
def test_a_slice_in_another_form_is_refused(slices):
    form = re.escape('allowed: "[:100]", "[10%:20%]", or several: "[:5%]+[-5%:]"')
    with pytest.raises(ConfigError, match=rf"training.sources\[0\].slice: given .*; {form}"):
        lines(f'--training.sources=[{{dataset = "text", dataset_path = "a.jsonl", slice = "{slices}"}}]')


def test_preview_refuses_an_unknown_format(tmp_path):
    path = write(tmp_path / "rows.jsonl")
    with pytest.raises(JobError, match="training.format: given 'chatt'; allowed: one of"):
        preview.main(arguments(tmp_path, path, training__format="chatt"))


def test_a_special_token_in_a_prompt_is_refused():
    """The tokenizer would split it into ordinary tokens."""
    from_text = ["--training.dataset=text", "--training.dataset_path=tests"]
    template = toml({"format": "<|begin_of_text|>{instruction}", "no_input_format": "{instruction}"})
    faults = lines(*from_text, f"--training.template={template}")
    (fault,) = (fault_line for fault_line in faults if fault_line.startswith("training.template: given {"))
    assert "text without the special token <|begin_of_text|>, as prompts are encoded as plain text" in fault
    assert "for turns use messages and data.chat_template" in fault
    plain = toml({"format": "<|im_start|>{instruction}", "no_input_format": "{instruction}"})
    assert not any("template" in fault_line for fault_line in lines(*from_text, f"--training.template={plain}"))
