"""Files: those that a user names, those that come with the package, and rules for those of other programs.

A user names a file by a path in a job or a command, or it is in a folder that one of these names.

Such a path may lead to a pipe, where a reader would wait without end, to a device, which never ends, or to a file far
larger than expected. Only regular files are opened, and each caller limits the size. tests/core/test_files.py refuses
code that reads files in any other way.

Errors of the machine (core/machine_errors.py) are retried, at each open and each read, and raised as `MachineError`.

The package also comes with files: jobs that can be called by name, and a small tokenizer.

Two rules hold for the files of other programs (config.json, tokenizer_config.json, adapter_config.json):

1. Every key is used, known to have no effect here, or refused by name (`DeclaredKeys`). A reader that ignored the keys
   it does not know would train another model than the file describes, and say nothing.
2. Sources of the same fact agree, or are refused (`agreed_value`). Preferring one of them is a guess. A key with two
   values is such a fact (`load_json`).
"""

import errno
import io
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan.core.errors import JobError, format_bytes
from torchtitan.core.machine_errors import retried

REMEDY = "give the path of a regular file that can be read"
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISSOCK, "a socket"),
)


class FileError(JobError):
    """A path that cannot be read as a file.

    `reason` completes a sentence that begins with the path. `error_number`: the system's, if it refused the path.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str, error_number: int | None = None) -> None:
        self.path, self.reason, self.error_number = Path(path), reason, error_number
        super().__init__(f"{os.fspath(path)} {reason}; {REMEDY}")

    @property
    def missing(self) -> bool:
        """Return True if nothing exists at the path."""
        return self.error_number == errno.ENOENT


class _RetryingFile(io.FileIO):
    """An open file whose reads are retried after errors of the machine."""

    def __init__(self, descriptor: int, path: str | os.PathLike[str]) -> None:
        super().__init__(descriptor, "rb")
        self.path = path

    def readinto(self, buffer: Any) -> Any:
        return retried(lambda: super(_RetryingFile, self).readinto(buffer), self.path, with_rights=False)

    def read(self, size: int | None = -1) -> Any:
        read = super().read
        return retried(lambda: read(size), self.path, with_rights=False)

    def readall(self) -> Any:
        begin, readall = self.tell(), super().readall

        def read_from_begin() -> Any:
            self.seek(begin)  # a failure in the middle has lost what was read before it
            return readall()

        return retried(read_from_begin, self.path, with_rights=False)


def open_file(path: str | os.PathLike[str], follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading. Raises FileError for anything else, OSError as `open` does, and MachineError
    where the machine cannot open it or, later, read it.

    The kind is checked before the file is opened, because opening alone may wait (a pipe) or act (some devices), and
    again on the open file, because another one may have replaced it in between.
    """
    _refuse_special(path, retried(lambda: os.stat(path, follow_symlinks=follow_links), path, with_rights=False))
    # O_NONBLOCK: a pipe that takes the file's place now is opened at once, and refused below
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    raw = _RetryingFile(retried(lambda: os.open(path, flags), path, with_rights=False), path)
    try:
        _refuse_special(path, os.fstat(raw.fileno()))
    except FileError:
        raw.close()
        raise
    return io.BufferedReader(raw)


def read_file(path: str | os.PathLike[str], limit: int, follow_links: bool = True) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises FileError, and MachineError."""
    try:
        with open_file(path, follow_links) as file:
            size = os.fstat(file.fileno()).st_size
            # read() allocates a buffer of the requested size up front, so request only the size at first
            content = b"" if size > limit else file.read(size + 1)
            if content and len(content) > size:  # some system files (/proc) report size 0
                content += file.read(limit + 1 - len(content)) or b""
    except (OSError, ValueError) as error:
        raise _as_file_error(path, error) from None
    if content is None:  # a kernel log without a further line
        raise FileError(path, "cannot be read (it has no content to give now)")
    if max(size, len(content)) > limit:
        has = f"has {size:,} bytes" if size > limit else f"has more than {limit:,} bytes"
        raise FileError(path, f"{has}; at most {limit:,} ({format_bytes(limit)}) are read")
    return content


def require_file(path: str | os.PathLike[str], missing_ok: bool = False) -> None:
    """Raise FileError unless the path is a regular file, or does not exist with `missing_ok`.

    Call it before a library opens a path itself (safetensors, pyarrow).
    """
    try:
        _refuse_special(path, retried(lambda: os.stat(path), path, with_rights=False))
    except (OSError, ValueError) as error:
        if not (missing_ok and isinstance(error, FileNotFoundError)):
            raise _as_file_error(path, error) from None


def _as_file_error(path: str | os.PathLike[str], error: OSError | ValueError) -> FileError:
    if isinstance(error, FileError):
        return error
    reason = getattr(error, "strerror", None) or str(error)  # a ValueError: a NUL in the name
    return FileError(path, f"cannot be read ({reason})", getattr(error, "errno", None))


def _refuse_special(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "a device")
        raise FileError(path, f"is not a regular file but {kind}")


# Files that come with the package

_PACKAGE = Path(__file__).parent.parent
_INSTALLED = (_PACKAGE / "train_configs").exists()  # a wheel has copies; a checkout has them next to the package

JOBS = (_PACKAGE if _INSTALLED else _PACKAGE.parent) / "train_configs"
TOKENIZER = (_PACKAGE if _INSTALLED else _PACKAGE.parent / "tests") / "assets/tokenizer/tiktoken.model"
"""A small tokenizer with 2,048 tokens, for `model.tokenizer_path = "debug"`."""
TOKENIZATION_VERSION = 3
"""Version of the rules by which text becomes ids. Raise it when the same text gives other ids. Version 1 tokenized an
answer and its header separately. Version 2 cut conversations at special tokens and guessed a begin token where
tokenizer_config.json says that there is none; runs that began with it go on with it (data.tokenization_version)."""

MODEL_PLACEHOLDER, RECORDS_PLACEHOLDER = "./base_model", "./records.jsonl"
"""Placeholders in fine-tuning jobs for the user's model folder and records."""


def shipped_jobs() -> dict[str, Path]:
    """Return the paths of the shipped jobs by name, sorted."""
    return {path.stem: path for path in sorted(JOBS.glob("*.toml"))}


def find_job_file(name: str, path: str | None = None) -> str:
    """Return the file of the shipped job `name` if no file exists at `path` (default: `name`), else `path`."""
    file = name if path is None else path
    shipped = shipped_jobs().get(name)
    return str(shipped) if shipped and not Path(file).exists() else file


# Files of other programs


def load_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError (JSONDecodeError for invalid JSON) or RecursionError."""
    return json.loads(text, object_pairs_hook=unique_keys)


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its pairs. Raises ValueError for a key with two values, of which one would be lost."""
    table = dict(pairs)
    if len(table) < len(pairs):
        for name, value in pairs:
            if json.dumps(value) != json.dumps(table[name]):  # 1 and true are equal in Python
                raise ValueError(f"the key {name!r} is there twice, with different values; remove one of them")
    return table


EMPTY_VALUES: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values of features that are off."""


@dataclass(frozen=True)
class DeclaredKeys:
    """The keys of one kind of file.

    `used`: keys that the reader interprets, including those that it refuses itself with a better message. `harmless`:
    keys without effect here, whatever their value. `defaults`: the only value, besides null, at which a further key has
    no effect, because the other program assumes the same without it. All other keys with an empty value or a leading
    underscore have none either, unless the other program reads them: `read_when_private` names such keys with an
    underscore.
    """

    used: frozenset[str]
    harmless: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read_when_private: frozenset[str] = frozenset()

    def unknown(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys, with their values, that would be ignored although they may have an effect."""
        return {key: value for key, value in content.items() if not self._has_no_effect(key, value)}

    def _has_no_effect(self, key: str, value: Any) -> bool:
        if key in self.used or key in self.harmless:
            return True
        if key in self.defaults:  # before the empty values: false is not the default of a feature that is on
            return value is None or bool(self.defaults[key] == value)
        return value in EMPTY_VALUES or (key.startswith("_") and key not in self.read_when_private)

    def check(self, content: Mapping[str, Any], file: str, remedy: str) -> None:
        """Raise JobError, which begins with `file` and ends with `remedy`, if a key would be ignored."""
        if unknown := self.unknown(content):
            keys = ", ".join(f"{key} = {_shorten(value)}" for key, value in unknown.items())
            is_one = len(unknown) == 1
            raise JobError(
                f"{file} has {'a key' if is_one else 'keys'} that this program does not know, and that may change "
                f"the result: {keys}; {remedy}"
            )


def agreed_value(fact: str, sources: Mapping[str, Any], remedy: str) -> Any:
    """Return the value that the sources of a fact agree on; None if none of them has it.

    `sources`: name of the source, for example "config.json's eos_token_id" -> its value, None if it has none. Raises
    JobError, which names two sources that differ and ends with `remedy`.
    """
    present = {name: value for name, value in sources.items() if value is not None}
    if not present:
        return None
    (first_name, first), *remaining = present.items()
    for name, value in remaining:
        if value != first:
            raise JobError(
                f"{fact}: {first_name} is {_shorten(first)}, but {name} is {_shorten(value)}; they must be equal; "
                f"{remedy}"
            )
    return first


def _shorten(value: Any, longest: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}..."
