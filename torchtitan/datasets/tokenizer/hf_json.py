"""Tokenizers from Hugging Face's tokenizer.json, or from the older vocab.json and merges.txt.

The tokens that begin and end a document come from tokenizer_config.json in the same folder; without one, they are found
by their usual names.

The regular expressions of a tokenizer.json can be dangerous: some exceed the library's step limit on a short text, and
the library then panics in the middle of a run. A pattern with nested repetition is therefore tried out first, in a
separate process.

The module also adds special tokens to a tokenizer and returns the files of the extended one.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.datasets.tokenizer import hf_export
from torchtitan.datasets.tokenizer.base import Range, Tokenizer, TokenizerError, read_content, sha256, token_ranges_of
from torchtitan.datasets.tokenizer.chat_templates import (
    resolve_template,
)

MANY = 10
"""Largest number of repetitions in a regular expression that counts as bounded."""
RUN, SECONDS = 64, 30
_TRIAL = """
import json, sys, tokenizers
patterns, texts = json.load(sys.stdin)
for pattern in patterns:
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    for text in texts:
        split.pre_tokenize_str(text)
"""
_SIGN = re.compile(r"\\.|[\[\]()|]|(?:[*+]|\{\d*,?\d*\})[?+]?|.", re.DOTALL)


def check_patterns(path: Path, content: bytes) -> None:
    """Raise TokenizerError if a pattern of a tokenizer.json backtracks without limit."""
    try:
        patterns = [p for p in _patterns(json.loads(content)) if may_backtrack(p)]
    except (ValueError, RecursionError):
        return  # the library reads the file next and reports the error
    if not patterns:
        return
    letters = {*"a1 !é中\n", *(letter for pattern in patterns for letter in pattern if letter.isalnum())}
    texts = [letter * RUN + end for letter in sorted(letters) for end in ("", "\0", " ", "b!")]
    try:
        trial = [sys.executable, "-I", "-c", _TRIAL]
        process = subprocess.run(
            trial, input=json.dumps([patterns, texts]).encode(), capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        process = None
    if process is None or process.returncode:
        cause = f"its pattern {patterns[0][:80]!r} needs more steps than there are on a text of {RUN} letters"
        raise TokenizerError(path, cause, "give a tokenizer without nested repetitions in its pattern")


def _patterns(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(value.get("Regex"), str):
        yield value["Regex"]
    elif isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if key not in ("vocab", "merges"):
                yield from _patterns(inner)


def may_backtrack(pattern: str) -> bool:
    """Return True for a repeated group that contains a repetition or an alternative, and for a back reference."""
    if re.search(r"\\(?:[1-9]|[kg]<)", pattern):
        return True
    inside, depth, closed = [False], 0, False
    for sign in _SIGN.findall(pattern):
        repeats = sign[0] in "*+" or (sign[0] == "{" and len(sign) > 1 and _is_long(sign))
        if repeats and closed:
            return True
        closed = False
        if sign == "[" or (sign == "]" and depth):
            depth += 1 if sign == "[" else -1
        elif depth:
            continue
        elif sign == "(":
            inside.append(False)
        elif sign == ")" and len(inside) > 1:
            closed = inside.pop()
            inside[-1] |= closed
        elif sign == "|" or repeats:
            inside[-1] = True
    return False


def _is_long(braces: str) -> bool:
    minimum, comma, maximum = braces.rstrip("?+").strip("{}").partition(",")
    return int((maximum or MANY + 1) if comma else (minimum or 0)) > MANY


# <|endoftext|> both begins and ends a document in the GPT-2 family.
BOS_NAMES = ["<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]", "<|endoftext|>", "[CLS]"]
EOS_NAMES = ["<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "[EOS]", "[SEP]"]
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
BESIDE = (CONFIG, MAP, "chat_template.jinja", "chat_template.json", ADDED)
"""Files that belong to a tokenizer.json and are copied with it."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class HuggingFaceTokenizer(Tokenizer):
    def __init__(self, path: Path, content: bytes) -> None:
        import tokenizers

        check_patterns(path, content)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing narrower
            cause = f"not a complete tokenizer.json ({error})"
            raise TokenizerError(path, cause, "fetch it again, from a model that has a fast tokenizer") from None
        # Truncation and padding are for batches of model inputs, not for a stream of text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._path = path
        config = _read_config(path.with_name(CONFIG))
        _add_tokens(self._tokenizer, config, path)
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos_id = _find("bos_token", config, BOS_NAMES, vocabulary, path)
        eos_id = _find("eos_token", config, EOS_NAMES, vocabulary, path)
        if eos_id is None:
            cause = f"no eos_token: it has none of {', '.join(EOS_NAMES)}"
            raise TokenizerError(path, cause, f"put a {CONFIG} beside it with eos_token = one of its tokens")
        self.eos_id = eos_id
        decoder = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: number for number, token in decoder.items() if token.special}
        self.chat_template = _template(config, path)
        self.fingerprint = sha256(content + f"bos {self.bos_id}, eos {self.eos_id}".encode())

    def as_hf_files(self) -> dict[str, bytes]:
        """Return its files and those next to it, such as the chat template. References to custom code are dropped."""
        name = self._tokenizer.id_to_token
        bos = None if self.bos_id is None else name(self.bos_id)
        eos = name(self.eos_id)
        assert eos is not None
        exported = hf_export.tokenizer_files(json.loads(self._tokenizer.to_str()), bos, eos)
        paths = {name: self._path.with_name(name) for name in BESIDE}
        existing = {name: read_content(file) for name, file in paths.items() if os.path.lexists(file)}
        if CONFIG in existing:
            config = _read_config(paths[CONFIG])
            existing[CONFIG] = hf_export.dumped({key: value for key, value in config.items() if key != "auto_map"})
        return exported | existing

    def _encode(self, text: str) -> list[int]:
        return self._encoding_of(text).ids

    def _encode_with_ranges(self, text: str, ranges: Sequence[Range]) -> tuple[list[int], list[Range]]:
        encoding = self._encoding_of(text)
        token_ranges = []
        for begin, end in ranges:  # listing all offsets would take a third of the encoding time
            first, last = encoding.char_to_token(begin), encoding.char_to_token(end - 1)
            if first is None or last is None:  # white space without offsets
                return encoding.ids, token_ranges_of(ranges, encoding.offsets)
            while (characters := encoding.token_to_chars(last + 1)) and characters[0] < end:
                last += 1
            token_ranges.append((first, last + 1))
        return encoding.ids, token_ranges

    def _encoding_of(self, text: str) -> Any:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except BaseException as error:
            raise _translated(error, self._path, text) from None

    def _decode(self, ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=True)
        except BaseException as error:
            raise _translated(error, self._path, f"{len(ids)} tokens") from None


def _translated(error: BaseException, path: Path, text: str) -> BaseException:
    """Convert a panic of the library, which is not an Exception, to a TokenizerError; return others unchanged."""
    if type(error).__name__ != "PanicException":
        return error
    cause = f"it fails ({str(error)[:200]}) on a text that begins {text[:40]!r}"
    return TokenizerError(path, cause, "give the tokenizer of the model's own repository, or leave that text out")


def from_vocab_and_merges(path: Path) -> bytes:
    """Return the tokenizer.json of a vocab.json and the merges.txt next to it.

    Splits text as GPT-2 does, or as Qwen 2 if tokenizer_config.json names its class.
    """
    kind = _read_config(path.with_name(CONFIG)).get("tokenizer_class", "GPT2Tokenizer")
    family = str(kind).removesuffix("Fast").removesuffix("Tokenizer")
    if family not in ("GPT2", "Roberta", "Qwen2"):
        cause = f"tokenizer_config.json says {kind!r}, and vocab.json alone does not tell how that one splits text"
        raise TokenizerError(path, cause, "give its tokenizer.json (AutoTokenizer's save_pretrained writes one)")
    vocabulary = _read_config(path)
    merges = read_content(path.with_name("merges.txt")).decode(errors="replace").split("\n")
    pairs = [line.split(" ") for line in merges if line.strip() and not line.startswith("#version")]
    if any(type(i) is not int for i in vocabulary.values()) or any(len(pair) != 2 for pair in pairs):
        cause = "vocab.json is no table of tokens to ids, or a line of merges.txt is no pair"
        raise TokenizerError(path, cause, "fetch both again")
    added = _read_config(path.with_name("added_tokens.json"))
    special = {name: i for name, i in (vocabulary | added).items() if name in added or name in (*BOS_NAMES, *EOS_NAMES)}
    tokenizer_json = hf_export.letters_bpe_json(vocabulary, pairs, special, qwen=family == "Qwen2")
    return hf_export.dumped(tokenizer_json, indent=None)


def _add_tokens(tokenizer: Any, config: dict[str, Any], path: Path) -> None:
    """Append the tokens of tokenizer_config.json that tokenizer.json lacks.

    They are appended in the order of their numbers, as in transformers. The numbers themselves are not used: they may
    belong to a larger vocabulary.
    """
    import tokenizers

    listed = config.get("added_tokens_decoder", {})
    try:
        entries = [entry for _, entry in sorted(listed.items(), key=lambda item: int(item[0]))]
        vocabulary = tokenizer.get_vocab()
        for entry in entries:
            if entry["content"] not in vocabulary:
                flags = {flag: bool(entry[flag]) for flag in FLAGS if flag in entry}
                tokenizer.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])
                if (number := tokenizer.token_to_id(entry["content"])) in vocabulary.values():
                    raise ValueError(f"{entry['content']} would be number {number}, which is another token's")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        cause = f"added_tokens_decoder of {CONFIG} is damaged ({type(error).__name__}: {error})"
        raise TokenizerError(path, cause, "fetch it again, or remove it") from None


def _read_config(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file; empty if it does not exist."""
    if not os.path.lexists(path):
        return {}
    try:
        config = json.loads(read_content(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(path, f"not JSON ({error})", "fetch it again, or remove it") from None
    if not isinstance(config, dict):
        raise TokenizerError(path, f"a {type(config).__name__} instead of an object", "fetch it again, or remove it")
    return config


def template_next_to(path: Path) -> str | None:
    """Return the chat template in the folder of a tokenizer's file."""
    return _template(_read_config(path.with_name(CONFIG)), path)


def _template(config: dict[str, Any], path: Path) -> str | None:
    """Return the chat template from chat_template.jinja, or the (default) one of the tokenizer's configuration."""
    file = path.with_name("chat_template.jinja")
    if os.path.lexists(file):
        return resolve_template(str(file))
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next(
            (e.get("template") for e in template if isinstance(e, dict) and e.get("name") == "default"), None
        )
    return template if isinstance(template, str) else None


def _find(key: str, config: dict[str, Any], names: list[str], vocabulary: dict[str, int], path: Path) -> int | None:
    token = config.get(key)
    if isinstance(token, dict):  # older files describe the token instead of naming it
        token = token.get("content")
    if token is not None:
        if not isinstance(token, str) or token not in vocabulary:
            cause = f"tokenizer_config.json names {token!r} as {key}, which is not in the vocabulary"
            raise TokenizerError(path, cause, "take both files from the same model")
        return vocabulary[token]
    return next((vocabulary[name] for name in names if name in vocabulary), None)


def template_file(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return name -> content of the tokenizer's template file for Hugging Face; empty without a template."""
    template = tokenizer.chat_template
    return {} if template is None else {"chat_template.jinja": template.encode()}


SHORTEST = 2
"""Minimum number of letters of a special token. Single letters occur in ordinary text."""


def missing_tokens(vocabulary: Tokenizer, tokens: Sequence[str]) -> list[str]:
    """Return the tokens that are not special tokens yet, each once. Raises JobError for an unusable name."""
    missing = [token for token in dict.fromkeys(tokens) if token not in vocabulary.special_tokens]
    for token in missing:
        if len(token) < SHORTEST or token != token.strip():
            allowed = f"at least {SHORTEST} letters, without blanks around them"
            raise JobError(f"token {token!r}: allowed: {allowed}; what people write is not to be taken for it")
    return missing


def extended(vocabulary: Tokenizer, tokens: Sequence[str], eos: str | None) -> dict[str, bytes]:
    """Return name -> content of the tokenizer's files with these new special tokens appended.

    `eos`: the token that ends a document. The ids of ordinary text stay the same. Raises JobError for a kind of
    tokenizer without such files, and for tokens that are already ordinary tokens.
    """
    import tokenizers

    try:
        files = vocabulary.as_hf_files() | template_file(vocabulary)
    except JobError as error:
        remedy = "write its tokenizer.json first (AutoTokenizer's save_pretrained does)"
        raise JobError(f"the tokenizer cannot be given tokens: {error}; {remedy}") from error
    extended_tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    entries = extended_tokenizer.get_vocab()
    if ordinary := [token for token in tokens if token in entries]:
        number = entries[ordinary[0]]
        raise JobError(f"token {ordinary[0]!r}: text becomes it already, as number {number}; give it another name")
    if eos is not None and eos not in entries and eos not in tokens:
        raise JobError(f"eos token {eos!r}: the tokenizer has no such token; add it too")
    extended_tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in tokens]
    )
    new_ids = {token: extended_tokenizer.token_to_id(token) for token in tokens}
    expected = range(vocabulary.vocab_size, vocabulary.vocab_size + len(tokens))
    if list(new_ids.values()) != list(expected):
        remedy = "number them without gaps, or take the tokenizer of the model's own repository"
        raise JobError(f"the tokenizer cannot be given tokens: its own are {len(entries)}, up to number "
                       f"{vocabulary.vocab_size - 1}; {remedy}")  # fmt: skip
    return (
        files
        | {"tokenizer.json": extended_tokenizer.to_str().encode()}
        | _updated_files(files, extended_tokenizer, new_ids, eos)
    )


def _updated_files(files: dict[str, bytes], opened: Any, numbers: dict[str, Any], eos: str | None) -> dict[str, bytes]:
    """Return the existing files next to tokenizer.json that list tokens, updated."""
    eos_entry = {} if eos is None else {"eos_token": eos}
    listed = {
        str(number): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for number, token in sorted(opened.get_added_tokens_decoder().items())
    }
    changes = {CONFIG: {"added_tokens_decoder": listed} | eos_entry, MAP: eos_entry, ADDED: numbers}
    updated = {name: json.loads(files[name]) | changed for name, changed in changes.items() if name in files}
    return {name: hf_export.dumped(content) for name, content in updated.items()}
