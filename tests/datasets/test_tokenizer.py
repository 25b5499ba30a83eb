"""Tests of every kind of tokenizer: equality with its library, round trips, any text, and bad files."""

import argparse
import base64
import hashlib
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tokenizers

from tests.support.tokenizers import ASSETS, KINDS, TEXTS, write
from torchtitan.datasets.tokenizer import TokenizerError, build_tokenizer, byte_level
from torchtitan.datasets.tokenizer import base as tokenizer_base
from torchtitan.datasets.tokenizer.byte_level import TiktokenTokenizer


@pytest.fixture(scope="module", params=KINDS, ids=lambda path: Path(path).name)
def tokenizer(request):
    return build_tokenizer(request.param)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    # Text never becomes a special token, and special tokens never become text.
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    framed = tokenizer.encode(text, bos=True, eos=True)
    assert framed == [tokenizer.bos_id, *ids, tokenizer.eos_id]
    assert tokenizer.decode(framed) == text


def test_ids_fingerprint_and_pickling(tokenizer):
    assert tokenizer.bos_id != tokenizer.eos_id
    assert max(tokenizer.bos_id, tokenizer.eos_id) < tokenizer.vocab_size <= 2048
    assert len(tokenizer.fingerprint) == 64 and int(tokenizer.fingerprint, 16) >= 0
    assert all(type(i) is int for i in tokenizer.encode("plain integers"))
    # Loader workers may be started by spawn, which pickles the tokenizer.
    assert pickle.loads(pickle.dumps(tokenizer)).encode("import os") == tokenizer.encode("import os")


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b\udc00")) == "a\ufffdb\ufffd"


def test_ids_outside_the_vocabulary_decode_to_replacement_characters(tokenizer):
    ids = tokenizer.encode("ok")
    assert tokenizer.decode([*ids, tokenizer.vocab_size, -1]) == "ok\ufffd\ufffd"


def test_equal_to_tiktoken():
    path = ASSETS / "tiktoken.model"
    ranks = {base64.b64decode(t): int(r) for t, r in (line.split() for line in path.read_bytes().splitlines())}
    reference = tiktoken.Encoding("llama3", pat_str=byte_level.PATTERN, mergeable_ranks=ranks, special_tokens={})
    ours = build_tokenizer(str(path))
    for text in TEXTS.values():
        assert ours.encode(text) == reference.encode_ordinary(text)


def test_equal_to_sentencepiece():
    reference = sentencepiece.SentencePieceProcessor(model_file=str(ASSETS / "sentencepiece.model"))
    ours = build_tokenizer(str(ASSETS / "sentencepiece.model"))
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (2048, 1, 2)  # Llama 2's ids
    for text in TEXTS.values():
        assert ours.encode(text) == reference.encode(text)


def test_equal_to_hugging_face():
    reference = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    ours = build_tokenizer(str(ASSETS / "tokenizer.json"))
    for name, text in TEXTS.items():
        if name != "special":
            assert ours.encode(text) == reference.encode(text, add_special_tokens=False).ids


def test_llama3_numbering():
    """Llama 3 numbers special tokens after the ranks: 128000 begin, 128001 end, 128009 end of turn, 128256 in total."""
    specials = byte_level.SPECIAL_TOKENS
    assert len(set(specials)) == 256
    assert [specials.index(f"<|{name}|>") for name in ("begin_of_text", "end_of_text", "eot_id")] == [0, 1, 9]
    assert specials[2] == "<|reserved_special_token_0|>" and specials[-1] == "<|reserved_special_token_250|>"
    ours = build_tokenizer(str(ASSETS / "tiktoken.model"))
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (2048, 1792, 1793)


def test_small_vocabularies_compress():
    text = Path(argparse.__file__).read_text()
    for path in KINDS[1:]:
        assert len(text) / len(build_tokenizer(path).encode(text)) > 2.7
        assert Path(path).stat().st_size < 100_000


@pytest.mark.parametrize("unit", [" ", "\n", "a", ".", " \n", "\t "], ids=repr)
def test_long_runs_are_safe(tokenizer, unit):
    """tiktoken by itself panics on a million blanks."""
    text = unit * (1_000_000 // len(unit)) if isinstance(tokenizer, TiktokenTokenizer) else unit * 50_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("size", range(400, 440))
def test_encoding_in_pieces_gives_the_same_ids(monkeypatch, size):
    """A long text that is split after newlines has the ids of the unsplit text."""
    monkeypatch.setattr(byte_level, "MAX_PIECE", size)
    ours = build_tokenizer(str(ASSETS / "tiktoken.model"))
    text = "".join(f"    line {i}\n\n# über {i}\n" for i in range(600))
    pieces = list(byte_level._pieces(text))
    assert "".join(pieces) == text and len(pieces) > 30
    assert ours.encode(text) == ours._encoding.encode_ordinary(text)


def test_pieces_limit_the_length_of_runs():
    text = "word " * 10_000 + " " * 40_000 + "x" * 40_000 + " end"
    pieces = list(byte_level._pieces(text))
    assert "".join(pieces) == text
    assert max(len(run) for piece in pieces for run in piece.split()) <= 2 * byte_level.RUN
    assert max(len(piece) - len(piece.strip()) for piece in pieces) <= 2 * byte_level.RUN


def test_kind_is_read_from_the_content(tmp_path):
    for path in KINDS[1:]:
        same = build_tokenizer(shutil.copy(path, tmp_path / "tokenizer.model"))
        original = build_tokenizer(path)
        assert type(same) is type(original) and same.fingerprint == original.fingerprint


def test_tokenizer_folders(tmp_path):
    with pytest.raises(TokenizerError, match="no tokenizer"):
        build_tokenizer(str(tmp_path))
    shutil.copy(ASSETS / "tiktoken.model", tmp_path / "llama.tiktoken")
    assert build_tokenizer(str(tmp_path)).bos_id == 1792
    shutil.copy(ASSETS / "tiktoken.model", tmp_path / "other.tiktoken")
    with pytest.raises(TokenizerError, match="several tokenizers.*llama.tiktoken, other.tiktoken.*give one"):
        build_tokenizer(str(tmp_path))
    shutil.copy(ASSETS / "tokenizer.json", tmp_path)
    assert build_tokenizer(str(tmp_path)).bos_id == 0


def test_fingerprints_are_distinct():
    prints = {path: build_tokenizer(path).fingerprint for path in KINDS}
    assert len(set(prints.values())) == 4
    content = (ASSETS / "tiktoken.model").read_bytes()
    assert prints[KINDS[1]] == hashlib.sha256(content).hexdigest()


def test_bos_and_eos_of_tokenizer_config(tmp_path):
    path = shutil.copy(ASSETS / "tokenizer.json", tmp_path)
    plain = build_tokenizer(path)
    config = tmp_path / "tokenizer_config.json"
    write(config, json.dumps({"bos_token": {"content": "a"}, "eos_token": "b"}))
    other = build_tokenizer(path)
    assert [other.bos_id, other.eos_id] == plain.encode("a") + plain.encode("b")
    assert other.fingerprint != plain.fingerprint
    write(config, json.dumps({"bos_token": None}))  # as in Qwen's, to which transformers adds nothing
    assert build_tokenizer(path).bos_id is None
    assert build_tokenizer(path, version=2).bos_id == plain.bos_id  # for runs that began so
    for content, message in {
        '{"bos_token": "<nowhere>"}': "names '<nowhere>' as bos_token.*same model",
        '{"eos_token": 7}': "names 7 as eos_token",
        "[1]": "a list instead of an object",
        "{": "not JSON",
        " ": "empty",
    }.items():
        write(config, content)
        with pytest.raises(TokenizerError, match=message):
            build_tokenizer(path)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    reference = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    reference.enable_truncation(4)
    reference.enable_padding(length=8)
    reference.save(str(tmp_path / "tokenizer.json"))
    text = "one two three four five six"
    expected = build_tokenizer(str(ASSETS / "tokenizer.json")).encode(text)
    assert build_tokenizer(str(tmp_path)).encode(text) == expected


def tiktoken_lines(ranks: int = 300) -> list[str]:
    return (ASSETS / "tiktoken.model").read_text().splitlines()[:ranks]


BAD_FILES = {
    "empty": ("", "the file is empty"),
    "blank": (" \n", "the file is empty"),
    "garbage": (b"\x89PNG\r\n\x1a\n0000", "neither tiktoken ranks.*it begins b'.x89PNG"),
    "prose": ("Once upon a time", "neither tiktoken ranks"),
    "lfs": ("version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer.*git lfs pull"),
    "tiktoken bytes missing": ("\n".join(tiktoken_lines(255)) + "\n", "1 of the 256 single bytes.*0xff"),
    "tiktoken cut in a line": ("\n".join(tiktoken_lines()) + "\nIGlu", "line 301 is b'IGlu'.*fetch"),
    "tiktoken cut in a rank": ("\n".join(tiktoken_lines())[:-1], "line 300.*rank 29, expected 299"),
    "tiktoken repeats": ("\n".join([*tiktoken_lines(), "AA== 300"]), "line 301 repeats"),
    "tiktoken not base64": ("\n".join([*tiktoken_lines(), "A! 300"]), "line 301 is b'A! 300'"),
    "sentencepiece cut": ((ASSETS / "sentencepiece.model").read_bytes()[:20_000], "truncated or damaged"),
    "sentencepiece damaged": (
        (ASSETS / "sentencepiece.model").read_bytes().replace(b"<0x41>", b"<0x\xff1>"),
        "truncated or damaged",
    ),
    "json cut": ((ASSETS / "tokenizer.json").read_bytes()[:20_000], "not a complete tokenizer.json.*fetch"),
    "json of another kind": ('{"a": 1}', "not a complete tokenizer.json"),
    "json not utf-8": (b'{"a": "\xff"}', "not a complete tokenizer.json"),
}


@pytest.mark.parametrize("content, message", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_refused(tmp_path, content, message):
    path = write(tmp_path / "my.model", content)
    with pytest.raises(TokenizerError, match=message) as caught:
        build_tokenizer(path)
    assert path in str(caught.value) and "\n" not in str(caught.value)


def test_missing_and_too_large_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(TokenizerError, match="nowhere.model: the file cannot be read .No such file.*or the word bytes"):
        build_tokenizer(str(tmp_path / "nowhere.model"))
    monkeypatch.setattr(tokenizer_base, "MAX_BYTES", 1000)
    with pytest.raises(TokenizerError, match=r"the file has [\d,]+ bytes; at most 1,000 "):
        build_tokenizer(KINDS[1])


def test_importing_tokenizers_is_fast():
    """`torchtitan check` imports it, and has to answer within a second."""
    code = "import sys, torchtitan.datasets.tokenizer; print(sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not [m for m in ("'torch'", "'tiktoken'", "'tokenizers'", "'sentencepiece'") if m in modules]


@pytest.mark.parametrize("prompt", ["", "xxx"])
def test_streamed_text_is_the_text_however_many_tokens_a_character_has(prompt):
    """Characters of one to four tokens end at every place of the window, and none is lost or told twice."""
    tokenizer, streamed_text = build_tokenizer("bytes"), "a\u00e9\u4e2d\U0001f642" * 12
    pieces = tokenizer_base.decode_stream(tokenizer.encode(streamed_text), tokenizer.encode(prompt), tokenizer)
    assert "".join(pieces) == streamed_text
