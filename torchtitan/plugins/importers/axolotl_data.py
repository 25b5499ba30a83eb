"""Translate the data options of an Axolotl file: datasets, held-out splits, templates, packing and added tokens."""

from collections.abc import Collection, Mapping
from string import Formatter
from typing import Any

from torchtitan.config.options import hint
from torchtitan.models import CONFIG_CONVERTERS
from torchtitan.plugins.importers.axolotl_files import locations
from torchtitan.plugins.importers.axolotl_options import ENTRY_KEYS, UNSET
from torchtitan.plugins.importers.axolotl_prompts import (
    BRADLEY_TERRY,
    BY_STYLE,
    PAIRS,
    PAIRS_OF_MESSAGES,
    STRATEGIES,
    TEMPLATES_OF_PAIRS,
    pair_fields_of,
    prompt_of,
    reason_of,
    source_of,
)
from torchtitan.plugins.importers.axolotl_templates import (
    JINJA,
    OWN,
    TEMPLATES,
    TOKENIZER_TEMPLATE,
    is_of_model,
    own_template,
)
from torchtitan.plugins.importers.translation import JobDraft, Options, make_reward_model

FORMATS = {"alpaca": ("instruct", ""), "sharegpt": ("sharegpt", "conversations"), "completion": ("completion", "text")}
FORMATS |= {"input_output": ("input_output", "segments"), "prompt_completion": ("prompt_completion", "")}
"""Prompt type -> (record format, the field of that format that `field` and `field_messages` rename)."""
TYPES = (*FORMATS, "chat_template", "pretrain")
"""Supported prompt types. Those without an entry in FORMATS are recognized by the fields of their records."""
ROLES = ".load_role"
"""Suffix of sharegpt for messages with the keys role and value."""
PREFERENCES = ("dpo", "ipo", "orpo")
FIELDS = {f"field_{name}": name for name in ("instruction", "input", "output", "system")}
MESSAGE_FIELDS = {"message_field_role": "role", "message_field_content": "content"}
PROPERTIES = "message_property_mappings"
"""An entry's table from role and content to the fields of a message."""
ROLES_READ = {"system": {"system"}, "user": {"user", "human"}, "assistant": {"assistant", "gpt"}, "tool": {"tool"}}
"""Role -> names of it that records may have."""
THINKING = {"field_thinking": "template_thinking_key", "template_thinking_key": "field_thinking"}
"""Keys of an entry for the name of thoughts in a message and in the template, which are one here."""
THINKING_FIELD = "reasoning_content"
PAIR_FIELDS = {"field_chosen": "chosen", "field_rejected": "rejected"}
PAIR_TYPES = ("chat_template.default", "chat_template.argilla", "chat_template.argilla_chat")
"""Prompt types of pairs of messages under the chat template; those of Argilla have the prompt in both answers."""
AS_THEY_ARE = "passthrough.default"
KINDS_OF_PAIRS = (*PAIR_TYPES, AS_THEY_ARE, *(f"{name}.{kind}" for name in TEMPLATES_OF_PAIRS for kind in PAIRS))
END_OF_PAIRS = "a tokenizer's own end token is not written after the template's: see `torchtitan preview`"
FIRST_TURN = "of a conversation of several turns the last answers are compared; Axolotl reads its first two messages"
CUSTOM_FORMATS = {f"{name}_format": f"{{{name}}}" for name in ("prompt", "chosen", "rejected")}
"""Keys of a custom pair, and the only texts with which a pair is read as it is."""
CUSTOM_FIELDS = ("field_system", "field_prompt", "field_chosen", "field_rejected")
"""The first has no effect, as no format contains {system}."""
OTHER_READING = ("field", "field_messages", "text_column", "conversation", "roles")
"""Further keys of an entry that say how its records are read."""
NAMES = ("name", "ds_type", "field", "field_messages", "text_column", *THINKING)
"""Keys of an entry whose values are names."""
TEXTS = ("completion", "input_output", "prompt_completion", "instruct")
"""Formats of records that hold texts, which may have been rendered with a template before."""
SPELLED_TOKENS = "special tokens that its texts spell out are ordinary text here, and tokens for Axolotl"
REWRITE = "write the records as prompt and completion, or as messages"
REWRITE_PAIRS = "write the records with chosen and rejected: lists of messages, or answers next to messages or prompt"
PROMPT = {"format": "{instruction} {input} ", "no_input_format": "{instruction} ", "system_format": "{system}"}
PROMPT |= {"system_prompt": ""}
"""Parts of a custom prompt, with Axolotl's defaults."""
PLACES = {"format": ("instruction", "input"), "no_input_format": ("instruction",), "system_format": ("system",)}
"""Parts of a custom prompt, and what Axolotl fills into them."""
NO_SYSTEM = ("system_format", "")
"""The part of a custom prompt with which no system message is written."""
EMPTY = (NO_SYSTEM, ("field_system", ""), ("field_input", ""))
"""Keys of a custom prompt that mean something when they are empty."""
NEVER_EMPTY = ("format", "no_input_format", "field_instruction", "field_output")
SYSTEM_PROMPT = "system_prompt also stands in for an empty system message; Axolotl's only for a field that is not there"
NULL_SYSTEM = "not the same: a system message that is null is empty here, and the text None for Axolotl"
DPO_OPTIONS = {"rl_beta": "dpo.beta", "dpo_beta": "dpo.beta", "dpo_label_smoothing": "dpo.label_smoothing"}
DPO_OPTIONS |= {"orpo_alpha": "dpo.beta"}
SHORTEST = 2
"""Fewest tokens of a record without min_sample_len; a record of one has nothing to predict."""
DROP = "drop_system_message"


class DataTranslation:
    """The data options of one file."""

    def __init__(self, options: Options, draft: JobDraft) -> None:
        self.options, self.draft = options, draft
        self.values, self.note, self.refuse = draft.values, draft.notes.append, draft.refuse
        self._templates: list[str] = []

    def read(self) -> None:
        if self.options["pretraining_dataset"] is not None:
            self._pretraining()
        else:
            self._records()
        max_length = self.options["max_packed_sequence_len"]
        if max_length not in (None, self.values.get("training.seq_len")):
            self.refuse("max_packed_sequence_len", max_length, "sequence_len", "samples are of one length")

    def _pretraining(self) -> None:
        for name in ("max_tokens", "too_long"):
            self.values.pop(f"data.{name}", None)
        dataset = self.options["pretraining_dataset"]
        entries = dataset if isinstance(dataset, list) else [dataset]
        if len(entries) > 1:
            reason = "Axolotl only reads the first; a job may have several training.sources with weights"
            self.refuse("pretraining_dataset", f"{len(entries)} entries", "one entry", reason)
        sources = self._sources("pretraining_dataset", entries[:1])
        if any("slice" in source for source in sources):
            self.refuse("pretraining_dataset[0].split", entries[0]["split"], "train", "Axolotl's stream has no slices")
        self._set_sources("training", sources)
        if (self.options["min_sample_len"] or 0) > SHORTEST:
            self.note("min_sample_len: no effect with pretraining_dataset, as in Axolotl: its texts are concatenated")
        for name in ("datasets", "test_datasets", "val_set_size", "dataset_shard_num", "dataset_exact_deduplication"):
            if self.options[name]:
                self.refuse(name, self.options[name], "nothing with pretraining_dataset", "drop one of the two")
        if self.options["sample_packing"] and self.options["pretrain_multipack_attn"] is not False:
            self.values["training.document_mask"] = True
        else:
            self.note("documents are packed end to end; training.document_mask = true keeps them apart")
        self.note(f"pretraining_dataset: {SPELLED_TOKENS}")

    def _records(self) -> None:
        options, values = self.options, self.values
        values["task.kind"] = "sft"
        self._preference()
        entries = options["datasets"] or []
        if options["train_data_uri"] is not None:
            entries = [{"path": options["train_data_uri"]}]
        if not entries:
            self.refuse("datasets", None, "at least one entry with its path", "name the training data")
        self._set_sources("training", self._sources("datasets", entries))
        learns_inputs = bool(options["train_on_inputs"])
        if learns_inputs and options["reward_model"]:
            self.note("train_on_inputs: no effect with reward_model, as in Axolotl: the last token is read")
        values["data.train_on"] = "all" if learns_inputs and not options["reward_model"] else "completion"
        values["data.packing"] = "best_fit" if options["sample_packing"] else "off"
        are_texts = bool(entries) and all(
            isinstance(entry, dict) and entry.get("type") == "completion" for entry in entries
        )
        has_split = self._held_out()
        if are_texts and not has_split:
            values["data.too_long"] = "split"
            values.pop("data.max_tokens", None)
            self.note("texts that are too long are cut; the last token of a piece is learned too, as the first label")
        elif values["data.too_long"] == "drop":
            exception = "; Axolotl cuts them, as a job does with test_datasets instead of val_set_size"
            self.note(f"records that are too long are left out, and counted{exception * are_texts}")
        self._template()
        self._order(len(entries))
        self._lengths()
        self._left_out()

    def _order(self, sets: int) -> None:
        """Translate the order of records. Axolotl shuffles several data sets into one before any other order."""
        is_sequential, is_shuffled = self.options["curriculum_sampling"], self.options["shuffle_merged_datasets"]
        if not is_sequential and (is_shuffled is False or self.options["shuffle_before_merging_datasets"]):
            self.note("shuffle_merged_datasets: no effect without curriculum_sampling: each epoch is shuffled")
        if is_sequential and sets == 1:
            self.values["training.shuffle"] = False
        elif is_sequential and is_shuffled is not False:
            self.note("not the same: each epoch is shuffled again; curriculum_sampling repeats the first order")
        elif is_sequential:
            allowed = "false with several datasets and without shuffle_merged_datasets"
            self.refuse("curriculum_sampling", True, allowed, "write the records into one file, in their order")

    def _lengths(self) -> None:
        """Translate the padding and ordering of unpacked samples, and the shard of the dataset to read."""
        options, values, is_packed = self.options, self.values, bool(self.options["sample_packing"])
        if options["pad_to_sequence_len"] is not None and not is_packed:
            values["data.pad_to"] = "seq_len" if options["pad_to_sequence_len"] else "batch"
        if options["group_by_length"] and is_packed:
            self.note("group_by_length: no effect, as packed samples are of one length")
        elif options["group_by_length"]:
            values["data.group_by_length"] = True
        shards, number = options["dataset_shard_num"], options["dataset_shard_idx"] or 0
        if shards is not None and not 0 <= number < shards:
            self.refuse("dataset_shard_idx", number, f"from 0 to {shards - 1}, one of dataset_shard_num {shards}")
        elif shards is not None:
            values["data.shards"] = f"{number + 1}/{shards}"
        elif options["dataset_shard_idx"] is not None:
            self.refuse("dataset_shard_idx", number, "nothing without dataset_shard_num")

    def _left_out(self) -> None:
        """Translate which records are left out: those with few tokens, and those that repeat another one."""
        options, values = self.options, self.values
        are_pairs = options["rl"] is not None or bool(options["reward_model"])
        if (least := options["min_sample_len"] or 0) > SHORTEST and not are_pairs:
            values["data.min_tokens"] = least
        elif least > SHORTEST:
            cause = "reward_model" if options["reward_model"] else "rl"
            self.note(
                f"min_sample_len: no effect with {cause}, as in Axolotl; data.min_tokens would leave out short answers"
            )
        if not options["dataset_exact_deduplication"]:
            return
        values["data.deduplicate"] = True
        if options["rl"] is not None and options["test_datasets"]:
            self.note("not the same: pairs of test_datasets that are in datasets too are kept; Axolotl leaves them out")
        if options["dataset_shard_num"] is not None:
            self.note("not the same: records are compared before one of dataset_shard_num shards is taken, not after")

    def _preference(self) -> None:
        kind = self.options["rl"]
        self._reward(kind)
        if kind in PREFERENCES:
            self.values["task.kind"] = kind
        elif kind is not None:
            is_kto = kind in ("kto", "kto_pair")
            reason = "KTO needs a mean over all pairs of a step" if is_kto else "others are not supported"
            self.refuse("rl", kind, f"one of {', '.join(PREFERENCES)}", reason)
        adapter_folder = self.options["lora_model_dir"] or self.options["peft_adapter"]
        if kind in ("dpo", "ipo") and adapter_folder and self.options["base_model"] is not None:
            self.values["dpo.reference"] = self.options["base_model"]  # without the adapter that training starts from
        for name, option in DPO_OPTIONS.items():
            if self.options[name] and (kind is None or (name == "orpo_alpha" and kind != "orpo")):
                required = "orpo" if name == "orpo_alpha" else "dpo"
                self.refuse(name, self.options[name], f"nothing without rl: {required}", f"give rl: {required}")
            elif self.options[name] is not None:
                self.values[option] = self.options[name]

    def _reward(self, rl: str | None) -> None:
        """Translate the options of a reward model, or refuse them without one."""
        options, values = self.options, self.values
        is_reward, labels = bool(options["reward_model"]), options["num_labels"]
        if is_reward and rl is not None:
            self.refuse("rl", rl, "nothing with reward_model", "choose one")
        if labels not in (None, 1) or (labels and not is_reward):
            self.refuse("num_labels", labels, "1, with reward_model: true", "other heads are not trained")
        coefficient = options["center_rewards_coefficient"]
        if coefficient and not is_reward:
            self.refuse("center_rewards_coefficient", coefficient, "nothing without reward_model: true", "drop it")
        if not is_reward:
            return
        make_reward_model(values, coefficient)
        values["data.too_long"] = "drop"
        self.note("reward_model: not the same: pairs of more tokens are left out, and counted; Axolotl cuts them")

    def _held_out(self) -> bool:
        """Translate the validation data. Returns True if a part of the training data is held out."""
        options, values, share = self.options, self.values, self.options["val_set_size"] or 0
        entries = options["test_datasets"] or []
        if options["val_data_uri"] is not None:
            entries = [{"path": options["val_data_uri"]}]
        if entries and share:
            self.refuse("val_set_size", share, "0 with test_datasets", "validate on one of them")
        elif entries or share:
            values |= {"validation.enable": True, "validation.samples": 0}
            if share:
                values["validation.split"] = share
            else:
                self._set_sources("validation", self._sources("test_datasets", entries))
        return bool(share)

    def _sources(self, name: str, entries: list[Any]) -> list[dict[str, Any]]:
        """Translate the entries of a list of datasets to sources of a job."""
        sources: list[dict[str, Any]] = []
        for number, raw_entry in enumerate(entries):
            label = f"{name}[{number}]"
            kind = raw_entry.get("type") if isinstance(raw_entry, dict) else None
            table = kind if self.options["rl"] in PREFERENCES and isinstance(kind, dict) else None
            entry = entry_of(raw_entry if table is None else {**raw_entry, "type": AS_THEY_ARE}, label, self.draft)
            if entry is not None:
                self._check_entry(label, entry)
                self._drop_system(label, entry)
                reading = self._reading(label, entry) if table is None else self._custom_pairs(label, table)
                sources += [location | reading for location in locations(label, entry, self.draft)]
        return sources

    def _drop_system(self, label: str, entry: Mapping[str, Any]) -> None:
        """Translate whether the system messages of an entry's conversations are left out, as of all or of none."""
        if entry.get(DROP) is not True:
            return
        reads_messages = str(entry.get("type", "")).startswith("chat_template")
        entries = [*(self.options["datasets"] or []), *(self.options["test_datasets"] or [])]
        if not reads_messages:
            self.refuse(f"{label}.{DROP}", True, "nothing without type: chat_template", "it belongs to messages")
        elif any(not isinstance(other, dict) or other.get(DROP) is not True for other in entries):
            self.refuse(f"{label}.{DROP}", True, "the same for all datasets", "take the messages out of the records")
        else:
            self.values["data.drop_system"] = True

    def _check_entry(self, label: str, entry: Mapping[str, Any]) -> None:
        for key, value in entry.items():
            if key not in (*ENTRY_KEYS, "text_column"):
                self.refuse(f"{label}.{key}", value, "a known key", hint(key, ENTRY_KEYS))
            elif key in PAIR_FIELDS and value != PAIR_FIELDS[key] and entry.get("type") not in PAIR_TYPES:
                self.refuse(f"{label}.{key}", value, PAIR_FIELDS[key], "rename the field in the records")
            elif key in THINKING and value != entry.get(THINKING[key], THINKING_FIELD):
                self.refuse(f"{label}.{key}", value, "one name for both", f"rename the field {value} in the records")
            elif key == DROP and value not in (True, False):
                self.refuse(f"{label}.{key}", value, "true or false")
            elif key == "conversation" and not isinstance(value, str):
                self.refuse(f"{label}.conversation", value, "the name of a template")
            elif key == "roles" and not _are_roles(value):
                self.refuse(f"{label}.roles", value, "the usual names of roles", "rename the roles in the records")
            elif key in (*PROMPT, *FIELDS, *MESSAGE_FIELDS, *PAIR_FIELDS, *NAMES) and not isinstance(value, str):
                self.refuse(f"{label}.{key}", value, "text")
            elif key in PROMPT and ("{{" in value or "}}" in value):
                self.refuse(f"{label}.{key}", value, "text without {{ and }}", "write the text of the prompt's braces")
            elif key in PLACES and not _has_only(PLACES[key], value):
                places = " and ".join(f"{{{name}}}" for name in PLACES[key])
                remedy = "Axolotl has nothing else to fill in there; other forms of a place are not read"
                self.refuse(f"{label}.{key}", value, f"text with the places {places}", remedy)
        if isinstance(entry.get("conversation"), str):
            self._templates.append(entry["conversation"])

    def _reading(self, label: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that say how an entry's records are read.

        A prompt type takes precedence over detection by fields, because a dataset may also store the text of the
        whole record in one of its fields.
        """
        fields = {name: entry[key] for key, name in FIELDS.items() if entry.get(key, name) != name}
        message_fields = {name: entry[key] for key, name in MESSAGE_FIELDS.items() if entry.get(key, name) != name}
        template = {key: entry[key] for key in PROMPT if key in entry}
        if self.options["reward_model"]:
            return self._reward_pairs(label, entry)
        if self.options["rl"] in PREFERENCES and entry.get("type") in PAIR_TYPES:
            return self._pairs(entry, message_fields)
        strategy = str(entry.get("type"))
        if self.options["rl"] in PREFERENCES and (strategy == AS_THEY_ARE or pair_fields_of(strategy)):
            return self._pairs_of_texts(label, entry)
        if message_fields and self.options["rl"] in PREFERENCES:
            key = next(key for key in MESSAGE_FIELDS if MESSAGE_FIELDS[key] in message_fields)
            remedy = "write the messages with role and content"
            self.refuse(f"{label}.{key}", entry[key], "nothing with rl", remedy)
            return {}
        field = entry.get("text_column", entry.get("field", entry.get("field_messages")))
        kind = self._kind(label, entry)
        if (prompt := prompt_of(kind)) is not None and kind != "alpaca":
            self._refuse_keys(label, entry, (*PROMPT, *FIELDS, *MESSAGE_FIELDS, *OTHER_READING))
            self.note(f"{label}: {SPELLED_TOKENS}")
            if "{system}" in prompt.template.get("format", ""):
                self.note(f"{label}.type {kind}: {NULL_SYSTEM}")
            return source_of(prompt)
        record_format, default_field = FORMATS.get(kind.removesuffix(ROLES), ("", ""))
        if kind.endswith(ROLES):
            message_fields = {"content": "value"} | message_fields
        if (template or fields) and kind not in ("", "alpaca"):
            self._refuse_keys(label, entry, (*PROMPT, *FIELDS))
        elif template or fields:
            record_format, default_field, message_fields = "instruct", "", {}
            if NO_SYSTEM in template.items():
                template = template | {NO_SYSTEM[0]: PROMPT[NO_SYSTEM[0]], "system_prompt": ""}
                fields = fields | {"system": ""}
            elif "system_prompt" in template:
                self.note(f"{label}: {SYSTEM_PROMPT}")
        elif message_fields and not record_format or kind == "chat_template" and field is not None:
            record_format, default_field, field = "chat", "messages", field or "messages"
        if default_field and field not in (None, default_field):
            fields = {default_field: field}
        if record_format and field is not None and field not in fields.values() and field != default_field:
            self.note(f"{label}: {field!r} is not read, as records of format {record_format} have other fields")
        if record_format in TEXTS:
            self.note(f"{label}: {SPELLED_TOKENS}")
        if record_format:
            settings = {
                "format": record_format,
                "fields": fields | message_fields,
                "template": PROMPT | template if template else {},
            }
            return {key: value for key, value in settings.items() if value}
        if kind:
            self.note(f"{label}.type {kind}: the format is detected from the fields of a record, see docs/data.md")
        return {"text_field": field} if isinstance(field, str) else {}

    def _refuse_keys(self, label: str, entry: Mapping[str, Any], keys: Collection[str]) -> None:
        for key in [key for key in entry if key in keys]:
            allowed = f"nothing with type: {entry['type']}"
            self.refuse(f"{label}.{key}", entry[key], allowed, "it belongs to another type: drop it")

    def _reward_pairs(self, label: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        if entry.get("type") != BRADLEY_TERRY:
            self.refuse(f"{label}.type", entry.get("type"), f"{BRADLEY_TERRY} with reward_model", REWRITE_PAIRS)
            return {}
        self._refuse_keys(label, entry, (*PROMPT, *FIELDS, *MESSAGE_FIELDS, *PAIR_FIELDS, *OTHER_READING))
        return {"format": "preference", "fields": {"question": "input"}}

    def _pairs_of_texts(self, label: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of pairs that a strategy writes under its own template, or reads as they are."""
        self._refuse_keys(label, entry, (*PROMPT, *FIELDS, *MESSAGE_FIELDS, *PAIR_FIELDS, *OTHER_READING))
        if (strategy := pair_fields_of(entry["type"])) is None:
            return {"format": "preference"}
        template, fields = strategy
        self._templates.append(template)
        self.note(f"{label}.type {entry['type']}: {END_OF_PAIRS}")
        if entry["type"].endswith(PAIRS_OF_MESSAGES):
            self.note(f"{label}.type {entry['type']}: {FIRST_TURN}")
        return {"format": "preference", "fields": fields} if fields else {"format": "preference"}

    def _custom_pairs(self, label: str, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of pairs with fields of their own, from the table that is the entry's type."""
        fields = {}
        for key, value in table.items():
            name = key.removeprefix("field_")
            if key in CUSTOM_FORMATS and value not in (None, "", CUSTOM_FORMATS[key]):
                self.refuse(f"{label}.type.{key}", value, CUSTOM_FORMATS[key], "write the text into the records")
            elif key not in (*CUSTOM_FORMATS, *CUSTOM_FIELDS):
                self.refuse(f"{label}.type.{key}", value, "a known key", hint(key, [*CUSTOM_FORMATS, *CUSTOM_FIELDS]))
            elif key in CUSTOM_FIELDS and not isinstance(value, str):
                self.refuse(f"{label}.type.{key}", value, "text")
            elif key in CUSTOM_FIELDS[1:] and value != name:
                fields[name] = value
        return {"format": "preference", "fields": fields} if fields else {"format": "preference"}

    def _pairs(self, entry: Mapping[str, Any], message_fields: Mapping[str, str]) -> dict[str, Any]:
        """Return the options of pairs whose prompt, if the entry names a field for it, stands next to the answers."""
        names = {"messages": "field_messages"} if entry["type"] == PAIR_TYPES[0] else {}
        names |= {name: key for key, name in PAIR_FIELDS.items()}
        fields = {name: entry[key] for name, key in names.items() if entry.get(key, name) != name}
        fields |= message_fields
        return {"format": "preference", "fields": fields} if fields else {}

    def _kind(self, label: str, entry: Mapping[str, Any]) -> str:
        kind = entry.get("type")
        if kind is None or kind in (*TYPES, f"sharegpt{ROLES}"):
            return kind or ""
        if self.options["rl"] in PREFERENCES:
            self.refuse(f"{label}.type", kind, f"one of {', '.join(KINDS_OF_PAIRS)}", REWRITE_PAIRS)
            return ""
        if isinstance(kind, str) and prompt_of(kind) is not None:
            return kind
        reason = (reason_of(kind) if isinstance(kind, str) else "") or f"other prompts are not supported: {REWRITE}"
        kinds = dict.fromkeys([*TYPES, *BY_STYLE, *STRATEGIES])
        self.refuse(f"{label}.type", kind, f"one of {', '.join(kinds)}", reason)
        return ""

    def _set_sources(self, section: str, sources: list[dict[str, Any]]) -> None:
        if len(sources) == 1 and sources[0].keys() <= {"dataset", "dataset_path"}:
            self.values |= {f"{section}.{key}": value for key, value in sources[0].items()}
        elif sources:
            self.values[f"{section}.sources"] = sources
        if len(sources) > 1 and self.options["pretraining_dataset"] is not None:
            self.note(f"{section}: the {len(sources)} sources have equal shares of the samples; weight changes that")
        elif len(sources) > 1:
            self.values |= {"training.mixing": "sizes"} if section == "training" else {}
            joined = "are read as one, every record equally often, as Axolotl joins them"
            self.note(f"{section}: the {len(sources)} sources {joined}")

    def _template(self) -> None:
        name, jinja = self.options["chat_template"], self.options["chat_template_jinja"]
        if jinja is not None and name in (None, JINJA):
            name = jinja
        elif jinja is not None:
            self.refuse("chat_template_jinja", jinja, f"nothing with chat_template: {name}", "drop one of the two")
        if name is not None:
            self._templates.append(name)
        templates = {TEMPLATES.get(name, name) for name in self._templates if name not in TOKENIZER_TEMPLATE}
        if len(templates) > 1:
            self.refuse("chat_template", sorted(templates), "one for all datasets", "choose one")
            return
        model, family = self.options["base_model"] or "", self.values.get("model.name")
        model_types = CONFIG_CONVERTERS[family].model_types if family else ()
        for template in templates:
            jinja = template.removeprefix("path:")
            if template.startswith("tokenizer_default_fallback_"):
                self.note("chat_template: the tokenizer's; if it has none, write data.chat_template")
            elif is_of_model(template, model, model_types):
                text = "the tokenizer's is used, which Axolotl's may differ from: see `torchtitan preview`"
                self.note(f"chat_template {template}: {text}")
            elif template in TEMPLATES.values() or jinja.endswith(".jinja") or "{%" in jinja or "{{" in jinja:
                self.values["data.chat_template"] = jinja
            elif (jinja_text := own_template(template)) is not None:
                self.values["data.chat_template"] = jinja_text
            else:
                names = ", ".join(dict.fromkeys((*TEMPLATES.values(), *OWN)))
                allowed = f"tokenizer_default, {names}, the name of the model's own, or a .jinja file"
                remedy = hint(template, (*TEMPLATES, *OWN)) or "write the template into a file for chat_template_jinja"
                self.refuse("chat_template", template, allowed, remedy)


def entry_of(raw_entry: Any, label: str, draft: JobDraft) -> Mapping[str, Any] | None:
    """Return a dataset entry without its unset keys, or None if it is not a valid entry.

    A table as the entry's type is a custom prompt.
    """
    if isinstance(raw_entry, str):
        raw_entry = {"path": raw_entry}
    path = raw_entry.get("path") if isinstance(raw_entry, dict) else None
    if not isinstance(path, str) or path in UNSET:
        draft.refuse(label, raw_entry, "tables that have a path")
        return None
    nested = raw_entry.get("type")
    if isinstance(nested, dict) and (empty := [key for key in NEVER_EMPTY if nested.get(key) == ""]):
        draft.refuse(f"{label}.type.{empty[0]}", "", "text, or nothing for Axolotl's default", "leave the key out")
        return None
    tables = (PROMPT, {**raw_entry, "type": None}, nested) if isinstance(nested, dict) else (raw_entry,)
    entry = {
        key: value
        for table in tables
        for key, value in table.items()
        if value is not None and (value not in UNSET or (table is nested and (key, value) in EMPTY))
    }
    properties = entry.pop(PROPERTIES, {})
    is_table = isinstance(properties, dict) and all(isinstance(field, str) for field in properties.values())
    if not is_table or properties.keys() - set(MESSAGE_FIELDS.values()):
        remedy = "rename other fields in the records"
        draft.refuse(f"{label}.{PROPERTIES}", properties, "a table with role and content", remedy)
        return None
    return entry | {f"message_field_{name}": field for name, field in properties.items()}


def _has_only(names: Collection[str], text: str) -> bool:
    """Return True if the places of a text, as for str.format, are plain ones of these names."""
    try:
        return all(
            name is None or (name in names and not form and conversion is None)
            for _, name, form, conversion in Formatter().parse(text)
        )
    except ValueError:  # a brace alone
        return False


def _are_roles(table: Any) -> bool:
    """Return True if a table maps roles to names that are read as these roles anyway."""
    return isinstance(table, dict) and all(
        isinstance(names, list) and all(isinstance(name, str) and name in ROLES_READ.get(role, ()) for name in names)
        for role, names in table.items()
    )
