"""Text from files: formats, positions, and errors of bad input."""

import gzip
import json
import os
import random
import subprocess
import sys
import sysconfig

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tests.support import judged
from tests.support.text_sources import TEXTS, documents, lines, refusal, write
from torchtitan.datasets import DATASETS, Dataset
from torchtitan.datasets.sources import MAX_LISTED_FILES, DataError, IndexedSource, SequentialSource, files
from torchtitan.datasets.sources.files import KINDS, PIECE, TextFile, open_text_files, text


def write_parquet(path, texts=TEXTS, field="text", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), field: texts}), path, **options)
    return path


WRITERS = {
    "a.jsonl": lambda path: write(path, lines()),
    "b.jsonl.gz": lambda path: write(path, gzip.compress(lines())),
    "c.jsonl.zst": lambda path: write(path, zstandard.compress(lines())),
    "d.parquet": lambda path: write_parquet(path, row_group_size=2),
}


# Formats


@pytest.mark.parametrize("name", WRITERS)
def test_every_format(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert documents(tmp_path / name) == TEXTS
    source = text(str(tmp_path / name), "text")
    parts = source.files if isinstance(source, IndexedSource) else source.parts
    for part in parts:  # any start
        texts = [item.text for item in part.read(0)]
        assert [[item.text for item in part.read(i)] for i in range(len(texts) + 1)] == [
            texts[i:] for i in range(len(texts) + 1)
        ]


def test_plain_files_are_indexed_and_others_are_streams(tmp_path):
    write(tmp_path / "a.txt", b"some text")
    WRITERS["a.jsonl"](tmp_path / "deeper" / "a.jsonl")
    source = text(str(tmp_path), "text")
    assert isinstance(source, IndexedSource) and len(source) == 1 + len(TEXTS)
    assert [source.get(i).text for i in range(len(source))] == ["some text", *TEXTS]
    assert source.get(2).location == "deeper/a.jsonl:2"
    WRITERS["b.jsonl.gz"](tmp_path / "b.jsonl.gz")
    assert isinstance(text(str(tmp_path), "text"), SequentialSource)
    assert documents(tmp_path) == ["some text", *TEXTS, *TEXTS]


def test_file_folder_and_glob(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/.hidden.txt", ".git/d.txt"):
        write(tmp_path / name, name.encode())
    write(tmp_path / "notes.md", b"of another kind")
    assert documents(tmp_path / "a.txt") == ["a.txt"]
    assert documents(tmp_path) == ["a.txt", "b.txt", "sub/c.txt"]
    assert documents(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert documents(tmp_path / "**" / "*.txt") == ["a.txt", "b.txt", "sub/c.txt"]


def test_lines_without_end_and_blank_lines(tmp_path):
    content = lines().rstrip(b"\n").replace(b"\n", b"\r\n\n", 1)
    expected = [TEXTS[0], "", *TEXTS[1:]]
    assert documents(write(tmp_path / "a.jsonl", content)) == expected
    assert documents(write(tmp_path / "a.jsonl.gz", gzip.compress(content))) == expected


def test_several_compressed_members(tmp_path):
    members = b"".join(gzip.compress(lines([t])) for t in TEXTS) + bytes(100)
    assert documents(write(tmp_path / "a.jsonl.gz", members)) == TEXTS
    frames = b"".join(zstandard.compress(lines([t])) for t in TEXTS)
    assert documents(write(tmp_path / "a.jsonl.zst", frames)) == TEXTS


def test_lines_longer_than_what_is_read_at_a_time(tmp_path):
    texts = ["x" * 50_000, "y" * 200_000, "z"]
    assert documents(write(tmp_path / "a.jsonl.gz", gzip.compress(lines(texts)))) == texts


def test_another_text_field(tmp_path):
    assert documents(write(tmp_path / "a.jsonl", lines(field="content")), "content") == TEXTS
    assert documents(write_parquet(tmp_path / "a.parquet", field="content"), "content") == TEXTS


@pytest.mark.parametrize(
    "kind", [pyarrow.large_string(), pyarrow.binary(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())]
)
def test_parquet_text_types(tmp_path, kind):
    column = pyarrow.array(TEXTS).cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet") == TEXTS


def reference_pieces(content, piece, within):
    """The rule of TextFile, on the whole text."""
    borders = [0]
    for target in range(piece, len(content), piece):
        line_end = content.find(b"\n", target, target + within)
        if target + within >= len(content):
            target, line_end = len(content), -1
        elif line_end < 0:
            while target < len(content) and content[target] & 0xC0 == 0x80:
                target += 1
        borders.append(line_end + 1 if line_end >= 0 else target)
    return [content[a:b] for a, b in zip(borders, [*borders[1:], len(content)], strict=True)]


@pytest.mark.parametrize("line", ["short lines\n", "a long line of äöü and 三 " * 9 + "\n", "ä三" * 3000, "\n"])
def test_large_text_files_are_cut_at_line_ends(tmp_path, monkeypatch, line):
    monkeypatch.setattr(files, "PIECE", 1000)
    monkeypatch.setattr(files, "LINE_END_SEARCH_BYTES", 300)
    for length in (999, 1000, 1001, 5003):
        content = (line * (length // len(line) + 1)).encode()[:length].decode(errors="ignore").encode()
        file = TextFile(write(tmp_path / "a.txt", content), "a.txt")
        pieces = [file.get(i).text.encode() for i in range(len(file))]
        assert b"".join(pieces) == content
        assert pieces == reference_pieces(content, 1000, 300)
        if "short" in line:
            assert all(piece.endswith(b"\n") for piece in pieces[:-2])


def test_pieces_are_not_found_by_reading_the_file(tmp_path):
    with (tmp_path / "big.txt").open("wb") as file:
        file.truncate(2**40)  # a hole: takes no space, and no time unless it is read
        file.seek(10**6 * PIECE)
        file.write(b"a" * 2 * PIECE)
    source = text(str(tmp_path / "big.txt"), "text")
    assert len(source) == 2**40 // PIECE
    assert len(source.get(10**6).text) == PIECE


def test_byte_order_mark(tmp_path):
    assert documents(write(tmp_path / "a.txt", b"\xef\xbb\xbfbegin")) == ["begin"]
    assert "byte 5 (0xff) is not UTF-8" in refusal(write(tmp_path / "a.txt", b"\xef\xbb\xbfab\xff"))
    content = b"\xef\xbb\xbf" + lines()
    assert documents(write(tmp_path / "a.jsonl", content)) == documents(write(tmp_path / "a.json", content)) == TEXTS
    assert documents(write(tmp_path / "a.jsonl.gz", gzip.compress(content))) == TEXTS
    assert "no valid JSON at byte 4" in refusal(write(tmp_path / "a.jsonl", b"\xef\xbb\xbf{"))


def test_fingerprints(tmp_path):
    path = write(tmp_path / "a.txt", b"text")
    first = text(str(tmp_path), "text").fingerprint
    assert first["files"] == {"a.txt": 4} and json.loads(json.dumps(first)) == first
    for i in range(MAX_LISTED_FILES + 1):
        write(tmp_path / f"{i}.txt", b"x")
    many = text(str(tmp_path), "text").fingerprint
    assert many["number of files"] == MAX_LISTED_FILES + 2 and len(json.dumps(many)) < 500
    path.write_bytes(b"texts")
    changed = text(str(tmp_path), "text").fingerprint
    assert changed["names and sizes"] != many["names and sizes"] and changed["bytes"] == many["bytes"] + 1


# Bad input


def test_nothing_there(tmp_path):
    with pytest.raises(DataError, match="training.dataset_path is not set.*a file, a folder or a glob of .txt"):
        text(None, "text")
    assert f"{tmp_path}/no: no such file or folder" in refusal(tmp_path / "no")
    assert f"{tmp_path}: nothing is there; a file, a folder or a glob of .txt, .jsonl" in refusal(tmp_path)
    assert "nothing is there" in refusal(tmp_path / "*.txt")
    write(tmp_path / "a.doc", b"x")
    assert "a.doc is of another kind" in refusal(tmp_path / "a.doc")
    assert "a.doc is of another kind" in refusal(tmp_path / "*")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    """The system is asked about it, and here answers as it does to a user who is not root."""
    write(tmp_path / "a.txt", b"x")
    monkeypatch.setattr(os, "access", lambda path, mode: not (path.name == "a.txt" and mode == os.R_OK))
    assert f"{tmp_path}/a.txt: may not be read by this user" in refusal(tmp_path)


def test_empty_files(tmp_path):
    write(tmp_path / "a.txt", b"")
    assert f"{tmp_path}/a.txt: no data, it is empty" in refusal(tmp_path / "a.txt")
    write(tmp_path / "b.jsonl", b"")
    assert "no data, all 2 files are empty" in refusal(tmp_path)
    write(tmp_path / "c.txt", b"text")
    assert documents(tmp_path) == ["text"]


@pytest.mark.parametrize("name, pack", [("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)])
def test_truncated_and_damaged_compressed_files(tmp_path, name, pack):
    content = pack(lines([str(i) * 50 + str(i**7) for i in range(20_000)]))
    cut = len(content) * 2 // 3
    *good, error = documents(write(tmp_path / name, content[:cut]))
    assert str(error).startswith(f"{tmp_path}/{name}: truncated, it ends too soon at byte {cut};")
    assert good[:1] == ["0" * 51] and all(isinstance(t, str) for t in good)
    damaged = bytearray(content)
    damaged[cut : cut + 8] = b"\xff" * 8
    assert f"{tmp_path}/{name}:" in refusal(write(tmp_path / name, bytes(damaged)))
    assert "damaged before byte" in refusal(write(tmp_path / name, b"no such format"))
    write(tmp_path / "good.jsonl", lines())
    write(tmp_path / name, b"")
    assert "truncated, it ends too soon at byte 0" in refusal(tmp_path)


def test_a_flipped_bit_in_gzip_is_noticed(tmp_path):
    content = bytearray(gzip.compress(lines(), compresslevel=0))
    content[len(content) // 2] ^= 1
    assert "incorrect data check" in refusal(write(tmp_path / "a.jsonl.gz", bytes(content)))


def test_truncated_parquet(tmp_path):
    path = write_parquet(tmp_path / "a.parquet")
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    message = refusal(path)
    assert f"{path}: damaged or truncated parquet file ({len(content) - 20} bytes)" in message


def test_damaged_parquet_pages(tmp_path):
    texts = [str(i**9) for i in range(5000)]
    path = write_parquet(tmp_path / "a.parquet", texts, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) * 3 // 4] = bytes(len(content) * 3 // 4 - len(content) // 2)
    path.write_bytes(bytes(content))
    assert f"{path}, row 0: cannot be read" in refusal(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_bad_lines(tmp_path, name):
    def message(line, field="text"):
        content = lines(["good"]) + line + b"\n" + lines(["good"])
        path = write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
        items = documents(path, field)
        assert field != "text" or [items[0], items[2]] == ["good", "good"]  # the others are not lost
        return str(items[1]).replace(str(tmp_path), "")

    start = len(lines(["good"]))
    broken = '{"text": "ä", oops}'.encode()
    assert message(broken).startswith(f"/{name}:2: no valid JSON at byte {start + 15}: Expecting property name")
    assert 'training.on_bad_data = "skip"' in message(broken)
    assert message(b"[1, 2]").startswith(f"/{name}:2: a list at byte {start}; each line must be a JSON object")
    assert "no field 'text'; the record's fields: 'body', 'id'; set training.text_field" in message(
        b'{"body": "x", "id": 1}'
    )
    assert "no field 'text'; the record's fields: none" in message(b"{}")
    assert message(b'{"text": null}').startswith(f"/{name}:2: field 'text' holds nothing (null), not text")
    assert "field 'text' holds list, not text" in message(b'{"text": ["a"]}')
    assert message(b'{"text": "\xff"}').startswith(f"/{name}:2: byte {start + 10} (0xff) is not UTF-8; convert")
    assert "no usable JSON" in message(b"[" * 100_000)
    assert "no usable JSON" in message(b'{"n": ' + b"1" * 5000 + b"}")


def test_truncated_lines_are_found_before_the_job_starts(tmp_path):
    content = lines(["one", "two", "three"])
    source = text(str(write(tmp_path / "a.jsonl", content[:-5])), "text")
    with pytest.raises(DataError, match=r"a.jsonl:3: no valid JSON at byte 68: Unterminated string"):
        source.probe()
    text(str(write(tmp_path / "a.jsonl", content)), "text").probe()


def test_lines_without_end_are_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 2**20)
    long = lines([random.Random(0).randbytes(2**20).hex()])
    assert "a.jsonl:1: more than 1 MiB without a line end" in refusal(write(tmp_path / "a.jsonl", long))
    assert "a.jsonl.gz:1: more than 1 MiB without" in refusal(write(tmp_path / "a.jsonl.gz", gzip.compress(long)))


def test_bad_parquet_columns(tmp_path):
    path = write_parquet(tmp_path / "a.parquet")
    assert f"{path}: has no column 'body'; its columns: id, text; set training.text_field" in refusal(path, "body")
    assert f"{path}: has no text but int64 in column 'id'" in refusal(path, "id")
    items = documents(write_parquet(tmp_path / "b.parquet", ["a", None, "c"], row_group_size=2))
    assert items[0] == "a" and items[2] == "c" and "b.parquet, row 1: field 'text' holds nothing" in str(items[1])
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([b"ok", b"\xff"])}), tmp_path / "b.parquet")
    assert "b.parquet, row 1: byte 0 (0xff) is not UTF-8" in refusal(tmp_path / "b.parquet")


def test_text_that_is_not_utf8(tmp_path):
    path = write(tmp_path / "a.txt", b"line\n" * 60_000 + b"caf\xe9\n")
    assert len(TextFile(path, "a.txt")) == 2
    message = refusal(path)
    assert f"{path}: byte 300003 (0xe9) is not UTF-8; convert the file to UTF-8" in message


@pytest.mark.parametrize("content", ["hello\n".encode("utf-16-le"), b"hello\n" + bytes(100)])
def test_text_with_many_nuls_is_refused(tmp_path, content):
    """UTF-16 without its mark is valid UTF-8, and so are the zeros at the end of a file that was not written."""
    message = refusal(write(tmp_path / "a.txt", content))
    assert f"a quarter of bytes 0 to {len(content)} is NUL, as in UTF-16" in message
    (item,) = text(str(write(tmp_path / "b.txt", b"a\0bca")), "text").documents()
    assert item.content == "a\0bca"


def test_a_file_that_shrinks(tmp_path):
    path = write(tmp_path / "a.jsonl", lines())
    source = text(str(path), "text")
    assert source.get(4).text == TEXTS[4]
    path.write_bytes(lines()[:40])
    with pytest.raises(DataError, match=f"a.jsonl: the file shrank to 40 bytes from the {len(lines())} at"):
        source.get(4)


@pytest.mark.parametrize("name, package", [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    write(tmp_path / name, b"something")
    with pytest.raises(
        DataError, match=f"reading it needs {package}; install it with: pip install 'torchtitan-toml.dat"
    ):
        text(str(tmp_path), "text")  # when the source is opened, so that `torchtitan check` reports it


# Registered kinds of sources


def test_a_kind_of_file_is_a_line_in_a_table(tmp_path, monkeypatch):
    write(tmp_path / "a.note", b"noted")
    assert "nothing is there; a file, a folder or a glob of .txt, " in refusal(tmp_path)
    monkeypatch.setitem(KINDS, ".note", lambda file, name, reading: [TextFile(file, name)])
    assert documents(tmp_path) == ["noted"]


def test_how_records_are_read_is_said_to_those_that_have_them(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", lines(field="output"))
    arguments = ["--training.dataset=mine", f"--training.dataset_path={tmp_path}", "--training.text_field=output"]
    monkeypatch.setitem(DATASETS, "mine", Dataset(text))
    assert judged.lines(*arguments) == []
    as_records = [*arguments[:2], "--training.format=prompt_completion", "--training.fields={prompt = 'id'}"]
    form, fields = judged.lines(*as_records)
    assert form == (
        'training.format: given "prompt_completion"; allowed: unset if no source has '
        "records with several fields; drop it, or read text or huggingface"
    )
    assert fields.startswith("training.fields: ")
    monkeypatch.setitem(DATASETS, "mine", Dataset(text, open_text_files))
    assert judged.lines(*as_records) == []


# The Python library


def test_python_stdlib():
    training, held_out = (DATASETS[name](None, "text") for name in ("python_stdlib", "python_stdlib_validation"))
    names = {file.name for file in training.files}
    held_out_names = {file.name for file in held_out.files}
    assert {"argparse.py", "json/decoder.py"} <= names | held_out_names
    assert not names & held_out_names and 0.02 < len(held_out_names) / len(names) < 0.1
    assert not any(part in name.split("/") for name in names for part in ("site-packages", "test", "tests"))
    assert [file.name for file in training.files] == sorted(names)
    total = sum(file.size for file in training.files)
    assert 3e6 < total < 5e7
    assert all(item.text for item in held_out.documents() if len(item.text) > 0)
    assert sum(len(item.text) for item in held_out.documents()) > 1e5


def test_python_stdlib_leaves_out_what_is_not_utf8(tmp_path, monkeypatch):
    write(tmp_path / "good.py", b"print()")
    write(tmp_path / "old.py", b"# caf\xe9")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [item.text for item in DATASETS["python_stdlib"](None, "text").documents()] == ["print()", ""]


def test_python_stdlib_refusals(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="dataset_path is '/data', but python_stdlib is the library of the running"):
        DATASETS["python_stdlib"]("/data", "text")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="no library files to read"):
        DATASETS["python_stdlib"](None, "text")


# Hugging Face


def hub_folder(tmp_path, shards=3, rows=300):
    for shard in range(shards):
        write(tmp_path / "data" / f"train-{shard}.jsonl", lines([f"{shard}:{i}" for i in range(rows)]))
    write(tmp_path / "data" / "validation-0.jsonl", lines(["held", "out"]))
    return str(tmp_path / "data")


def test_hugging_face_folder(tmp_path):
    folder = hub_folder(tmp_path)
    source = DATASETS["huggingface"](folder, "text")
    assert "train-0.jsonl" in source.fingerprint["files"]
    expected = [f"{shard}:{i}" for shard in range(3) for i in range(300)]
    assert len(source.parts) == 3
    assert [item.text for item in source.documents()] == expected
    assert source.fingerprint["shards"] == 3
    for start in (0, 1, 256, 299, 300):
        assert [item.text for item in source.parts[1].read(start)] == expected[300 + start : 600]
    assert [item.text for item in DATASETS["huggingface_validation"](folder, "text").documents()] == ["held", "out"]
    assert [item.text for item in DATASETS["c4_validation"](folder, "text").documents()] == ["held", "out"]
    assert len(list(DATASETS["c4_test"](folder, "text").documents())) == 900


def test_hugging_face_refusals(tmp_path):
    folder = hub_folder(tmp_path, shards=1, rows=3)
    (error,) = DATASETS["huggingface"](folder, "body").documents()
    assert "shard 0, row 0: no field 'body'; the record's fields: 'id', 'text'; set training.text_field" in str(error)
    assert "field 'id' holds int, not text" in str(next(DATASETS["huggingface"](folder, "id").documents()))
    with pytest.raises(DataError, match="needs dataset_path: the name of a dataset on the hub"):
        DATASETS["huggingface"](None, "text")
    with pytest.raises(
        DataError, match="c4_test is tests/assets/c4_test of PyTorch's torchtitan, which is not shipped"
    ):
        DATASETS["c4_test"](None, "text")
    with pytest.raises(DataError, match="./no: no such folder"):
        DATASETS["huggingface"]("./no", "text")
    with pytest.raises(DataError, match=r"owner/no-such-set \(train\): cannot be opened: .*check its name"):
        list(DATASETS["huggingface"]("owner/no-such-set", "text").documents())  # the tests have no network
    write(tmp_path / "data" / "train-0.jsonl", lines(["good"] * 3) + b"{broken\n")
    *_, error = DATASETS["huggingface"](folder, "text").documents()
    assert "cannot be read" in str(error)


def test_hugging_face_package(tmp_path, monkeypatch):
    folder = hub_folder(tmp_path, shards=1, rows=3)
    monkeypatch.setattr("datasets.__version__", "3.6.0")
    with pytest.raises(DataError, match="3.6.0 would run code that comes with a dataset; install 4.0 or later"):
        list(DATASETS["huggingface"](folder, "text").documents())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError, match=r"needs the package datasets; install it with: pip install 'torchtitan-toml\[data\]'"
    ):
        list(DATASETS["huggingface"](folder, "text").documents())


def test_a_dataset_folder_with_code_runs_none(tmp_path):
    folder = hub_folder(tmp_path, shards=1, rows=3)
    write(tmp_path / "data" / "config/sections/training.py", f"open({str(tmp_path / 'ran')!r}, 'w')".encode())
    try:
        list(DATASETS["huggingface"](folder, "text").documents())
    except DataError as error:
        assert "cannot be opened" in str(error)
    assert not (tmp_path / "ran").exists()


def test_no_torch():
    code = "import sys, torchtitan.datasets, torchtitan.datasets.token_shards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
