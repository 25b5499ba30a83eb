"""Forty forms of records: the same sample from every kind of file, equal to a plain reference; and mutated records,
which give the sample of the reference or are refused, and never lose a text.

The reference knows no format: a conversation is rendered and tokenized by transformers, texts one by one.
"""

import csv
import json
import random
from collections import Counter

import numpy as np
import pytest

from tests.support.chat_templates import folder_with
from tests.support.record_forms import FORMS, Talk
from torchtitan.core.errors import JobError
from torchtitan.datasets import open_hub_dataset
from torchtitan.datasets.encoding import TrainOn, encode
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import DataError, Pair
from torchtitan.datasets.sources.files import open_text_files
from torchtitan.datasets.tokenizer import build_tokenizer

TEMPLATE = """\
{%- if style is defined %}{{- 'STYLE ' + style + '<|eot_id|>' }}{% endif %}
{%- if tools %}{{- 'TOOLS ' + (tools | tojson) + '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + (m.name or '') + (m.tool_call_id or '') + '<|end_header_id|>' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ m.content }}
        {%- for c in m.tool_calls or [] %}{{ 'CALL' + (c.id or '') + (c.function | tojson) }}{% endfor -%}
        {{ '<|eot_id|>' }}{% endgeneration %}
    {%- else %}{{ m.content + '<|eot_id|>' }}{% endif %}
{%- endfor %}
"""
LISTS = ("messages", "conversations", "segments", "tools", "chat_template_kwargs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_with(tmp_path_factory.mktemp("forms") / "tokenizer", TEMPLATE)


@pytest.fixture(scope="module")
def here(folder):
    return build_tokenizer(str(folder))


@pytest.fixture(scope="module")
def reference(folder):
    """Return a function from an expected document to its ids and mask."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids_of(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def sample(document):
        if isinstance(document, Talk):
            options = dict(tools=document.tools, return_dict=True, return_assistant_tokens_mask=True)
            encoding = tokenizer.apply_chat_template(document.messages, **options, **document.variables)
            ids, mask = encoding["input_ids"], encoding["assistant_masks"]
            if document.untrained:
                before = tokenizer.apply_chat_template(document.messages[: document.untrained], **options)["input_ids"]
                assert ids[: len(before)] == before
                mask = [0] * len(before) + mask[len(before) :]
            return ids, mask
        pieces = [([tokenizer.bos_token_id], document[0][1]), *((ids_of(text), flag) for text, flag in document)]
        pieces.append(([tokenizer.eos_token_id], document[-1][1]))
        return [i for ids, _ in pieces for i in ids], [int(flag) for ids, flag in pieces for _ in ids]

    return sample


def sample_of(tokenizer, document):
    """Return (ids, mask) of each document of a record, as its task tokenizes it."""
    is_pair = isinstance(document.content, Pair)
    parts = document.content if is_pair else [document]
    train_on = TrainOn("last_turn") if is_pair else TrainOn()
    tokens = [encode(tokenizer, part, train_on) for part in parts]
    return [(ids.tolist(), np.asarray(mask).astype(int).tolist()) for ids, mask in tokens]


def documents(path, options):
    reader = RecordReader(**options)
    if path.name == "streamed":
        return list(open_hub_dataset("huggingface", "train", str(path), reader).documents())
    return list(open_text_files(str(path), reader).documents())


# Files


def write_jsonl(folder, records):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_json(folder, records):
    path = folder / "rows.json"
    path.write_text(json.dumps(records, indent=1))
    return path


def write_csv(folder, records, **form):
    path = folder / "rows.csv"
    names = list(dict.fromkeys(name for record in records for name in record))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, **form)
        writer.writerow(names)
        for record in records:
            cells = [record.get(name) for name in names]
            writer.writerow("" if v is None else v if isinstance(v, str) else json.dumps(v) for v in cells)
    return path


def write_cr_csv(folder, records):
    return write_csv(folder, records, lineterminator="\r", quoting=csv.QUOTE_ALL)


def write_parquet(folder, records):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_of_one_schema(records)), folder / "rows.parquet")
    return folder / "rows.parquet"


def write_arrow(folder, records):
    import pyarrow

    table = pyarrow.Table.from_pylist(_of_one_schema(records))
    with pyarrow.ipc.new_file(folder / "rows.arrow", table.schema) as file:
        file.write_table(table)
    return folder / "rows.arrow"


def write_saved(folder, records):
    import datasets

    datasets.Dataset.from_list(_of_one_schema(records)).save_to_disk(folder / "saved")
    return folder / "saved"


def write_streamed(folder, records):
    """Write a folder that `load_dataset` reads."""
    (folder / "streamed").mkdir()
    write_jsonl(folder, records).rename(folder / "streamed" / "train.jsonl")
    return folder / "streamed"


def _of_one_schema(records):
    names = dict.fromkeys(name for record in records for name in record)
    return [{name: record.get(name) for name in names} for record in records]


WRITERS = {
    "jsonl": write_jsonl,
    "json": write_json,
    "csv": write_csv,
    "csv with CR": write_cr_csv,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "save_to_disk": write_saved,
    "load_dataset": write_streamed,
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_gives_the_sample_of_the_reference_from_every_file(name, here, reference, tmp_path):
    form = FORMS[name]
    expected = [reference(document) for document in form.documents]
    assert all(0 < sum(mask) <= len(mask) for _, mask in expected)
    records = [form.record, *([form.sibling] if form.sibling else []), form.record]
    for kind, writer in WRITERS.items():
        (tmp_path / kind).mkdir()
        first, *_, last = documents(writer(tmp_path / kind, records), form.options)
        for document in (first, last):
            assert not isinstance(document, DataError), (kind, document)
            assert sample_of(here, document) == [tuple(sample) for sample in expected], kind
            assert document.unread == ()


def test_there_are_forty_forms():
    assert len(FORMS) == 40


# Mutations


OTHER_TYPES = (5, True, [], {}, ["Lost."], {"lost": "Lost."}, "Lost.", "", [{"role": "user", "content": "Lost."}])


def paths_in(value, path=()):
    """Yield the path of each key in a nested value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from paths_in(inner, (*path, key))


def mutated(record, rng):
    """Return the kind of a mutation and a mutated copy of a record."""
    record = json.loads(json.dumps(record))
    *parents, key = rng.choice(list(paths_in(record)))
    table = record
    for parent in parents:
        table = table[parent]
    kind = rng.choice(["removed", "null", "doubled", "other type", "extra key", "other role"])
    if kind == "removed":
        del table[key]
    elif kind == "null":
        table[key] = None
    elif kind == "doubled":
        table[key] = [table[key], table[key]]
    elif kind == "other type":
        table[key] = rng.choice(OTHER_TYPES)
    elif kind == "extra key" and isinstance(table, dict):
        name = rng.choice(
            ["extra", "system", "tools", "label", "history", "function_call", "tool_calls", "value", "name"]
        )
        table[name] = rng.choice(["Lost.", *OTHER_TYPES])
    elif kind == "other role" and isinstance(table, dict) and key in ("role", "from"):
        table[key] = rng.choice(["Assistant", "model", "function_call", "observation", "developer", "critic", "gpt"])
    return kind, record


def texts_in(value):
    """Yield the texts in a nested value, without names of roles; those in JSON texts too."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("role", "from", "type", "who"):
                yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)
    elif isinstance(value, str) and value.strip():
        try:
            content = json.loads(value)
        except ValueError:
            content = None
        if isinstance(content, dict | list):
            yield from texts_in(content)
        else:
            yield value


def lost_text(tokenizer, document, record):
    """Return a text of the fields that were read that is not in the decoded sample; empty if there is none."""
    decoded = " ".join(tokenizer.decode(ids) for ids, _ in sample_of(tokenizer, document))
    plain = decoded + decoded.encode().decode("unicode_escape", errors="replace")
    claimed = {name: value for name, value in record.items() if name not in document.unread}
    return next((text for text in texts_in(claimed) if text not in plain and json.dumps(text)[1:-1] not in plain), "")


def outcome(path, options, tokenizer):
    """Return the document of the first record and its sample, or the error that refuses it."""
    try:
        document = documents(path, options)[0]
        return (document, document) if isinstance(document, DataError) else (document, sample_of(tokenizer, document))
    except JobError as error:
        return error, error


ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "model": "assistant"}
ROLES |= {"observation": "tool", "function_call": "assistant"}


def plain_talk(record):
    """Return the conversation that a record of messages means to a plain reader, which does not check it."""
    (field,) = {"messages", "conversations"} & record.keys()
    messages = []
    for turn in record[field]:
        turn = {key: value for key, value in turn.items() if value is not None}
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value", ""))
        calls = turn.get("tool_calls") or ([{"function": turn["function_call"]}] if "function_call" in turn else [])
        if role == "function_call":
            called = json.loads(content)
            calls = [{"function": function} for function in (called if isinstance(called, list) else [called])]
            content = ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        renamed = ROLES.get(role, role) if field == "conversations" or "from" in turn else role
        message = {"role": renamed, "content": content}
        message |= {key: turn[key] for key in ("name", "tool_call_id") if key in turn}
        if calls:
            message["tool_calls"] = [plain_call(call) for call in calls]
        messages.append(message)
    system = record.get("system") or ""
    has_it = bool(messages) and (messages[0]["role"], messages[0]["content"]) == ("system", system)
    if system.strip() and not has_it:
        messages.insert(0, {"role": "system", "content": system})
    tools = record.get("tools") or None
    tools = json.loads(tools) if isinstance(tools, str) else tools
    tools = [tools] if isinstance(tools, dict) else tools
    if tools and field == "conversations":
        is_bare = ["name" in tool and not {"type", "function"} & tool.keys() for tool in tools]
        tools = [{"type": "function", "function": t} if bare else t for t, bare in zip(tools, is_bare, strict=True)]
    return Talk(messages, 0, tools and filled(tools), filled(record.get("chat_template_kwargs") or {}))


def filled(value):
    """Return a nested value without the keys of tables that hold null, as Arrow fills in where a key is not there."""
    if isinstance(value, dict):
        return {key: filled(inner) for key, inner in value.items() if inner is not None}
    return [filled(item) for item in value] if isinstance(value, list) else value


def plain_call(call):
    function = call.get("function", call)
    arguments = function.get("arguments")
    arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    arguments = {} if arguments is None else {"arguments": filled(arguments)}
    return call | {"function": {"name": function["name"]} | arguments}


@pytest.mark.parametrize("name", FORMS)
def test_mutated_records_lose_no_text(name, here, reference, tmp_path, is_full_run, record_property):
    """A mutated record is refused, or all texts of the fields that are read are in the decoded sample.

    Conversations have the sample of the plain reference. The template of this test shows content, names, identifiers,
    calls and tools; a key that no template knows is an exception, as transformers hands it over too."""
    rng, counts = random.Random(name), Counter()
    form = FORMS[name]
    for _ in range(60 if is_full_run else 20):
        kind, record = mutated(form.record, rng)
        document, sample = outcome(write_jsonl(tmp_path, [record]), form.options, here)
        counts["drawn"] += 1
        if isinstance(sample, JobError):
            counts["refused"] += 1
            continue
        counts["read"] += 1
        lost = lost_text(here, document, without_unknown_keys(record))
        assert not lost, f"{kind}: {lost!r} of {record} is not in {document}"
        if (
            document.format_name in ("chat", "sharegpt")
            and "prompt" not in record
            and not form.options
            and sample[0][0]
        ):
            assert sample == [tuple(reference(plain_talk(record)))], f"{kind}: {record}"
            counts["equal to the plain reference"] += 1
        for other in (write_csv, write_parquet, write_arrow):
            if other is write_csv and not document.format_name and not isinstance(document.content, str):
                continue  # a column of texts holds texts, also where these are JSON
            if other is write_csv and any(filled(value) != value for value in record.values()):
                continue  # JSON text keeps nulls
            try:
                path = other(tmp_path, [record] if other is write_csv else [record, form.record])
            except Exception:  # a kind of file that cannot hold this record
                continue
            _, again = outcome(path, form.options, here)
            same = isinstance(again, JobError) or again == sample
            assert same, f"{kind}, {other.__name__}: {record}"
            counts["equal in other files" if again == sample else "refused in other files"] += 1
    for outcome_name, count in counts.items():
        record_property(outcome_name, count)


def without_unknown_keys(record):
    """Return a record without the keys of messages that the template of this test does not show."""
    shown = {"role", "content", "from", "value", "name", "tool_calls", "tool_call_id", "who", "said", "function_call"}

    def clean(value, in_message):
        is_message = in_message and isinstance(value, dict) and not {"role", "from", "who"}.isdisjoint(value)
        return {k: v for k, v in value.items() if k in shown} if is_message else value

    result = {}
    for name, value in record.items():
        if name == "chat_template_kwargs" and isinstance(value, dict):
            value = {key: inner for key, inner in value.items() if key == "style"}
        if isinstance(value, list) and name not in ("tools",):
            value = [clean(item, True) for item in value]
        result[name] = clean(value, name in ("chosen", "rejected"))
    return result
