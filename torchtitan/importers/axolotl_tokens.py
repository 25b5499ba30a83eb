"""What an Axolotl file adds to the vocabulary: rows of a folder that `torchtitan convert` writes ahead of the job."""

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
"""Behind the name of the folder."""


class Tokens:
    """`new`: tokens whose rows have to be trained."""

    def __init__(self, given: Values, meaning: Meaning) -> None:
        self.given, self.values = given, meaning.values
        self.note, self.refuse = meaning.notes.append, meaning.refuse
        self.new: list[str] = list(given["tokens"] or [])

    def read(self, folder: str) -> str:
        """The folder that the job begins from, with its own tokenizer unless the job says another."""
        eos = self._special(Path(folder, "tokenizer_config.json"))
        words = ["--add-tokens", *dict.fromkeys(self.new)] if self.new else []
        words += ["--eos-token", eos] if eos is not None else []
        words += ["--vocab-multiple", str(MULTIPLE)] if self.given["resize_token_embeddings_to_32x"] else []
        if not words:
            self.values.setdefault("model.tokenizer_path", folder)
            return folder
        larger, tokenizer = folder.rstrip("/") + LARGER, self.values.get("model.tokenizer_path")
        words += [f"--model.tokenizer_path={tokenizer}"] if tokenizer is not None else []
        self.values["model.tokenizer_path"] = larger
        made = shlex.join(["torchtitan", "convert", folder, larger, *words])
        if not os.path.isfile(Path(larger, CONFIG)):
            self.note(f"{larger} has to be made first: {made}")
        elif lacking := [token for token in self.new if token not in self._known(Path(larger))]:
            self.note(f"{larger} is there without {' '.join(lacking)}: it has to be made anew: {made}")
        else:
            self.note(f"{larger} is there and taken, as made by: {made}")
        return larger

    def _known(self, folder: Path) -> set[str]:
        """Tokens that a folder's tokenizer has beside its own pieces; those that are asked for where it says none."""
        path = folder / "tokenizer.json"
        if not os.path.isfile(path):
            return set(self.new)
        try:
            added = read_json(path).get("added_tokens", [])
            return {each["content"] for each in added}
        except (JobError, KeyError, TypeError):
            return set()

    def _special(self, path: Path) -> str | None:
        """They are the tokenizer's own, whatever a file says; but for an end that it is to have, and further ones."""
        asked = dict(self.given["special_tokens"] or {})
        if asked.pop("pad_token", None) is not None:
            self.note("special_tokens.pad_token: masks are by position, so that what pads is never learned")
        further = asked.pop("additional_special_tokens", None) or []
        if not isinstance(further, list) or any(not isinstance(each, str) for each in further):
            self.refuse("special_tokens.additional_special_tokens", further, "a list of texts")
        else:
            self.new += further
        try:
            own = read_json(path) if path.is_file() else None
        except JobError:
            own = {}
        if asked and own is None:
            self.note(f"special_tokens: those of {path.parent} are taken, which have to be these")
            return None
        other = {name: token for name, token in asked.items() if self._said(own or {}, name) != token}
        eos = other.pop("eos_token", None)
        for name, token in other.items():
            self.refuse(f"special_tokens.{name}", token, "the tokenizer's own", f"write it into {path}")
        if isinstance(eos, str):
            self.new.append(eos)
        elif eos is not None:
            self.refuse("special_tokens.eos_token", eos, "text")
            return None
        return eos

    @staticmethod
    def _said(own: dict[str, Any], name: str) -> Any:
        there = own.get(name)
        return there.get("content") if isinstance(there, dict) else there
