"""Translate the data of a LLaMA-Factory file: datasets described by dataset_info.json, template and packing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.options import hint
from torchtitan.core.errors import JobError
from torchtitan.models.hf.config import read_json
from torchtitan.plugins.importers.llama_factory_templates import TEMPLATES, chat_template, end_token
from torchtitan.plugins.importers.translation import HUB_SPLITS, JobDraft, Options

INFO, ONLINE, REMOTE = "dataset_info.json", "ONLINE", "REMOTE:"
_ENTRY_KEYS = """file_name hf_hub_url ms_hub_url om_hub_url formatting ranking subset split columns tags script_url
    cloud_file_name folder num_samples"""
ENTRY_KEYS = _ENTRY_KEYS.split()
UNSUPPORTED = {
    "script_url": "scripts of datasets are never executed: write its records into a file",
    "cloud_file_name": "download it first",
    "folder": "download the folder, and name it by file_name",
    "num_samples": "records are not drawn: max_samples takes the first ones",
}
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
COLUMNS |= {"system": "system", "tools": "tools"}
"""LLaMA-Factory's columns of instructions -> fields of the format alpaca_chat here."""
DEFAULT_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
"""Columns that an entry without `columns` has."""
UNREAD = ""
"""Name of a field that records have and that is not read."""
MEDIA_COLUMNS = ("images", "videos", "audios", "kto_tag")
TAGS = {
    "user_tag": ["human", "user"],
    "assistant_tag": ["gpt", "assistant"],
    "observation_tag": ["observation", "tool"],
    "function_tag": ["function_call"],
    "system_tag": ["system"],
}
"""Tags of roles, and the names of each that are read."""
SPELLED = "special tokens that records spell out are ordinary text here, and tokens for LLaMA-Factory"
NEWLINE = "not the same: LLaMA-Factory also learns the blanks that its template writes after an answer's last token"


class FactoryData:
    """The data options of one file."""

    def __init__(self, options: Options, draft: JobDraft) -> None:
        self.options, self.draft, self.stage = options, draft, options["stage"]
        self.values, self.note, self.refuse = draft.values, draft.notes.append, draft.refuse
        self.info = self._info()

    def read(self) -> None:
        options, values = self.options, self.values
        if options["dataset"] is None:
            self.refuse("dataset", None, "names of datasets", "LLaMA-Factory needs it too")
        self._set_sources("training", options["dataset"])
        self._held_out()
        if options["train_sampling_strategy"] == "sequential":
            values["training.shuffle"] = False
        elif options["train_sampling_strategy"] == "group_by_length":
            values["data.group_by_length"] = True
        if (path := options["tokenized_path"]) is not None and Path(path).is_dir():
            self.refuse("tokenized_path", path, "a folder that does not exist yet", "its samples are not read: drop it")
        elif path is not None:
            values["data.cache_dir"] = path
        if self.stage == "pt":
            self._documents()
        else:
            self._records()
            self._template()

    def _documents(self) -> None:
        """Translate the packing of texts, which are learned whole."""
        options, values, length = self.options, self.values, self.options["cutoff_len"]
        if options["packing"] is False:
            values |= {"task.kind": "sft", "data.packing": "off", "data.too_long": "truncate", "data.train_on": "all"}
            return
        values["task.kind"] = "pretrain"
        values.pop("data.max_tokens", None)
        if options["packing"]:
            values["training.seq_len"] = length - 1
        self.note("documents are packed end to end, as there; a block here also learns its first token")
        self.note("a tokenizer's begin token stands before each document here, and before each block there")
        if end := "<|end_of_text|>" if options["template"] == "llama3" else end_token(options["template"]):
            self.note(f"documents end with the tokenizer's end token; with this template there with {end}")

    def _records(self) -> None:
        options, values = self.options, self.values
        values.setdefault("task.kind", "sft")
        values["data.train_on"] = "completion"
        if self.stage == "sft":
            if options["train_on_prompt"] and options["mask_history"]:
                self.refuse("mask_history", True, "false with train_on_prompt", "LLaMA-Factory refuses it too")
            values["data.train_on"] = "all" if options["train_on_prompt"] else "completion"
            if options["mask_history"]:
                values["data.train_on"] = "last_turn"
        for name in ("train_on_prompt", "mask_history", "packing", "neat_packing"):
            if self.stage == "dpo" and options[name]:
                self.refuse(name, True, "false with stage: dpo", "pairs are read whole, and never packed")
        values["data.packing"] = "off"
        if options["neat_packing"] and self.stage == "sft":
            values |= {"data.packing": "best_fit", "data.packing_window": max(2, options["preprocessing_batch_size"])}
        elif options["packing"] and self.stage == "sft":
            remedy = "records of a sample see each other there, and never here: neat_packing: true keeps them apart"
            self.refuse("packing", True, "false, or neat_packing: true", remedy)
        values["data.too_long"] = "drop"
        self.note("not the same: records of more than cutoff_len tokens are left out, and counted; there they are cut")
        self.note(SPELLED)

    def _template(self) -> None:
        options, name = self.options, self.options["template"]
        thinks = options["enable_thinking"]
        if not isinstance(thinks, bool | None):
            self.refuse("enable_thinking", thinks, "true, false or null")
            return
        if name is None:
            self.note("no template: the tokenizer's is used, from which LLaMA-Factory takes the texts around messages")
        elif name not in TEMPLATES:
            remedy = hint(name, TEMPLATES) or "leave it out for the tokenizer's own, or write data.chat_template"
            self.refuse("template", name, f"one of {', '.join(TEMPLATES)}", remedy)
        else:
            turns = TEMPLATES[name]
            drops_thoughts = not options["preserve_thinking"]
            at_the_end = self.stage == "dpo" or (options["mask_history"] and drops_thoughts)
            if turns.thought and at_the_end and drops_thoughts:
                self.note("earlier answers with thoughts: LLaMA-Factory leaves their thoughts out; take them out")
            self.values["data.chat_template"] = chat_template(turns, thinks, at_the_end)
            if turns.assistant.endswith("\n"):
                self.note(NEWLINE)

    def _held_out(self) -> None:
        options, values, share = self.options, self.values, self.options["val_size"]
        if share and options["eval_dataset"] is not None:
            self.refuse("val_size", share, "0 with eval_dataset", "LLaMA-Factory refuses it too")
        elif options["eval_dataset"] is not None:
            values |= {"validation.enable": True, "validation.samples": 0}
            self._set_sources("validation", options["eval_dataset"])
            if self.stage == "pt":
                values["validation.samples"] = 80
                self.note("validation.samples: 80 samples of the held-out texts are measured")
        elif share:
            count = len(self.values.get("training.sources", [1]))
            if self.stage == "pt":
                self.refuse("val_size", share, "0 with stage: pt", "name held-out texts by eval_dataset")
            elif share > 1 and (share != int(share) or count > 1):
                remedy = "each source holds out a part of its own: give a fraction"
                self.refuse("val_size", share, "a fraction below 1, or a whole number with one dataset", remedy)
            else:
                values |= {"validation.enable": True, "validation.samples": 0, "validation.split": share}

    def _info(self) -> Mapping[str, Any] | None:
        """Return the descriptions of the datasets; None if their names are those of the hub."""
        folder = self.options["dataset_dir"]
        if isinstance(folder, dict) or folder == ONLINE:
            return folder if isinstance(folder, dict) else None
        if not isinstance(folder, str):
            self.refuse("dataset_dir", folder, f"a folder with {INFO}")
            return {}
        path = Path(folder.removeprefix(REMOTE), INFO).expanduser()
        try:
            return read_json(path)
        except JobError as error:
            remedy = f"download it to a folder of that name here; {error}" if folder.startswith(REMOTE) else str(error)
            self.refuse("dataset_dir", folder, f"a folder with {INFO}", remedy)
            return {}

    def _set_sources(self, section: str, names: str | None) -> None:
        sources = []
        for name in [name.strip() for name in (names or "").split(",") if name.strip()]:
            if self.info is not None and name not in self.info:
                if self.info:
                    near = hint(name, list(self.info))
                    self.refuse("dataset", name, f"a dataset of {INFO}", near or "write its entry there")
                continue
            entry = self.info[name] if self.info is not None else {"hf_hub_url": name}
            if source := _Entry(name, entry, self).source():
                sources.append(source)
        if not sources:
            return
        self.values[f"{section}.sources"] = sources
        if len(sources) > 1 and section == "training":
            self.values["training.mixing"] = "sizes"


class _Entry:
    """One dataset of dataset_info.json."""

    def __init__(self, name: str, entry: Any, data: FactoryData) -> None:
        self.name, self.entry, self.data = name, entry, data
        self.stage, self.note = data.stage, data.note

    def refuse(self, key: str, value: Any, allowed: str, remedy: str = "") -> None:
        self.data.refuse(f"{INFO}: {self.name}.{key}", value, allowed, remedy)

    def source(self) -> dict[str, Any] | None:
        """Return the source; None if it is refused."""
        before = len(self.data.draft.faults)
        if not isinstance(self.entry, dict):
            self.data.refuse(f"{INFO}: {self.name}", self.entry, "a table")
            return None
        for key in self.entry:
            if key not in ENTRY_KEYS:
                self.refuse(key, self.entry[key], "a known key", hint(key, ENTRY_KEYS))
            elif key in UNSUPPORTED and self.entry[key] is not None:
                self.refuse(key, self.entry[key], "nothing", UNSUPPORTED[key])
        source = self._location() | self._reading()
        if (limit := self.data.options["max_samples"]) is not None:
            source["slice"] = f"[:{limit}]"
        return None if len(self.data.draft.faults) > before else source

    def _location(self) -> dict[str, Any]:
        entry, split = self.entry, self.entry.get("split") or "train"
        url, file = entry.get("hf_hub_url"), entry.get("file_name")
        splits = HUB_SPLITS if isinstance(url, str) else {"train": "text"}
        if not isinstance(split, str) or split not in splits:
            self.refuse("split", split, " or ".join(splits), "write the split into a file, and name that")
            return {}
        if isinstance(url, str):
            subset = entry.get("subset")
            return {"dataset": splits[split], "dataset_path": f"{url}:{subset}" if subset else url}
        if not isinstance(file, str):
            remedy = "download it: other hubs are not read" if entry.keys() & {"ms_hub_url", "om_hub_url"} else ""
            self.refuse("file_name", file, "a file, or hf_hub_url", remedy)
            return {}
        folder = self.data.options["dataset_dir"]
        path = Path("" if isinstance(folder, dict) else folder.removeprefix(REMOTE), file)
        if path.suffix == ".txt":
            self.refuse("file_name", file, ".json, .jsonl, .csv, .parquet or .arrow", "write its lines as records")
        return {"dataset": "text", "dataset_path": str(path)}

    def _reading(self) -> dict[str, Any]:
        """Return how records are read."""
        entry, kind = self.entry, self.entry.get("formatting", "alpaca")
        columns = entry["columns"] if isinstance(entry.get("columns"), dict) else DEFAULT_COLUMNS
        if "columns" in entry and not isinstance(entry["columns"], dict):
            self.refuse("columns", entry["columns"], "a table")
        columns = {key: column for key, column in columns.items() if column is not None}
        for key in columns:
            if key in MEDIA_COLUMNS:
                self.refuse(f"columns.{key}", columns[key], "nothing", "images, sound and KTO are not supported")
            elif key not in (*COLUMNS, "messages", "chosen", "rejected"):
                self.refuse(f"columns.{key}", columns[key], "a known column", hint(key, COLUMNS))
        ranks = bool(entry.get("ranking"))
        if ranks != (self.stage == "dpo"):
            allowed = "true with stage: dpo, and false otherwise"
            self.refuse("ranking", ranks, allowed, "LLaMA-Factory refuses it too")
        if kind not in ("alpaca", "sharegpt"):
            self.refuse("formatting", kind, "alpaca or sharegpt", "openai's adds words to the system message there")
            return {}
        if self.stage == "pt":
            return self._texts(kind, columns)
        if kind == "alpaca":
            return self._pairs_of_instructions(columns) if ranks else self._instructions(columns)
        return self._conversations(columns, ranks)

    def _texts(self, kind: str, columns: Mapping[str, str]) -> dict[str, Any]:
        if kind != "alpaca" or "prompt" not in columns or "query" in columns:
            remedy = 'give columns of its own: {"prompt": "text"}'
            self.refuse("columns", dict(columns), "prompt alone with stage: pt", remedy)
            return {}
        if self.data.options["packing"] is False:
            return {"format": "completion", "fields": {"text": columns["prompt"]}}
        return {"text_field": columns["prompt"]}

    def _instructions(self, columns: Mapping[str, str]) -> dict[str, Any]:
        for key in ("prompt", "response"):
            if key not in columns:
                self.refuse(f"columns.{key}", None, "the name of a field", "records have to have it")
        fields = {field: columns.get(key, UNREAD) for key, field in COLUMNS.items()}
        return {"format": "alpaca_chat", "fields": {name: column for name, column in fields.items() if name != column}}

    def _pairs_of_instructions(self, columns: Mapping[str, str]) -> dict[str, Any]:
        if "columns" not in self.entry or "query" in columns or "prompt" not in columns:
            remedy = "join instruction and input in one field, and name it as prompt"
            self.refuse("columns", dict(columns), "prompt, chosen and rejected with ranking", remedy)
        fields = {"question": columns.get("prompt", "question")}
        fields |= {key: columns[key] for key in ("chosen", "rejected") if columns.get(key, key) != key}
        return {"format": "preference", "fields": fields | self._context(columns)}

    @staticmethod
    def _context(columns: Mapping[str, str]) -> dict[str, str]:
        """Return the names of the fields next to a conversation."""
        return {key: columns.get(key, UNREAD) for key in ("system", "tools") if columns.get(key) != key}

    def _conversations(self, columns: Mapping[str, str], ranks: bool) -> dict[str, Any]:
        tags = self.entry.get("tags", {})
        if not isinstance(tags, dict):
            self.refuse("tags", tags, "a table")
            tags = {}
        for key, tag in tags.items():
            if key in TAGS and tag is not None and tag not in TAGS[key]:
                self.refuse(f"tags.{key}", tag, f"one of {', '.join(TAGS[key])}", "rename the roles in the records")
            elif key not in (*TAGS, "role_tag", "content_tag"):
                self.refuse(f"tags.{key}", tag, "a known tag", hint(key, [*TAGS, "role_tag", "content_tag"]))
        fields = {key: columns[key] for key in ("chosen", "rejected") if columns.get(key, key) != key}
        fields |= self._context(columns)
        messages = columns.get("messages", "conversations")
        fields |= {"conversations": messages} if messages != "conversations" else {}
        role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
        if (role, content) not in (("from", "value"), ("role", "content")):
            fields |= {"role": role, "content": content}
        if "tools" in columns:
            self.note(f"{self.name}: records with tools are refused when they are read, as the template has no place")
        return {"format": "preference" if ranks else "sharegpt", "fields": fields}
