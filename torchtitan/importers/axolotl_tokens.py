"""Translate the tokens that an Axolotl file adds to the vocabulary.

Their rows are in a model folder that `torchtitan convert` writes before the job starts.
"""

import os.path
import shlex
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.importers.axolotl_values import Values
from torchtitan.importers.translation import Meaning
from torchtitan.models.hf.config import CONFIG, read_json

MULTIPLE = 32
LARGER = "-resized"
"""Suffix of the resized folder's name."""


class Tokens:
    """The vocabulary changes of one Axolotl file. `new`: tokens whose rows have to be trained."""

    def __init__(self, options: Values, meaning: Meaning) -> None:
        self.given, self.values = options, meaning.values
        self.note, self.refuse = meaning.notes.append, meaning.refuse
        self.new: list[str] = list(options["tokens"] or [])

    def read(self, folder: str) -> str:
        """Return the folder to start training from. Its tokenizer is used unless the job names another."""
        eos = self._special(Path(folder, "tokenizer_config.json"))
        arguments = ["--add-tokens", *dict.fromkeys(self.new)] if self.new else []
        arguments += ["--eos-token", eos] if eos is not None else []
        arguments += ["--vocab-multiple", str(MULTIPLE)] if self.given["resize_token_embeddings_to_32x"] else []
        if not arguments:
            self.values.setdefault("model.tokenizer_path", folder)
            return folder
        larger, tokenizer = folder.rstrip("/") + LARGER, self.values.get("model.tokenizer_path")
        arguments += [f"--model.tokenizer_path={tokenizer}"] if tokenizer is not None else []
        self.values["model.tokenizer_path"] = larger
        command = shlex.join(["torchtitan", "convert", folder, larger, *arguments])
        if not os.path.isfile(Path(larger, CONFIG)):
            self.note(f"{larger} has to be made first: {command}")
        elif missing := [token for token in self.new if token not in self._known(Path(larger))]:
            self.note(f"{larger} is there without {' '.join(missing)}: it has to be made anew: {command}")
        else:
            self.note(f"{larger} is there and taken, as made by: {command}")
        return larger

    def _known(self, folder: Path) -> set[str]:
        """Return the added tokens of a folder's tokenizer, or the requested tokens if it has no tokenizer.json."""
        path = folder / "tokenizer.json"
        if not os.path.isfile(path):
            return set(self.new)
        try:
            added = read_json(path).get("added_tokens", [])
            return {token["content"] for token in added}
        except (JobError, KeyError, TypeError):
            return set()

    def _special(self, path: Path) -> str | None:
        """Return the end-of-sequence token to add, or None.

        Additional special tokens are added too. All other special tokens stay those of the tokenizer; a file that
        asks for different ones is refused.
        """
        special_tokens = dict(self.given["special_tokens"] or {})
        if special_tokens.pop("pad_token", None) is not None:
            self.note("special_tokens.pad_token: masks are by position, so that what pads is never learned")
        additional = special_tokens.pop("additional_special_tokens", None) or []
        if not isinstance(additional, list) or any(not isinstance(entry, str) for entry in additional):
            self.refuse("special_tokens.additional_special_tokens", additional, "a list of texts")
        else:
            self.new += additional
        try:
            tokenizer_config = read_json(path) if path.is_file() else None
        except JobError:
            tokenizer_config = {}
        if special_tokens and tokenizer_config is None:
            self.note(f"special_tokens: those of {path.parent} are taken, which have to be these")
            return None
        differing = {
            name: token for name, token in special_tokens.items() if self._said(tokenizer_config or {}, name) != token
        }
        eos = differing.pop("eos_token", None)
        for name, token in differing.items():
            self.refuse(f"special_tokens.{name}", token, "the tokenizer's own", f"write it into {path}")
        if isinstance(eos, str):
            self.new.append(eos)
        elif eos is not None:
            self.refuse("special_tokens.eos_token", eos, "text")
            return None
        return eos

    @staticmethod
    def _said(tokenizer_config: dict[str, Any], name: str) -> Any:
        value = tokenizer_config.get(name)
        return value.get("content") if isinstance(value, dict) else value
