"""Where the records of Axolotl's dataset entries are: its splits, kinds of files and folders."""

import contextlib
import random
from pathlib import Path

import pytest
from datasets.data_files import get_data_patterns, resolve_pattern

from torchtitan.plugins.importers.axolotl_files import locations
from torchtitan.plugins.importers.translation import JobDraft


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(label="datasets[0]", **entry):
    draft = JobDraft("job.yml", "")
    return locations(label, entry, draft), [str(fault) for fault in draft.faults]


def touch(*names):
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


def test_held_out_entries_of_the_hub_are_its_test_split():
    """Axolotl chooses `test` for test_datasets, and `train` for datasets, where an entry has no split."""
    for label, split, dataset in (
        ("datasets[0]", None, "huggingface"),
        ("test_datasets[1]", None, "huggingface_test"),
        ("test_datasets[1]", "train", "huggingface"),
        ("test_datasets[1]", "validation[:9]", "huggingface_validation"),
    ):
        (location,), faults = read(label, path="owner/name", **({"split": split} if split else {}))
        assert location["dataset"] == dataset and not faults
    assert read("test_datasets[0]", path="held_out.jsonl")[0] == [{"dataset": "text", "dataset_path": "held_out.jsonl"}]


def test_a_folder_with_files_of_several_splits_is_refused():
    """Random names against datasets, which looks for words of splits in the names of folders, else of files."""
    draw, counts = random.Random(0), {True: 0, False: 0}
    stems = ["train", "training", "valid", "dev", "test", "eval", "a", "data", "latest", "trainer", "Test"]
    for number in range(60):
        parts = [
            draw.choice(["", "x-", "0"]) + draw.choice(stems) + draw.choice(["", "_1", "-x", "9"]) for _ in range(6)
        ]
        root = f"folder{number}"
        names = {f"{root}/{parts[0]}.jsonl", f"{root}/{parts[1]}.jsonl"}
        names |= {f"{root}/{parts[2]}/{parts[3]}.jsonl"} if draw.random() < 0.4 else set()
        touch(*names)
        chosen = set[str]()
        for pattern in get_data_patterns(str(Path(root).absolute())).get("train", []):
            with contextlib.suppress(FileNotFoundError):  # one of several patterns matches
                files = resolve_pattern(pattern, str(Path(root).absolute()))
                chosen |= {str(Path(file).relative_to(Path.cwd())) for file in files}
        _, faults = read(path=f"./{root}")
        assert bool(faults) == (chosen != names), (sorted(names), sorted(chosen), faults)
        counts[bool(faults)] += 1
    assert min(counts.values()) > 5


CARD = "---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files: a.jsonl\n---\n"


@pytest.mark.parametrize(
    "names, card, message",
    [
        (("a.jsonl", "b.json", "c.jsonl.gz"), "---\nlicense: mit\n---\nconfigs: none\n", ""),
        (("a.jsonl", "b.jsonl", "c.csv"), "", "a folder with files of one kind; Axolotl does not read all of it"),
        (("a.jsonl", "b.csv.gz"), "", "a folder with files of one kind"),
        (("a.jsonl", "b.txt"), "", "a folder without .txt; each line of a .txt is a record"),
        (("a.txt",), "", "a folder without .txt"),
        (("a.jsonl", "b.jsonl"), CARD, "a folder without configs in its README.md; Axolotl does not read all of it"),
    ],
)
def test_folders_of_which_datasets_reads_some_files_are_refused(names, card, message):
    """load_dataset reads the files of the commonest kind, or those that the card lists."""
    touch(*(f"folder/{name}" for name in names))
    if card:
        Path("folder/README.md").write_text(card)
    faults = read(path="./folder")[1]
    assert [message in fault for fault in faults] == [True] * bool(message), faults


def test_saved_datasets():
    touch("saved/state.json", "splits/dataset_dict.json", "splits/train/state.json", "splits/other/state.json")
    assert read(path="saved")[0] == [{"dataset": "text", "dataset_path": "saved"}]
    assert read(path="splits")[0][0]["dataset_path"] == "splits/train"
    assert read(path="splits", split="other")[0][0]["dataset_path"] == "splits/other"
    for entry, part in (({"split": "train[:9]"}, "the name of a folder in splits"), ({"split": "../saved"}, "given")):
        assert part in read(path="splits", **entry)[1][0]
    assert "the name of a folder in splits" in read("test_datasets[0]", path="splits")[1][0], "it has no test"


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"path": "a.jsonl", "ds_type": "csv"}, 'datasets[0].path: given "a.jsonl"; allowed: files that end in .csv'),
        ({"path": "a.txt"}, "each line is a record for Axolotl: write them as JSON"),
        ({"path": "a.jsonl", "ds_type": "text"}, "datasets[0].ds_type"),
        ({"path": "json", "data_files": ["a.jsonl", "b.txt"]}, 'datasets[0].data_files: given "b.txt"'),
    ],
)
def test_kinds_of_files_that_are_read_otherwise_are_refused(entry, message):
    (fault,) = read(**entry)[1]
    assert message in fault


def test_files_next_to_a_folder_are_those_of_the_working_folder():
    """load_dataset("json", data_files=...) knows nothing of the entry's path."""
    touch("data/a.jsonl", "a.jsonl")
    assert read(path="data", data_files="a.jsonl", ds_type="json") == (
        [{"dataset": "text", "dataset_path": "a.jsonl"}],
        [],
    )
    assert read(path="owner/name", data_files=["a.jsonl"])[0][0]["dataset_path"] == "owner/name/a.jsonl"
