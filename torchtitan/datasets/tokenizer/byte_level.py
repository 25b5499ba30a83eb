"""Llama 3's tokenizer: byte-level BPE in tiktoken's format, base64 token and rank on each line.

The file holds the ranks alone. The splitting pattern and the 256 special tokens that follow the ranks are Llama 3's
(source: meta-llama/llama3, llama/tokenizer.py), so the published file gives 128,000 + 256 ids.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

from torchtitan.datasets.tokenizer import hf_export
from torchtitan.datasets.tokenizer.base import Range, Tokenizer, TokenizerError, offsets_of_bytes, sha256

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL = 256
SPECIAL_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(5, NUM_SPECIAL - 5)),
]

# tiktoken's regular expression engine panics on a text of a million characters without a place to split, and its
# merging slows down on long words. Texts are cut into pieces of MAX_PIECE, and where RUN characters in a row are all
# blank or all not.
MAX_PIECE = 400_000
RUN = 12_500
# Here the pattern always splits: no alternative continues after a newline with a character that is not blank.
_SAFE_CUT = re.compile(r"\n(?=\S)")


class TiktokenTokenizer(Tokenizer):
    def __init__(self, path: Path, content: bytes) -> None:
        import tiktoken

        ranks = _read_ranks(path, content)
        self._num_ranks = len(ranks)
        self.vocab_size = len(ranks) + NUM_SPECIAL
        self.special_tokens = special = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        self.bos_id = special["<|begin_of_text|>"]
        self.eos_id = special["<|end_of_text|>"]
        self.fingerprint = sha256(content)
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special, explicit_n_vocab=self.vocab_size
        )

    def as_hf_files(self) -> dict[str, bytes]:
        ranks = {self._encoding.decode_single_token_bytes(i): i for i in range(self._num_ranks)}
        special = self.special_tokens
        bos, eos, *_ = SPECIAL_TOKENS
        return hf_export.tokenizer_files(hf_export.byte_level(ranks, special, bos, PATTERN, merges=True), bos, eos)

    def _encode(self, text: str) -> list[int]:
        if len(text) <= RUN:
            return self._encoding.encode_ordinary(text)
        return [i for piece in _pieces(text) for i in self._encoding.encode_ordinary(piece)]

    def _offsets(self, text: str, ids: list[int]) -> list[Range]:
        return offsets_of_bytes(text, map(len, self._encoding.decode_tokens_bytes(ids)))

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode([i for i in ids if i < self._num_ranks])


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of the text that are safe to encode.

    A piece ends after a newline if one is in reach, which keeps the ids of the whole text. A run of blanks or
    non-blanks that fills RUN characters is cut inside."""
    begin = 0
    while begin < len(text):
        window = text[begin : begin + MAX_PIECE]
        cut = len(window)
        if begin + cut < len(text):
            cut = max((m.end() for m in _SAFE_CUT.finditer(window)), default=cut)
        start = 0
        for end in range(RUN, cut, RUN):
            run = window[end - RUN : end]
            if run.isspace() or run.split(maxsplit=1) == [run]:
                yield window[start:end]
                start = end
        yield window[start:cut]
        begin += cut


def _read_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    remedy = "each line must be a base64 token and its rank; fetch the file again"
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            token = base64.b64decode(token, validate=True)
            if int(rank) != len(ranks) or token in ranks:
                cause = f"line {number} repeats a token or skips a rank (rank {int(rank)}, expected {len(ranks)})"
                raise TokenizerError(path, cause, "the file is truncated or damaged: fetch it again")
        except (ValueError, binascii.Error) as error:
            if isinstance(error, TokenizerError):
                raise
            raise TokenizerError(path, f"line {number} is {line[:60]!r}", remedy) from None
        ranks[token] = len(ranks)
    if missing := [b for b in range(256) if bytes([b]) not in ranks]:
        cause = f"{len(missing)} of the 256 single bytes have no token, the first {missing[0]:#04x}"
        raise TokenizerError(path, cause, "the file is truncated: fetch it again")
    return ranks


BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes, 256 begins a document and 257 ends it."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    special_tokens = MappingProxyType({BOS: 256, EOS: 257})
    fingerprint = sha256(b"bytes, bos 256, eos 257")

    def as_hf_files(self) -> dict[str, bytes]:
        ranks = {bytes([byte]): byte for byte in range(256)}
        return hf_export.tokenizer_files(
            hf_export.byte_level(ranks, self.special_tokens, BOS, None, merges=False), BOS, EOS
        )

    def _encode(self, text: str) -> list[int]:
        return list(text.encode())

    def _offsets(self, text: str, ids: list[int]) -> list[Range]:
        return offsets_of_bytes(text, [1] * len(ids))

    def _decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")
