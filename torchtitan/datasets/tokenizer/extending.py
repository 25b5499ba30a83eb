"""Special tokens that a tokenizer is to have beside its own, as the files by which it is opened then."""

import json
from collections.abc import Sequence
from typing import Any

from torchtitan.datasets.tokenizer import hf_files
from torchtitan.datasets.tokenizer.base import Tokenizer
from torchtitan.datasets.tokenizer.chat_templates import template_file
from torchtitan.errors import JobError

SHORTEST = 2
"""Letters of a special token: one alone is in what people write."""
MAP, ADDED, CONFIG = "special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"


def lacking(vocabulary: Tokenizer, tokens: Sequence[str]) -> list[str]:
    """Those that are no special tokens yet, each once. JobError for what cannot be one."""
    new = [token for token in dict.fromkeys(tokens) if token not in vocabulary.special_tokens]
    for token in new:
        if len(token) < SHORTEST or token != token.strip():
            allowed = f"at least {SHORTEST} letters, without blanks around them"
            raise JobError(f"token {token!r}: allowed: {allowed}; what people write is not to be taken for it")
    return new


def extended(vocabulary: Tokenizer, tokens: Sequence[str], eos: str | None) -> dict[str, bytes]:
    """Name -> content of its files with these special tokens, which it lacks, behind all others, and with `eos` as the
    one that ends a document. Text becomes the ids that it became. JobError for a kind that has no such files, and for
    tokens that it has as ordinary ones.
    """
    import tokenizers

    try:
        files = vocabulary.as_hf_files() | template_file(vocabulary)
    except JobError as error:
        remedy = "write its tokenizer.json first (AutoTokenizer's save_pretrained does)"
        raise JobError(f"the tokenizer cannot be given tokens: {error}; {remedy}") from error
    opened = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    known = opened.get_vocab()
    if ordinary := [token for token in tokens if token in known]:
        number = known[ordinary[0]]
        raise JobError(f"token {ordinary[0]!r}: text becomes it already, as number {number}; give it another name")
    if eos is not None and eos not in known and eos not in tokens:
        raise JobError(f"eos token {eos!r}: the tokenizer has no such token; add it too")
    opened.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in tokens])
    numbers = {token: opened.token_to_id(token) for token in tokens}
    expected = range(vocabulary.vocab_size, vocabulary.vocab_size + len(tokens))
    if list(numbers.values()) != list(expected):
        remedy = "number them without gaps, or take the tokenizer of the model's own repository"
        raise JobError(f"the tokenizer cannot be given tokens: its own are {len(known)}, up to number "
                       f"{vocabulary.vocab_size - 1}; {remedy}")  # fmt: skip
    return files | {"tokenizer.json": opened.to_str().encode()} | _beside(files, opened, numbers, eos)


def _beside(files: dict[str, bytes], opened: Any, numbers: dict[str, Any], eos: str | None) -> dict[str, bytes]:
    """What stands beside tokenizer.json, as far as it is there and tells of tokens."""
    ends = {} if eos is None else {"eos_token": eos}
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
    changes = {CONFIG: {"added_tokens_decoder": listed} | ends, MAP: ends, ADDED: numbers}
    found = {name: json.loads(files[name]) | more for name, more in changes.items() if name in files}
    return {name: hf_files.dumped(content) for name, content in found.items()}
