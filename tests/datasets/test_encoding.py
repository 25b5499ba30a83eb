"""Loss masks of documents: from records through spans and shards to labels and the loss."""

import json
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.support import jobs
from tests.support.loaders import global_samples, interleave, loader, rows
from tests.support.pool import run_ranks
from tests.support.shards import make_shards, records, segments, write
from tests.support.tokenizers import KINDS
from torchtitan.config import manager
from torchtitan.datasets.encoding import encode
from torchtitan.datasets.formats import to_document
from torchtitan.datasets.loader import merge_states
from torchtitan.datasets.samples import IGNORE
from torchtitan.datasets.sources import DataError, Document, Span
from torchtitan.datasets.sources.files import text
from torchtitan.datasets.token_shards import TokenShards
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

BYTES = build_tokenizer("bytes")


# Records to documents


def test_a_field_holds_text_ids_or_segments():
    assert to_document("ab", "f", "long", "short") == Document("ab", "short")
    assert to_document([3, 1], "f", "long", "short") == Document([Span([3, 1])], "short", has_begin_end=True)
    document = to_document(segments(("q", False), ("a", True)), "f", "long", "short")
    assert document == Document([Span("q", False), Span("a", True)], "short")
    assert [span.content for span in Document("ab", "").spans] == ["ab"]


@pytest.mark.parametrize(
    "value, message",
    [
        (None, "a.jsonl:7: field 'f' holds nothing (null), not text, nor a list of token ids, of"),
        (5, "field 'f' holds int, not text"),
        ([1, "a"], "field 'f' holds list, not text"),
        ([1, True], "field 'f' holds list, not text"),
        ([-1], "field 'f' holds list, not text"),
        ([2**31], "field 'f' holds list, not text"),
        ([{"text": "a"}], "segment 0 of field 'f' has text: str; allowed: text: str and label: bool"),
        ([*segments(("a", True)), {"text": 1, "label": True}], "segment 1 of field 'f' has text: int, label: bool"),
        ([{}], "segment 0 of field 'f' has nothing"),
        (
            [{"text": "a", "label": True, "weight": 0}],
            "(whether it is trained), and not train, weight, loss of messages",
        ),
        ([{"from": ["gpt"], "value": "a"}], "message 0 of field 'f' has list as role, not text"),
    ],
)
def test_other_values_are_refused_by_name(value, message):
    with pytest.raises(DataError) as error:
        to_document(value, "f", "a.jsonl:7", "7")
    assert message in str(error.value) and "training.on_bad_data" in str(error.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow"])
def test_every_file_type_gives_the_same_documents(tmp_path, suffix):
    for kind, values in (("ids", [[3, 1], [2], []]), ("segments", [segments(("q", False), ("a", True))] * 2)):
        path = tmp_path / f"{kind}{suffix}"
        table = {"text": values}
        if suffix == ".parquet":
            pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").table(table), path)
        elif suffix == ".arrow":
            pyarrow = pytest.importorskip("pyarrow")
            with pyarrow.ipc.new_file(path, pyarrow.table(table).schema) as file:
                file.write_table(pyarrow.table(table))
        elif suffix == ".json":
            path.write_text(json.dumps([{"text": value} for value in values]))
        else:
            write(path, values)
        expected = [to_document(value, "text", "", "")[:1] for value in values]
        assert [document[:1] for document in text(str(path), "text").documents()] == expected


# Documents to tokens


@pytest.fixture(scope="module", params=KINDS, ids=lambda path: Path(path).name)
def tokenizer(request):
    return build_tokenizer(request.param)


def test_a_text_is_trained_between_its_begin_and_end(tokenizer):
    ids, trained = encode(tokenizer, Document("def f(x):\n    return x", ""))
    assert ids.tolist() == tokenizer.encode("def f(x):\n    return x", bos=True, eos=True) and trained.all()
    for blank in ("", " \n", [], [Span("", False), Span(" ")]):
        assert not len(encode(tokenizer, Document(blank, "")).ids)


@pytest.mark.parametrize(
    "question, answer", [("Q: two words?\nA:", "yes"), ("the ", "answer"), ("a", " b"), ("x", "\ny")]
)
def test_prompt_and_answer_are_tokenized_separately(tokenizer, question, answer):
    """The prompt has the same ids as without an answer, and all ids together decode to the original text."""
    half = len(question) // 2
    spans = [Span(question[:half], False), Span(question[half:], False), Span(answer)]
    ids, trained = encode(tokenizer, Document(spans, ""))
    prompt = tokenizer.encode(question, bos=True)
    assert ids[: len(prompt)].tolist() == prompt
    assert trained.tolist() == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    assert tokenizer.decode(ids) == question + answer
    assert tokenizer.decode(ids[trained]).strip(" ") == answer.strip(" ") and ids[-1] == tokenizer.eos_id


def test_begin_and_end_tokens_have_the_flags_of_their_neighbours(tokenizer):
    _, trained = encode(tokenizer, Document([Span("a"), Span("b", False)], ""))
    assert trained.tolist()[0] and not trained.tolist()[-1]


def test_token_ids_are_unchanged(tokenizer):
    ids, trained = encode(tokenizer, Document([Span([5, 7], False), Span([9])], "", has_begin_end=True))
    assert (ids.tolist(), trained.tolist()) == ([5, 7, 9], [False, False, True])
    ids, _ = encode(tokenizer, Document([Span([5]), Span("a")], ""))
    assert ids.tolist() == [tokenizer.bos_id, 5, *tokenizer.encode("a"), tokenizer.eos_id]


# Tokens to labels


def is_trained(token):
    return 65 <= token < 91


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    path = write(folder / "a.jsonl", records())
    make_shards(path, folder / "shards")
    return {
        "indexed": dict(dataset_path=path),
        "stream": dict(dataset_path=write(folder / "b.jsonl.gz", records())),
        "prepared": dict(dataset="tokens", dataset_path=folder / "shards"),
    }


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("kind", ["indexed", "stream", "prepared"])
def test_only_trained_tokens_have_labels(data, kind, document_mask):
    """Only trained tokens have labels."""
    samples = global_samples(80, **data[kind], document_mask=document_mask)
    letters = [pair for row in samples for pair in zip(row[0][1:], row[1][:-1], strict=True) if pair[0] < 256]
    assert all(label == (token if is_trained(token) else IGNORE) for token, label in letters)
    assert 0.2 < np.mean([label != IGNORE for _, label in letters]) < 0.8
    # the end token after an answer is trained, the begin token before a question never is
    ends = {row[1][t] for row in samples for t in range(15) if row[0][t + 1] == BYTES.eos_id and is_trained(row[0][t])}
    begins = {row[1][t] for row in samples for t in range(15) if row[0][t + 1] == BYTES.bos_id}
    assert (ends, begins) == ({BYTES.eos_id}, {IGNORE})


def test_a_mask_changes_only_the_labels(data, tmp_path):
    texts = ["".join(segment["text"] for segment in record) for record in records()]
    plain = global_samples(60, dataset_path=write(tmp_path / "a.jsonl", texts), document_mask=True)
    masked = global_samples(60, **data["indexed"], document_mask=True)
    for (tokens, labels, *other_fields), (same_tokens, some_labels, *same_rest) in zip(plain, masked, strict=True):
        assert (tokens, other_fields) == (same_tokens, same_rest)
        assert all(some in (label, IGNORE) for label, some in zip(labels, some_labels, strict=True))


@pytest.mark.parametrize("kind", ["indexed", "stream", "prepared"])
def test_masks_are_the_same_for_any_ranks_workers_and_resumes(data, kind):
    expected = global_samples(60, **data[kind])
    assert global_samples(60, 3, local_batch_size=1, **data[kind]) == expected
    first = loader(**data[kind], num_workers=2)
    assert [row for batch in islice(first, 9) for row in rows(batch)] == expected[:18]
    state = merge_states([first.state_dict()])
    first.close()
    ranks = [loader(**data[kind], state=state, dp_rank=r, dp_size=3, local_batch_size=2) for r in range(3)]
    by_rank = [[row for batch in islice(rank, 4) for row in rows(batch)] for rank in ranks]
    assert interleave(by_rank) == expected[18:42]


def test_shards_hold_the_flags_of_the_text(data, capfd, tmp_path):
    """With one stream and no shuffle, the text and its shards give the same batches."""
    path = write(tmp_path / "a.jsonl", ["all of it is trained", *records(14)])  # flags begin after the first document
    make_shards(path, tmp_path / "s", workers=2)
    header = TokenShards(tmp_path / "s").header
    share = f"{header['trained_tokens'] / header['tokens']:.1%} of them trained"
    assert header["version"] == 2 and share in capfd.readouterr().out
    options = dict(shuffle=False, document_mask=True)
    count = (header["tokens"] - 1) // 16
    from_text = global_samples(count, **options, dataset_path=path)
    assert global_samples(count, **options, dataset="tokens", dataset_path=tmp_path / "s") == from_text
    trained = np.fromfile(tmp_path / "s" / "trained.bin", dtype=np.uint8)
    assert trained.sum() == header["trained_tokens"] < len(trained)
    flags = [encode(BYTES, document).loss_mask for document in text(str(path), "text").documents()]
    assert trained.tolist() == np.concatenate(flags).tolist()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: content[:-1], "bytes, .* by the header"),
        (
            lambda content: content[:-1] + bytes([1 - content[-1]]),
            "its contents differ from the checksum in the header",
        ),
        (lambda content: None, "the file is missing"),
    ],
)
def test_damaged_flags_are_named(data, tmp_path, change, message):
    path = shutil.copytree(data["prepared"]["dataset_path"], tmp_path / "s") / "trained.bin"
    content = change(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match=f"trained.bin: .*{message}"):
        TokenShards(tmp_path / "s").verify()


def test_ids_of_another_vocabulary_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [[1, 2, 300] * 40])
    with pytest.raises(DataError, match="the data hold the ids 1 to 300, but the tokenizer's vocabulary has 258"):
        next(iter(loader(path)))
    with pytest.raises(DataError, match="ids from 1 to 300, but the tokenizer's vocabulary ends at 257; give ids of"):
        make_shards(path, tmp_path / "shards")


# Labels to the loss


def first_loss(argv):
    """Return the loss of the first batch by torch's cross-entropy over the logits of all tokens."""
    trainer = Trainer(manager.load(argv), read_ranks())
    batch = next(iter(trainer.loader))
    with torch.no_grad():
        logits = trainer.model.parts[0](batch["tokens"], batch["positions"], batch["document_ids"])
    labels = batch["labels"].flatten()
    losses = cross_entropy(logits.flatten(0, 1).double(), labels.clamp_min(0), reduction="none")
    trainer.metrics.close()
    return (losses[labels != IGNORE].sum() / (labels != IGNORE).sum()).item(), (labels != IGNORE).double().mean().item()


def test_the_loss_is_the_mean_over_all_trained_tokens(data, tmp_path):
    """Ranks and microbatches have unequal numbers of trained tokens, some none."""
    options = dict(training__document_mask=True, training__steps=3, training__seq_len=8)
    path = data["indexed"]["dataset_path"]
    expected, share = run_ranks(1, first_loss, jobs.arguments(tmp_path / "0", path, **options))[0]
    assert 0.2 < share < 0.8
    plans = {1: {}, 2: dict(training__local_batch_size=1), 3: dict(parallelism__tensor_parallel_degree=2)}
    losses_by_layout = []
    for name, plan in plans.items():
        argv = jobs.arguments(tmp_path / str(name), path, **options, **plan)
        losses_by_layout.append([row["loss"] for row in run_ranks(min(name, 2), jobs.train, argv)[0][0]])
    assert losses_by_layout[0][0] == pytest.approx(expected, rel=1e-6)  # float32 sums
    for losses in losses_by_layout[1:]:
        assert losses == pytest.approx(losses_by_layout[0], rel=1e-5)
