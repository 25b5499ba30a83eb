"""Formats of fine-tuning records: detection, and the trained part."""

import json

import pytest

from tests.support.loaders import loader, rows
from torchtitan.datasets import DATASETS
from torchtitan.datasets.encoding import encode
from torchtitan.datasets.formats import FORMATS, detect_format
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.samples import IGNORE
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.sources.files import text
from torchtitan.datasets.tokenizer import build_tokenizer

BYTES = build_tokenizer("bytes")
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd.\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 {2}\n\n"
    "### Response:\n"
)
CASES = {
    "prompt_completion": (dict(prompt="Two?", completion=" Four."), "Two?", " Four."),
    "alpaca": (dict(instruction="Add.", output="3"), ALPACA, "3"),
    "alpaca, empty input": (dict(instruction="Add.", input="", output="3"), ALPACA, "3"),
    "alpaca, input": (dict(instruction="Add.", input="1 {2}", output="3", text_id=5), ALPACA_INPUT, "3"),
    "input_output": (dict(segments=[dict(text="Q", label=False), dict(text="A", label=True)]), "Q", "A"),
}


@pytest.mark.parametrize("name", CASES)
def test_only_the_answer_and_its_end_token_are_trained(name):
    record, prompt, answer = CASES[name]
    assert detect_format(record) == name.partition(",")[0]
    ids, trained = encode(BYTES, RecordReader().document(record, "long", "short"))
    assert BYTES.decode(ids[~trained]) == prompt and BYTES.decode(ids[trained]) == answer
    assert ids[trained][-1] == BYTES.eos_id and not trained[0] and ids[0] == BYTES.bos_id


def test_every_format_has_a_test():
    # below, in test_messages.py, test_preference.py, test_axolotl_prompts.py and, for completion, which has no field of
    # its own, in test_record_format.py
    tested_elsewhere = {"alpaca_chat", "instruct", "chat", "sharegpt", "preference", "completion"}
    assert {name.partition(",")[0] for name in CASES} | tested_elsewhere == set(FORMATS)


def test_the_text_field_of_the_job_takes_precedence():
    record = dict(prompt="a", completion="b", text="c")
    assert RecordReader().document(record, "", "").content == "c"
    assert RecordReader("prompt").document(record, "", "").content == "a"


@pytest.mark.parametrize(
    "record, message",
    [
        (
            dict(prompt="a"),
            "a.jsonl:3: no field 'text'; the record's fields: 'prompt'; set training.text_field, or",
        ),
        (dict(prompt="a", completion=None), "field 'completion' of format prompt_completion holds nothing (null), not"),
        (dict(instruction=5, output="b"), "field 'instruction' of format alpaca holds int, not text"),
        (dict(instruction="a", output="b", input=5), "field 'input' of format alpaca holds int, not text"),
        (dict(segments=[5, {}]), "field 'segments' holds list, not text"),
        ({}, "the record's fields: none; set"),
    ],
)
def test_records_of_no_format_are_refused(record, message):
    with pytest.raises(DataError) as error:
        RecordReader().document(record, "a.jsonl:3", "3")
    assert message in str(error.value)


def test_files_of_any_format_are_read_and_packed(tmp_path):
    records = [record for record, *_ in CASES.values()]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "b.json").write_text(json.dumps(records))
    expected = [RecordReader().document(record, "", "").content for record in records]
    for name in ("a.jsonl", "b.json"):
        assert [document.content for document in text(str(tmp_path / name), "text").documents()] == expected
    tokens, labels, *_ = rows(next(iter(loader(tmp_path / "a.jsonl", seq_len=1024))))[0]
    trained = [token for token, label in zip(tokens[1:], labels, strict=False) if label != IGNORE]
    assert set(BYTES.decode(trained)) == set(" Four.3A")


def test_formats_apply_to_hub_datasets(tmp_path):
    pytest.importorskip("datasets")
    records = [dict(prompt=f"q{i}", completion=f"a{i}") for i in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    contents = [document.content for document in DATASETS["huggingface"](str(tmp_path), "text").documents()]
    assert contents == [RecordReader().document(record, "", "").content for record in records]


def test_instructions_as_conversations():
    """The input is on a line below the instruction; an empty name leaves an optional field out."""

    def messages(record, **fields):
        content = RecordReader(format_name="alpaca_chat", fields=fields).document(record, "a.jsonl:3", "3").content
        return [(message["role"], message["content"]) for message in content.messages], content.tools

    record = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be kind.", "history": [["Q", "A"]]}
    said = [("user", "Q"), ("assistant", "A"), ("user", "Add.\n1 2"), ("assistant", "3")]
    assert messages(record | {"tools": '[{"name": "f"}]'}) == ([("system", "Be kind."), *said], [{"name": "f"}])
    assert messages(record, system="", history="", input="") == ([("user", "Add."), ("assistant", "3")], None)
    assert messages({"q": "Add.", "output": "3"}, instruction="q") == ([("user", "Add."), ("assistant", "3")], None)
    with pytest.raises(DataError, match="field 'history' is no list of pairs"):
        messages(record | {"history": ["Q"]})
    with pytest.raises(DataError, match="has int as content, not text"):
        messages(record | {"output": 3})
    for name in ("instruction", "input"):
        with pytest.raises(DataError, match=f"field '{name}' holds int, not text"):
            messages(record | {name: 3})
    assert detect_format(record) == "alpaca"
