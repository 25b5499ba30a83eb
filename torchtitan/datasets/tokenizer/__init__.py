"""Tokenizers by the path of their file. The kind is read from the content, because `.model` may be either of two."""

import re
from collections.abc import Callable, Collection
from pathlib import Path

from torchtitan.core.files import TOKENIZATION_VERSION, TOKENIZER
from torchtitan.core.registry import Registry
from torchtitan.datasets.tokenizer.base import Tokenizer, TokenizerError, read_content, sha256
from torchtitan.datasets.tokenizer.byte_level import ByteTokenizer, TiktokenTokenizer
from torchtitan.datasets.tokenizer.chat_templates import NAMED, resolve_template
from torchtitan.datasets.tokenizer.hf_files import CompanionFiles, template_in
from torchtitan.datasets.tokenizer.hf_json import HuggingFaceTokenizer, from_vocab_and_merges
from torchtitan.datasets.tokenizer.sentencepiece_model import SentencePieceTokenizer

__all__ = ["Tokenizer", "TokenizerError", "build_tokenizer"]

TOKENIZERS: Registry[Callable[[str], Tokenizer]] = Registry(
    "torchtitan.tokenizers",
    {
        "bytes": lambda argument: ByteTokenizer(),
        "debug": lambda argument: TiktokenTokenizer(TOKENIZER, read_content(TOKENIZER)),
    },
    Callable,
)
"""Tokenizers by name. Each function receives the text after "name:", which is empty without a colon."""

# File names that are searched in a folder, in this order.
FILE_NAMES = ["tokenizer.json", "tokenizer.model", "*.tiktoken", "*.model", "vocab.json"]
_TIKTOKEN_LINE = re.compile(rb"\s*[A-Za-z0-9+/]+={0,2} \d+\s")
_SENTENCEPIECE_HEAD = re.compile(rb"\n.{1,2}\n", re.DOTALL)  # the first piece, and its text


def build_tokenizer(
    path: str | Path,
    chat_template: str | None = None,
    version: int = TOKENIZATION_VERSION,
    ignored_keys: Collection[str] = (),
) -> Tokenizer:
    """Build a tokenizer. Raises TokenizerError.

    `path`: a file (tiktoken ranks, a sentencepiece model, a tokenizer.json, a vocab.json next to its merges.txt), a
    folder with one, a name from TOKENIZERS, or such a name, a colon and a path. `chat_template`: replaces its own chat
    template, see chat_templates.py. `version`: an earlier TOKENIZATION_VERSION, for a run that began with it.
    `ignored_keys`: keys of the files of a Hugging Face folder that are not read."""
    tokenizer = _build(path, version, ignored_keys)
    tokenizer.version = version
    tokenizer.template_name = f"the chat template of the tokenizer {path}"
    if chat_template is not None:
        tokenizer.chat_template = resolve_template(chat_template)
        is_name = chat_template in NAMED or chat_template.endswith(".jinja")
        tokenizer.template_name = f"the chat template {chat_template}" if is_name else "the Jinja in data.chat_template"
    return tokenizer


def _build(path: str | Path, version: int, ignored_keys: Collection[str]) -> Tokenizer:
    prefix, _, argument = str(path).partition(":")
    if path in TOKENIZERS.data or _is_word(prefix) and not Path(path).exists() and prefix in TOKENIZERS:
        return TOKENIZERS[prefix](argument)
    file = Path(path)
    if file.is_dir():
        file = _file_in(file)
    content = from_vocab_and_merges(file) if file.name == "vocab.json" else read_content(file)
    if content.lstrip()[:1] == b"{":
        return HuggingFaceTokenizer(file, content, version, ignored_keys)
    kinds = ((_TIKTOKEN_LINE, TiktokenTokenizer), (_SENTENCEPIECE_HEAD, SentencePieceTokenizer))
    for head, kind in kinds:
        if head.match(content):
            tokenizer = kind(file, content)
            files = CompanionFiles(file, ignored_keys, strict=version >= TOKENIZATION_VERSION)
            tokenizer.chat_template = template_in(files.config, file)
            if version >= TOKENIZATION_VERSION:
                _adopt_named_tokens(tokenizer, files)
            return tokenizer
    if content.startswith(b"version https://git-lfs"):
        raise TokenizerError(file, "a Git LFS pointer instead of the file", "run git lfs pull in its repository")
    cause = f"neither tiktoken ranks, nor a sentencepiece model, nor a tokenizer.json (it begins {content[:24]!r})"
    raise TokenizerError(file, cause, "give one of these, or the word bytes")


def _adopt_named_tokens(tokenizer: Tokenizer, files: CompanionFiles) -> None:
    """Take the begin and end token, and the absence of a begin token, from the files next to tiktoken ranks or a
    sentencepiece model. Raise TokenizerError for tokens that these do not have."""
    remedy = "give its tokenizer.json (AutoTokenizer's save_pretrained writes one)"
    for token in files.listed_contents():
        if not tokenizer.has_token(token):
            raise TokenizerError(files.path, f"the files next to it add {token!r}, which it does not have", remedy)
    ids = tokenizer.bos_id, tokenizer.eos_id
    for key in ("bos_token", "eos_token"):
        if key not in files.tokens or (key == "eos_token" and files.tokens[key] is None):
            continue
        name = files.token(key)
        if name is not None and name not in tokenizer.special_tokens:
            raise TokenizerError(files.path, f"{key} next to it is {name!r}, which it does not have", remedy)
        setattr(tokenizer, key.replace("token", "id"), None if name is None else tokenizer.special_tokens[name])
    if ids != (tokenizer.bos_id, tokenizer.eos_id):
        tokenizer.fingerprint = sha256(f"{tokenizer.fingerprint} {tokenizer.bos_id} {tokenizer.eos_id}".encode())


def _is_word(kind: str) -> bool:
    return kind not in TOKENIZERS.data and kind.replace("-", "_").isidentifier()


def _file_in(folder: Path) -> Path:
    for name in FILE_NAMES:
        matches = sorted(folder.glob(name))
        if len(matches) > 1:
            names = ", ".join(f.name for f in matches)
            raise TokenizerError(folder, f"the folder has several tokenizers ({names})", "give one of the files")
        if matches:
            return matches[0]
    cause = f"the folder has no tokenizer ({', '.join(FILE_NAMES)})"
    raise TokenizerError(folder, cause, "give the folder that holds it, its file, or the word bytes")
