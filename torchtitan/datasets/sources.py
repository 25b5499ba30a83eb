"""What a source of documents is, and how files are found and named.

There are two kinds. An Indexed source gives any document by its number, so a shuffle can jump about in it. A Stream is
a list of parts (files, row groups, shards) that can only be read forward, each from any record on. Both are cheap to
make, only names and sizes are looked at: `torchtitan check` makes them too. Nothing here imports torch.
"""

import glob
import hashlib
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError, open_file, require_file

REMEDY = 'repair the file, or set training.on_bad_data = "skip" to count and leave out what cannot be read'
MAX_RECORD = 2**25
"""A longer line, field or element is taken for damage: one runaway record must not take all memory."""
# A fingerprint lists this many files one by one, so that a difference can be named; more go into one checksum.
LISTED_FILES = 256
CONTENTS = "samples of the contents"
"""In a fingerprint; those of older checkpoints have none."""
CONVERSATIONS = "conversations"
"""In the fingerprint of data with conversations: the version of their tokenization. Version 1 was not noted."""
SAMPLE_BYTES = 4096


class DataError(JobError):
    """Data that cannot be used. The message names the file, the place in it and the remedy."""


class Unreachable(DataError):
    """Data that may be good and cannot be had now. Never skipped: what is left out would depend on the network."""


class PairFound(DataError):
    """Of a pair of answers, where text is read."""


class BadRecord(DataError):
    """Of a document that was read and has no tokens: its template or the tokenizer fails on it, and not on others."""


class Span(NamedTuple):
    """A stretch of a document. The model always reads it; what is not trained has no loss."""

    content: str | Sequence[int]
    """Text, or the ids of the job's tokenizer."""
    trained: bool = True


class Chat(NamedTuple):
    """A conversation; the tokenizer's chat template says what its text is."""

    messages: Sequence[dict[str, Any]]
    """{role, content} each, and what else the template knows."""


class Labelled(NamedTuple):
    """One text or two, and the class that they are of. `ended`: whether the token that ends a document stands behind
    each text; else it stands between two of them.
    """

    texts: Sequence[str]
    label: int
    ended: bool

    def spans(self, begin: Sequence[int], end: int) -> list[Span]:
        """Between these ids, and behind all the class as an id, which alone is trained."""
        texts = [Span(text, False) for text in self.texts]
        after = [Span([end], False)]
        between = after * (2 if self.ended else 1)
        inner = [texts[0], *(span for text in texts[1:] for span in (*between, text))]
        return [Span(begin, False), *inner, *(after * self.ended), Span([self.label])]


class Document(NamedTuple):
    content: "str | Sequence[Span] | Chat | Labelled | Pair"
    """A text, all of which is trained, spans, a conversation, texts of a class, or two answers. May be empty: such a
    document is left out."""
    place: str
    """Where it came from, for people."""
    framed: bool = False
    """Whether it brings the tokens that begin and end it; else they are added."""
    form: str = ""
    """The format of the record that it was made of (formats.py), if it was one."""

    @property
    def spans(self) -> Sequence[Span]:
        """Of a conversation what was said, without its template."""
        if isinstance(self.content, Labelled):
            return [Span(text, False) for text in self.content.texts]
        if isinstance(self.content, Pair):
            return [*self.content.chosen.spans, *self.content.rejected.spans]
        if isinstance(self.content, Chat):
            return [Span(str(message["content"]), message["role"] == "assistant") for message in self.content.messages]
        return [Span(self.content)] if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        """What of it is text."""
        return "".join(span.content for span in self.spans if isinstance(span.content, str))


class Pair(NamedTuple):
    """Two answers to one question, each with the question."""

    chosen: Document
    rejected: Document


Item = Document | DataError


def attempt(read: Callable[..., Document], *args: Any) -> Item:
    """What it gives, or the error that it raises."""
    try:
        return read(*args)
    except DataError as error:
        return error


class Part(ABC):
    """Something that is read forward: a file, a row group, a shard."""

    size = 1
    """How much there is in it, in a unit that all parts of its class share."""

    @abstractmethod
    def read(self, start: int) -> Iterator[Item]:
        """The records from number `start` on. A record that cannot be read comes as the error that says why, so that
        the numbers of the others stay; if nothing can be read after it, it is the last."""


class IndexedFile(Part):
    """A file whose records can be read in any order."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name, self.size = path, name, path.stat().st_size

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def get(self, index: int) -> Document:
        """Raises DataError."""

    def probe(self) -> None:
        """As Indexed.probe."""

    def read(self, start: int) -> Iterator[Item]:
        for index in range(start, len(self)):
            yield attempt(self.get, index)

    def bytes(self, start: int, stop: int) -> bytes:
        with open_file(self.path) as file:
            file.seek(start)
            content = file.read(stop - start)
        if len(content) < stop - start:
            raise DataError(
                f"{self.path}: the file shrank to {self.path.stat().st_size} bytes from the {self.size} at the start; "
                "leave the data as it is while a job runs, or start a new job"
            )
        return content


class Source:
    packages: tuple[str, ...] = ()
    """What reading it needs of what is not always installed."""

    def __init__(self, name: str, fingerprint: dict[str, Any]) -> None:
        self.name = name
        self.fingerprint = fingerprint
        """What the order of documents depends on, JSON-able. A resume compares it."""

    def documents(self) -> Iterator[Item]:
        """All of them, in the order in which they are stored."""
        raise NotImplementedError


class Indexed(Source):
    def __init__(self, name: str, fingerprint: dict[str, Any], files: list[IndexedFile]) -> None:
        super().__init__(name, fingerprint)
        self.files = files

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(file) for file in self.files))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def documents(self) -> Iterator[Item]:
        for file in self.files:
            yield from file.read(0)

    def get(self, index: int) -> Document:
        """Raises DataError."""
        file = bisect_right(self._ends, index)
        return self.files[file].get(index - (self._ends[file - 1] if file else 0))

    def probe(self) -> None:
        """Look where damage shows cheaply, so that it is found before the job starts, by all ranks alike. Raises
        DataError."""
        for file in self.files:
            file.probe()


class Stream(Source):
    def __init__(self, name: str, fingerprint: dict[str, Any], parts: list[Part] | None = None) -> None:
        super().__init__(name, fingerprint)
        self._parts = parts

    @cached_property
    def parts(self) -> list[Part]:
        return self._parts if self._parts is not None else self.open()

    def open(self) -> list[Part]:
        """The parts, for sources that must ask far away for them."""
        raise NotImplementedError

    def documents(self) -> Iterator[Item]:
        for part in self.parts:
            yield from part.read(0)


def find_files(path: str | None, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """Name -> path, sorted by name, of a file, of all files with such a suffix under a folder, or of a glob."""
    option = "training.dataset_path"
    allowed = f"a file, a folder or a glob of {', '.join(suffixes)}"
    if not path:
        raise DataError(f"{option} is not set; this dataset needs {allowed}; set {option}")
    if os.path.lexists(path) and not os.path.isdir(path):
        found = {os.path.basename(path): Path(path)}
    elif os.path.isdir(path):
        found = walk(path, suffixes)
    elif glob.has_magic(path):
        found = {
            os.path.normpath(f): Path(f)
            for f in glob.glob(path, recursive=True)
            if os.path.exists(f) and not os.path.isdir(f)
        }
    else:
        raise DataError(f"{path}: no such file or folder; {allowed} is needed; correct {option}")
    wrong = sorted(name for name in found if not name.lower().endswith(suffixes))
    if wrong or not found:
        what = f"{wrong[0]} is of another kind" if wrong else "nothing is there"
        raise DataError(f"{path}: {what}; {allowed} is needed; correct {option}")
    for file in found.values():
        try:
            require_file(file)
        except FileError as error:
            raise DataError(f"{file} {error.reason}; {allowed} is needed; correct {option}") from None
        if not os.access(file, os.R_OK):
            raise DataError(f"{file}: may not be read by this user; change its permissions or {option}")
    return dict(sorted(found.items()))


def files_fingerprint(files: dict[str, Path]) -> dict[str, Any]:
    """Names, sizes and a checksum of samples of the content; DataError if there is not a byte in them."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if not any(sizes.values()):
        what = "it is" if len(files) == 1 else f"all {len(files)} files are"
        raise DataError(f"{next(iter(files.values()))}: no data, {what} empty; give files with text")
    contents = {CONTENTS: _samples_checksum(files, sizes)}
    if len(sizes) <= LISTED_FILES:
        return {"files": sizes} | contents
    listing = "".join(f"{name}\0{size}\0" for name, size in sizes.items())
    return {
        "number of files": len(sizes),
        "bytes": sum(sizes.values()),
        "names and sizes": hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest(),
    } | contents


def _samples_checksum(files: dict[str, Path], sizes: dict[str, int]) -> str:
    """Over the beginning, the end and two places between of up to LISTED_FILES files, evenly spaced: other texts of the
    same names and sizes are told apart in milliseconds, a change of a few bytes elsewhere is not."""
    names = list(files)
    digest = hashlib.sha256()
    for name in names[:: -(-len(names) // LISTED_FILES)]:
        with open_file(files[name]) as file:
            for third in range(4):
                file.seek(max(0, sizes[name] - SAMPLE_BYTES) * third // 3)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def walk(folder: str, suffixes: tuple[str, ...], left_out: Collection[str] = ()) -> dict[str, Path]:
    """Name relative to the folder -> path, of all files below it, without hidden ones and folders of those names."""
    found = {}
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in left_out]
        for name in names:
            file = Path(root, name)
            if not name.startswith(".") and name.lower().endswith(suffixes) and file.exists():
                found[file.relative_to(folder).as_posix()] = file
    return found


def decode(content: bytes, place: str, offset: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: byte {offset + error.start} (0x{content[error.start]:02x}) is not UTF-8; "
            f'convert the file to UTF-8, or set training.on_bad_data = "skip"'
        ) from None


def missing(path: Path, package: str) -> DataError:
    return DataError(f"{path}: reading it needs {package}; install it with: pip install 'torchtitan-toml[data]'")
