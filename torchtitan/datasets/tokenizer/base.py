"""The tokenizer interface, reading of tokenizer files, and incremental decoding.

TokenizerError names the file, the cause and the remedy. Incremental decoding yields whole characters, at constant cost
per token.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from torchtitan.core.errors import JobError
from torchtitan.core.files import TOKENIZATION_VERSION, FileError, read_file

# The largest vocabularies in use take 40 MB as JSON. A much larger file is something else (weights, data).
MAX_BYTES = 128 * 2**20
Range = tuple[int, int]
GUARD = "\n"
"""A prefix with tokens that never merge with the text after it. A blank that the tokenizer adds comes before it."""


class TokenizerError(JobError):
    """A tokenizer that cannot be used; the message names the file, the cause and the remedy."""

    def __init__(self, path: str | Path, cause: str, remedy: str) -> None:
        super().__init__(f"tokenizer {path}: {cause}; {remedy}")


class Tokenizer(ABC):
    """Text to token ids and back.

    Any Python string can be encoded: text that looks like a special token is encoded as the text it is, and lone
    surrogates (which JSON can smuggle in) become U+FFFD. Ids are below vocab_size.
    """

    vocab_size: int
    """The largest id plus one, which is the minimum number of embedding rows of a model."""
    bos_id: int | None
    """Id of the begin token. None if documents have none, as for T5."""
    eos_id: int
    special_tokens: Mapping[str, int] = MappingProxyType({})
    """Special tokens (name -> id). Ordinary text is never encoded to them."""
    unknown_id: int | None = None
    """The special token that stands for text outside the vocabulary, if there is one."""
    reads_special_tokens = False
    """True if text with the names of special tokens in it can be encoded as a whole (`encode_rendered`)."""
    chat_template: str | None = None
    """Jinja template that renders conversations as text (chat_templates.py)."""
    has_tool_template = False
    """True if the tokenizer has another template for conversations with tools."""
    template_name = "the chat template"
    """Name of the template in messages."""
    version: int = TOKENIZATION_VERSION
    """Version of the rules of tokenization, TOKENIZATION_VERSION or an earlier one."""
    fingerprint: str
    """SHA-256 of everything that determines the ids. Data tokenized with another fingerprint is incompatible."""

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the ids of the text, with the document's begin and end ids if requested; none for an empty text."""
        ids = self._encode(without_lone_surrogates(text))
        return self.begin_ids * bos + ids + [self.eos_id] * eos

    @cached_property
    def template_tokens(self) -> Mapping[str, str]:
        """Return the special tokens that chat templates read, by the names of their variables."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        names = {number: name for name, number in self.special_tokens.items()}
        return {key: names[number] for key, number in ids.items() if number is not None and number in names}

    @property
    def pad_id(self) -> int | None:
        """Return the id of the special token that pads batches elsewhere, if the tokenizer's files name one."""
        return self.special_tokens.get(self.template_tokens.get("pad_token", ""))

    @property
    def begin_ids(self) -> list[int]:
        """Return the ids that begin a document: one, or none."""
        return [] if self.bos_id is None else [self.bos_id]

    def encode_after(self, text: str) -> list[int]:
        """Return the ids of a text that continues another one.

        Some tokenizers (mostly sentencepiece) prepend a blank to every text. This method does not, so that the joined
        ids decode to the joined texts."""
        if not self._adds_blank:
            return self.encode(text)
        return self.encode(GUARD + text)[len(self.encode(GUARD)) :]

    @cached_property
    def _adds_blank(self) -> bool:
        plain, guard, guarded = (self.encode(text) for text in ("a", GUARD, f"{GUARD}a"))
        return guarded[: len(guard)] == guard and guarded[len(guard) :] != plain

    def encode_with_ranges(self, text: str, ranges: Sequence[Range]) -> tuple[list[int], list[Range]]:
        """Return the ids of the text and, for each range of its characters, the range of tokens that overlap it. Ranges
        are (begin, end) and not empty."""
        return self._encode_with_ranges(without_lone_surrogates(text), ranges)

    def has_token(self, name: str) -> bool:
        """Return True if the vocabulary has this token, special or not."""
        return name in self.special_tokens

    def encode_rendered(
        self, text: str, ranges: Sequence[Range], spelled: Sequence[Range] = ()
    ) -> tuple[list[int], list[Range]]:
        """Encode like `encode_with_ranges`, but read the names of special tokens in the text as these tokens.

        `spelled`: ranges of names that are ordinary text, in ascending order. Only if `reads_special_tokens`."""
        raise NotImplementedError

    def _encode_with_ranges(self, text: str, ranges: Sequence[Range]) -> tuple[list[int], list[Range]]:
        ids = self._encode(text)
        return ids, token_ranges_of(ranges, self._offsets(text, ids))

    def _offsets(self, text: str, ids: list[int]) -> list[Range]:
        """Return the characters of each token, by decoding ever longer beginnings; for tokenizers without offsets."""
        ends = [len(self.decode(ids[: count + 1]).rstrip("\ufffd")) for count in range(len(ids))]
        return list(zip([0, *ends], ends, strict=False))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids, without special tokens.

        Ids outside the vocabulary (a model may have spare rows) and bytes that are not UTF-8 become U+FFFD."""
        runs = groupby((int(i) for i in ids), key=lambda i: 0 <= i < self.vocab_size)
        return "".join(
            self._decode(list(run)) if in_vocabulary else "\ufffd" * len(list(run)) for in_vocabulary, run in runs
        )

    @abstractmethod
    def as_hf_files(self) -> dict[str, bytes]:
        """Return name -> content of its Hugging Face files. Raises JobError if it cannot be exported."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...


def read_content(path: Path) -> bytes:
    """Return the bytes of a tokenizer file. Raises TokenizerError if it is missing, unreadable, empty or too large."""
    try:
        content = read_file(path, MAX_BYTES)
    except FileError as error:
        remedy = "give an existing tokenizer file or folder, or the word bytes"
        raise TokenizerError(path, f"the file {error.reason}", remedy) from None
    if not content.strip():
        raise TokenizerError(path, "the file is empty", "fetch it again")
    return content


def token_ranges_of(ranges: Sequence[Range], offsets: Sequence[Range]) -> list[Range]:
    """Return the range of tokens that overlap each range of characters, by the offsets of all tokens. White space that
    offsets leave out before a token belongs to it."""
    ends = [end for _, end in offsets]
    token_ranges = []
    for begin, end in ranges:
        first, last = bisect_right(ends, begin), bisect_left(ends, end)
        while last + 1 < len(ends) and offsets[last + 1][0] < end:  # bytes of the same last character
            last += 1
        token_ranges.append((first, min(last + 1, len(ends))))
    return token_ranges


def offsets_of_bytes(text: str, lengths: Iterable[int]) -> list[Range]:
    """Return the range of characters of each token. `lengths`: number of bytes of each token."""
    character_of = [number for number, letter in enumerate(text) for _ in letter.encode()]
    offsets, first = [], 0
    for length in lengths:
        offsets.append((character_of[first], character_of[first + length - 1] + 1))
        first += length
    return offsets


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def without_lone_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@lru_cache(maxsize=16)
def special_names_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern, with a group, for any of the names; the longest is tried first.

    Cached: compiling up to 256 names costs more than rendering a record."""
    return re.compile("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")


PENDING = "\ufffd"
"""Replacement character for bytes that are not, or not yet, a complete character."""
MAX_PENDING = 3
"""Maximum number of bytes of an incomplete character. Some tokenizers decode each of them to PENDING."""
WINDOW_TOKENS = 8
"""Number of earlier tokens that are decoded together with a new one. Its text may depend on them: a blank at the
beginning of a text is dropped, for example, and the bytes of a character may be spread over several tokens."""


def decode_stream(tokens: Iterable[int], prompt: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text that the tokens add to the prompt's.

    The joined pieces are the text of all ids without the prompt's. Bytes of an incomplete last character are dropped.
    """
    window = list(prompt[-WINDOW_TOKENS:])
    shown = len(tokenizer.decode(window))
    for token in tokens:
        window.append(token)
        text = tokenizer.decode(window)
        num_pending = min(MAX_PENDING, len(text) - len(text.rstrip(PENDING)))
        num_complete = len(text) - num_pending
        if num_complete > shown:
            yield text[shown:num_complete]
            shown = num_complete
        if len(window) > WINDOW_TOKENS:
            window = window[-WINDOW_TOKENS:]
            shown += len(tokenizer.decode(window)) - len(text)
