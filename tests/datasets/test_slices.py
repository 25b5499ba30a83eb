"""Slices of sources select what datasets.load_dataset selects of the same files, and a run resumes in them exactly."""

import csv
import gzip
import json
from itertools import islice

import datasets as hub
import pyarrow
import pyarrow.parquet
import pytest

from tests.support.loaders import global_samples, loader, rows, write_documents
from tests.support.text_sources import write
from torchtitan.core.errors import JobError
from torchtitan.datasets import open_source
from torchtitan.datasets.loader import merge_states
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import DataError, IndexedSource
from torchtitan.datasets.sources.slices import record_ranges

SLICES = ["[:20%]", "[:1%]", "[7:]", "[:-3]", "[-5:]", "[-1%:]", "[:100]", "[3:9]", "[25%:75%]", "[:]", "[:50%]+[-2:]"]
SLICES += ["[-1000:4]", "[10%:3%]+[2:4]", "[:5%]+[:5%]", "[-10%:]", "[-100:90]"]
ROWS = {"text": [f"record {number}" for number in range(37)]}


def lines(rows):
    return "".join(json.dumps({"text": text}) + "\n" for text in rows["text"])


def write_files(folder):
    """Write the rows in every kind of file of records; in two parts where that is its own case."""
    paths = {"json": folder / "lines.jsonl", "array": folder / "array.json", "csv": folder / "table.csv"}
    paths |= {"parquet": folder / "groups.parquet", "gz": folder / "lines.jsonl.gz"}
    paths["json"].write_text(lines(ROWS))
    paths["array"].write_text(json.dumps([{"text": text} for text in ROWS["text"]]))
    with paths["csv"].open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in ROWS["text"])])
    pyarrow.parquet.write_table(pyarrow.table(ROWS), paths["parquet"], row_group_size=10)
    paths["gz"].write_bytes(gzip.compress(lines(ROWS).encode()))
    return paths


def texts(path, slices=None, dataset="text", **kwargs):
    return [item.text for item in opened(path, slices, dataset, **kwargs).documents()]


def opened(path, slices=None, dataset="text"):
    return open_source(dataset, str(path), RecordReader(), slices=slices)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def reference(files, tmp_path_factory):
    """Map slices to the texts that load_dataset selects, or to our error if it selects none."""
    cache = str(tmp_path_factory.mktemp("cache"))
    selected = {}
    for slices in SLICES:
        split = "+".join(f"train{part}" for part in slices.split("+"))
        try:
            dataset = hub.load_dataset("json", data_files=str(files["json"]), split=split, cache_dir=cache)
            selected[slices] = dataset["text"][:]
        except ValueError as error:
            assert "corresponds to no data" in str(error)
            selected[slices] = "selects none of its 37 records"
    return selected


@pytest.mark.parametrize("kind", ["json", "array", "csv", "parquet", "gz"])
def test_slices_are_those_of_load_dataset(files, reference, kind):
    for slices in SLICES:
        if isinstance(reference[slices], str):
            with pytest.raises(DataError, match=reference[slices]):
                texts(files[kind], slices)
        else:
            assert texts(files[kind], slices) == reference[slices], slices


def test_a_folder_in_the_layout_of_the_hub_is_sliced(files, reference, tmp_path):
    (tmp_path / "train.jsonl").write_text(lines(ROWS))
    for slices in ("[:20%]", "[3:9]", "[-5:]"):
        assert texts(tmp_path, slices, "huggingface") == reference[slices]


@pytest.mark.parametrize("records", [1, 2, 10, 50, 99, 100, 101, 150, 250, 12345])
def test_percentages_are_rounded_as_by_the_package_datasets(records):
    for percent in range(-100, 101):
        absolute = hub.ReadInstruction.from_spec(f"train[{percent}%:]").to_absolute({"train": records})[0]
        (numbers,) = record_ranges(f"[{percent}%:]", records)
        assert (numbers.start, numbers.stop) == (absolute.from_, absolute.to), percent


def test_records_of_a_slice_are_read_in_any_order_and_forward_from_any(files):
    whole = texts(files["json"])
    indexed = opened(files["json"], "[30:]+[:4]")
    assert isinstance(indexed, IndexedSource) and len(indexed) == 11
    assert [indexed.get(i).text for i in (10, 0, 7)] == [whole[3], whole[30], whole[0]]
    with pytest.raises(IndexError):
        indexed.get(11)
    for kind in ("parquet", "gz", "csv"):
        parts = opened(files[kind], "[5:25]").parts
        assert sum(part.size for part in parts) == 20
        for start in range(21):  # of each part; beyond its end nothing follows
            read = [item.text for part in parts for item in part.read(start)]
            assert read == [text for part in parts for text in [item.text for item in part.read(0)][start:]]


def test_only_the_needed_records_are_counted(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress((lines(ROWS) + "[1]\n").encode()))
    assert texts(path, "[:5]") == ROWS["text"][:5]
    with pytest.raises(DataError, match="each line must be a JSON object.* with a slice it cannot be left out"):
        texts(path, "[:20%]")


def test_what_cannot_be_counted_is_refused(files, tmp_path):
    for name, content in {"a.jsonl": lines(ROWS).replace("\n", "\n \n", 3), "a.csv": "text\na\n\nb\n"}.items():
        path = write(tmp_path / name, content.encode())
        with pytest.raises(DataError, match=r"a\.\w+(:2|, row 1): an empty line, which is no record"):
            texts(path, "[:20%]")
    indented = write(tmp_path / "b.jsonl", lines(ROWS).replace("{", " {").encode())
    assert texts(indented, "[:2]+[-1:]") == [ROWS["text"][number] for number in (0, 1, 36)]
    for content in ("\n" + lines(ROWS), lines(ROWS) + "\n"):
        with pytest.raises(DataError, match="an empty line, which is no record"):
            texts(write(tmp_path / "c.jsonl", content.encode()), "[:2]")
    plain = write(tmp_path / "a.txt", b"one\ntwo\n")
    with pytest.raises(DataError, match="a.txt: has no records that slice = .*; drop slice"):
        opened(plain, "[:20%]")


def test_a_slice_is_part_of_the_fingerprint(files):
    prints = [opened(files[kind], slices).fingerprint for kind in ("json", "csv") for slices in (None, "[:9]", "[:8]")]
    assert [item.get("slice") for item in prints] == [None, "[:9]", "[:8]"] * 2


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_resume_continues_in_a_slice_at_the_exact_sample(tmp_path, suffix):
    path, slices = write_documents(tmp_path / f"a{suffix}"), "[20%:60%]+[-7:]"
    expected = global_samples(40, dataset_path=path, slices=slices)
    assert expected != global_samples(40, dataset_path=path)
    ranks = [loader(path, slices=slices, dp_rank=rank, dp_size=2, local_batch_size=3) for rank in range(2)]
    samples = [rows(next(iter(rank))) for rank in ranks]
    assert [row for pair in zip(*samples, strict=True) for row in pair] == expected[:6]
    state = json.loads(json.dumps(merge_states([rank.state_dict() for rank in ranks])))
    later = loader(path, slices=slices, state=state)
    assert [row for batch in islice(later, 17) for row in rows(batch)] == expected[6:]
    for other in (None, "[20%:60%]"):
        with pytest.raises(JobError, match="slice: .* in the checkpoint"):
            loader(path, slices=other, state=state)
