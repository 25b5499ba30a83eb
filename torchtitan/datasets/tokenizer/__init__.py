"""Tokenizers by the path of their file. The kind is read from the content, because `.model` may be either of two."""

import re
from pathlib import Path

from torchtitan.datasets.tokenizer.base import Tokenizer, TokenizerError, read_content
from torchtitan.datasets.tokenizer.byte_level import ByteTokenizer
from torchtitan.datasets.tokenizer.hf_json import HuggingFaceTokenizer
from torchtitan.datasets.tokenizer.sentencepiece_model import SentencePieceTokenizer
from torchtitan.datasets.tokenizer.tiktoken_bpe import TiktokenTokenizer

__all__ = ["Tokenizer", "TokenizerError", "build_tokenizer"]

# What a folder is searched for, in this order.
FILE_NAMES = ["tokenizer.json", "tokenizer.model", "*.tiktoken", "*.model"]
_TIKTOKEN_LINE = re.compile(rb"\s*[A-Za-z0-9+/]+={0,2} \d+\s")
_SENTENCEPIECE_HEAD = re.compile(rb"\n.{1,2}\n", re.DOTALL)  # the first piece, and its text


def build_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a file (tiktoken ranks, a sentencepiece model, a tokenizer.json), of a folder that holds one,
    or of the word `bytes`. Raises TokenizerError."""
    if path == "bytes":
        return ByteTokenizer()
    file = Path(path)
    if file.is_dir():
        file = _file_in(file)
    content = read_content(file)
    if content.lstrip()[:1] == b"{":
        return HuggingFaceTokenizer(file, content)
    if _TIKTOKEN_LINE.match(content):
        return TiktokenTokenizer(file, content)
    if _SENTENCEPIECE_HEAD.match(content):
        return SentencePieceTokenizer(file, content)
    if content.startswith(b"version https://git-lfs"):
        raise TokenizerError(file, "a Git LFS pointer instead of the file", "run git lfs pull in its repository")
    cause = f"neither tiktoken ranks, nor a sentencepiece model, nor a tokenizer.json (it begins {content[:24]!r})"
    raise TokenizerError(file, cause, "give one of these, or the word bytes")


def _file_in(folder: Path) -> Path:
    for name in FILE_NAMES:
        found = sorted(folder.glob(name))
        if len(found) > 1:
            names = ", ".join(f.name for f in found)
            raise TokenizerError(folder, f"the folder has several tokenizers ({names})", "give one of the files")
        if found:
            return found[0]
    cause = f"the folder has no tokenizer ({', '.join(FILE_NAMES)})"
    raise TokenizerError(folder, cause, "give the folder that holds it, its file, or the word bytes")
