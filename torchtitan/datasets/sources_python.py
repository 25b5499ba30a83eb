"""The text that every machine with Python has: its standard library, code and documentation."""

import sysconfig
import zlib

from torchtitan.datasets.sources import DataError, Document, Indexed, Source, files_fingerprint, walk
from torchtitan.datasets.sources_text import TextFile

# Installed packages, tests with broken files on purpose, tables of numbers, and what this one machine was built with.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "lib-dynload"}
HELD_OUT_ONE_IN = 20


def python_stdlib(path: str | None, text_field: str) -> Source:
    return _library(path, held_out=False)


def python_stdlib_validation(path: str | None, text_field: str) -> Source:
    """One file in twenty, chosen by its name. The training set does not have them."""
    return _library(path, held_out=True)


def _library(path: str | None, held_out: bool) -> Source:
    name = "python_stdlib_validation" if held_out else "python_stdlib"
    if path is not None:
        raise DataError(
            f"dataset_path is {path!r}, but {name} is the library of the running Python and takes none; "
            'leave dataset_path out, or set dataset = "text"'
        )
    folder = sysconfig.get_paths()["stdlib"]
    files = {
        file_name: file
        for file_name, file in sorted(walk(folder, (".py", ".rst", ".txt"), LEFT_OUT).items())
        if not file_name.startswith(("config-", "_sysconfigdata"))
        and (zlib.crc32(file_name.encode()) % HELD_OUT_ONE_IN == 0) == held_out
    }
    if not files:
        raise DataError(
            f"{folder}: this Python has no library files to read (a stripped or zipped installation); "
            'use a full Python, or set training.dataset = "text" and training.dataset_path'
        )
    return Indexed(name, files_fingerprint(files), [_LibraryFile(file, name) for name, file in files.items()])


class _LibraryFile(TextFile):
    def get(self, index: int) -> Document:
        try:
            return super().get(index)
        except DataError:
            # Some library files are in old encodings. The selection is ours, so nobody has to hear of it.
            return Document("", self.name)
