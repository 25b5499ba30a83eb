"""The tokenizer in a GGUF file, made from tokenizer.json.

llama.cpp has two of its kinds: byte-level BPE, whose text is split by one of the patterns that it knows by name, and
sentencepiece BPE, which merges by the scores of pieces. Others are refused.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.datasets.tokenizer.byte_level import PATTERN
from torchtitan.datasets.tokenizer.hf_export import QWEN2

SPLITS = {PATTERN: "llama-bpe", QWEN2: "qwen2"}
"""llama.cpp's name of a pattern that splits text before byte-level BPE."""
GPT2, DIGITS = "gpt-2", "refact"
"""The pattern of GPT-2, alone and after each digit is split off."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens in a GGUF file."""
REFUSAL = (
    "--format gguf: the tokenizer {}, which llama.cpp cannot be told; export a Hugging Face folder (without --format)"
)


def vocabulary_fields(files: Mapping[str, bytes], config: Mapping[str, Any], begins: bool) -> dict[str, Any]:
    """Return the metadata of the tokenizer: names of the writer's `add_` functions, and their arguments.

    `begins`: a prompt begins with the token that begins documents. Raises JobError for a kind that llama.cpp lacks.
    """
    content = json.loads(files["tokenizer.json"])
    model, added = content["model"], content["added_tokens"]
    if model.get("type", "BPE") != "BPE":
        raise JobError(REFUSAL.format(f"is of the kind {model['type']}"))
    tokens = {id_: (token, NORMAL) for token, id_ in model["vocab"].items()}
    tokens |= {entry["id"]: (entry["content"], CONTROL if entry["special"] else USER_DEFINED) for entry in added}
    is_byte_level = any(step["type"] == "ByteLevel" for step in _steps(content["pre_tokenizer"]))
    merges = [entry if isinstance(entry, str) else " ".join(entry) for entry in model["merges"]]
    if not is_byte_level:
        bytes_of_pieces = {f"<0x{byte:02X}>" for byte in range(256)}
        unknown = model.get("unk_token")
        tokens |= {id_: (token, BYTE) for id_, (token, _) in tokens.items() if token in bytes_of_pieces}
        tokens |= {id_: (token, UNKNOWN) for id_, (token, _) in tokens.items() if token == unknown}
    size = config["vocab_size"]
    listed = [tokens.get(id_, (f"[unused{id_}]", UNUSED)) for id_ in range(size)]
    fields: dict[str, Any] = {"token_list": [token for token, _ in listed], "token_types": [kind for _, kind in listed]}
    if is_byte_level:
        fields |= {"tokenizer_model": "gpt2", "tokenizer_pre": _split_name(content), "token_merges": merges}
    else:
        ranks = {merge.replace(" ", "", 1): -float(rank) for rank, merge in reversed([*enumerate(merges)])}
        scores = [ranks.get(token, 0.0) for token in fields["token_list"]]
        fields |= {"tokenizer_model": "llama", "tokenizer_pre": "default", "token_scores": scores}
        fields |= {"add_space_prefix": _adds_blank(content)}
    template = files.get("chat_template.jinja")
    fields |= _special_tokens(files) | {"add_bos_token": begins, "add_eos_token": False}
    return fields | ({"chat_template": template.decode()} if template else {})


def _special_tokens(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the ids of the tokens that begin and end texts, and of the others that llama.cpp knows by purpose."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer_config, generation = (
        json.loads(files["tokenizer_config.json"]),
        json.loads(files["generation_config.json"]),
    )
    fields: dict[str, Any] = {}
    for key in ("bos", "eos", "unk", "pad"):
        token = tokenizer_config.get(f"{key}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token is not None:
            fields[f"{key}_token_id"] = tokenizer.token_to_id(token)
    ends = generation.get("eos_token_id")
    turn_ends = [end for end in ends if end != fields.get("eos_token_id")] if isinstance(ends, list) else []
    if turn_ends:
        fields["eot_token_id"] = turn_ends[-1]
    return fields


def _steps(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, which may be a sequence of them."""
    if value is not None and value["type"] == "Sequence":
        for step in value.get("normalizers") or value.get("pretokenizers") or []:
            yield from _steps(step)
    elif value is not None:
        yield value


def _split_name(content: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for how a byte-level tokenizer splits text. Raises JobError if it has none."""
    if unknown := [step["type"] for step in _steps(content["normalizer"]) if step["type"] != "NFC"]:
        raise JobError(REFUSAL.format(f"changes text by {unknown[0]}"))
    *splits, last = _steps(content["pre_tokenizer"])
    if last.get("add_prefix_space") or last["type"] != "ByteLevel":
        raise JobError(REFUSAL.format("puts a blank in front of a text"))
    if not content["model"]["merges"] or (not splits and last.get("use_regex", True)):
        return GPT2  # without merges every byte is a token, however the text is split
    patterns = [step.get("pattern", {}).get("Regex", step["type"]) for step in splits]
    if len(splits) == 1 and splits[0]["type"] == "Digits" and splits[0]["individual_digits"]:
        if last.get("use_regex", True):
            return DIGITS
    elif len(patterns) == 1 and patterns[0] in SPLITS and not last.get("use_regex", True):
        return SPLITS[patterns[0]]
    raise JobError(REFUSAL.format(f"splits text by {' and '.join(map(repr, patterns))}"))


def _adds_blank(content: Mapping[str, Any]) -> bool:
    """Return True if a sentencepiece tokenizer puts a blank in front of a text. JobError for other changes of it."""
    steps = [*_steps(content["normalizer"]), *_steps(content["pre_tokenizer"])]
    has_blanks = True
    for step in steps:
        of_blanks = step.get("pattern") == {"String": " "}
        if step["type"] == "Replace" and of_blanks:
            has_blanks = False
        elif step["type"] not in ("Prepend", "Metaspace") and (has_blanks or not of_blanks or step["type"] != "Split"):
            raise JobError(REFUSAL.format(f"changes text by {step['type']}"))  # Gemma's split finds no blank any more
    return any(
        step["type"] == "Prepend" or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
