"""Translate the tokens that an Axolotl file adds to a vocabulary: its tokens, special_tokens and larger embeddings."""

import os.path
import shlex
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.models.hf.config import CONFIG, read_json
from torchtitan.plugins.importers.axolotl_prompts import BY_STYLE
from torchtitan.plugins.importers.translation import JobDraft, Options

MULTIPLE = 32
"""Multiple of the vocabulary's size with resize_token_embeddings_to_32x."""
CLASS = "tokenizer_class"
RESIZED = "-resized"
"""Suffix of the folder of a model with a larger vocabulary."""


class AddedTokens:
    """The tokens that a file adds to the vocabulary. `new`: tokens with rows that have to be trained.

    Their rows are in a model folder that `torchtitan convert` writes before the job starts.
    """

    def __init__(self, options: Options, draft: JobDraft) -> None:
        self.options, self.values = options, draft.values
        self.note, self.refuse = draft.notes.append, draft.refuse
        self.new: list[str] = list(options["tokens"] or [])

    def read(self, folder: str) -> str:
        """Return the folder to start training from. Its tokenizer is used unless the job names another."""
        eos = self._special_tokens(Path(folder, "tokenizer_config.json"))
        arguments = ["--add-tokens", *dict.fromkeys(self.new)] if self.new else []
        arguments += ["--eos-token", eos] if eos is not None else []
        arguments += ["--vocab-multiple", str(MULTIPLE)] if self.options["resize_token_embeddings_to_32x"] else []
        if not arguments:
            self.values.setdefault("model.tokenizer_path", folder)
            return folder
        resized, tokenizer = folder.rstrip("/") + RESIZED, self.values.get("model.tokenizer_path")
        arguments += [f"--model.tokenizer_path={tokenizer}"] if tokenizer is not None else []
        self.values["model.tokenizer_path"] = resized
        command = shlex.join(["torchtitan", "convert", folder, resized, *arguments])
        if not os.path.isfile(Path(resized, CONFIG)):
            self.note(f"{resized} has to be made first: {command}")
        elif missing := [token for token in self.new if token not in self._added_tokens(Path(resized))]:
            self.note(f"{resized} exists without {' '.join(missing)}: make it again: {command}")
        else:
            self.note(f"{resized} exists and is used, as made by: {command}")
        return resized

    def _added_tokens(self, folder: Path) -> set[str]:
        """Return the added tokens of a folder's tokenizer, or the requested tokens if it has no tokenizer.json."""
        path = folder / "tokenizer.json"
        if not os.path.isfile(path):
            return set(self.new)
        try:
            return {token["content"] for token in read_json(path).get("added_tokens", [])}
        except (JobError, KeyError, TypeError):
            return set()

    def _special_tokens(self, path: Path) -> str | None:
        """Return the end-of-sequence token to add, or None.

        Additional special tokens are added too. All other special tokens stay as in the tokenizer; a file that
        asks for different ones is refused.
        """
        special_tokens = dict(self.options["special_tokens"] or {})
        if special_tokens.pop("pad_token", None) is not None:
            self.note("special_tokens.pad_token: no effect; padding is masked by position and never learned")
        additional = special_tokens.pop("additional_special_tokens", None) or []
        if not isinstance(additional, list) or any(not isinstance(token, str) for token in additional):
            self.refuse("special_tokens.additional_special_tokens", additional, "a list of texts")
        else:
            self.new += additional
        try:
            tokenizer_config = read_json(path) if path.is_file() else None
        except JobError:
            tokenizer_config = {}
        if special_tokens and tokenizer_config is None:
            self.note(f"special_tokens: the special tokens of {path.parent} are used and must be the same")
            return None
        differing = {
            name: token
            for name, token in special_tokens.items()
            if _content((tokenizer_config or {}).get(name)) != token
        }
        eos = differing.pop("eos_token", None)
        if "bos_token" in differing and self._is_never_written(differing["bos_token"], tokenizer_config or {}):
            self.note("special_tokens.bos_token: no effect; this tokenizer begins no text with one")
            del differing["bos_token"]
        for name, token in differing.items():
            self.refuse(f"special_tokens.{name}", token, "the tokenizer's own", f"write it into {path}")
        if isinstance(eos, str):
            self.new.append(eos)
        elif eos is not None:
            self.refuse("special_tokens.eos_token", eos, "text")
            return None
        return eos

    def _is_never_written(self, token: Any, config: dict[str, Any]) -> bool:
        """Return True if this begin token only names one that the tokenizer has, and no text begins with it.

        Only the rule by which a tokenizer adds tokens, which changes for Llama's, and templates write it.
        """
        begins = config.get("bos_token") is not None or config.get("add_bos_token") or "Llama" in str(config.get(CLASS))
        is_special = token in {_content(config.get(name)) for name in ("eos_token", "unk_token", "pad_token")}
        entries = self.options["datasets"] if isinstance(self.options["datasets"], list) else []
        types = [str(entry.get("type")) for entry in entries if isinstance(entry, dict)]
        of_prompts = bool(types) and all(kind.partition(":")[0] in BY_STYLE for kind in types)
        return is_special and not begins and of_prompts and not self.options["chat_template"] and not self.options["rl"]


def _content(token: Any) -> Any:
    """Return the text of a special token in a tokenizer_config.json."""
    return token.get("content") if isinstance(token, dict) else token
