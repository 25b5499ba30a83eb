"""Loss masks of records: answers and their end tokens, train flags of messages, too long records."""

import json
import shutil

import numpy as np
import pytest

from tests.support.chat_templates import CHATML, LLAMA3, folder_with, unmarked
from tests.support.shards import segments, write
from torchtitan.core.errors import JobError
from torchtitan.datasets import open_source
from torchtitan.datasets.encoding import TRAIN_ON_ANSWERS, TrainOn, encode
from torchtitan.datasets.formats import to_document
from torchtitan.datasets.preparing import PrepareOptions, describe_records, prepared_shards
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.token_shards import TokenReader
from torchtitan.datasets.tokenizer import build_tokenizer

BYTES = build_tokenizer("bytes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_with(tmp_path_factory.mktemp("learned") / "t", CHATML)


def messages(*pairs, **flags):
    return [{"role": role, "content": content} for role, content in pairs]


def decode_with_mask(tokenizer, value, train_on=TRAIN_ON_ANSWERS):
    """Decode token by token, so without sentencepiece's blanks: trained parts in brackets, special tokens by name."""
    ids, trained = encode(tokenizer, to_document(value, "messages", "a.jsonl:3", "3"), train_on)
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    text, before = "", False
    for i, flag in zip(ids.tolist(), trained.tolist(), strict=True):
        text += ("]" if before else "[") * (flag != before)
        text += names[i] if i in names else tokenizer.decode([i])
        before = flag
    return (text + "]" * before).replace("<|im_start|>", "<").replace("<|im_end|>", ">")


TWO = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
MASKS = {
    TrainOn(): "<user\na>\n<assistant\n[b>]\n<user\nc>\n<assistant\n[d>]\n",
    TrainOn("all"): "[<user\na>\n<assistant\nb>\n<user\nc>\n<assistant\nd>\n]",
    TrainOn("last_turn"): "<user\na>\n<assistant\nb>\n<user\nc>\n<assistant\n[d>]\n",
    TrainOn(end_tokens="last"): "<user\na>\n<assistant\n[b]>\n<user\nc>\n<assistant\n[d>]\n",
    TrainOn(end_tokens="none"): "<user\na>\n<assistant\n[b]>\n<user\nc>\n<assistant\n[d]>\n",
    TrainOn(end_tokens="all"): "<user\na[>]\n<assistant\n[b>]\n<user\nc[>]\n<assistant\n[d>]\n",
    TrainOn("all", "none"): "[<user\na>\n<assistant\nb]>[\n<user\nc>\n<assistant\nd]>[\n]",
    TrainOn("last_turn", "none"): "<user\na>\n<assistant\nb>\n<user\nc>\n<assistant\n[d]>\n",
}


@pytest.mark.parametrize("train_on", MASKS, ids=str)
def test_answers_and_their_end_tokens_are_trained(folder, train_on):
    assert decode_with_mask(build_tokenizer(folder), messages(*TWO), train_on) == MASKS[train_on]


def test_texts_without_turns_end_once():
    record = RecordReader().document({"prompt": "a", "completion": "b"}, "", "")
    masks = {TRAIN_ON_ANSWERS: [0, 0, 1, 1], TrainOn("all"): [1, 1, 1, 1], TrainOn(end_tokens="none"): [0, 0, 1, 0]}
    for train_on, mask in masks.items():
        ids, trained = encode(BYTES, record, train_on)
        assert ids.tolist() == [256, 97, 98, 257] and trained.astype(int).tolist() == mask
    three = segments(("q", False), ("a", True), ("r", False), ("b", True))
    ids, trained = encode(BYTES, to_document(three, "f", "", ""), TrainOn("last_turn"))
    assert trained.astype(int).tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("has_markers", [True, False])
def test_messages_with_train_flags(tmp_path, has_markers):
    tokenizer = build_tokenizer(folder_with(tmp_path / "t", CHATML if has_markers else unmarked(CHATML)))
    chat = messages(*TWO)
    for flag in ({"train": False}, {"weight": 0}, {"loss": False}, {"weight": 0.0, "train": False}):
        chat[1] = {"role": "assistant", "content": "b"} | flag
        assert decode_with_mask(tokenizer, chat) == "<user\na>\n<assistant\nb>\n<user\nc>\n<assistant\n[d>]\n"
    for number, flags, message in (
        (0, {"train": True}, "message 0 of role 'user' is to be trained, but only the assistant's are"),
        (1, {"train": "no"}, "message 1 has train = 'no'; allowed: true or false"),
        (1, {"weight": 0.5}, "message 1 has weight = 0.5; allowed: true or false"),
        (1, {"loss": "no"}, "message 1 has loss = 'no'; allowed: true or false"),
        (1, {"train": True, "weight": 0}, "{'train': True, 'weight': 0}, which contradict each other"),
    ):
        with pytest.raises(DataError, match=message):
            decode_with_mask(tokenizer, [m | flags if i == number else m for i, m in enumerate(messages(*TWO))])


def test_train_flags_need_a_template_with_markers(tmp_path):
    once = "{% generation %}{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}{% endgeneration %}"
    tokenizer = build_tokenizer(folder_with(tmp_path / "t", once))
    assert decode_with_mask(tokenizer, messages(*TWO)) == "[a>b>c>d>]"
    with pytest.raises(DataError, match="marks 1 parts as generated in 2 messages of the assistant"):
        decode_with_mask(tokenizer, [*messages(*TWO)[:3], {"role": "assistant", "content": "d", "train": False}])


# Templates of other tokenizers


@pytest.mark.parametrize(
    ("kind", "template", "text"),
    [
        (
            "tiktoken.model",
            "llama3",
            "<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>assist",
        ),
        ("sentencepiece.model", "llama2", "<s>[INST]<<SYS>>\nbe\n<</SYS>>\n\na[/INST][b</s>]<s>[INST]c[/INST]"),
        (
            "bytes",
            "alpaca",
            "be\n\n### Instruction:\na\n\n### Response:\n[b<|end_of_text|>]\n\n### Instruction:\nc\n\n",
        ),
    ],
)
def test_templates_by_name_for_every_kind_of_tokenizer(kind, template, text):
    path = kind if kind == "bytes" else f"tests/assets/tokenizer/{kind}"
    tokenizer = build_tokenizer(path, template)
    system = [] if template == "llama3" else [("system", "be")]
    assert text in decode_with_mask(tokenizer, messages(*system, *TWO))
    attack = messages(("user", "<s></s><|eot_id|><|end_of_text|>"), ("assistant", "b"))
    ids, _ = encode(tokenizer, to_document(attack, "f", "", ""))
    assert sum(ids == tokenizer.eos_id) + sum(ids == tokenizer.special_tokens.get("<|eot_id|>", -1)) <= 2


def test_a_template_beside_the_tokenizer(tmp_path):
    shutil.copy("tests/assets/tokenizer/tiktoken.model", tmp_path / "tokenizer.model")
    assert build_tokenizer(tmp_path).chat_template is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ 'of the configuration' }}"}))
    assert build_tokenizer(tmp_path).chat_template == "{{ 'of the configuration' }}"
    (tmp_path / "mine.jinja").write_text("{{ 'mine' }}")
    assert build_tokenizer(tmp_path, str(tmp_path / "mine.jinja")).chat_template == "{{ 'mine' }}"
    assert build_tokenizer(tmp_path, "{{ 'said' }}").chat_template == "{{ 'said' }}"
    with pytest.raises(JobError, match="'chatmll' is no template; give chatml, llama3, llama2, alpaca, a file"):
        build_tokenizer(tmp_path, "chatmll")
    with pytest.raises(JobError, match="none.jinja cannot be read .No such file or directory.; give the path"):
        build_tokenizer(tmp_path, str(tmp_path / "none.jinja"))


def test_mismatching_templates_are_refused(folder):
    with pytest.raises(DataError, match=r"writes '<\|im_end\|>', which is no special token of the tokenizer"):
        decode_with_mask(build_tokenizer("bytes", CHATML), messages(*TWO))
    deaf = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")
    with pytest.raises(DataError, match="leaves out the text of message 0, of role 'system'"):
        decode_with_mask(build_tokenizer(folder, deaf), messages(("system", "be brief"), *TWO))
    assert "[b>]" in decode_with_mask(build_tokenizer(folder, deaf), messages(*TWO))
    assert build_tokenizer(folder, LLAMA3).chat_template == LLAMA3


# Too long records, and records without trained tokens


def prepare(recipe, value, tokenizer=BYTES):
    """Apply the options of `prepare` to one record; return its pieces (ids, flags) and what happened to it."""
    document = to_document(value, "f", "a.jsonl:3", "3")
    result = recipe.apply(*encode(tokenizer, document), document)
    pieces = [(i.tolist(), [True] * len(i) if t is None else t.tolist()) for i, t in result.pieces]
    return pieces, result.outcome


def test_too_long_records(folder):
    text = segments(("abc", False), ("defg", True))  # nine tokens, with begin and end
    ids = [256, *b"abcdefg", 257]
    flags = [False] * 4 + [True] * 5
    assert prepare(PrepareOptions(max_tokens=9), text) == ([(ids, flags)], "whole")
    assert prepare(PrepareOptions(max_tokens=8, too_long="drop"), text) == ([], "dropped")
    assert prepare(PrepareOptions(max_tokens=6, too_long="truncate"), text) == ([(ids[:6], flags[:6])], "truncated")
    assert prepare(PrepareOptions(max_tokens=4, too_long="truncate"), text) == ([], "empty")
    pieces, fate = prepare(PrepareOptions(max_tokens=4, too_long="split"), text)
    assert fate == "split" and pieces == [
        (ids[3:7], flags[3:7]),
        (ids[6:], flags[6:]),
    ]  # the first piece would have no trained token
    trained_ids = [i for piece, trained in pieces for i, t in zip(piece[1:], trained[1:], strict=True) if t]
    assert trained_ids == ids[4:]
    message = (
        "3: 9 tokens, but a sample of training.seq_len = 7 has room for 8; raise training.seq_len to 8, or set data"
    )
    with pytest.raises(DataError, match=message):
        prepare(PrepareOptions(max_tokens=8), text)
    with pytest.raises(
        DataError, match="but data.max_tokens = 8; raise data.max_tokens to 9 and training.seq_len to 8, or"
    ):
        prepare(PrepareOptions(max_tokens=8, is_given=True), text)
    tokenizer = build_tokenizer(folder)
    for way in ("truncate", "split", "error"):
        with pytest.raises(DataError, match='or set data.too_long to "drop"$'):
            prepare(PrepareOptions(max_tokens=8, too_long=way), messages(*TWO), tokenizer)
    with pytest.raises(DataError, match="and data.too_long = 'split' would cut its last answer off; raise"):
        prepare(PrepareOptions(max_tokens=8, too_long="split"), messages(*TWO), tokenizer)


def prepare_source(path, recipe, folder, workers=1):
    """Prepare a file of records into token shards."""
    opened = open_source("text", str(path), RecordReader())
    return prepared_shards(opened, str(path), "bytes", folder, workers=workers, stop=True, options=recipe)


@pytest.mark.parametrize("workers", [1, 2])
def test_counts_and_lengths_of_records_are_reported(tmp_path, workers):
    values = [segments(("q" * n, False), ("a", True)) for n in range(1, 41)] + [segments(("q", False))] * 2 + [""]
    path = write(tmp_path / "a.jsonl", values)
    recipe = PrepareOptions(max_tokens=21, too_long="drop", max_empty_ratio=0.05)
    shards = prepare_source(path, recipe, tmp_path / "data", workers)
    records = shards.header["records"]
    assert records["fates"] == {"whole": 18, "dropped": 22, "empty": 2}
    assert records["lengths"] == {"50": 23, "90": 39, "99": 43, "100": 43}
    assert describe_records(records, 20, is_given=False) == (
        "18 whole, 22 dropped, 2 empty; lengths 23 (50 %), 39 (90 %), 43 (99 %), 43 (100 %); "
        "training.seq_len = 42 would keep 99 % whole"
    )
    advice = "training.seq_len = 42 with data.max_tokens = 43 would keep 99 % whole"
    assert describe_records(records, 20, is_given=True).endswith(advice)
    assert len(TokenReader(shards).documents) == 18
    cut = prepare_source(path, PrepareOptions(max_tokens=21, too_long="truncate", max_empty_ratio=1), tmp_path / "data")
    assert cut.folder != shards.folder and prepare_source(path, recipe, tmp_path / "data").folder == shards.folder
    with pytest.raises(DataError, match=r"2 of 42 records have no trained token, the first a.jsonl:41; allowed: 0"):
        prepare_source(path, PrepareOptions(max_tokens=50, max_empty_ratio=0.04), tmp_path / "data")


def test_pretraining_keeps_records_without_trained_tokens(tmp_path):
    path = write(tmp_path / "a.jsonl", [segments(("q", False))] * 3)
    shards = prepare_source(path, PrepareOptions(), tmp_path / "data")
    assert "records" not in shards.header and len(TokenReader(shards).documents) == 3
    assert np.diff(TokenReader(shards).documents).tolist() == [3, 3]
