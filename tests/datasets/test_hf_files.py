"""Tests of tokenizer folders in Hugging Face's format.

Reading: companion files of tokenizer.json, vocab.json and merges.txt, models without a begin token, patterns that
backtrack. Writing: AutoTokenizer on exported files gives our ids.
"""

import argparse
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from transformers import AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer

from tests.support.tokenizers import ASSETS, KINDS, TEXTS, write
from torchtitan.commands.preview import View
from torchtitan.datasets.encoding import encode
from torchtitan.datasets.sources import DataError, Document
from torchtitan.datasets.tokenizer import TokenizerError, build_tokenizer, hf_json
from torchtitan.datasets.tokenizer import hf_json as patterns
from torchtitan.datasets.tokenizer.hf_json import may_backtrack

ORDINARY = {name: text for name, text in TEXTS.items() if name != "special"} | {
    "a module": Path(argparse.__file__).read_text(),
    "long words": "a" * 700 + " " + "ab" * 300,
}


def export_and_open(tokenizer, folder: Path):
    """Write the tokenizer's files and open them with AutoTokenizer."""
    for name, content in tokenizer.as_hf_files().items():
        (folder / name).write_bytes(content)
    return AutoTokenizer.from_pretrained(folder)


def assert_same_ids(reference, ours, texts=ORDINARY):
    for name, text in texts.items():
        ids = ours.encode(text)
        assert reference.encode(text, add_special_tokens=False) == ids, name
        assert reference.decode(ids).replace("<unk>", " \u2047 ") == ours.decode(ids), name  # sentencepiece's sign


def train_sentencepiece(path: Path, **options) -> str:
    """Train a model on the text of a module, without a begin token unless `bos_id` is given; return its path."""
    lines = Path(argparse.__file__).read_text().splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(path),
        minloglevel=2,
        **{"vocab_size": 400, "bos_id": -1} | options,
    )
    return f"{path}.model"


# Exports in Hugging Face's format


@pytest.mark.parametrize("path", KINDS, ids=lambda path: Path(path).name)
def test_exported_files_give_the_same_ids_in_auto_tokenizer(path, tmp_path):
    ours = build_tokenizer(path)
    reference = export_and_open(ours, tmp_path)
    assert_same_ids(reference, ours)
    assert (reference.bos_token_id, reference.eos_token_id, len(reference)) == (
        ours.bos_id,
        ours.eos_id,
        ours.vocab_size,
    )
    if not path.endswith("tokenizer.json"):  # that file has its own post-processor
        assert reference("def f").input_ids == ours.encode("def f", bos=True)
    exported = build_tokenizer(str(tmp_path))
    assert_same_ids(reference, exported)
    assert (exported.bos_id, exported.eos_id, exported.vocab_size) == (ours.bos_id, ours.eos_id, ours.vocab_size)


def test_the_sentencepiece_model_is_exported_for_llama_cpp():
    files = build_tokenizer(KINDS[2]).as_hf_files()
    assert files["tokenizer.model"] == Path(KINDS[2]).read_bytes()


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_models_without_a_begin_token(kind, tmp_path):
    """T5 has such a model: unigram, compiled normalization rules, collapsed blanks, no begin token."""
    rules = "nmt_nfkc" if kind == "unigram" else "identity"
    model = train_sentencepiece(tmp_path / "m", model_type=kind, normalization_rule_name=rules, pad_id=3)
    ours = build_tokenizer(model)
    (tmp_path / "out").mkdir()
    reference = export_and_open(ours, tmp_path / "out")
    assert ours.bos_id is None and ours.begin_ids == [] and reference.bos_token_id is None
    assert ours.encode("def", bos=True, eos=True) == [*ours.encode("def"), ours.eos_id]
    assert_same_ids(reference, ours, {"words": "a  ﬁne  module ", "a module": Path(argparse.__file__).read_text()})
    tokens = encode(ours, Document("def f", "here"))
    assert tokens.ids.tolist() == ours.encode("def f", eos=True) and tokens.loss_mask.all()
    sample = {"tokens": ours.encode("def f"), "labels": ours.encode("def f"), "document_ids": [0] * 9}
    sample["document_ids"], sample["positions"] = [0] * len(sample["tokens"]), list(range(len(sample["tokens"])))
    assert not any("begun in an earlier" in line for line in View(ours, 100, ids=False, colour=False).sample(0, sample))


def test_a_sentencepiece_model_without_an_end_token_is_refused(tmp_path):
    model = train_sentencepiece(tmp_path / "m", eos_id=-1)
    with pytest.raises(TokenizerError, match="no id for a document's end .eos -1.; train it with eos_id"):
        build_tokenizer(model)


def test_a_model_that_tokenizer_json_cannot_express_is_refused(tmp_path):
    model = train_sentencepiece(tmp_path / "m", treat_whitespace_as_suffix=True)
    with pytest.raises(TokenizerError, match="its kind of sentencepiece model has no tokenizer.json"):
        build_tokenizer(model).as_hf_files()


def test_companion_files_are_exported(tmp_path):
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    out.mkdir()
    shutil.copy(ASSETS / "tokenizer.json", home)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    write(home / "chat_template.jinja", template)
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "auto_map": {"AutoTokenizer": "code.X"}}
    write(home / "tokenizer_config.json", json.dumps(config | {"model_max_length": 77}))
    ours = build_tokenizer(str(home))
    reference = export_and_open(ours, out)
    assert_same_ids(reference, ours)
    assert reference.model_max_length == 77
    assert reference.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<user>hi"
    assert "auto_map" not in json.loads((out / "tokenizer_config.json").read_text())


# Folders of Hugging Face


def test_tokens_that_only_tokenizer_config_defines(tmp_path):
    """tokenizer.json lacks the tokens, and their ids belong to a larger vocabulary (tests of PyTorch's torchtitan)."""
    tokenizer = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = []
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {name: i - 2 for name, i in vocabulary.items() if not name.startswith("<|")}
    write(tmp_path / "tokenizer.json", json.dumps(content))
    entry = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    special_tokens = {"128001": "<|end_of_text|>", "128000": "<|begin_of_text|>"}
    config = {"added_tokens_decoder": {number: entry | {"content": name} for number, name in special_tokens.items()}}
    config |= {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|pad|>"}
    write(tmp_path / "tokenizer_config.json", json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    ours, reference = build_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.bos_id, ours.eos_id) == (reference.bos_token_id, reference.eos_token_id) == (2046, 2047)
    assert_same_ids(reference, ours)
    (tmp_path / "out").mkdir()
    assert export_and_open(ours, tmp_path / "out").bos_token_id == ours.bos_id
    content["model"]["vocab"] |= {name: i for name, i in vocabulary.items() if i == 2047}
    write(tmp_path / "tokenizer.json", json.dumps(content))
    with pytest.raises(TokenizerError, match="would be number 2047, which is another token's"):
        build_tokenizer(str(tmp_path))
    for damaged in ([1], {"one": {"content": "x"}}, {"1": {}}, {"1": {"content": 7}}, {"1": "x"}):
        write(tmp_path / "tokenizer_config.json", json.dumps({"added_tokens_decoder": damaged}))
        with pytest.raises(TokenizerError, match="added_tokens_decoder of tokenizer_config.json is damaged"):
            build_tokenizer(str(tmp_path))


@pytest.fixture
def vocab_and_merges(tmp_path) -> Path:
    """Write vocab.json and merges.txt of the shipped byte-level BPE, with one begin and end token, as GPT-2 has."""
    model = json.loads((ASSETS / "tokenizer.json").read_text())["model"]
    vocabulary = {name: i for name, i in model["vocab"].items() if not name.startswith("<|")}
    vocabulary["<|endoftext|>"] = 0
    write(tmp_path / "vocab.json", json.dumps(vocabulary))
    merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    write(tmp_path / "merges.txt", "#version: 0.2\n" + "\n".join(merges) + "\n")
    return tmp_path


@pytest.mark.parametrize("kind", [None, GPT2Tokenizer, Qwen2Tokenizer])
def test_vocab_and_merges(kind, vocab_and_merges):
    if kind is not None:
        write(vocab_and_merges / "tokenizer_config.json", json.dumps({"tokenizer_class": kind.__name__}))
    reference = (kind or GPT2Tokenizer).from_pretrained(vocab_and_merges)
    for path in (vocab_and_merges, vocab_and_merges / "vocab.json"):
        ours = build_tokenizer(str(path))
        assert (ours.eos_id, ours.bos_id) == (0, reference.bos_token_id)
        for name, text in ORDINARY.items():
            assert ours.encode(text) == reference.encode(text), name
    out = vocab_and_merges / "out"
    out.mkdir()
    (vocab_and_merges / "tokenizer_config.json").unlink(missing_ok=True)
    assert_same_ids(
        export_and_open(build_tokenizer(str(vocab_and_merges)), out), build_tokenizer(str(vocab_and_merges))
    )


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("tokenizer_config.json", '{"tokenizer_class": "CLIPTokenizer"}', "does not tell how that one splits text"),
        ("vocab.json", "[1]", "a list instead of an object"),
        ("vocab.json", '{"a": "b"}', "no table of tokens to ids"),
        ("merges.txt", "a b c\n", "a line of merges.txt is no pair"),
        ("merges.txt", "zz yy\n", "not a complete tokenizer.json"),
    ],
)
def test_bad_vocab_and_merges_are_refused(name, content, message, vocab_and_merges):
    write(vocab_and_merges / name, content)
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(str(vocab_and_merges))


def test_vocab_without_merges_is_refused(vocab_and_merges):
    (vocab_and_merges / "merges.txt").unlink()
    with pytest.raises(TokenizerError, match="merges.txt: the file cannot be read .No such file"):
        build_tokenizer(str(vocab_and_merges))


# Patterns

SAFE = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t|'re)?|\s+",
    r" ?[^(\s|[.,!?])]+",
    r"(a{1,3}){1,3}",
    r"\(a+\)+",
    r"[(a+)]+",
    "(",
    "a)+",
]
SUSPICIOUS = [r"(a+)+$", r"(?:\p{L}\p{M}*)+", r"(a|aa)*", r"((a+))*", r"(a{1,100}){1,100}", r"(a+)\1", r"(?<x>a\g<x>?)"]


@pytest.mark.parametrize("pattern", SAFE + SUSPICIOUS)
def test_patterns_that_may_backtrack_are_recognized(pattern):
    assert may_backtrack(pattern) == (pattern in SUSPICIOUS)


def with_pattern(folder: Path, pattern: str) -> str:
    """Write a tokenizer.json that first splits by a pattern; return its folder."""
    content = json.loads((ASSETS / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, *content["pre_tokenizer"]["pretokenizers"]],
    }
    write(folder / "tokenizer.json", json.dumps(content))
    return str(folder)


def test_a_backtracking_pattern_is_refused_without_a_panic(tmp_path, capfd):
    with pytest.raises(
        TokenizerError, match=r"its pattern '\(a\|aa\)\+\$' needs more steps.*without nested repetitions"
    ):
        build_tokenizer(with_pattern(tmp_path, "(a|aa)+$"))
    assert "panicked" not in capfd.readouterr().err


def test_a_suspicious_but_harmless_pattern_is_accepted(tmp_path):
    text = "Grüße aus Köln"
    assert (
        build_tokenizer(with_pattern(tmp_path, r"(?:\p{L}\p{M}*)+")).decode(build_tokenizer(KINDS[3]).encode(text))
        == text
    )


def test_a_pattern_trial_that_times_out_is_refused(tmp_path, monkeypatch):
    def late(*args, **options):
        raise subprocess.TimeoutExpired("python", options["timeout"])

    monkeypatch.setattr(patterns.subprocess, "run", late)
    with pytest.raises(TokenizerError, match="needs more steps than there are"):
        build_tokenizer(with_pattern(tmp_path, "(a+)+"))


def test_a_text_that_makes_the_library_panic_is_a_bad_record(tmp_path, monkeypatch):
    """The pattern trial is skipped, so that the panic happens while encoding."""
    monkeypatch.setattr(hf_json, "check_patterns", lambda path, content: None)
    ours = build_tokenizer(with_pattern(tmp_path, "(a|aa)+$"))
    message = (
        re.escape("a.jsonl:7: tokenizer ")
        + ".*it fails .*on a text that begins 'aaaa.*leave that text out.*on_bad_data"
    )
    with pytest.raises(DataError, match=message):
        encode(ours, Document("a" * 60 + "b", "a.jsonl:7"))
    assert ours.decode(ours.encode("fine")) == "fine"
