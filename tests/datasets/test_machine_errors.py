"""Errors of the machine while data are read: retried, then an error that names the file and leads to a restart."""

import errno
import gzip
import json
import os
import signal

import pytest

from torchtitan.core import files, machine_errors
from torchtitan.core.machine_errors import MachineError
from torchtitan.datasets.labelled import LabelledFile
from torchtitan.datasets.loader import LoaderOptions, WeightedSource, WorkerOptions, build_loader
from torchtitan.datasets.record_format import LabelledFields
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.sources.files import text
from torchtitan.datasets.token_shards import ShardWriter, TokenShards, Verification
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.launcher.processes import RankExit
from torchtitan.process.exit import CRASHED, EXPLAINED
from torchtitan.process.heartbeat import Activity
from torchtitan.process.ranks import Ranks
from torchtitan.training import ends

RECORDS = [{"text": f"record {number}", "label": number % 2} for number in range(50)]


def write(path):
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix in (".parquet", ".arrow"):
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = pyarrow.Table.from_pylist(RECORDS)
        if path.suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
                stream.write_table(table)
    elif path.suffix in (".csv", ".tsv"):
        sign = "," if path.suffix == ".csv" else "\t"
        path.write_text(f"text{sign}label\n" + "".join(f"{r['text']}{sign}{r['label']}\n" for r in RECORDS))
    elif path.suffix == ".json":
        path.write_text(json.dumps(RECORDS))
    else:
        path.write_text(lines)
    return path


@pytest.fixture
def disk(monkeypatch):
    """Let the next so many reads of files fail."""
    failures = {"left": 0}
    right = files.retried

    def flaky(action, path, with_rights):
        def attempt():
            if failures["left"] and getattr(action, "__name__", "") not in ("", "stat"):
                failures["left"] -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return action()

        return right(attempt, path, with_rights=with_rights)

    monkeypatch.setattr(files, "retried", flaky)
    monkeypatch.setattr(machine_errors.time, "sleep", lambda seconds: None)
    return failures


NAMES = ["a.jsonl", "a.jsonl.gz", "a.txt", "a.json", "a.csv", "a.tsv", "a.parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_reading_texts_is_retried_and_then_names_the_file(name, tmp_path, disk):
    path = write(tmp_path / name)
    source = text(str(path), "text")
    expected = [document.content for document in source.documents()]
    assert len(expected) == len(RECORDS) if name != "a.txt" else expected
    disk["left"] = 2
    assert [document.content for document in text(str(path), "text").documents()] == expected
    disk["left"] = 10**9
    with pytest.raises(MachineError, match=f"{path}: the machine cannot read it now .Input/output error.; .*dmesg"):
        list(text(str(path), "text").documents())


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.parquet"])
def test_reading_labelled_records_is_retried_and_then_names_the_file(name, tmp_path, disk):
    path = write(tmp_path / name)
    fields = LabelledFields("text", None, "label")
    disk["left"] = 2
    assert len(LabelledFile(path, name, fields)) == len(RECORDS)
    disk["left"] = 10**9
    with pytest.raises(MachineError, match=f"{path}: the machine cannot read it now"):
        len(LabelledFile(path, name, fields))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
def test_the_loader_tells_the_machine_from_the_data(number, workers, tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl")
    tokenizer, options = build_tokenizer("bytes"), LoaderOptions(seq_len=16, local_batch_size=2)
    loader = build_loader([WeightedSource("text", text(str(path), "text"))], tokenizer, options, WorkerOptions(workers))
    monkeypatch.setattr(machine_errors.time, "sleep", lambda seconds: None)
    right = os.open

    def fail(target, *args, **kwargs):
        if str(target) == str(path):
            raise OSError(number, os.strerror(number), str(path))
        return right(target, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(MachineError if number == errno.EIO else DataError, match=str(path)):
        next(iter(loader))
    loader.close()


def test_shards_that_cannot_be_verified_are_not_called_different(tmp_path, disk):
    (tmp_path / "shards").mkdir()
    writer = ShardWriter(tmp_path / "shards", 256)
    writer.write(list(range(100)))
    writer.finish(tokenizer="x", tokenizer_path="bytes", source={"name": "x"}, skipped=0)
    shards = TokenShards(tmp_path / "shards")
    disk["left"] = 10**9
    verification = Verification([shards])
    with pytest.raises(MachineError, match="shard-00000.bin: the machine cannot read it now"):
        verification.raise_if_damaged()


def test_a_rank_that_cannot_read_its_data_is_restarted(caplog):
    end = ends.end_of_failure(MachineError("a.jsonl: the machine cannot read it now"), None, Ranks())
    assert end.code == CRASHED and end.code not in EXPLAINED  # what the launcher restarts
    assert "a.jsonl: the machine cannot read it now" in caplog.text and "Traceback" not in caplog.text


def test_a_bus_error_is_explained():
    assert "mapped into memory, cannot be read" in str(RankExit(1, -signal.SIGBUS, Activity("train", 3, 0.0), 0.0))
