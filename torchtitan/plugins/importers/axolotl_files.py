"""Translate where the records of an Axolotl dataset entry are: a dataset of the hub, a folder, files, and a split.

Facts: utils/data/shared.py and sft.py of Axolotl (067b021c8, July 2026), and data_files.py of datasets for folders.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.core.files import read_file
from torchtitan.datasets.sources import files_below
from torchtitan.plugins.importers.translation import HUB_SPLITS, JobDraft

LOADERS = ("json", "csv", "parquet", "arrow", "text")
"""Values of `path` that name a loader when data_files is set."""
REMOTE = ("http://", "https://", "s3://", "gs://", "artifact:")
SUFFIXES = {"json": (".json", ".jsonl", ".gz", ".zst"), "csv": (".csv", ".tsv")}
SUFFIXES |= {"parquet": (".parquet",), "arrow": (".arrow",)}
"""ds_type -> ends of the files that are read so here."""
LINES = ".txt"
FILE_SUFFIXES = (*(suffix for suffixes in SUFFIXES.values() for suffix in suffixes), LINES)
KINDS = SUFFIXES | {LINES: (LINES,)}
CARD = "README.md"
"""Describes a dataset of the hub, and may list its files."""
LARGEST_CARD = 2**24
SPLIT = re.compile(r"(?P<name>\w+(\.\w+)*)(?P<slice>\[[-0-9_%:]*\])?")
MAX_SPLIT = 200
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that save_to_disk writes, of one dataset and of several splits, each in a folder of its own."""
_KEYWORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
SPLIT_NAMES = {
    split: re.compile(rf"(?:^|.*[-._ 0-9])(?:{names})(?:[-._ 0-9].*|$)") for split, names in _KEYWORDS.items()
}
"""Split -> names of the folders and files that datasets takes for it."""
ONE_SPLIT = "write the records of the split into a file and name that"


def locations(label: str, entry: Mapping[str, Any], draft: JobDraft) -> list[dict[str, Any]]:
    """Return dataset, dataset_path and slice of each of an entry's files, or of its folder or dataset of the hub.

    `label`: the entry in messages. Refuses in `draft` what is not read as Axolotl reads it.
    """
    return _Entry(label, entry, draft).locations()


class _Entry:
    def __init__(self, label: str, entry: Mapping[str, Any], draft: JobDraft) -> None:
        self.label, self.entry, self.draft, self.path = label, entry, draft, entry["path"]
        self.default = "test" if label.startswith("test_datasets") else "train"

    def refuse(self, key: str, value: Any, allowed: str, remedy: str = "") -> None:
        self.draft.refuse(f"{self.label}.{key}", value, allowed, remedy)

    def locations(self) -> list[dict[str, Any]]:
        path, files = self.path, self.entry.get("data_files")
        if files is None and path.startswith(REMOTE):
            self.refuse("path", path, "a file, a folder, a glob or owner/name of the hub", "download it first")
            return []
        is_local = (
            path.endswith(FILE_SUFFIXES) or path.startswith((".", "/", "~")) or "*" in path or path.count("/") != 1
        )
        if files is None and not (is_local or Path(path).exists()):
            dataset, part = self._split(HUB_SPLITS, self.default)
            name = self.entry.get("name")
            return [{"dataset": dataset, "dataset_path": f"{path}:{name}" if name is not None else path} | part]
        if files is None and Path(path).is_dir():
            return self._folder()
        files = [path] if files is None else [files] if isinstance(files, str) else files
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            self.refuse("data_files", files, "paths")
            return []
        return self._files(files)

    def _files(self, files: list[str]) -> list[dict[str, Any]]:
        key = "data_files" if "data_files" in self.entry else "path"
        dataset, part = self._split({"train": "text"}, "train")
        if part and len(files) > 1:
            self.refuse(key, files, "one file, as the slice is one of all of them", "join them")
        kind = self.entry.get("ds_type")
        if kind not in (None, *SUFFIXES):
            self.refuse("ds_type", kind, f"one of {', '.join(SUFFIXES)}", "its lines are records: write them as JSON")
        elif lines := [file for file in files if file.endswith(LINES)]:
            remedy = "each line is a record for Axolotl: write them as JSON"
            self.refuse(key, lines[0], f"files that end in {', '.join(FILE_SUFFIXES[:-1])}", remedy)
        elif kind and (misnamed := [file for file in files if not file.endswith(SUFFIXES[kind])]):
            self.refuse(key, misnamed[0], f"files that end in {' or '.join(SUFFIXES[kind])}, as ds_type: {kind}")
        in_working_folder = "data_files" not in self.entry or self.path in LOADERS or Path(self.path).is_dir()
        root = Path("" if in_working_folder else self.path)
        return [{"dataset": dataset, "dataset_path": str(root / file)} | part for file in files]

    def _folder(self) -> list[dict[str, Any]]:
        """Return the location of a folder with the records of one split alone."""
        path = Path(self.path)
        if (path / SAVED_SPLITS).exists():
            split = self.entry.get("split", self.default)
            if not (isinstance(split, str) and split.isidentifier() and (path / split / SAVED).exists()):
                self.refuse("split", split, f"the name of a folder in {path}", "Axolotl reads no slice of it")
            return [{"dataset": "text", "dataset_path": str(path / str(split))}]
        dataset, part = self._split({"train": "text"}, "train")
        if part and (path / SAVED).exists():
            remedy = "Axolotl reads all of such a folder, whatever the slice"
            self.refuse("split", self.entry["split"], "train for a folder of save_to_disk", remedy)
        elif not (path / SAVED).exists():
            split_name = "train" if "split" in self.entry else self.default
            names = sorted(files_below(self.path, FILE_SUFFIXES))
            self._refuse_unread(names)
            splits = _splits_of(names)
            if splits and set(splits.values()) != {split_name} and set(splits.values()) != {None}:
                chosen = [name for name, split in splits.items() if split == split_name]
                allowed = f"a folder whose files are all of the split {split_name} by their names"
                shown = ", ".join(chosen[:5]) or "none"
                self.refuse("path", self.path, allowed, f"Axolotl reads {shown} of it: name each file in an entry")
        return [{"dataset": dataset, "dataset_path": self.path} | part]

    def _refuse_unread(self, names: list[str]) -> None:
        """Refuse a folder of which datasets reads some files, or reads them otherwise."""
        kinds = {_kind_of(name) for name in names}
        remedy = "Axolotl does not read all of it: name each file in an entry"
        if LINES in kinds:
            as_lines = "each line of a .txt is a record for Axolotl, if it reads it: write them as JSON"
            self.refuse("path", self.path, f"a folder without {LINES}", as_lines)
        elif len(kinds) > 1:
            self.refuse("path", self.path, "a folder with files of one kind", remedy)
        if _lists_files(Path(self.path)):
            self.refuse("path", self.path, f"a folder without configs in its {CARD}", remedy)

    def _split(self, splits: Mapping[str, str], default: str) -> tuple[str, dict[str, str]]:
        """Return the dataset of the entry's split, one of `splits`, and its slice as an option of a source."""
        text = self.entry.get("split", default)
        parts = re.split(r"\s*\+\s*", text) if isinstance(text, str) and len(text) <= MAX_SPLIT else [""]
        matches = [match for match in map(SPLIT.fullmatch, parts) if match]
        names, slices = {match["name"] for match in matches}, [match["slice"] for match in matches]
        if len(matches) == len(parts) and len(names) == 1 and names <= splits.keys():
            if all(slices):
                return splits[names.pop()], {"slice": "+".join(slices).replace("_", "")}
            if len(parts) == 1:
                return splits[names.pop()], {}
        self.refuse("split", text, f"{' or '.join(splits)}, or slices of it, as train[:20%]", ONE_SPLIT)
        return splits["train"], {}


def _kind_of(name: str) -> str:
    """Return the kind of a file by the first of its suffixes that says it, as datasets does."""
    suffixes = [f".{part}" for part in name.lower().rpartition("/")[2].split(".")[1:]]
    return next((kind for suffix in suffixes for kind, ends in KINDS.items() if suffix in ends), "")


def _lists_files(folder: Path) -> bool:
    """Return True if a folder's card says which files have its records: datasets reads no others."""
    card = folder / CARD
    text = read_file(card, LARGEST_CARD).decode(errors="replace") if card.is_file() else ""
    front = re.match(r"\s*---\s*\n(.*?)\n---", text, re.DOTALL)
    return front is not None and re.search(r"^configs\s*:", front[1], re.MULTILINE) is not None


def _splits_of(names: list[str]) -> dict[str, str | None]:
    """Return the split of each file of a folder, by its folders' names or else its own; None without one."""
    for parts in ([name.split("/")[:-1] for name in names], [name.split("/")[-1:] for name in names]):
        splits = {
            name: next((split for split, form in SPLIT_NAMES.items() if any(map(form.fullmatch, path))), None)
            for name, path in zip(names, parts, strict=True)
        }
        if any(splits.values()):
            return splits
    return dict.fromkeys(names)
