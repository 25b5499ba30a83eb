"""Sources of documents, and the search for data files.

There are two kinds of sources. An IndexedSource has random access to documents by number, so it can be fully shuffled.
A SequentialSource is a list of parts (files, row groups, shards) that can only be read forward, each from any record
on. Both are cheap to create, because only names and sizes are read: `torchtitan check` creates them too. Nothing here
imports torch.
"""

import glob
import hashlib
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError, open_file, require_file

REMEDY = 'repair the file, or set training.on_bad_data = "skip" to count and leave out what cannot be read'
MAX_RECORD_BYTES = 2**25
"""Largest line, field or element, in bytes. A larger one counts as damage, so that it cannot exhaust the memory."""
# A fingerprint lists up to this many files, so that an error can name the difference; more go into one checksum.
MAX_LISTED_FILES = 256
CONTENTS = "samples of the contents"
"""Key in a fingerprint. Fingerprints of older checkpoints lack it."""
CONVERSATIONS = "conversations"
"""Key in the fingerprint of data with conversations: the version of their tokenization. Version 1 was not recorded."""
SAMPLE_BYTES = 4096


class DataError(JobError):
    """Data that cannot be used. The message names the file, the place in it and the remedy."""


class UnreachableData(DataError):
    """Data that cannot be reached now but may be good. Never skipped: the samples would depend on the network."""


class UnexpectedPair(DataError):
    """A preference pair in data that are read as text."""


class BadRecord(DataError):
    """A document that cannot be tokenized: the template or the tokenizer fails on it, but not on others."""


class Span(NamedTuple):
    """A part of a document. The model always reads it; only trained spans have a loss."""

    content: str | Sequence[int]
    """Text, or the ids of the job's tokenizer."""
    trained: bool = True
    starts_text: bool = False
    """Encoded as a text by itself: a tokenizer that puts a blank before every text puts one before it."""


class Chat(NamedTuple):
    """A conversation, rendered to text by the tokenizer's chat template."""

    messages: Sequence[dict[str, Any]]
    """Messages {role, content}, with any further keys that the template uses."""
    tools: Sequence[Any] | None = None
    """Tools that the model may call, usually JSON schemas of functions. Templates read them as `tools`."""
    template_kwargs: Mapping[str, Any] = {}
    """Further variables of the template, such as enable_thinking."""


class LabelledTexts(NamedTuple):
    """One or two texts and their class.

    `end_tokens`: the end-of-document token follows each text; otherwise it only separates two texts.
    """

    texts: Sequence[str]
    label: int
    end_tokens: bool

    def spans(self, begin: Sequence[int], end: int) -> list[Span]:
        """Return the spans: `begin`, the texts with `end`, and last the class as an id, the only trained span."""
        texts = [Span(text, False) for text in self.texts]
        after = [Span([end], False)]
        between = after * (2 if self.end_tokens else 1)
        inner = [texts[0], *(span for text in texts[1:] for span in (*between, text))]
        return [Span(begin, False), *inner, *(after * self.end_tokens), Span([self.label])]


class Document(NamedTuple):
    content: "str | Sequence[Span] | Chat | LabelledTexts | Pair"
    """A fully trained text, spans, a conversation, labelled texts, or a pair. Empty documents are skipped."""
    location: str
    """Origin of the document, as messages name it."""
    has_begin_end: bool = False
    """True if it already contains its begin and end tokens; otherwise they are added."""
    format_name: str = ""
    """Format of the record that it was read from (formats.py), if any."""
    unread: tuple[str, ...] = ()
    """Fields of the record that nothing in the document comes from."""
    is_reread: bool = False
    """True if earlier versions read such a record otherwise (record_account.py)."""
    is_empty_line: bool = False
    """True if there is no record, only an empty line."""

    @property
    def spans(self) -> Sequence[Span]:
        """Return the spans of the content; for a conversation the messages without the template."""
        if isinstance(self.content, LabelledTexts):
            return [Span(text, False) for text in self.content.texts]
        if isinstance(self.content, Pair):
            return [*self.content.chosen.spans, *self.content.rejected.spans]
        if isinstance(self.content, Chat):
            return [
                Span(str(message.get("content") or ""), message["role"] == "assistant")
                for message in self.content.messages
            ]
        return [Span(self.content)] if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        """Return the text of all spans; spans of ids are left out."""
        return "".join(span.content for span in self.spans if isinstance(span.content, str))


class Pair(NamedTuple):
    """Two answers to the same prompt; both documents include the prompt."""

    chosen: Document
    rejected: Document


DocumentOrError = Document | DataError


class RecordParser(Protocol):
    """Converts the records of a file to documents; record_format.py implements it."""

    def document(self, record: Mapping[str, Any], location: str, short_location: str) -> Document:
        """Convert a record to a document. Raises DataError, which names `location`, if it cannot be read."""

    def columns(self, fields: Collection[str]) -> list[str]:
        """Return the columns of a table with these fields that its records are read from."""

    def unplaced_columns(self, fields: Collection[str], texts: Collection[str] = ()) -> list[str]:
        """Return further columns that are looked at, because a record that holds something in them is refused.

        `texts`: fields that are known to hold texts alone."""

    def missing_field(self, fields: Collection[str]) -> str:
        """Return a description of the field that a record lacks; empty if it can be read."""

    def ambiguity(self, fields: Collection[str]) -> str:
        """Return why a record with these fields is ambiguous, with a remedy; empty if it is not."""

    def remedy(self, fields: Collection[str]) -> str:
        """Return the remedy for a field that is missing among these."""


def document_or_error(read: Callable[..., Document], *args: Any) -> DocumentOrError:
    """Call `read` and return its document, or the DataError that it raises."""
    try:
        return read(*args)
    except DataError as error:
        return error


class Part(ABC):
    """A part of a source that is read forward: a file, a row group, a shard."""

    size = 1
    """Amount of data, in a unit that all parts of the class share."""

    @abstractmethod
    def read(self, start: int) -> Iterator[DocumentOrError]:
        """Yield the records from number `start` on.

        An unreadable record is yielded as its error, so that the numbers of the others do not change. If nothing can
        be read after it, it is the last."""


class IndexedFile(Part):
    """A file with records that can be read in any order."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name, self.size = path, name, path.stat().st_size

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def get(self, index: int) -> Document:
        """Return a document. Raises DataError."""

    def probe(self) -> None:
        """Check the file like IndexedSource.probe."""

    def empty_record(self) -> int | None:
        """Return the number of the first record that is only an empty line, None if there is none."""
        return None

    def read(self, start: int) -> Iterator[DocumentOrError]:
        for index in range(start, len(self)):
            yield document_or_error(self.get, index)

    def bytes(self, start: int, stop: int) -> bytes:
        with open_file(self.path) as file:
            file.seek(start)
            content = file.read(stop - start)
        if len(content) < stop - start:
            raise DataError(
                f"{self.path}: the file shrank to {self.path.stat().st_size} bytes from the {self.size} at the start; "
                "do not change the data while a job runs, or start a new job"
            )
        return content


class Source:
    packages: tuple[str, ...] = ()
    """Optional packages that are needed for reading it."""

    def __init__(self, name: str, fingerprint: dict[str, Any]) -> None:
        self.name = name
        self.fingerprint = fingerprint
        """Everything that the order of documents depends on, JSON-able; compared when a run resumes."""

    def documents(self) -> Iterator[DocumentOrError]:
        """Yield all documents in stored order."""
        raise NotImplementedError


class IndexedSource(Source):
    def __init__(self, name: str, fingerprint: dict[str, Any], files: list[IndexedFile]) -> None:
        super().__init__(name, fingerprint)
        self.files = files

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(file) for file in self.files))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def documents(self) -> Iterator[DocumentOrError]:
        for file in self.files:
            yield from file.read(0)

    def get(self, index: int) -> Document:
        """Return a document. Raises DataError."""
        file = bisect_right(self._ends, index)
        return self.files[file].get(index - (self._ends[file - 1] if file else 0))

    def probe(self) -> None:
        """Check for damage that is cheap to detect, so that all ranks find it before the job starts.

        Raises DataError."""
        for file in self.files:
            file.probe()


class SequentialSource(Source):
    def __init__(self, name: str, fingerprint: dict[str, Any], parts: list[Part] | None = None) -> None:
        super().__init__(name, fingerprint)
        self._parts = parts

    @cached_property
    def parts(self) -> list[Part]:
        return self._parts if self._parts is not None else self.open()

    def open(self) -> list[Part]:
        """Return the parts; for sources that fetch the list from a server."""
        raise NotImplementedError

    def documents(self) -> Iterator[DocumentOrError]:
        for part in self.parts:
            yield from part.read(0)


def find_files(path: str | None, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """Return name -> path, sorted by name: one file, all files with these suffixes in a folder, or a glob's matches."""
    option = "training.dataset_path"
    allowed = f"a file, a folder or a glob of {', '.join(suffixes)}"
    if not path:
        raise DataError(f"{option} is not set; this dataset needs {allowed}; set {option}")
    if os.path.lexists(path) and not os.path.isdir(path):
        files = {os.path.basename(path): Path(path)}
    elif os.path.isdir(path):
        files = files_below(path, suffixes)
    elif glob.has_magic(path):
        files = {
            os.path.normpath(f): Path(f)
            for f in glob.glob(path, recursive=True)
            if os.path.exists(f) and not os.path.isdir(f)
        }
    else:
        raise DataError(f"{path}: no such file or folder; {allowed} is needed; correct {option}")
    unsupported = sorted(name for name in files if not name.lower().endswith(suffixes))
    if unsupported or not files:
        problem = f"{unsupported[0]} is of another kind" if unsupported else "nothing is there"
        raise DataError(f"{path}: {problem}; {allowed} is needed; correct {option}")
    for file in files.values():
        try:
            require_file(file)
        except FileError as error:
            raise DataError(f"{file} {error.reason}; {allowed} is needed; correct {option}") from None
        if not os.access(file, os.R_OK):
            raise DataError(f"{file}: may not be read by this user; change its permissions or {option}")
    return dict(sorted(files.items()))


def files_fingerprint(files: dict[str, Path]) -> dict[str, Any]:
    """Return names, sizes and a checksum of samples of the content. Raises DataError if all files are empty."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if not any(sizes.values()):
        subject = "it is" if len(files) == 1 else f"all {len(files)} files are"
        raise DataError(f"{next(iter(files.values()))}: no data, {subject} empty; give files with text")
    contents = {CONTENTS: _samples_checksum(files, sizes)}
    if len(sizes) <= MAX_LISTED_FILES:
        return {"files": sizes} | contents
    listing = "".join(f"{name}\0{size}\0" for name, size in sizes.items())
    return {
        "number of files": len(sizes),
        "bytes": sum(sizes.values()),
        "names and sizes": hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest(),
    } | contents


def _samples_checksum(files: dict[str, Path], sizes: dict[str, int]) -> str:
    """Return a checksum over the beginning, the end and two positions between in up to MAX_LISTED_FILES files.

    The files are evenly spaced. Different texts with the same names and sizes are detected in milliseconds; a change of
    a few bytes elsewhere is not."""
    names = list(files)
    digest = hashlib.sha256()
    for name in names[:: -(-len(names) // MAX_LISTED_FILES)]:
        with open_file(files[name]) as file:
            for third in range(4):
                file.seek(max(0, sizes[name] - SAMPLE_BYTES) * third // 3)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def files_below(folder: str, suffixes: tuple[str, ...], excluded_folders: Collection[str] = ()) -> dict[str, Path]:
    """Return relative name -> path of all files below a folder, without hidden files and `excluded_folders`."""
    files = {}
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in excluded_folders]
        directory, relative = Path(root), Path(root).relative_to(folder).as_posix()
        prefix = "" if relative == "." else f"{relative}/"
        for name in names:
            if not name.startswith(".") and name.lower().endswith(suffixes):
                file = directory / name
                if file.exists():
                    files[prefix + name] = file
    return files


def decode_utf8(content: bytes, location: str, offset: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{location}: byte {offset + error.start} (0x{content[error.start]:02x}) is not UTF-8; "
            f'convert the file to UTF-8, or set training.on_bad_data = "skip"'
        ) from None


def missing_package(path: Path, package: str) -> DataError:
    return DataError(f"{path}: reading it needs {package}; install it with: pip install 'torchtitan-toml[data]'")
