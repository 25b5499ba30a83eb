"""Export of a tokenizer to Hugging Face's files, tokenizer.json and tokenizer_config.json.

The exported tokenizer gives the same ids for ordinary text, and prepends the token that begins a document, as for a
prompt that a model continues.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.core.errors import JobError

Json = dict[str, Any]
Merges = Iterable[Sequence[str]]
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UNIGRAM, BPE = 1, 2
BLANK = "\u2581"  # sentencepiece's symbol for a blank


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The contents of a sentencepiece model, with readable names for the fields of its format."""

    kind: int
    ids: dict[str, int]
    scores: dict[str, float]  # only pieces that text can be encoded to
    unknown: str
    byte_fallback: bool
    prefixed: bool  # a blank is prepended to the text
    remove_extra_blanks: bool
    suffixed: bool  # blanks end words instead of beginning them
    charsmap: bytes  # rules of normalization, compiled


def tokenizer_files(tokenizer_json: Json, bos: str | None, eos: str, unknown: str | None = None) -> dict[str, bytes]:
    """Return name -> content of the tokenizer's files.

    PreTrainedTokenizerFast uses tokenizer.json unchanged; the classes named after a model add steps."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "eos_token": eos}
    config |= {key: token for key, token in (("bos_token", bos), ("unk_token", unknown)) if token is not None}
    return {"tokenizer.json": dumped(tokenizer_json, indent=None), "tokenizer_config.json": dumped(config)}


def dumped(content: Json, indent: int | None = 2) -> bytes:
    return json.dumps(content, indent=indent, ensure_ascii=False).encode() + b"\n"


def tokenizer_json(
    model: Json, special: Mapping[str, int], bos: str | None, *, normalizer: Any, pre_tokenizer: Any, decoder: Any
) -> Json:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id_, "content": name, **flags, "special": True} for name, id_ in special.items()],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None if bos is None else _in_front(bos, special[bos]),
        "decoder": decoder,
        "model": model,
    }


def _in_front(token: str, id_: int) -> Json:
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    tokens = {token: {"id": token, "ids": [id_], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, begin, second],
        "special_tokens": tokens,
    }


def byte_level(
    ranks: Mapping[bytes, int], special: Mapping[str, int], bos: str, pattern: str | None, merges: bool
) -> Json:
    """Return a byte-level BPE tokenizer. `ranks`: both ids and merge order; `pattern` splits the text first."""
    steps = [] if pattern is None else [_split(pattern)]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    letters = _letters()
    spelling = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {spelling[token]: id_ for token, id_ in ranks.items()}
    pairs = [(spelling[first], spelling[second]) for first, second in _pairs(ranks)] if merges else []
    model = _bpe(vocabulary | special, pairs) | {
        "ignore_merges": True
    }  # a word that is itself a token is not merged from parts
    pre_tokenizer = {"type": "Sequence", "pretokenizers": steps}
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return tokenizer_json(model, special, bos, normalizer=None, pre_tokenizer=pre_tokenizer, decoder=decoder)


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def letters_bpe_json(vocabulary: Mapping[str, int], merges: Merges, special: Mapping[str, int], qwen: bool) -> Json:
    """Return a byte-level BPE tokenizer with GPT-2's or Qwen 2's split and no prepended token."""
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not qwen}
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [_split(QWEN2), split]} if qwen else split
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    normalizer = {"type": "NFC"} if qwen else None
    steps = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder}
    return tokenizer_json(_bpe(vocabulary, merges), special, None, **steps)


def _bpe(vocabulary: Mapping[str, int], merges: Merges) -> Json:
    return {"type": "BPE", "vocab": vocabulary, "merges": [f"{first} {second}" for first, second in merges]}


def _pairs(ranks: Mapping[Any, int]) -> Iterable[tuple[Any, Any]]:
    """Yield all pairs of tokens that form a third one, in merge order: by its rank, then by the ranks of the pair."""
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        splits = [(first, second) for first, second in halves if first in ranks and second in ranks]
        yield from sorted(splits, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _letters() -> list[str]:
    """Return the letter of each byte in byte-level vocabularies.

    A printable byte is its own letter, any other byte gets a letter from 256 on (source: OpenAI's GPT-2, encoder.py).
    """
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(substitutes)) for byte in range(256)]


def pieces(tokens: "Pieces", special: Mapping[str, int], bos: str | None) -> Json:
    """Convert a sentencepiece model, unigram or BPE. Raises JobError for features that tokenizer.json lacks."""
    if tokens.kind not in (UNIGRAM, BPE) or tokens.suffixed or (tokens.kind == BPE and tokens.charsmap):
        raise JobError("its kind of sentencepiece model has no tokenizer.json")
    if tokens.kind == UNIGRAM:
        return _unigram(tokens, special, bos)
    order = sorted(tokens.scores, key=lambda piece: -tokens.scores[piece])
    model = _bpe(tokens.ids, _pairs({piece: rank for rank, piece in enumerate(order)}))
    model |= {"unk_token": tokens.unknown, "fuse_unk": True, "byte_fallback": tokens.byte_fallback}
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": BLANK}] if tokens.prefixed else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": BLANK})
    normalizer = {"type": "Sequence", "normalizers": _without_extra_blanks(tokens) + steps}
    spaces = [{"type": "Replace", "pattern": {"String": BLANK}, "content": " "}, {"type": "ByteFallback"}]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if tokens.prefixed else []
    decoder = {"type": "Sequence", "decoders": [*spaces, {"type": "Fuse"}, *strip]}
    return tokenizer_json(model, special, bos, normalizer=normalizer, pre_tokenizer=None, decoder=decoder)


def _unigram(tokens: "Pieces", special: Mapping[str, int], bos: str | None) -> Json:
    scored = [[piece, tokens.scores.get(piece, 0.0)] for piece in tokens.ids]
    model = {"type": "Unigram", "unk_id": tokens.ids[tokens.unknown], "vocab": scored}
    model["byte_fallback"] = tokens.byte_fallback
    charsmap = base64.b64encode(tokens.charsmap).decode()
    steps = [{"type": "Precompiled", "precompiled_charsmap": charsmap}] if charsmap else []
    normalizer = {"type": "Sequence", "normalizers": steps + _without_extra_blanks(tokens)}
    scheme = "always" if tokens.prefixed else "never"
    blanks = {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": scheme, "split": True}
    return tokenizer_json(model, special, bos, normalizer=normalizer, pre_tokenizer=blanks, decoder=blanks)


def _without_extra_blanks(tokens: "Pieces") -> list[Json]:
    if not tokens.remove_extra_blanks:
        return []
    changes = {r"\A +| +\z": "", " {2,}": " "}  # only blanks: Strip would remove line ends too
    return [{"type": "Replace", "pattern": {"Regex": old}, "content": new} for old, new in changes.items()]
