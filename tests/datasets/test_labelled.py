"""Records of texts and classes: kinds of files, errors, and labels in a batch."""

import csv
import gzip
import json

import numpy as np
import pytest

from tests.support.loaders import loader, rows
from tests.support.shards import make_shards
from tests.support.shards import write as write_texts
from torchtitan.datasets import labelled, open_source
from torchtitan.datasets.encoding import encode
from torchtitan.datasets.preparing import PrepareOptions
from torchtitan.datasets.record_format import LabelledFields, RecordReader
from torchtitan.datasets.sample_packing import Packing
from torchtitan.datasets.samples import IGNORE, class_arrays, masked_lm_arrays
from torchtitan.datasets.sources import DataError, Document, LabelledTexts
from torchtitan.datasets.tokenizer import build_tokenizer

ROWS = [{"sentence": "it rains", "label": 0, "idx": 7}, {"sentence": "it, shines", "label": 1, "idx": 8}]
FIELDS = LabelledFields("", "label", 2)
BYTES = build_tokenizer("bytes")
BOS, EOS = BYTES.bos_id, BYTES.eos_id


def write(folder, kind, rows=ROWS):
    path = folder / f"rows.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "jsonl":
        path.write_text(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist(rows)
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
                stream.write_table(table)
    return str(path)


def read(path, fields=FIELDS, text="sentence", dataset="text"):
    source = open_source(dataset, path, RecordReader(text), fields)
    return [(list(document.content.texts), document.content.label) for document in map(source.get, range(len(source)))]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "tsv", "parquet", "arrow"])
def test_every_kind_of_file(kind, tmp_path):
    assert read(write(tmp_path, kind)) == [(["it rains"], 0), (["it, shines"], 1)]


@pytest.mark.parametrize("dataset, expected", [("huggingface", 0), ("huggingface_validation", 1)])
def test_a_folder_that_datasets_saved(dataset, expected, tmp_path):
    datasets = pytest.importorskip("datasets")
    splits = {name: datasets.Dataset.from_list([row]) for name, row in zip(("train", "validation"), ROWS, strict=True)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "sst2")
    assert [label for _, label in read(str(tmp_path / "sst2"), dataset=dataset)] == [expected]


def test_pairs_and_names(tmp_path):
    rows = [{"a": "one", "b": "two", "is": "entailed"}, {"a": "1", "b": "2", "is": "not"}]
    fields = LabelledFields("", "is", 2, second_text="b", class_names=("not", "entailed"))
    assert read(write(tmp_path, "csv", rows), fields, "a") == [(["one", "two"], 1), (["1", "2"], 0)]


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_numbers_are_classes_beside_names_in_a_table_of_text(kind, tmp_path):
    fields = LabelledFields("", "label", 2, class_names=("bad", "good"))
    assert [label for _, label in read(write(tmp_path, kind), fields)] == [0, 1]
    rows = [{"sentence": "it rains", "label": "1"}, {"sentence": "it shines", "label": "0"}]
    fields = LabelledFields("", "label", 2, class_names=("1", "0"))
    assert [label for _, label in read(write(tmp_path, kind, rows), fields)] == [0, 1]


def test_quotation_marks_of_tabbed_text_are_text(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text('sentence\tlabel\n"so he said\t0\nit ended\t1\nso" she said\t1\n')
    assert read(str(path)) == [(['"so he said'], 0), (["it ended"], 1), (['so" she said'], 1)]


@pytest.mark.parametrize(
    "kind, row, remedy",
    [("csv", "it, shines,1", "put a text with commas in quotation marks"), ("tsv", "it\tshines\t1", "without tabs")],
)
def test_a_row_of_more_values_than_the_header_is_named(kind, row, remedy, tmp_path):
    path = tmp_path / f"rows.{kind}"
    comma = "," if kind == "csv" else "\t"
    path.write_text(f"sentence{comma}label\nit rains{comma}0\n{row}\n")
    with pytest.raises(DataError, match=f"rows.{kind}, row 1: 3 values under a header of 2, at line 3; .*{remedy}"):
        read(str(path))


@pytest.mark.parametrize(
    "row, message",
    [
        ({"label": 1}, r"row 0: field 'sentence' is not there; there are 'label'; set training.text_field"),
        ({"sentence": 3, "label": 1}, "field 'sentence' holds int, not text"),
        ({"sentence": "x"}, "field 'label' is not there; allowed: a class from 0 to 1, or names that task.labels has"),
        ({"sentence": "x", "label": 2}, "field 'label' holds 2; allowed: a class from 0 to 1"),
        ({"sentence": "x", "label": -1}, "holds -1"),
        ({"sentence": "x", "label": 0.5}, "holds 0.5"),
        ({"sentence": "x", "label": "good"}, "holds 'good'"),
        ("x", "row 0: a str; each record is a JSON object"),
    ],
)
def test_records_that_are_wrong_are_named(row, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path, "jsonl", [row]))


def test_files_that_are_wrong_are_named(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="a.parquet: damaged"):
        read(str(path))
    (tmp_path / "b.jsonl").write_text('{"sentence": \n')
    with pytest.raises(DataError, match="b.jsonl: damaged, or of another format than its name"):
        read(str(tmp_path / "b.jsonl"))
    packed = bytearray(gzip.compress(b'{"sentence": "x", "label": 1}\n'))
    packed[10] |= 0b110  # no kind of block of deflate
    (tmp_path / "c.jsonl.gz").write_bytes(packed)
    with pytest.raises(DataError, match="c.jsonl.gz: damaged, or of another format than its name"):
        read(str(tmp_path / "c.jsonl.gz"))
    with pytest.raises(DataError, match="dataset 'c4' has no classes; allowed: text, sentiment, .*huggingface"):
        read("x", dataset="c4")
    with pytest.raises(DataError, match="nyu-mll/glue: no local folder"):
        read("nyu-mll/glue", dataset="huggingface")
    with pytest.raises(DataError, match="sentiment is made of words and takes none"):
        read("x", dataset="sentiment")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_a_file_that_unpacks_to_too_much_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(labelled, "LARGEST", 20)
    with pytest.raises(DataError, match=f"rows.{kind}: more than .* GiB of records; cut it into several files"):
        read(write(tmp_path, kind))


def test_made_sentences_are_held_out_from_each_other():
    train, held_out = (read(None, text="text", dataset=name) for name in ("sentiment", "sentiment_validation"))
    assert not {texts[0] for texts, _ in train} & {texts[0] for texts, _ in held_out}
    assert len(held_out) > 500 and 0.45 < np.mean([label for _, label in held_out]) < 0.55


def encode_record(*texts, label=1, ended=False, longest=None):
    document = Document(LabelledTexts(texts, label, ended), "here", has_begin_end=True)
    ids, trained = encode(BYTES, document)
    if longest is not None:
        ((ids, trained),) = PrepareOptions(max_tokens=longest, too_long="truncate").apply(ids, trained, document).pieces
    assert trained.nonzero()[0].tolist() == [len(ids) - 1]
    return ids.tolist()


def test_what_a_text_and_its_class_become():
    a, b = list(b"ab"), list(b"c")
    assert encode_record("ab") == [BOS, *a, 1]
    assert encode_record("ab", ended=True) == [BOS, *a, EOS, 1]
    assert encode_record("ab", "c") == [BOS, *a, EOS, *b, 1]
    assert encode_record("ab", "c", ended=True) == [BOS, *a, EOS, EOS, *b, EOS, 1]  # as RoBERTa's tokenizer joins two


def test_a_text_that_is_cut_keeps_its_end_and_its_class():
    assert encode_record("abcdef", longest=5) == [BOS, *b"abc", 1]
    assert encode_record("abcdef", ended=True, longest=5) == [BOS, *b"ab", EOS, 1]


ROW = [BOS, 5, 6, 1, BOS, 7, 0, 9, 9]  # two records of classes 1 and 0, and padding


@pytest.mark.parametrize(
    "first, labels",
    [(True, [1, -100, -100, -100, 0, -100, -100, -100]), (False, [-100, -100, 1, -100, -100, 0, -100, -100])],
)
def test_a_class_is_the_label_of_one_token(first, labels):
    rows, begins = np.array([ROW]), (np.array([0, 0, 0]), np.array([0, 4, 7]))
    trained = np.isin(np.arange(9), [3, 6])[None]
    tokens, label_array, documents, positions = class_arrays(rows, begins, 258, trained, 9, first)
    assert label_array.tolist() == [labels]
    assert tokens.tolist() == [[BOS, 5, 6, 9, BOS, 7, 9, 9]], "no token shows the class"
    assert documents.tolist() == [[0, 0, 0, 1, 2, 2, 3, 4]]
    assert positions.tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]


def test_a_class_at_the_end_of_a_sample():
    rows, begins = np.array([[9, 9, BOS, 5, 6, 1]]), (np.array([0, 0]), np.array([0, 2]))
    trained = np.array([[False] * 5 + [True]])
    for first, place in ((True, 2), (False, 4)):
        _, labels, _, _ = class_arrays(rows, begins, 258, trained, 9, first)
        assert labels[0].nonzero() and labels[0, place] == 1 and (labels != IGNORE).sum() == 1


def test_a_hidden_word_is_its_own_label():
    rows, begins = np.array([[BOS, 5, 6, EOS, BOS, 7]]), (np.array([0, 0]), np.array([0, 4]))
    trained = np.array([[False, True, True, False, False, True]])
    tokens, labels, _, positions = masked_lm_arrays(rows, begins, True, 258, trained)
    assert tokens.tolist() == [[BOS, 5, 6, EOS, BOS]] and positions.tolist() == [[0, 1, 2, 3, 0]]
    assert labels.tolist() == [[IGNORE, 5, 6, IGNORE, IGNORE]]
    assert (masked_lm_arrays(rows, begins, False, 258, None)[1] == tokens).all()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_record_that_fills_the_last_step_up_has_no_label_at_its_end(tmp_path, ranks):
    make_shards(write_texts(tmp_path / "rows.jsonl", ["ab", "c", "def"]), tmp_path / "shards")
    samples = []
    for rank in range(ranks):
        options = dict(packing=Packing(1, EOS), labels="ends", epochs=1, local_batch_size=4 // ranks)
        shards = loader(tmp_path / "shards", "tokens", dp_rank=rank, dp_size=ranks, **options)
        samples += [sample for batch in shards for sample in rows(batch)]
        shards.close()
    last = [
        (tokens[place], tokens[place + 1])
        for tokens, labels, *_ in samples
        for place, label in enumerate(labels)
        if label != IGNORE
    ]
    assert len(samples) == 4 and last == [(EOS, EOS)] * 3, "the token before padding, of each of three records"
