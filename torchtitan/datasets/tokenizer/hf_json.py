"""Hugging Face's tokenizer.json. Which tokens begin and end a document stands in the tokenizer_config.json beside it,
if there is one; else they are found by the names that are in use."""

import json
from pathlib import Path
from typing import Any

from torchtitan.datasets.tokenizer.base import Tokenizer, TokenizerError, read_content, sha256

# <|endoftext|> both begins and ends a document in the GPT-2 family.
BOS_NAMES = ["<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]", "<|endoftext|>", "[CLS]"]
EOS_NAMES = ["<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "[EOS]", "[SEP]"]


class HuggingFaceTokenizer(Tokenizer):
    def __init__(self, path: Path, content: bytes) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing narrower
            cause = f"not a complete tokenizer.json ({error})"
            raise TokenizerError(path, cause, "fetch it again, from a model that has a fast tokenizer") from None
        # What the file says about batches of model inputs is not meant for a stream of text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab()
        config_path = path.with_name("tokenizer_config.json")
        config = _read_config(config_path) if config_path.exists() else {}
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos_id = _find("bos_token", config, BOS_NAMES, vocabulary, path)
        self.eos_id = _find("eos_token", config, EOS_NAMES, vocabulary, path)
        self.fingerprint = sha256(content + f"bos {self.bos_id}, eos {self.eos_id}".encode())

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_content(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(path, f"not JSON ({error})", "fetch it again, or remove it") from None
    if not isinstance(config, dict):
        raise TokenizerError(path, f"a {type(config).__name__} instead of an object", "fetch it again, or remove it")
    return config


def _find(key: str, config: dict[str, Any], names: list[str], vocabulary: dict[str, int], path: Path) -> int:
    said = config.get(key)
    if isinstance(said, dict):  # older files describe the token instead of naming it
        said = said.get("content")
    if said is not None:
        if not isinstance(said, str) or said not in vocabulary:
            cause = f"tokenizer_config.json names {said!r} as {key}, which is not in the vocabulary"
            raise TokenizerError(path, cause, "take both files from the same model")
        return vocabulary[said]
    for name in names:
        if name in vocabulary:
            return vocabulary[name]
    cause = f"no {key}: it has none of {', '.join(names)}"
    raise TokenizerError(path, cause, f"put a tokenizer_config.json beside it with {key} = one of its tokens")
