"""The files of transformers next to a tokenizer: tokenizer_config.json, special_tokens_map.json, added_tokens.json.

They mean what transformers 5 makes of them. If tokenizer_config.json lists its added tokens (added_tokens_decoder),
transformers reads neither of the other two; otherwise special_tokens_map.json overrides it. Here files that contradict
each other are refused. Every key is used, known to be harmless, or refused by name.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.core.files import DeclaredKeys, agreed_value, load_json
from torchtitan.datasets.tokenizer.base import TokenizerError, read_content
from torchtitan.datasets.tokenizer.chat_templates import resolve_template

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
COMPANIONS = (CONFIG, MAP, "chat_template.jinja", "chat_template.json", ADDED)
"""Files that belong to a tokenizer.json and are copied with it."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")
"""Names of the list of further special tokens, in transformers 5 and before."""
LISTED = "added_tokens_decoder"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
DEFAULT_TOKENS: dict[str, tuple[str | None, str | None]] = {
    "GPT2Tokenizer": ("<|endoftext|>", "<|endoftext|>"),
    "Qwen2Tokenizer": (None, "<|endoftext|>"),
    "LlamaTokenizer": ("<s>", "</s>"),
    "RobertaTokenizer": ("<s>", "</s>"),
    "T5Tokenizer": (None, "</s>"),
    "GemmaTokenizer": ("<bos>", "<eos>"),
    "PreTrainedTokenizer": (None, None),
    "TokenizersBackend": (None, None),
}
"""Tokenizer class -> its bos_token and eos_token where its configuration names none."""
REMEDY = "take the file of the model's own repository, or name the key in model.ignore_config_keys if it has no effect"


def _names(*texts: str) -> frozenset[str]:
    return frozenset(name for text in texts for name in text.split())


CONFIG_KEYS = DeclaredKeys(
    used=_names(
        *NAMED_TOKENS, *EXTRA_TOKENS, LISTED, "chat_template tokenizer_class split_special_tokens",
        "add_prefix_space do_lower_case strip_accents tokenize_chinese_chars",
    ),
    harmless=_names(  # about decoding, batches, slow tokenizers, or what stands around a text
        "add_bos_token add_eos_token auto_map backend chat_control_tokens clean_up_tokenization_spaces "
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output device_map do_basic_tokenize errors "
        "extra_ids files_loaded from_slow init_inputs is_local legacy local_files_only max_len max_length "
        "model_input_names model_max_length name_or_path never_split pad_to_multiple_of pad_token_type_id padding "
        "padding_side processor_class response_schema response_template return_token_type_ids sp_model_kwargs "
        "spaces_between_special_tokens special_tokens_map_file stride tokenizer_file tokenizer_type trim_offsets "
        "truncation truncation_side truncation_strategy trust_remote_code unk_id use_default_system_prompt use_fast "
        "verbose vocab_size"
    ),
)  # fmt: skip
MAP_KEYS = DeclaredKeys(used=_names(*NAMED_TOKENS, *EXTRA_TOKENS))
JSON_KEYS = DeclaredKeys(
    used=_names("added_tokens normalizer pre_tokenizer post_processor decoder model"),
    harmless=_names("version truncation padding"),
)
"""tokenizer.json. Truncation and padding are for batches of model inputs, not for a stream of text."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file; empty if it does not exist."""
    if not os.path.lexists(path):
        return {}
    content = parsed_json(path, read_content(path))
    if not isinstance(content, dict):
        raise TokenizerError(path, f"a {type(content).__name__} instead of an object", "fetch it again, or remove it")
    return content


def parsed_json(path: Path, content: bytes) -> Any:
    """Return the value of a file's JSON."""
    try:
        return load_json(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(path, f"not JSON ({error})", "fetch it again, or remove it") from None


class CompanionFiles:
    """The files next to a tokenizer's file at `path`. Raises TokenizerError for what cannot be read.

    `strict`: refuse unknown keys and contradictions; runs that began with earlier versions never refused them."""

    def __init__(self, path: Path, ignored_keys: Collection[str] = (), strict: bool = True) -> None:
        self.path = path
        self.config, self.map, self.added = (
            {key: value for key, value in read_json(path.with_name(name)).items() if key not in ignored_keys}
            for name in (CONFIG, MAP, ADDED)
        )
        if not strict:
            return
        table = self.config.pop("model_specific_special_tokens", None) or {}  # transformers 5, as of Gemma 3
        self.config |= table if isinstance(table, dict) else {"model_specific_special_tokens": table}
        for name, content, keys in ((CONFIG, self.config, CONFIG_KEYS), (MAP, self.map, MAP_KEYS)):
            tokens = _tokens_in(content)
            further = {key: value for key, value in content.items() if key not in tokens}
            keys.check(further, f"tokenizer {path.with_name(name)}", REMEDY)
        if self.config.get("split_special_tokens"):
            raise self._error(CONFIG, "split_special_tokens is on, which splits the special tokens of a chat template")
        for key in _tokens_in(self.config).keys() & _tokens_in(self.map).keys():
            self._check_equal(key, *(self._content(key, content[key]) for content in (self.config, self.map)))

    @property
    def exist(self) -> bool:
        """True if a file names special tokens, or says that there are none."""
        return any(os.path.lexists(self.path.with_name(name)) for name in (CONFIG, MAP))

    @cached_property
    def tokens(self) -> dict[str, Any]:
        """Return the entries that transformers reads: bos_token and the like -> a name, null, or an object with flags.

        A begin token that only special_tokens_map.json names, where transformers does not read it, is refused."""
        config, mapped = _tokens_in(self.config), _tokens_in(self.map)
        if LISTED not in self.config:
            return config | mapped
        if "bos_token" in mapped and "bos_token" not in config:
            self._check_equal("bos_token", None, self._content("bos_token", mapped["bos_token"]))
        return config

    def token(self, key: str) -> str | None:
        """Return the token of documents: `bos_token` or `eos_token`; None if there is none.

        Raises LookupError if the files leave it to the tokenizer's class, and the class is not known."""
        sources = [content for content in (self.tokens, _tokens_in(self.map)) if key in content]
        if sources:
            return self._content(key, sources[0][key])
        kind = str(self.config["tokenizer_class"]).removesuffix("Fast")
        return DEFAULT_TOKENS[kind][("bos_token", "eos_token").index(key)]

    @property
    def template_tokens(self) -> dict[str, str]:
        """Return the variables of a chat template: bos_token and the like -> special token."""
        contents = {key: self._content(key, value) for key, value in self.tokens.items()}
        return {key: content for key, content in contents.items() if content is not None}

    def add_earlier_tokens(self, tokenizer: Any) -> None:
        """Add the tokens of added_tokens_decoder that are not in the vocabulary, as versions up to 2 did."""
        vocabulary = tokenizer.get_vocab()
        listed = self._listed_tokens() if LISTED in self.config else []
        self._append(tokenizer, [token for token in listed if token.content not in vocabulary])

    def add_tokens(self, tokenizer: Any) -> list[Any]:
        """Add the tokens that a tokenizers.Tokenizer lacks, as transformers does, and return them.

        They are appended in the order of their numbers. The numbers themselves are not used: they may belong to a
        larger vocabulary."""
        import tokenizers

        existing = tokenizer.get_added_tokens_decoder().values()
        existing_tokens = {repr(token) for token in existing}
        tokens = [token for token in self._listed_tokens() if repr(token) not in existing_tokens]
        contents = {token.content for token in (*existing, *tokens)}
        named_tokens = {key: self.tokens[key] for key in sorted(self.tokens, key=_order)}
        special = [*named_tokens.items(), *((EXTRA_TOKENS[0], value) for value in self._extra_tokens())]
        names = {self._content(key, value) for key, value in named_tokens.items()}
        for token in tokens:
            token.special = token.special or token.content in names
        for key, value in special:
            if (content := self._content(key, value)) and content not in contents:
                if key in ("bos_token", "eos_token") and tokenizer.token_to_id(content) is None:
                    cause = f"it or {MAP} names {content!r} as {key}, which is not in the vocabulary"
                    raise self._error(CONFIG, cause, "take both files from the same model")
                contents.add(content)
                flags = {flag: bool(value[flag]) for flag in FLAGS if flag in value} if isinstance(value, dict) else {}
                tokens.append(tokenizers.AddedToken(content, **flags | {"special": True}))
        self._append(tokenizer, tokens)
        return tokens

    def _append(self, tokenizer: Any, tokens: Sequence[Any]) -> None:
        vocabulary = tokenizer.get_vocab()
        ids = set(vocabulary.values())
        for token in tokens:
            tokenizer.add_tokens([token])
            number = tokenizer.token_to_id(token.content)
            if token.content not in vocabulary and number in ids:
                raise self._damaged(f"{token.content} would be number {number}, which is another token's")

    def _listed_tokens(self) -> list[Any]:
        """Return the added tokens of added_tokens_decoder, or of added_tokens.json, as tokenizers.AddedToken."""
        if LISTED not in self.config and not self.added:
            return []  # without importing the library, which other kinds of tokenizers do not need
        import tokenizers

        try:
            if LISTED in self.config:
                entries = sorted(self.config[LISTED].items(), key=lambda item: int(item[0]))
                if any(flag not in (*FLAGS, "content", "__type") for _, entry in entries for flag in entry):
                    raise ValueError(f"allowed in a token: content, {', '.join(FLAGS)}")
                flags = [{flag: entry[flag] for flag in FLAGS if flag in entry} for _, entry in entries]
                contents = [entry["content"] for _, entry in entries]
                return [tokenizers.AddedToken(c, **f) for c, f in zip(contents, flags, strict=True)]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"{type(error).__name__}: {error}") from None
        if any(type(number) is not int for number in self.added.values()):
            raise self._error(ADDED, "no table of tokens to their numbers")
        special = {*self.template_tokens.values(), *(self._content(ADDED, token) for token in self._extra_tokens())}
        return [
            tokenizers.AddedToken(name, normalized=name not in special, special=name in special)
            for name in sorted(self.added, key=lambda name: int(self.added[name]))
        ]

    def listed_contents(self) -> list[str]:
        """Return the names of the added tokens."""
        return [token.content for token in self._listed_tokens()]

    def _extra_tokens(self) -> list[Any]:
        """Return the further special tokens. transformers 5 calls their list extra_special_tokens."""
        lists = []
        for content in (self.config, self.map) if LISTED not in self.config else (self.config,):
            for value in (content[key] for key in EXTRA_TOKENS if content.get(key) is not None):
                lists.append([*value.values()] if isinstance(value, dict) else value)
                if not isinstance(value, list | dict):
                    raise self._error(CONFIG, f"{EXTRA_TOKENS[0]} or {EXTRA_TOKENS[1]} is {value!r}, which is no list")
        names = [{self._content(EXTRA_TOKENS[0], token) for token in tokens} for tokens in lists]
        for further in names[1:]:
            self._check_equal(" or ".join(EXTRA_TOKENS), sorted(map(str, names[0])), sorted(map(str, further)))
        return lists[0] if lists else []

    def _content(self, key: str, value: Any) -> str | None:
        content = value.get("content", {}) if isinstance(value, dict) else value
        if not isinstance(content, str | None):
            raise self._error(CONFIG, f"it or {MAP} names {value!r} as {key}, which is no token")
        return content

    def _check_equal(self, key: str, configured: Any, mapped: Any) -> None:
        if configured != mapped:
            cause = f"its {key} is {mapped!r}, but {configured!r} in {CONFIG}"
            raise self._error(MAP, cause, "make them equal, or remove the wrong one")

    def _damaged(self, cause: str) -> TokenizerError:
        return self._error(CONFIG, f"{LISTED} of {CONFIG} is damaged ({cause})", "fetch it again, or remove it")

    def _error(
        self, name: str, cause: str, remedy: str = "take the file of the model's own repository"
    ) -> TokenizerError:
        return TokenizerError(self.path.with_name(name), cause, remedy)


def _tokens_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a file that name one special token, such as bos_token or image_token."""
    return {
        key: value
        for key, value in content.items()
        if key in NAMED_TOKENS
        or key.endswith("_token")
        and (isinstance(value, str) or isinstance(value, dict) and "__type" in value)
    }


def _order(key: str) -> int:
    return NAMED_TOKENS.index(key) if key in NAMED_TOKENS else len(NAMED_TOKENS)


def check_steps(tokenizer_json: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> None:
    """Raise JobError if tokenizer.json has unknown keys, draws at random, or contradicts tokenizer_config.json."""
    JSON_KEYS.check(tokenizer_json, f"tokenizer {path}", REMEDY)
    if tokenizer_json["model"].get("dropout"):
        cause = "its model drops merges at random (dropout), so that the same text has other ids each time"
        raise TokenizerError(path, cause, "set dropout to null")
    steps = list(_steps(tokenizer_json.get("normalizer"))) + list(_steps(tokenizer_json.get("pre_tokenizer")))
    facts = [
        ("add_prefix_space", "ByteLevel", lambda step: step.get("add_prefix_space", True)),
        ("add_prefix_space", "Metaspace", lambda step: step.get("prepend_scheme", "always") != "never"),
        ("do_lower_case", "BertNormalizer", lambda step: step.get("lowercase")),
        ("strip_accents", "BertNormalizer", lambda step: step.get("strip_accents")),
        ("tokenize_chinese_chars", "BertNormalizer", lambda step: step.get("handle_chinese_chars")),
    ]
    for key, kind, value_of in facts:
        values = {f"tokenizer.json's {kind}": value_of(step) for step in steps if step.get("type") == kind}
        remedy = f"take both files from the same model, or remove {key} from {CONFIG}"
        agreed_value(f"tokenizer {path}: {key}", {f"{CONFIG}'s {key}": config.get(key), **values}, remedy)


def _steps(step: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, also those of a sequence."""
    if isinstance(step, dict):
        yield step
        for inner in step.get("normalizers") or step.get("pretokenizers") or ():
            yield from _steps(inner)


def template_in(config: Mapping[str, Any], path: Path) -> str | None:
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


def has_tool_template(config: Mapping[str, Any], path: Path) -> bool:
    """Return True if a tokenizer's configuration has a template of its own for conversations with tools."""
    templates = config.get("chat_template")
    if os.path.lexists(path.with_name("chat_template.jinja")) or not isinstance(templates, list):
        return False
    return any(isinstance(entry, dict) and entry.get("name") == "tool_use" for entry in templates)
