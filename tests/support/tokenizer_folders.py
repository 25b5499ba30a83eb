"""Small tokenizer folders of transformers, of six kinds, and seeded mutations of their files."""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = Path(argparse.__file__).read_text()[:20000].splitlines()
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>\\n' }}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- '<|user|>\\n' + m.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""
CHATS = [
    [("user", "def main(args):"), ("assistant", "return  None")],
    [("user", " two  words\n"), ("assistant", "\n a list"), ("user", "é x"), ("assistant", "self.parser = 3 ")],
]
TEXTS = ["def add_argument(self):", " a  line\n\nand\tmore ", "Ünïcode é \U0001f600", ""]


def train(kind: str) -> tokenizers.Tokenizer:
    """Return a small tokenizer of a kind in KINDS, without added tokens but those that its model needs."""
    if kind == "wordpiece":
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL)
    elif kind == "unigram":
        tokenizer = tokenizers.Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        trainer = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=SPECIAL)
    elif kind.startswith("metaspace"):
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=False))
        scheme = kind.removeprefix("metaspace ")
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, max_token_length=8)
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE())
        pattern = pre_tokenizers.Split(
            tokenizers.Regex(r"\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+|[^\s\p{L}\p{N}]+"), "isolated"
        )
        ready = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "byte level")
        tokenizer.pre_tokenizer = ready if kind == "byte level" else pre_tokenizers.Sequence([pattern, ready])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS = ["byte level", "tiktoken", "metaspace first", "metaspace always", "metaspace never", "unigram", "wordpiece"]
_trained: dict[str, dict[str, Any]] = {}


def files_of(kind: str) -> dict[str, dict[str, Any]]:
    """Return file name -> content of a valid folder: tokenizer.json, its configuration and its map."""
    if kind not in _trained:
        _trained[kind] = json.loads(train(kind).to_str())
    tokenizer_json = json.loads(json.dumps(_trained[kind]))
    listed = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in tokenizer_json["added_tokens"]}
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": listed,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        **named,
    }
    return {"tokenizer.json": tokenizer_json, "tokenizer_config.json": config, "special_tokens_map.json": dict(named)}


VALUES = [None, True, 7, "", "<s>", "</s>", "<|end|>", "<new>", [], ["<|end|>"], {}, {"content": "<s>"}, "e"]
CONFIG_KEYS = ["bos_token", "eos_token", "unk_token", "pad_token", "mask_token", "image_token", "cls_token"]
CONFIG_KEYS += ["additional_special_tokens", "extra_special_tokens", "added_tokens_decoder", "split_special_tokens"]
CONFIG_KEYS += ["add_prefix_space", "add_bos_token", "clean_up_tokenization_spaces", "legacy", "next_month"]
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def mutate(files: dict[str, dict[str, Any]], draw: random.Random) -> str:
    """Change one to three entries of the files, and return a description."""
    changes = []
    for _ in range(draw.choice([1, 1, 2, 3])):
        change = draw.choice(["config", "config", "map", "map", "flag", "flag", "entry", "unlisted", "added", "files"])
        config = files["tokenizer_config.json"]
        if change in ("config", "map"):
            content = config if change == "config" else files.setdefault("special_tokens_map.json", {})
            keys = CONFIG_KEYS if change == "config" else CONFIG_KEYS[:6] + CONFIG_KEYS[7:9]
            key = draw.choice(keys)
            if draw.random() < 0.3:
                content.pop(key, None)
                changes.append(f"{change} without {key}")
            else:
                content[key] = draw.choice(VALUES)
                changes.append(f"{change} {key} = {content[key]!r}")
        elif change == "flag":  # of an added token in tokenizer.json
            token, flag = draw.choice(files["tokenizer.json"]["added_tokens"]), draw.choice(FLAGS)
            token[flag] = not token[flag]
            changes.append(f"tokenizer.json {token['content']} {flag}")
            entries = config.get("added_tokens_decoder")
            entry = entries.get(str(token["id"])) if isinstance(entries, dict) else None
            if isinstance(entry, dict) and draw.random() < 0.7:
                entry[flag] = token[flag]
                changes[-1] += " in both"
        elif change == "entry":
            entries = config.get("added_tokens_decoder")
            if isinstance(entries, dict) and entries:
                number = draw.choice(list(entries))
                entries[number] = draw.choice([None, {}, {"content": "<new>"}, {**(entries[number] or {}), "odd": 1}])
                changes.append(f"entry {number} = {entries[number]!r}")
        elif change == "unlisted":
            config.pop("added_tokens_decoder", None)
            changes.append("no added_tokens_decoder")
        elif change == "added":
            files["added_tokens.json"] = draw.choice(
                [{"<new>": 400}, {"<new>": 3}, {"<|end|>": 5}, {"def": 9}, {"x": "y"}]
            )
            changes.append(f"added_tokens.json {files['added_tokens.json']}")
        else:
            name = draw.choice(["special_tokens_map.json", "tokenizer_config.json"])
            if name == "special_tokens_map.json":
                files.pop(name, None)
                changes.append(f"no {name}")
    return "; ".join(changes)


def write(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
