"""Blocks of token ids that were tokenized and cut before the run, as ReLoRA's scripts make and read them.

The folder was saved by the package `datasets` (save_to_disk), with the ids in the column input_ids, and has an
args.json with the settings: {"tokenizer": ..., "sequence_length": ...}. A sample is one block. All its ids have a loss
except the first, which no token precedes.
"""

from pathlib import Path
from typing import Any

from torchtitan.core.files import FileError, load_json, read_file
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import DataError, Document, IndexedFile, IndexedSource, Source, Span, files_fingerprint
from torchtitan.datasets.sources.tables import MAX_JSON_BYTES, ArrowFile, saved_split
from torchtitan.datasets.tokenizer import Tokenizer, TokenizerError, build_tokenizer

ARGS, COLUMN = "args.json", "input_ids"


def pretokenized(path: str | None, text_field: str) -> Source:
    return PretokenizedBlocks(path, "train")


def pretokenized_validation(path: str | None, text_field: str) -> Source:
    return PretokenizedBlocks(path, "validation")


class PretokenizedBlocks(IndexedSource):
    """The blocks of one split, or of a folder without splits. Raises DataError."""

    packages = ("pyarrow",)

    def __init__(self, path: str | None, split: str) -> None:
        if path is None:
            raise DataError(f"a pretokenized dataset needs dataset_path: a folder with {ARGS}, saved by save_to_disk")
        self.folder = Path(path)
        self.tokenizer, self.length = _read_args(self.folder)
        saved = saved_split(str(self.folder), split)
        files = {} if saved is None else {file.name: file for file in sorted(Path(saved).glob("*.arrow"))}
        if not files:
            raise DataError(f"{self.folder}: no blocks of {split} in it; give a folder that save_to_disk wrote")
        about = {"dataset_path": str(self.folder), "split": split, "sequence_length": self.length}
        blocks: list[IndexedFile] = [BlockFile(file, name, self.length) for name, file in files.items()]
        super().__init__(f"{path} ({split})", about | files_fingerprint(files), blocks)
        if not len(self):
            raise DataError(f"{self.folder}: its {split} has no rows; one block at least is needed: save it again")

    def check(self, seq_len: int, tokenizer: Tokenizer, tokenizer_path: str) -> None:
        """Raise DataError unless blocks match this sample length and the job's tokenizer. Reads three blocks."""
        self.check_length(seq_len)
        self._check_tokenizer(tokenizer, tokenizer_path)
        for index in {0, len(self) // 2, len(self) - 1}:
            largest = max(max(span.content) for span in self.get(index).spans if len(span.content))
            if largest >= tokenizer.vocab_size:
                raise DataError(
                    f"{self.folder}: block {index} holds the id {largest}, and the tokenizer {tokenizer_path} has "
                    f"{tokenizer.vocab_size}; set model.tokenizer_path to the one it was made with, {self.tokenizer}"
                )

    def check_length(self, seq_len: int) -> None:
        if seq_len != self.length:
            raise DataError(
                f"{self.folder}: blocks of {self.length} tokens (sequence_length in {ARGS}), but samples of {seq_len} "
                f"are wanted; set training.seq_len = {self.length}"
            )

    def _check_tokenizer(self, tokenizer: Tokenizer, path: str) -> None:
        """Compare tokenizers if the one in args.json exists locally; otherwise the job's path must contain its name."""
        try:
            same = build_tokenizer(self.tokenizer, version=tokenizer.version).fingerprint == tokenizer.fingerprint
        except (OSError, TokenizerError):
            name = self.tokenizer.rstrip("/").rpartition("/")[2].lower()
            parts = Path(path).absolute().parts  # a path in a cache contains models--google--t5-base/snapshots/...
            same = any(name in (part.lower(), part.lower().rpartition("--")[2]) for part in parts)
        if not same:
            raise DataError(
                f"{self.folder}: made with the tokenizer {self.tokenizer} ({ARGS}), but model.tokenizer_path is "
                f"{path}; give that one, in a folder of its name"
            )


class BlockFile(ArrowFile):
    def __init__(self, path: Path, name: str, length: int) -> None:
        super().__init__(path, name, RecordReader(COLUMN))
        self.length = length

    def get(self, index: int) -> Document:
        document = super().get(index)
        ids = document.spans[0].content
        if isinstance(ids, str) or len(ids) != self.length:
            content = "text" if isinstance(ids, str) else f"{len(ids)} ids"
            raise DataError(f"{self.path}, row {index}: {content} instead of {self.length} ids; save the dataset again")
        return Document([Span(ids[:1], trained=False), Span(ids[1:])], document.location, has_begin_end=True)


def _read_args(folder: Path) -> tuple[str, int]:
    """Return the tokenizer's name and the length of a block."""
    path = folder / ARGS
    try:
        args: Any = load_json(read_file(path, MAX_JSON_BYTES))
    except FileError as error:
        remedy = f'give a folder with {ARGS}, or read ids without it: dataset = "text", text_field = "{COLUMN}"'
        raise DataError(f"{path} {error.reason}; {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged: {error}; write it again") from None
    args = args if isinstance(args, dict) else {}
    name, length = args.get("tokenizer"), args.get("sequence_length")
    if not isinstance(name, str) or type(length) is not int or length < 1:
        raise DataError(f"{path}: the tokenizer (a name) or the sequence_length is missing; write them into it")
    return name, length
