"""Tokenizer folders, valid and mutated: the ids of transformers, or a refusal; nothing else."""

import random
import shutil
from collections import Counter

import pytest
from transformers import AutoTokenizer

from tests.support.jobs import ROOT
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
    for number in range(800 if is_full_run else 280):
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


@pytest.mark.parametrize(
    "name, changes, message",
    [
        (
            "tokenizer_config.json",
            {"next_month": 1},
            "tokenizer_config.json has a key .* next_month = 1; .*ignore_config_k",
        ),
        (
            "tokenizer_config.json",
            {"split_special_tokens": True},
            "split_special_tokens is on, which splits the special",
        ),
        (
            "tokenizer_config.json",
            {"add_prefix_space": True},
            "add_prefix_space: tokenizer_config.json's .* must be equal",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"4": {"content": "a", "odd": 1}}},
            "is damaged .*allowed in a",
        ),
        ("tokenizer_config.json", {"extra_special_tokens": 7}, "is 7, which is no list"),
        (
            "special_tokens_map.json",
            {"eos_token": "<s>"},
            "its eos_token is '<s>', but '</s>' in tokenizer_config.json",
        ),
        ("special_tokens_map.json", {"odd": "x"}, "special_tokens_map.json has a key .* odd = 'x'"),
        ("added_tokens.json", {"x": "y"}, "added_tokens.json: no table of tokens to their numbers"),
        ("tokenizer.json", {"odd": {"a": 1}}, "not a complete tokenizer.json|tokenizer.json has a key"),
    ],
)
def test_files_that_cannot_be_read_are_refused(name, changes, message, tmp_path):
    files = files_of("byte level")
    if name == "added_tokens.json":
        del files["tokenizer_config.json"]["added_tokens_decoder"]
    files.setdefault(name, {}).update(changes)
    with pytest.raises(JobError, match=message):
        build_tokenizer(str(write(tmp_path / "t", files)))


def test_dropout_is_refused_and_an_unknown_key_can_be_ignored(tmp_path):
    files = files_of("byte level")
    files["tokenizer_config.json"]["next_month"] = 1
    folder = write(tmp_path / "t", files)
    assert build_tokenizer(str(folder), ignored_keys=["next_month"]).eos_id == 2
    files["tokenizer.json"]["model"]["dropout"] = 0.1
    del files["tokenizer_config.json"]["next_month"]
    with pytest.raises(JobError, match="drops merges at random .dropout., so that the same text has other ids"):
        build_tokenizer(str(write(tmp_path / "u", files)))


@pytest.mark.parametrize("file", ["tiktoken.model", "sentencepiece.model"])
def test_files_next_to_other_kinds_of_tokenizers(file, tmp_path):
    source = ROOT / "tests/assets/tokenizer" / file
    plain = build_tokenizer(str(source))
    bos, eos = (
        next(name for name, i in plain.special_tokens.items() if i == id_) for id_ in (plain.bos_id, plain.eos_id)
    )
    for config, message in [
        ({"bos_token": "<new>"}, "bos_token next to it is '<new>', which it does not have"),
        ({"added_tokens_decoder": {"9999": {"content": "<new>"}}}, "the files next to it add '<new>'"),
        ({"odd": 1}, "tokenizer_config.json has a key"),
        ({"bos_token": None}, None),
        ({"bos_token": bos, "eos_token": bos}, None),
    ]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write(folder, {"tokenizer_config.json": config | {"chat_template": "x"}})
        shutil.copy(source, folder)
        if message is not None:
            with pytest.raises(JobError, match=message):
                build_tokenizer(str(folder))
            continue
        ours = build_tokenizer(str(folder))
        assert ours.bos_id == (plain.bos_id if config["bos_token"] else None)
        assert ours.eos_id == (plain.bos_id if "eos_token" in config else plain.eos_id) and eos
        assert ours.fingerprint != plain.fingerprint and ours.encode("def f") == plain.encode("def f")
        assert build_tokenizer(str(folder), version=2).bos_id == plain.bos_id


@pytest.mark.parametrize("kind", ["byte level", "metaspace first"])
def test_special_tokens_in_a_table_of_transformers_5_are_read(kind, tmp_path):
    """As Gemma 3's image tokens; here a new one, which gets a number of its own."""
    files = files_of(kind)
    key = "tokenizer_config.json"
    files[key] = {**files[key], "model_specific_special_tokens": {"image_token": "alpha"}, "from_slow": True}
    folder = write(tmp_path / "t", files)
    assert ids_here(folder, chats_for(kind)) == ids_of_transformers(folder, chats_for(kind))
