"""Tokenizers from Hugging Face's tokenizer.json, or from the older vocab.json and merges.txt.

The tokens that begin and end a document come from tokenizer_config.json and special_tokens_map.json in the same folder
(hf_files.py); without these, they are found by their usual names.

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
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.core.files import TOKENIZATION_VERSION
from torchtitan.datasets.tokenizer import hf_export
from torchtitan.datasets.tokenizer.base import (
    GUARD,
    Range,
    Tokenizer,
    TokenizerError,
    read_content,
    sha256,
    token_ranges_of,
    without_lone_surrogates,
)
from torchtitan.datasets.tokenizer.hf_files import (
    ADDED,
    COMPANIONS,
    CONFIG,
    MAP,
    CompanionFiles,
    check_steps,
    has_tool_template,
    parsed_json,
    read_json,
    template_in,
)

MANY = 10
"""Largest number of repetitions in a regular expression that counts as bounded."""
RUN, SECONDS = 64, 30
_TRIAL = f"""
import json, signal, sys, tokenizers
signal.alarm({SECONDS})  # where the process that waits for it is gone
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


class HuggingFaceTokenizer(Tokenizer):
    reads_special_tokens = True

    def __init__(
        self, path: Path, content: bytes, version: int = TOKENIZATION_VERSION, ignored_keys: Collection[str] = ()
    ) -> None:
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
        self._path, self.version = path, version
        is_current = version >= TOKENIZATION_VERSION
        files = CompanionFiles(path, ignored_keys, strict=is_current)
        added = ""
        if is_current:
            check_steps(parsed_json(path, content), files.config, path)
            added = "".join(map(repr, files.add_tokens(self._tokenizer)))
        else:
            files.add_earlier_tokens(self._tokenizer)
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos_id = self._id_of("bos_token", files, BOS_NAMES, vocabulary)
        eos_id = self._id_of("eos_token", files, EOS_NAMES, vocabulary)
        if eos_id is None:
            cause = f"no eos_token: it has none of {', '.join(EOS_NAMES)}"
            raise TokenizerError(path, cause, f"put a {CONFIG} beside it with eos_token = one of its tokens")
        self.eos_id = eos_id
        decoder = self._tokenizer.get_added_tokens_decoder()
        self._added_names = frozenset(token.content for token in decoder.values())
        self.special_tokens = {token.content: number for number, token in decoder.items() if token.special}
        self.unknown_id = self._tokenizer.token_to_id(_unknown_token(json.loads(content)["model"]) or "")
        if is_current and files.exist:
            self.template_tokens = files.template_tokens
        self.chat_template = template_in(files.config, path)
        self.has_tool_template = has_tool_template(files.config, path)
        self.fingerprint = sha256(content + f"bos {self.bos_id}, eos {self.eos_id}{added}".encode())

    def _id_of(self, key: str, files: CompanionFiles, names: list[str], vocabulary: dict[str, int]) -> int | None:
        """Return the id of bos_token or eos_token. It is guessed by its usual names only if no file says it."""
        try:
            token = files.token(key)
            is_named = token is not None or (self.version >= TOKENIZATION_VERSION and key == "bos_token")
        except LookupError:
            is_named = False
        if not is_named:
            return next((vocabulary[name] for name in names if name in vocabulary), None)
        if token is not None and token not in vocabulary:
            cause = f"{CONFIG} or {MAP} names {token!r} as {key}, which is not in the vocabulary"
            raise TokenizerError(self._path, cause, "take both files from the same model")
        return None if token is None else vocabulary[token]

    def as_hf_files(self) -> dict[str, bytes]:
        """Return its files and those next to it, such as the chat template. References to custom code are dropped."""
        name = self._tokenizer.id_to_token
        bos = None if self.bos_id is None else name(self.bos_id)
        eos = name(self.eos_id)
        assert eos is not None
        exported = hf_export.tokenizer_files(json.loads(self._tokenizer.to_str()), bos, eos)
        paths = {name: self._path.with_name(name) for name in COMPANIONS}
        existing = {name: read_content(file) for name, file in paths.items() if os.path.lexists(file)}
        if CONFIG in existing:
            config = read_json(paths[CONFIG])
            existing[CONFIG] = hf_export.dumped({key: value for key, value in config.items() if key != "auto_map"})
        return exported | existing

    def _encode(self, text: str) -> list[int]:
        return self._encoding_of(text).ids

    def has_token(self, name: str) -> bool:
        return name in self._added_names

    def encode_rendered(
        self, text: str, ranges: Sequence[Range], spelled: Sequence[Range] = ()
    ) -> tuple[list[int], list[Range]]:
        """Encode as transformers' apply_chat_template does; with `spelled`, as with its sanitize_control_tokens: the
        text is cut before and after each of these names."""
        text = without_lone_surrogates(text)
        if not spelled:
            return self._with_ranges(self._encoding_of(text, rendered=True), ranges)
        cuts = [0, *(border for name in spelled for border in name), len(text)]
        ids: list[int] = []
        token_ranges: list[Range] = []
        for number, (begin, end) in enumerate(pairwise(cuts)):
            inner = [(max(first, begin) - begin, min(last, end) - begin) for first, last in ranges]
            inner = [(first, last) for first, last in inner if first < last]
            piece_ids, piece_ranges = self._encode_piece(text[begin:end], inner, number % 2 == 0, after=begin > 0)
            token_ranges += [(len(ids) + first, len(ids) + last) for first, last in piece_ranges]
            ids += piece_ids
        return ids, token_ranges

    def _encode_piece(
        self, text: str, ranges: Sequence[Range], rendered: bool, after: bool
    ) -> tuple[list[int], list[Range]]:
        """Encode a piece of a text. `after`: it stands after another one, so no blank is added in front of it."""
        if not text:
            return [], []
        if after:
            guard = self._encoding_of(GUARD, rendered).ids
            shifted = [(first + len(GUARD), last + len(GUARD)) for first, last in ranges]
            ids, token_ranges = self._with_ranges(self._encoding_of(GUARD + text, rendered), shifted)
            if ids[: len(guard)] == guard:
                count = len(guard)
                return ids[count:], [(max(first - count, 0), last - count) for first, last in token_ranges]
        return self._with_ranges(self._encoding_of(text, rendered), ranges)

    def _encode_with_ranges(self, text: str, ranges: Sequence[Range]) -> tuple[list[int], list[Range]]:
        return self._with_ranges(self._encoding_of(text), ranges)

    def _with_ranges(self, encoding: Any, ranges: Sequence[Range]) -> tuple[list[int], list[Range]]:
        token_ranges = []
        for begin, end in ranges:  # listing all offsets would take a third of the encoding time
            first, last = encoding.char_to_token(begin), encoding.char_to_token(end - 1)
            if first is None or last is None:  # white space without offsets
                return encoding.ids, token_ranges_of(ranges, encoding.offsets)
            while (characters := encoding.token_to_chars(last + 1)) and characters[0] < end:
                last += 1
            token_ranges.append((first, last + 1))
        return encoding.ids, token_ranges

    @cached_property
    def _rendering_tokenizer(self) -> Any:
        """Return the tokenizer that reads special tokens in text. It shares the vocabulary with the one that does not.

        Switching one tokenizer back and forth would not be safe: several threads encode."""
        import tokenizers

        plain = self._tokenizer
        rendering = tokenizers.Tokenizer(plain.model)
        for name in ("normalizer", "pre_tokenizer", "decoder"):
            if getattr(plain, name) is not None:
                setattr(rendering, name, getattr(plain, name))
        added = plain.get_added_tokens_decoder()
        rendering.add_tokens([added[number] for number in sorted(added)])
        if {i: repr(token) for i, token in rendering.get_added_tokens_decoder().items()} != {
            i: repr(token) for i, token in added.items()
        }:  # numbers with gaps
            rendering = tokenizers.Tokenizer.from_str(plain.to_str())
        rendering.encode_special_tokens = False
        return rendering

    def _encoding_of(self, text: str, rendered: bool = False) -> Any:
        tokenizer = self._rendering_tokenizer if rendered else self._tokenizer
        try:
            return tokenizer.encode(text, add_special_tokens=False)
        except BaseException as error:
            raise _translated(error, self._path, text) from None

    def _decode(self, ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=True)
        except BaseException as error:
            raise _translated(error, self._path, f"{len(ids)} tokens") from None


def _unknown_token(model: dict[str, Any]) -> str | None:
    """Return the token that a model gives to text outside its vocabulary."""
    if isinstance(number := model.get("unk_id"), int) and isinstance(model.get("vocab"), list):
        return str(model["vocab"][number][0])
    return model.get("unk_token")


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
    kind = read_json(path.with_name(CONFIG)).get("tokenizer_class", "GPT2Tokenizer")
    family = str(kind).removesuffix("Fast").removesuffix("Tokenizer")
    if family not in ("GPT2", "Roberta", "Qwen2"):
        cause = f"tokenizer_config.json says {kind!r}, and vocab.json alone does not tell how that one splits text"
        raise TokenizerError(path, cause, "give its tokenizer.json (AutoTokenizer's save_pretrained writes one)")
    vocabulary = read_json(path)
    merges = read_content(path.with_name("merges.txt")).decode(errors="replace").split("\n")
    pairs = [line.split(" ") for line in merges if line.strip() and not line.startswith("#version")]
    if any(type(i) is not int for i in vocabulary.values()) or any(len(pair) != 2 for pair in pairs):
        cause = "vocab.json is no table of tokens to ids, or a line of merges.txt is no pair"
        raise TokenizerError(path, cause, "fetch both again")
    added = read_json(path.with_name("added_tokens.json"))
    special = {name: i for name, i in (vocabulary | added).items() if name in added or name in (*BOS_NAMES, *EOS_NAMES)}
    tokenizer_json = hf_export.letters_bpe_json(vocabulary, pairs, special, qwen=family == "Qwen2")
    return hf_export.dumped(tokenizer_json, indent=None)


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
