"""The data of an Axolotl file: its datasets as sources, what is held out, templates, packing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.options import hint
from torchtitan.importers.axolotl_options import TABLE_OF_DATA
from torchtitan.importers.axolotl_values import Values, entry_of
from torchtitan.importers.meaning import Meaning

TYPES = ("alpaca", "sharegpt", "chat_template", "completion", "input_output", "prompt_completion", "pretrain")
"""Whose records are told by their fields here."""
PREFERENCES = ("dpo", "ipo", "orpo")
LOADERS = ("json", "csv", "parquet", "arrow", "text")
"""What stands in path beside data_files."""
TEMPLATES = {"chatml": "chatml", "llama2": "llama2", "llama-2": "llama2", "llama3": "llama3", "llama-3": "llama3"}
TEMPLATES |= {"alpaca": "alpaca"}
OWN = ("tokenizer", "tokenizer_default")
REWRITE = "write the records as prompt and completion, or as messages"
ENDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")


class Data:
    def __init__(self, given: Values, meaning: Meaning) -> None:
        self.given, self.meaning = given, meaning
        self.values, self.note, self.refuse = meaning.values, meaning.notes.append, meaning.refuse
        self._templates: list[str] = []

    def read(self) -> None:
        given = self.given
        if given["pretraining_dataset"] is not None:
            self._pretraining()
        else:
            self._records()
        if (longest := given["max_packed_sequence_len"]) not in (None, self.values.get("training.seq_len")):
            self.refuse("max_packed_sequence_len", longest, "sequence_len", "samples are of one length")

    def _pretraining(self) -> None:
        said = self.given["pretraining_dataset"]
        sources = self._sources("pretraining_dataset", said if isinstance(said, list) else [said])
        self._write("training", sources)
        for name in ("datasets", "test_datasets", "val_set_size"):
            if self.given[name]:
                self.refuse(name, self.given[name], "nothing beside pretraining_dataset", "drop one of the two")
        self.note("documents are packed end to end; training.document_mask = true keeps them apart")

    def _records(self) -> None:
        given, values = self.given, self.values
        values["task.kind"] = "sft"
        self._preference()
        entries = given["datasets"] or []
        if given["train_data_uri"] is not None:
            entries = [{"path": given["train_data_uri"]}]
        if not entries:
            self.refuse("datasets", None, "at least one entry with its path", "say what is trained on")
        self._write("training", self._sources("datasets", entries))
        values["data.train_on"] = "all" if given["train_on_inputs"] else "completion"
        values["data.packing"] = "best_fit" if given["sample_packing"] else "off"
        texts = bool(entries) and all(isinstance(each, dict) and each.get("type") == "completion" for each in entries)
        held_out = self._held_out()
        values["data.too_long"] = "split" if texts and not held_out else "drop"
        what = "texts are cut" if values["data.too_long"] == "split" else "records are left out, and counted"
        self.note(f"too long {what}")
        self._template()

    def _preference(self) -> None:
        kind = self.given["rl"]
        if kind in PREFERENCES:
            self.values["task.kind"] = kind
        elif kind is not None:
            self.refuse("rl", kind, f"one of {', '.join(PREFERENCES)}", "no other is here yet")
        for name, option in {"dpo_beta": "dpo.beta", "dpo_label_smoothing": "dpo.label_smoothing"}.items():
            if self.given[name] and kind is None:
                self.refuse(name, self.given[name], "nothing without rl", "give rl: dpo")
            elif self.given[name] is not None:
                self.values[option] = self.given[name]

    def _held_out(self) -> bool:
        """Whether a part of the training data is."""
        given, values, share = self.given, self.values, self.given["val_set_size"] or 0
        tests = given["test_datasets"] or []
        if given["val_data_uri"] is not None:
            tests = [{"path": given["val_data_uri"]}]
        if tests and share:
            self.refuse("val_set_size", share, "0 beside test_datasets", "validate on one of them")
        elif tests:
            values |= {"validation.enable": True, "validation.samples": 0}
            self._write("validation", self._sources("test_datasets", tests))
        elif share:
            values |= {"validation.enable": True, "validation.samples": 0, "validation.split": share}
        return bool(share)

    def _sources(self, name: str, entries: list[Any]) -> list[dict[str, Any]]:
        sources: list[dict[str, Any]] = []
        for number, said in enumerate(entries):
            entry = entry_of(said, f"{name}[{number}]", self.meaning)
            if entry is not None:
                sources += self._source(f"{name}[{number}]", entry)
        return sources

    def _source(self, name: str, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
        for key, value in entry.items():
            if key not in (*TABLE_OF_DATA, "text_column"):
                self.refuse(f"{name}.{key}", value, "a key that is known", hint(key, TABLE_OF_DATA))
            elif key in ("format", "no_input_format", "system_format", "system_prompt", "field_system"):
                self.refuse(f"{name}.{key}", value, "nothing", f"prompts of one's own are not here yet: {REWRITE}")
            elif key.startswith("field_") and key != "field_messages" and value != TABLE_OF_DATA[key]:
                self.refuse(
                    f"{name}.{key}", value, TABLE_OF_DATA[key], f"rename the field in the records, or {REWRITE}"
                )
        if entry.get("split", "train") != "train":
            self.refuse(f"{name}.split", entry["split"], "train", "fetch the part into a file and name that")
        self._type(name, entry)
        template = entry.get("conversation")
        if template is not None:
            self._templates.append(template)
        field = entry.get("text_column", entry.get("field", entry.get("field_messages")))
        places = self._places(name, entry)
        return [place | ({"text_field": field} if isinstance(field, str) else {}) for place in places]

    def _type(self, name: str, entry: Mapping[str, Any]) -> None:
        kind = entry.get("type")
        if kind is not None and (not isinstance(kind, str) or kind.removesuffix(".load_role") not in TYPES):
            self.refuse(
                f"{name}.type", kind, f"one of {', '.join(TYPES)}", f"other prompts are not made here: {REWRITE}"
            )
        elif kind is not None:
            self.note(f"{name}.type {kind}: the fields of a record tell how it is read, see docs/data.md")

    def _places(self, name: str, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
        path, files = entry["path"], entry.get("data_files")
        if files is not None:
            files = [files] if isinstance(files, str) else files
            if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
                self.refuse(f"{name}.data_files", files, "paths")
                return []
            root = "" if path in LOADERS else path
            return [{"dataset": "text", "dataset_path": str(Path(root, file))} for file in files]
        if path.startswith(("http://", "https://", "s3://", "gs://", "artifact:")):
            self.refuse(f"{name}.path", path, "a file, a folder, a glob or owner/name of the hub", "fetch it first")
            return []
        local = path.endswith(ENDS) or path.startswith((".", "/", "~")) or "*" in path or path.count("/") != 1
        if local or Path(path).exists():
            return [{"dataset": "text", "dataset_path": path}]
        configured = f"{path}:{entry['name']}" if "name" in entry else path
        return [{"dataset": "huggingface", "dataset_path": configured}]

    def _write(self, section: str, sources: list[dict[str, Any]]) -> None:
        if len(sources) == 1 and "text_field" not in sources[0]:
            self.values |= {f"{section}.{key}": value for key, value in sources[0].items()}
        elif sources:
            self.values[f"{section}.sources"] = sources
            if len(sources) > 1:
                self.note(f"{section}: with epochs every source is read once in each, as Axolotl joins them")

    def _template(self) -> None:
        name = self.given["chat_template"]
        if name is not None:
            self._templates.append(name)
        wanted = {TEMPLATES.get(each, each) for each in self._templates if each not in OWN}
        if len(wanted) > 1:
            self.refuse("chat_template", sorted(wanted), "one for all datasets", "choose one")
            return
        for each in wanted:
            own = each.removeprefix("path:")
            if each.startswith("tokenizer_default_fallback_"):
                self.note("chat_template: the tokenizer's own; without one write data.chat_template")
            elif each in TEMPLATES.values() or own.endswith(".jinja") or "{%" in own:
                self.values["data.chat_template"] = own
            else:
                known = ", ".join(dict.fromkeys(TEMPLATES.values()))
                self.refuse(
                    "chat_template", each, f"tokenizer_default, {known}, or a .jinja file", hint(each, TEMPLATES)
                )
