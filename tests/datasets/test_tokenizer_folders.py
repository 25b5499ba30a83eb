"""Tokenizer folders, valid and mutated: the ids of transformers, or a refusal; nothing else."""

import random
from collections import Counter

import pytest
from transformers import AutoTokenizer

from tests.support.tokenizer_folders import CHATS, KINDS, TEXTS, files_of, mutate, write
from torchtitan.core.errors import JobError
from torchtitan.datasets.encoding import encode, prompt_ids
from torchtitan.datasets.sources import Chat, Document
from torchtitan.datasets.tokenizer import build_tokenizer


def messages(chat):
    return [{"role": role, "content": content} for role, content in chat]


def chats_for(kind):
    """Return conversations. WordPiece has no token for the blank before an answer, at which transformers stops: it
    marks neither this answer nor those after it."""
    if kind != "wordpiece":
        return CHATS
    return [[(role, content.strip()) for role, content in chat] for chat in CHATS]


def ids_of_transformers(folder, chats=CHATS):
    """Return the ids of conversations, with their masks, of their prompts and of texts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encodings = []
    for chat in chats:
        options = dict(return_dict=True, return_assistant_tokens_mask=True)
        encoding = tokenizer.apply_chat_template(messages(chat), **options)
        prompt = tokenizer.apply_chat_template(messages(chat[:1]), add_generation_prompt=True)["input_ids"]
        encodings.append((encoding["input_ids"], encoding["assistant_masks"], prompt))
    return encodings, [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS], tokenizer.bos_token_id


def ids_here(folder, chats=CHATS):
    tokenizer = build_tokenizer(str(folder))
    encodings = []
    for chat in chats:
        tokens = encode(tokenizer, Document(Chat(messages(chat)), "a.jsonl:1"))
        prompt = prompt_ids(tokenizer, messages(chat[:1]), "a.jsonl:1")
        encodings.append((tokens.ids.tolist(), tokens.loss_mask.astype(int).tolist(), prompt))
    return encodings, [tokenizer.encode(text) for text in TEXTS], tokenizer.bos_id


@pytest.mark.parametrize("kind", KINDS)
def test_valid_folders(kind, tmp_path):
    files = files_of(kind)
    folder = write(tmp_path / "t", files)
    assert ids_here(folder, chats_for(kind)) == ids_of_transformers(folder, chats_for(kind))


@pytest.mark.parametrize("flags", [("rstrip",), ("lstrip",), ("single_word",), ("lstrip", "rstrip"), ("normalized",)])
@pytest.mark.parametrize("kind", KINDS)
def test_flags_of_added_tokens(kind, flags, tmp_path):
    files = files_of(kind)
    for name in ("<|user|>", "<|assistant|>"):
        token = next(t for t in files["tokenizer.json"]["added_tokens"] if t["content"] == name)
        token |= dict.fromkeys(flags, True)
        files["tokenizer_config.json"]["added_tokens_decoder"][str(token["id"])] |= dict.fromkeys(flags, True)
    folder = write(tmp_path / "t", files)
    assert ids_here(folder, chats_for(kind)) == ids_of_transformers(folder, chats_for(kind))


def test_mutated_folders(tmp_path, is_full_run):
    """Seeded mutations of every kind. What transformers itself fails on is only read in two harmless forms: a token
    as an object without its type, and an option that is off by another value than false."""
    draw, outcomes = random.Random(7), Counter()
    for number in range(1500 if is_full_run else 280):
        kind = KINDS[number % len(KINDS)]
        files = files_of(kind)
        change = mutate(files, draw)
        folder = write(tmp_path / str(number), files)
        try:
            ours = ids_here(folder, chats_for(kind))
        except JobError:
            outcomes["refused"] += 1
            continue
        try:
            expected = ids_of_transformers(folder, chats_for(kind))
        except TypeError:
            outcomes["read here alone"] += 1
            continue
        assert ours == expected, f"{kind}: {change}"
        outcomes["equal"] += 1
    assert outcomes["equal"] > outcomes.total() / 2 and outcomes["read here alone"] < outcomes.total() / 50
