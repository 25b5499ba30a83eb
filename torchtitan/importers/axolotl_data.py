"""Translate the data options of an Axolotl file: datasets to sources, held-out splits, templates and packing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.options import hint
from torchtitan.importers.axolotl_options import TABLE_OF_DATA
from torchtitan.importers.axolotl_values import PROMPT, Values, entry_of
from torchtitan.importers.translation import Meaning

TYPES = ("alpaca", "sharegpt", "chat_template", "completion", "input_output", "prompt_completion", "pretrain")
"""Supported prompt types. Types without an entry in READ are recognized by the fields of their records."""
READ = {"alpaca": ("alpaca", ""), "sharegpt": ("sharegpt", "conversations"), "completion": ("completion", "text")}
READ |= {"input_output": ("input_output", "segments"), "prompt_completion": ("prompt_completion", "")}
"""Prompt type -> (record format, the field of that format that `field` and `field_messages` rename)."""
ROLES = ".load_role"
"""Suffix of sharegpt for messages with the keys role and value."""
PREFERENCES = ("dpo", "ipo", "orpo")
LOADERS = ("json", "csv", "parquet", "arrow", "text")
"""Values of `path` that name a loader when data_files is set."""
TEMPLATES = {"chatml": "chatml", "llama2": "llama2", "llama-2": "llama2", "llama3": "llama3", "llama-3": "llama3"}
TEMPLATES |= {"alpaca": "alpaca"}
OWN, JINJA = ("tokenizer", "tokenizer_default"), "jinja"
FIELDS = {f"field_{name}": name for name in ("instruction", "input", "output", "system")}
INSIDE = {"message_field_role": "role", "message_field_content": "content"}
REWRITE = "write the records as prompt and completion, or as messages"
REWRITE_PAIRS = "write the records with chosen and rejected: lists of messages, or answers behind messages or prompt"
ENDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")


class Data:
    def __init__(self, options: Values, meaning: Meaning) -> None:
        self.given, self.meaning = options, meaning
        self.values, self.note, self.refuse = meaning.values, meaning.notes.append, meaning.refuse
        self._templates: list[str] = []

    def read(self) -> None:
        options = self.given
        if options["pretraining_dataset"] is not None:
            self._pretraining()
        else:
            self._records()
        if (longest := options["max_packed_sequence_len"]) not in (None, self.values.get("training.seq_len")):
            self.refuse("max_packed_sequence_len", longest, "sequence_len", "samples are of one length")

    def _pretraining(self) -> None:
        dataset = self.given["pretraining_dataset"]
        entries = dataset if isinstance(dataset, list) else [dataset]
        if len(entries) > 1:
            reason = "Axolotl reads the first alone; a job may have several training.sources with weights"
            self.refuse("pretraining_dataset", f"{len(entries)} entries", "one entry", reason)
        sources = self._sources("pretraining_dataset", entries[:1])
        self._write("training", sources)
        for name in ("datasets", "test_datasets", "val_set_size", "dataset_shard_num"):
            if self.given[name]:
                self.refuse(name, self.given[name], "nothing beside pretraining_dataset", "drop one of the two")
        self.note("documents are packed end to end; training.document_mask = true keeps them apart")

    def _records(self) -> None:
        options, values = self.given, self.values
        values["task.kind"] = "sft"
        self._preference()
        entries = options["datasets"] or []
        if options["train_data_uri"] is not None:
            entries = [{"path": options["train_data_uri"]}]
        if not entries:
            self.refuse("datasets", None, "at least one entry with its path", "say what is trained on")
        self._write("training", self._sources("datasets", entries))
        values["data.train_on"] = "all" if options["train_on_inputs"] else "completion"
        values["data.packing"] = "best_fit" if options["sample_packing"] else "off"
        texts = bool(entries) and all(
            isinstance(entry, dict) and entry.get("type") == "completion" for entry in entries
        )
        held_out = self._held_out()
        values["data.too_long"] = "split" if texts and not held_out else "drop"
        handling = "texts are cut" if values["data.too_long"] == "split" else "records are left out, and counted"
        reason = (
            "; Axolotl cuts them, as this does with test_datasets instead of val_set_size" if texts and held_out else ""
        )
        self.note(f"too long {handling}{reason}")
        self._template()
        self._lengths()

    def _lengths(self) -> None:
        """Translate the padding and ordering of unpacked samples, and the shard of the dataset to read."""
        options, values, packed = self.given, self.values, bool(self.given["sample_packing"])
        if options["pad_to_sequence_len"] is not None and not packed:
            values["data.pad_to"] = "seq_len" if options["pad_to_sequence_len"] else "batch"
        if options["group_by_length"] and packed:
            self.note("group_by_length: samples are packed, so that all are of one length")
        elif options["group_by_length"]:
            values["data.group_by_length"] = True
        shards, number = options["dataset_shard_num"], options["dataset_shard_idx"] or 0
        if shards is not None and not 0 <= number < shards:
            self.refuse("dataset_shard_idx", number, f"from 0 to {shards - 1}, one of dataset_shard_num {shards}")
        elif shards is not None:
            values["data.shards"] = f"{number + 1}/{shards}"
        elif options["dataset_shard_idx"] is not None:
            self.refuse("dataset_shard_idx", number, "nothing without dataset_shard_num")

    def _preference(self) -> None:
        kind = self.given["rl"]
        if kind in PREFERENCES:
            self.values["task.kind"] = kind
        elif kind is not None:
            reason = (
                "KTO begins from a mean over all pairs of a step"
                if kind in ("kto", "kto_pair")
                else "no other is here yet"
            )
            self.refuse("rl", kind, f"one of {', '.join(PREFERENCES)}", reason)
        adapter_folder = self.given["lora_model_dir"] or self.given["peft_adapter"]
        if kind in ("dpo", "ipo") and adapter_folder and self.given["base_model"] is not None:
            self.values["dpo.reference"] = self.given["base_model"]  # without the adapter that is learned on
        options = {
            "rl_beta": "dpo.beta",
            "dpo_beta": "dpo.beta",
            "dpo_label_smoothing": "dpo.label_smoothing",
            "orpo_alpha": "dpo.beta",
        }
        for name, option in options.items():
            if self.given[name] and (kind is None or (name == "orpo_alpha" and kind != "orpo")):
                required = "orpo" if name == "orpo_alpha" else "dpo"
                self.refuse(name, self.given[name], f"nothing without rl: {required}", f"give rl: {required}")
            elif self.given[name] is not None:
                self.values[option] = self.given[name]

    def _held_out(self) -> bool:
        """Translate the validation data. Returns True if a share of the training data is held out."""
        options, values, share = self.given, self.values, self.given["val_set_size"] or 0
        tests = options["test_datasets"] or []
        if options["val_data_uri"] is not None:
            tests = [{"path": options["val_data_uri"]}]
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
        for number, raw_entry in enumerate(entries):
            entry = entry_of(raw_entry, f"{name}[{number}]", self.meaning)
            if entry is not None:
                sources += self._source(f"{name}[{number}]", entry)
        return sources

    def _source(self, name: str, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
        for key, value in entry.items():
            if key not in (*TABLE_OF_DATA, "text_column"):
                self.refuse(f"{name}.{key}", value, "a key that is known", hint(key, TABLE_OF_DATA))
            elif key in (*PROMPT, *FIELDS, *INSIDE) and not isinstance(value, str):
                self.refuse(f"{name}.{key}", value, "text")
        if entry.get("split", "train") != "train":
            self.refuse(f"{name}.split", entry["split"], "train", "fetch the part into a file and name that")
        template = entry.get("conversation")
        if template is not None:
            self._templates.append(template)
        reading = self._reading(name, entry)
        return [place | reading for place in self._places(name, entry)]

    def _reading(self, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that say how an entry's records are read.

        A prompt type takes precedence over detection by fields, because a dataset may also store the text of the
        whole record in one of its fields.
        """
        fields = {ours: entry[key] for key, ours in FIELDS.items() if entry.get(key, ours) != ours}
        message_fields = {ours: entry[key] for key, ours in INSIDE.items() if entry.get(key, ours) != ours}
        template = {key: entry[key] for key in PROMPT if key in entry}
        field = entry.get("text_column", entry.get("field", entry.get("field_messages")))
        kind = self._kind(name, entry)
        record_format, default_field = READ.get(kind.removesuffix(ROLES), ("", ""))
        if kind.endswith(ROLES):
            message_fields = {"content": "value"} | message_fields
        if (template or fields) and kind not in ("", "alpaca"):
            for key in [key for key in entry if key in PROMPT or key in FIELDS]:
                self.refuse(
                    f"{name}.{key}", entry[key], f"nothing beside type: {kind}", "it is of instructions: drop it"
                )
        elif template or fields:
            record_format, default_field, message_fields = "alpaca", "", {}
        elif message_fields and not record_format or kind == "chat_template" and field is not None:
            record_format, default_field, field = "chat", "messages", field or "messages"
        if default_field and field not in (None, default_field):
            fields = {default_field: field}
        if record_format and field is not None and field not in fields.values() and field != default_field:
            self.note(f"{name}: {field!r} is not read, as records of format {record_format} have fields of their own")
        if record_format:
            settings = {
                "format": record_format,
                "fields": fields | message_fields,
                "template": PROMPT | template if template else {},
            }
            return {key: value for key, value in settings.items() if value}
        if kind:
            self.note(f"{name}.type {kind}: the fields of a record tell how it is read, see docs/data.md")
        return {"text_field": field} if isinstance(field, str) else {}

    def _kind(self, name: str, entry: Mapping[str, Any]) -> str:
        kind = entry.get("type")
        if kind is None or kind in (*TYPES, f"sharegpt{ROLES}"):
            return kind or ""
        if self.given["rl"] in PREFERENCES:
            self.refuse(f"{name}.type", kind, "nothing with rl, as the fields of a record tell", REWRITE_PAIRS)
        else:
            reason = f"other prompts are not made here: {REWRITE}"
            self.refuse(f"{name}.type", kind, f"one of {', '.join(TYPES)}", reason)
        return ""

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
        if len(sources) == 1 and sources[0].keys() <= {"dataset", "dataset_path"}:
            self.values |= {f"{section}.{key}": value for key, value in sources[0].items()}
        elif sources:
            self.values[f"{section}.sources"] = sources
        if len(sources) > 1 and self.given["pretraining_dataset"] is not None:
            self.note(f"{section}: the {len(sources)} sources have equal shares of the samples; weight changes that")
        elif len(sources) > 1:
            self.values |= {"training.mixing": "sizes"} if section == "training" else {}
            joined = "are read as one, every record equally often, as Axolotl joins them"
            self.note(f"{section}: the {len(sources)} sources {joined}")

    def _template(self) -> None:
        name, jinja = self.given["chat_template"], self.given["chat_template_jinja"]
        if jinja is not None and name in (None, JINJA):
            name = jinja
        elif jinja is not None:
            self.refuse("chat_template_jinja", jinja, f"nothing beside chat_template: {name}", "drop one of the two")
        if name is not None:
            self._templates.append(name)
        templates = {TEMPLATES.get(template, template) for template in self._templates if template not in OWN}
        if len(templates) > 1:
            self.refuse("chat_template", sorted(templates), "one for all datasets", "choose one")
            return
        for template in templates:
            jinja = template.removeprefix("path:")
            if template.startswith("tokenizer_default_fallback_"):
                self.note("chat_template: the tokenizer's own; without one write data.chat_template")
            elif template in TEMPLATES.values() or jinja.endswith(".jinja") or "{%" in jinja or "{{" in jinja:
                self.values["data.chat_template"] = jinja
            else:
                known_templates = ", ".join(dict.fromkeys(TEMPLATES.values()))
                self.refuse(
                    "chat_template",
                    template,
                    f"tokenizer_default, {known_templates}, or a .jinja file",
                    hint(template, TEMPLATES),
                )
