"""JSON arrays, csv files and folders of the package `datasets` as data: their documents, and errors of bad input."""

import csv
import json
import pickle
import struct

import datasets as hub
import pyarrow
import pyarrow.feather
import pytest

from tests.support.text_sources import TEXTS, documents, lines, refusal, write
from torchtitan.datasets import DATASETS
from torchtitan.datasets.sources import DataError, Document, IndexedSource, files
from torchtitan.datasets.sources.files import JsonArray, text


def write_csv(path, texts=TEXTS, delimiter=",", names=("id", "text")):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(names)
        writer.writerows(enumerate(texts))
    return path


def saved(path, texts=TEXTS, shards=2):
    hub.Dataset.from_dict({"id": range(len(texts)), "text": texts}).save_to_disk(path, num_shards=shards)
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_files_are_read(tmp_path, delimiter):
    texts = [*TEXTS, 'with "quotes", commas; and\ttabs', "x" * 300_000]
    path = write_csv(tmp_path / "a.csv", texts, delimiter)
    assert documents(path) == texts
    source = text(str(path), "text")
    assert [item.text for item in source.parts[0].read(4)] == texts[4:]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"id", b"id"))  # as Excel saves it
    assert documents(path) == texts


def test_malformed_csv_files_are_refused(tmp_path):
    path = write_csv(tmp_path / "a.csv")
    assert f"{path}: no field 'body' in its first line, which names 'id', 'text'; set training" in refusal(path, "body")
    path.write_bytes(b'id,text\n0,good\n1\n\n2,"never closed')
    good, short, blank, cut = documents(path)
    assert (good, blank) == ("good", "") and "a.csv, row 1: 1 values under a header of 2, at line 3; put" in str(short)
    assert "a.csv, row 3: cannot be read: unexpected end of data" in str(cut)
    path.write_bytes(b"id,text\n0,good\n1,\xff\n")
    assert "cannot be read: 'utf-8' codec" in refusal(path)
    path.write_bytes(b"\xff,text\n")
    assert "its first line is not UTF-8" in refusal(path)


@pytest.mark.parametrize("window", [1, 7, 2**24])
def test_json_arrays_are_read(tmp_path, monkeypatch, window):
    monkeypatch.setattr(JsonArray, "WINDOW", window)
    for indent, head in ((None, b""), (2, b"\xef\xbb\xbf \n")):
        content = json.dumps([{"id": i, "text": t} for i, t in enumerate(TEXTS)], indent=indent, ensure_ascii=False)
        path = write(tmp_path / "a.json", head + content.encode())
        source = text(str(path), "text")
        assert isinstance(source, IndexedSource) and len(source) == len(TEXTS) and documents(path) == TEXTS
        assert source.get(3) == Document(TEXTS[3], "a.json, element 3", unread=("id",))
    assert documents(write(tmp_path / "a.json", b"[ ]")) == []
    assert documents(write(tmp_path / "a.json", lines())) == TEXTS  # JSON lines in a .json file


def test_a_number_is_not_taken_for_its_first_digits(tmp_path, monkeypatch):
    monkeypatch.setattr(JsonArray, "WINDOW", 2)
    source = text(str(write(tmp_path / "a.json", b"[12345, 67]")), "text")
    assert len(source) == 2 and all("a int at byte" in str(error) for error in source.documents())


@pytest.mark.parametrize(
    "content, message",
    [
        (b'[{"text": "a"}', "no JSON array at byte 14: ']' is expected"),
        (b'[{"text": "a"}, {"tex', "no JSON array at byte 16: Unterminated string"),
        (b'[{"text": "a"}] x', "no JSON array at byte 16: more after the end of the array"),
        (b'[{"text": "a"} {"text": "b"}]', "no JSON array at byte 15: ']' is expected"),
        (b'[{"text": "a"}, ' + b"[" * 100_000, "no JSON array at byte 16: "),
        (b'[{"text": "\xff"}]', "not UTF-8 before byte"),
        (b'[{"text": "a"}, 7]', "element 1: a int at byte 16; each line must be a JSON object"),
        (b'[{"body": "a"}]', "element 0: no field 'text'; the record's fields: 'body'"),
    ],
)
def test_malformed_json_arrays_are_refused(tmp_path, content, message):
    path = write(tmp_path / "a.json", content)
    assert message in refusal(path)
    with pytest.raises(DataError):
        text(str(path), "text").probe()


def test_an_unterminated_element_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(JsonArray, "WINDOW", 100)
    assert "an element of more than" in refusal(write(tmp_path / "a.json", b'[{"text": "' + b"x" * 3000 + b'"}]'))


def test_folders_of_save_to_disk_are_read(tmp_path):
    texts = [f"{t} {i}" for i in range(700) for t in TEXTS]
    one = saved(tmp_path / "one", texts)
    for name in ("text", "huggingface"):
        source = DATASETS[name](str(one), "text")
        assert isinstance(source, IndexedSource) and [item.text for item in source.documents()] == texts
        assert source.get(3000).text == texts[3000]
    assert list(source.fingerprint["files"]) == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    second = pickle.loads(pickle.dumps(source))  # as a spawned worker gets it
    assert second.get(3000) == source.get(3000) and len(pickle.dumps(source)) < 2000
    held_out = {"validation": ["held", "out"], "test": ["tested"]}
    splits = {name: hub.Dataset.from_dict({"text": held}) for name, held in held_out.items()}
    hub.DatasetDict({"train": hub.load_from_disk(one), **splits}).save_to_disk(tmp_path / "dict")
    folder = str(tmp_path / "dict")
    assert [item.text for item in DATASETS["huggingface"](folder, "text").documents()] == texts
    for name, held in held_out.items():
        assert [item.text for item in DATASETS[f"huggingface_{name}"](folder, "text").documents()] == held
    assert documents(tmp_path / "dict/validation") == ["held", "out"]
    assert "a dataset of several splits (test, train, validation); give the folder of one" in refusal(tmp_path / "dict")


def test_malformed_arrow_files_are_refused(tmp_path):
    one = saved(tmp_path / "one", shards=1)
    (file,) = one.glob("*.arrow")
    assert f"{file}: has no column 'body'; its columns: id, text; set training.text_field" in refusal(one, "body")
    assert f"{file}: has no text but int64 in column 'id'" in refusal(one, "id")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert f"{file}: damaged or truncated arrow file" in refusal(one)
    # offsets beyond the texts: read without a check, they crash the process
    offsets = content.index(struct.pack("<3i", 0, len(TEXTS[0]), len(TEXTS[0] + TEXTS[1]) + 3))
    file.write_bytes(content[: offsets + 4] + struct.pack("<i", 2**30) + content[offsets + 8 :])
    assert f"{file}, row 0: damaged" in refusal(one)
    pyarrow.feather.write_feather(pyarrow.table({"text": ["a", None]}), tmp_path / "b.arrow", compression="lz4")
    good, damaged = documents(tmp_path / "b.arrow")  # the second layout of Arrow files
    assert good == "a" and "b.arrow, row 1: field 'text' holds nothing" in str(damaged)


def test_malformed_folders_of_save_to_disk_are_refused(tmp_path):
    hub.DatasetDict({"test": hub.Dataset.from_dict({"text": TEXTS})}).save_to_disk(tmp_path)
    with pytest.raises(DataError, match="there is no split 'train', only test; give the folder of one"):
        DATASETS["huggingface"](str(tmp_path), "text")
    for content in ("{", "[]", '{"splits": 7}', '{"splits": [7]}'):
        (tmp_path / "dataset_dict.json").write_text(content)
        with pytest.raises(DataError, match="dataset_dict.json is damaged"):
            DATASETS["huggingface"](str(tmp_path), "text")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["../train"]}')
    with pytest.raises(DataError, match="there is no split 'train', only none"):
        DATASETS["huggingface"](str(tmp_path), "text")
