"""Records that cannot be read whole are refused with a remedy, and files that are damaged in a way of their kind."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.chat_templates import folder_with
from torchtitan.commands import prepare
from torchtitan.core.errors import JobError
from torchtitan.datasets import open_source
from torchtitan.datasets.encoding import unread_fields
from torchtitan.datasets.labelled import open_labelled_files
from torchtitan.datasets.loader import LoaderOptions, WeightedSource, build_loader
from torchtitan.datasets.position import check_same_data
from torchtitan.datasets.preparing import prepared_shards
from torchtitan.datasets.record_account import check_account, has_records, unread_of
from torchtitan.datasets.record_format import LabelledFields, RecordReader
from torchtitan.datasets.sources import BadRecord, Chat, DataError, Document, Span
from torchtitan.datasets.sources.files import open_text_files
from torchtitan.datasets.sources.tables import record_columns
from torchtitan.datasets.tokenizer import build_tokenizer

TALK = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
SFT = {"refuse_ambiguous": True}


def refused(record, **options):
    with pytest.raises(DataError) as error:
        RecordReader(**options).document(record, "a.jsonl:3", "3")
    return str(error.value)


def with_call(**changes):
    return {"messages": [TALK[0], {"role": "assistant", "tool_calls": [CALL | changes]}]}


# Records of other forms


REMEDIES = [
    (dict(completion="a"), 'set training.text_field = "completion"'),
    (
        dict(messages=TALK, prompt="Q", completion="B"),
        "is of format chat, and has other texts in 'prompt' and 'completi",
    ),
    (dict(messages=TALK, conversations=[dict(SYSTEM)]), 'set training.format to "chat" or "sharegpt", which leaves'),
    (dict(prompt="a", response="b"), 'format = "prompt_completion" and training.fields = { completion = "response" }'),
    (dict(question="a", answer="b"), '{ prompt = "question", completion = "answer" }'),
    (dict(problem="a", solution="b"), '{ prompt = "problem", completion = "solution" }'),
    (dict(instruction="a", context="", response="b"), '{ input = "context", output = "response" }'),
    (dict(instruction="a", response="b"), 'training.format = "alpaca" and training.fields = { output = "response" }'),
    (
        dict(prompt="a", completion="b", label=False),
        "'label', next to a prompt and a completion, so each is rated good",
    ),
    (dict(prompt="a", completion="b", label="True"), "(KTO), which no task learns; leave the bad ones"),
    (dict(prompt="a", completion="b", system="c"), "'system', which format prompt_completion has no place for"),
    (dict(prompt="a", completion="b", tools=[{"name": "f"}]), "'tools', which format prompt_completion has no place"),
    (dict(instruction="a", output="b", history=[["c", "d"]]), "'history', which format alpaca has no place for"),
    (dict(instruction="a", output="b", system="c"), 'also training.fields = { system = "system" }'),
    (dict(question="a", chosen="b", rejected="c", history=[["d", "e"]]), "'history', which format preference has no"),
    (dict(prompt="a", chosen="b", rejected="c", history=[["d", "e"]]), "write its turns as messages before the others"),
    (dict(prompt=TALK[:1], completion=TALK[1:], history=[["d", "e"]]), "write its turns as messages before the others"),
    (dict(messages=TALK, history='[["d", "e"]]'), "'history', which format chat has no place for"),
    (dict(messages=[TALK[0] | {"images": ["a.png"]}, TALK[1]]), "has 'images' in message 0, which no text model reads"),
    (dict(messages=TALK, images=["a.png"]), "the field 'images', which no text model reads; take such records out"),
    (dict(conversations=TALK, image="a.png"), 'or set training.format = "sharegpt", which leaves the field out'),
    (dict(prompt="a", completion="b", videos=["a.mp4"]), "the field 'videos', which no text model reads"),
    (dict(prompt="a", chosen="b", rejected="c", audios=[{"path": "a"}]), "the field 'audios', which no text model"),
    (
        dict(context="a", question="b", answer="c"),
        'format = "alpaca" and training.fields = { instruction = "question", input = "context", output = "answer" }',
    ),
    (
        dict(id=5, context="a", question="b", answers={"text": ["c"]}),
        "write one of the 'answers' as text into a field 'answer', and set training.format = \"alpaca\" and training."
        'fields = { instruction = "question", input = "context", output = "answer" }, which leaves out \'id\'',
    ),
    (dict(dialog=TALK), "no field 'text', but messages in 'dialog'; set training.text_field = \"dialog\""),
    (
        dict(instruction="a", input="", chosen="b", rejected="c"),
        'set training.format = "preference" and training.fields = { prompt = "instruction" }',
    ),
    (dict(instruction="a", input="b", chosen="c", rejected="d"), "join 'instruction' and 'input' to one text in a"),
    (dict(question="a", choices=["b"], answer="c"), "completion = \"answer\" }, which leaves out 'choices'"),
    (dict(messages=TALK, functions=[{"name": "f"}], tools=[{"name": "g"}]), "'tools' and 'functions' hold other tools"),
    (dict(prompt=TALK[:1], completion="b"), "field 'prompt' of format prompt_completion holds list, not text"),
    (dict(prompt="a", completion=TALK[1:]), "field 'completion' of format prompt_completion holds list, not text"),
    (dict(prompt=TALK, completion=TALK), "messages that do not begin with an answer of the assistant"),
    (dict(messages="text"), "field 'messages' of format chat holds str, not a list of messages {role, content}, also"),
    (dict(messages='[{"role": "user", "content": '), "not a list of messages {role, content}, also not as JSON"),
    (dict(messages="7"), "holds str, not a list of messages {role, content}, but int as JSON"),
    (dict(messages="[{'role': 'user', 'content': 'Q'}]"), "write it with json.dumps"),
    (dict(messages=[5, 6]), "field 'messages' of format chat holds list, not a list of messages"),
    (dict(messages=None), "field 'messages' holds nothing (null)"),
    (dict(prompt="a", completion='[{"role": "user", '), "begins like a list of messages, but is no JSON"),
    (dict(system="c", messages=[SYSTEM, *TALK]), "field 'system' holds another system message than the conversation"),
    (dict(system=5, messages=TALK), "field 'system' holds int, not text"),
    (dict(messages=TALK, tools=5), "field 'tools' holds, not a list of tools"),
    (dict(messages=TALK, tools="[5]"), "field 'tools' holds, not a list of tools"),
    (dict(messages=TALK, chat_template_kwargs=[5]), "field 'chat_template_kwargs' holds list, not a JSON object"),
]


@pytest.mark.parametrize("record, message", REMEDIES, ids=range(len(REMEDIES)))
def test_records_of_other_forms_are_refused_with_the_remedy(record, message):
    assert message in refused(record)


@pytest.mark.parametrize("form", ["chosen", "messages"])
def test_earlier_turns_and_images_are_refused_whatever_the_task(form):
    """A preference task and a text field set the format too, but do not name it to leave fields out."""
    record = dict(prompt="a", chosen="b", rejected="c") if form == "chosen" else dict(messages=TALK)
    options = dict(pairs=True) if form == "chosen" else dict(text_field="messages")
    for name in ("history", "images"):
        assert f"has the field '{name}'" in refused(record | {name: ["d"]}, **options)
        assert RecordReader(**options).document(record | {name: []}, "", "").unread == (name,)
    named = RecordReader(format_name="preference" if form == "chosen" else "chat")
    assert named.document(record | {"history": ["d"]}, "", "").unread == ("history",)


def test_empty_fields_of_llama_factory_are_read():
    record = dict(instruction="a", input="", output="b", system="", history=[], images="[]")
    assert (
        RecordReader(**SFT).document(record, "", "").content
        == RecordReader().document(dict(instruction="a", output="b"), "", "").content
    )


def test_a_class_next_to_prompt_and_completion_is_no_rating():
    for label in ("math", 3, 0.5):
        assert RecordReader().document(dict(prompt="a", completion="b", label=label), "", "").unread == ("label",)
    for label in (True, 0, "FALSE", "1"):
        assert "(KTO)" in refused(dict(prompt="a", completion="b", label=label))


def test_functions_of_openai_are_tools():
    functions = [{"name": "f", "parameters": {"type": "object"}}]
    tools = [{"type": "function", "function": functions[0]}]
    for value in (functions, json.dumps(functions)):
        for rest in ({}, {"tools": None}, {"tools": []}, {"tools": tools}):
            document = RecordReader().document({"messages": TALK, "functions": value, **rest}, "", "")
            assert document.content == Chat(TALK, tools) and not document.unread and document.is_reread


def test_a_named_format_leaves_out_what_it_has_no_place_for():
    record = dict(prompt="a", completion="b", label=False, system="c")
    document = RecordReader(format_name="prompt_completion").document(record, "", "")
    assert document.content == [Span("a", False), Span("b")] and document.unread == ("label", "system")
    empty = RecordReader().document(record | {"label": None, "system": ""}, "", "")
    assert empty.content == document.content


def test_fields_of_another_format_may_repeat_the_texts():
    for record in (dict(messages=TALK, prompt="Q", completion="A"), dict(messages=TALK, conversations=TALK)):
        assert RecordReader().document(record, "", "").content == Chat(TALK)
    named = RecordReader(format_name="chat").document(dict(messages=TALK, prompt="Q", completion="B"), "", "")
    assert named.unread == ("prompt", "completion")


MESSAGES = [
    (
        [{"role": "Assistant", "content": "A"}],
        "message 0 of role 'Assistant', which a chat template does not know as 'ass",
    ),
    ([{"role": "gpt", "content": "A"}], "write 'assistant', or set training.format = \"sharegpt\" for records with"),
    ([{"role": "function_call", "content": "{}"}], "message 0 of role 'function_call', which a chat template"),
    ([{"from": "critic", "value": "A"}], "message 0 of role 'critic', which is not known; allowed: human, gpt"),
    (
        [{"from": "human", "value": "A"}, {"role": "x", "from": "gpt", "value": "A"}],
        "two values for the role of message 1",
    ),
    (
        [{"role": "user", "content": "A", "value": "B"}],
        "two values for the content of message 0, in 'content' and 'val",
    ),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "has a part {'type': 'image_url'",
    ),
    ([{"role": "user", "content": [{"type": "text", "text": "A", "cache": "B"}]}], "no text model reads; allowed: {"),
    ([{"role": "user", "content": [None]}], "has a part None in message 0"),
    ([{"role": "user", "content": {"a": 1}}], "message 0 of field 'messages' has dict as content, not text"),
    ([{"role": "assistant", "content": None}], "message 0 of field 'messages' has nothing as content"),
    ([TALK[0] | {"tool_calls": [CALL]}], "tool calls in message 0 of role 'user', which only the assistant makes"),
    ([TALK[1] | {"tool_calls": "f()"}], "tool_calls in message 0, that are no list of calls"),
    (
        [TALK[1] | {"tool_calls": [CALL], "function_call": CALL["function"]}],
        "with tool_calls and function_call, of which",
    ),
    (
        [TALK[1] | {"tool_calls": [{"function": {"arguments": "{}"}}]}],
        "a tool call in message 0, that names no function",
    ),
    ([TALK[1] | {"tool_calls": [CALL | {"thought": "B"}]}], "a tool call in message 0, with the key 'thought', which"),
    ([{"from": "function_call", "value": "f()"}], "role 'function_call', that holds no JSON {name, arguments}"),
    (
        [{"from": "function_call", "value": '{"name": "f", "why": "B"}'}],
        "role 'function_call', that is not {name, argu",
    ),
    (
        [{"from": "function_call", "value": "{}", "tool_calls": [CALL]}],
        "tool_calls in message 0 of role 'function_call'",
    ),
    ([{"role": "user", "content": "A\ud800"}], "the text has the lone surrogate '\\ud800', which is no character"),
    ([*TALK, "text"], "field 'messages' of format chat holds str, not a list"),
]


@pytest.mark.parametrize("messages, message", MESSAGES, ids=range(len(MESSAGES)))
def test_messages_of_unknown_forms_are_refused_by_name(messages, message):
    error = refused({"messages": messages})
    assert message in error or messages[-1] == "text" and "field 'messages' holds list, not text" in error


@pytest.mark.parametrize("arguments", ["", "{}", {}])
def test_a_call_without_arguments_has_an_empty_table(arguments):
    function = {"name": "f", "arguments": arguments}
    document = RecordReader().document(with_call(function=function), "", "")
    assert document.content.messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {}}}
    ]
    assert "whose arguments are no JSON object" in refused(with_call(function={"name": "f", "arguments": "f(x)"}))


def test_nulls_in_the_json_text_of_a_call_are_kept():
    """Arrow fills in nulls of tables only."""
    arguments = {"a": None, "b": [{"c": None}]}
    turn = {"from": "function_call", "value": json.dumps({"name": "f", "arguments": arguments})}
    for record in (
        with_call(function={"name": "f", "arguments": json.dumps(arguments)}),
        {"conversations": [{"from": "human", "value": "Q"}, turn]},
    ):
        (call,) = RecordReader().document(record, "", "").content.messages[1]["tool_calls"]
        assert call["function"]["arguments"] == arguments
    (call,) = (
        RecordReader()
        .document(with_call(function={"name": "f", "arguments": arguments}), "", "")
        .content.messages[1]["tool_calls"]
    )
    assert call["function"]["arguments"] == {"b": [{}]}


def test_nulls_in_the_json_text_of_tools_and_messages_are_kept():
    """So a default of null is shown to the model. Keys of messages and calls that are null are absent in JSON too."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"p": {"type": "string", "default": None}}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"p": None}}}
    messages = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    padded = [messages[0] | {"tool_calls": None}, messages[1] | {"tool_calls": [call | {"id": None}], "name": None}]
    for record in (
        {"messages": messages, "tools": json.dumps([tool])},
        {"messages": messages, "tools": [json.dumps(tool)]},
        {"messages": json.dumps(padded), "tools": json.dumps([tool])},
        {"text": messages, "tools": json.dumps([tool])},
    ):
        content = RecordReader().document(record, "", "").content
        assert content.tools == [tool], record
        arguments = {"p": None} if isinstance(record.get("messages"), str) else {}
        assert content.messages[1]["tool_calls"] == [call | {"function": {"name": "f", "arguments": arguments}}]
        assert all(message.keys() <= {"role", "content", "tool_calls"} for message in content.messages)
    content = RecordReader().document({"messages": messages, "tools": [tool]}, "", "").content
    assert content.tools[0]["function"]["parameters"] == {"p": {"type": "string"}}


def test_a_function_call_of_openai_is_a_tool_call():
    asked = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    message = RecordReader().document({"messages": [TALK[0], asked]}, "", "").content.messages[1]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert message == {"role": "assistant", "tool_calls": [call]}


def test_roles_of_sharegpt_are_mapped_in_renamed_fields_too():
    reader = RecordReader(format_name="sharegpt", fields={"conversations": "talk", "role": "who", "content": "said"})
    talk = [{"who": "human", "said": "Q"}, {"who": "gpt", "said": "A"}]
    assert reader.document({"talk": talk}, "", "").content == Chat(TALK)
    assert reader.document({"talk": json.dumps(talk)}, "", "").content == Chat(TALK)


def test_a_table_of_columns_is_a_list_of_messages():
    """`datasets` stores a Sequence of tables in this way."""
    columns = {"role": ["user", "assistant"], "content": ["Q", "A"]}
    assert RecordReader().document({"messages": columns}, "", "").content == Chat(TALK)


def test_pairs_that_differ_before_their_last_answer_are_refused():
    other = [TALK[0], {"role": "assistant", "content": "B"}]
    longer = [*TALK, *TALK], [*other, *other]
    assert "differ in more than their last message" in refused(dict(chosen=longer[0], rejected=longer[1]))
    assert "differ in more than their last" in refused(
        dict(prompt="Q", chosen=[*TALK, TALK[0]], rejected=[*TALK, SYSTEM])
    )
    assert "one of the fields 'chosen' and 'rejected' holds text" in refused(
        dict(prompt="Q", chosen=TALK, rejected="B")
    )
    turns = "\n\nHuman: Q\n\nAssistant: A"
    for rejected in (turns + "\n\nHuman: R\n\nAssistant: B", "\n\nHuman: R\n\nAssistant: B", turns + "\n\nHuman: R"):
        assert "field 'chosen' holds str, with nothing as prompt" in refused(dict(chosen=turns, rejected=rejected))


# JSON in the text field


def test_json_in_a_text_field_is_a_list_only_where_its_name_says_so():
    text, read = json.dumps(TALK), RecordReader().document
    assert read({"text": text}, "", "").content == text
    assert RecordReader("messages").document({"messages": text}, "", "").content == Chat(TALK)
    assert RecordReader("messages").document({"messages": "[sic] text"}, "", "").content == "[sic] text"
    assert RecordReader("input_ids").document({"input_ids": "[5, 2]"}, "", "").content == [Span([5, 2])]
    assert "begins like a list, but is no JSON" in refused({"messages": text[:-1]}, text_field="messages")
    for ids in ("[5 2]", "tensor([5, 2])", "5,2", '["5"]'):  # as numpy, torch and others print them in a table
        message = refused({"input_ids": ids}, text_field="input_ids")
        assert "field 'input_ids' holds text that is no list of token ids as JSON" in message
    message = refused({"text": text}, **SFT)
    assert 'set training.format = "chat" and training.fields = { messages = "text" }' in message
    assert 'training.format = "completion" and training.fields = { text = "text" } to learn the JSON' in message
    reader = RecordReader(format_name="completion", fields={"text": "text"}, **SFT)
    assert reader.document({"text": text}, "", "").content == text
    assert RecordReader(**SFT).document({"text": "[1, 2]"}, "", "").content == "[1, 2]"


@pytest.mark.parametrize(
    "mask", [{"labels": [-100, 2]}, {"attention_mask": [1, 0]}, {"loss_mask": "[0, 1]"}, {"completion_mask": [1]}]
)
def test_token_ids_with_a_mask_that_leaves_some_out_are_refused(mask, tmp_path):
    """All ids of a record are trained, so prompts and padding would be too, without a word."""
    ids = {"input_ids": [5, 2]}
    (name,) = mask
    message = refused(ids | mask, text_field="input_ids")
    assert f"field '{name}' leaves out some of the token ids in 'input_ids'" in message
    whole = ids | {"labels": [5, 2], "attention_mask": [1, 1], "loss_mask": "[1, 1]"}
    document = RecordReader("input_ids").document(whole, "", "")
    assert document.content == [Span([5, 2])] and document.unread == ("labels", "attention_mask", "loss_mask")
    table = pyarrow.Table.from_pylist([whole, whole | mask])
    pyarrow.parquet.write_table(table.drop_columns(["loss_mask"]), tmp_path / "a.parquet")
    items = open_text_files(str(tmp_path), RecordReader("input_ids")).documents()
    assert [isinstance(item, DataError) for item in items] == [False, name in ("labels", "attention_mask")]


def test_what_is_empty_next_to_ids_and_in_segments_and_messages_does_not_count():
    """Arrow fills in nulls where another record has a key, and a CSV holds lists as JSON."""
    read, name = RecordReader("input_ids").document, "input_ids"
    assert read({name: [5, 2], "labels": [], "attention_mask": None}, "", "").content == [Span([5, 2])]
    assert read({name: "[]"}, "", "").content == read({name: []}, "", "").content == [Span([])]
    segments = [{"text": "a", "label": True, "weight": None, "train": None}]
    assert RecordReader().document({"segments": segments}, "", "").content == [Span("a")]
    for nothing in ([], "[]", "null", "", None, False):
        talk = [TALK[0] | {"images": nothing}, TALK[1]]
        assert len(RecordReader().document({"messages": talk}, "", "").content.messages) == 2


def test_masks_next_to_texts_are_not_even_decoded(tmp_path):
    """Columns that a tokenizer added to a table take ten times as long as its texts, and bytes may be no UTF-8."""
    columns = {"labels": [b"\xff", b"\xff"], "attention_mask": [[1, 0], [1]]}
    texts = pyarrow.array(["a", "b"])
    for number, text in enumerate((texts, texts.dictionary_encode())):
        pyarrow.parquet.write_table(pyarrow.table({"text": text} | columns), tmp_path / f"{number}.parquet")
    documents = [*open_text_files(str(tmp_path), RecordReader()).documents()]
    assert [document.content for document in documents] == ["a", "b", "a", "b"]
    assert {document.unread for document in documents} == {("labels", "attention_mask")}
    schema = pyarrow.table({"text": [[5, 2]]} | {name: values[:1] for name, values in columns.items()}).schema
    assert record_columns(tmp_path, schema, RecordReader()).looked_at == ["text", "labels", "attention_mask"]


def test_a_conversation_in_the_text_field_has_its_system_message_and_tools():
    record = {"conversations": [{"from": "human", "value": "Q"}], "system": "S", "tools": '[{"name": "f"}]', "id": 5}
    document = RecordReader("conversations").document(record, "", "")
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert document.content == Chat([{"role": "system", "content": "S"}, TALK[0]], tools) and document.unread == ("id",)


# The account


def test_the_account_refuses_what_a_reader_left_out():
    values, location = {"messages": TALK}, "a.jsonl:3"
    check_account(values, Document(Chat(TALK), ""), location)
    for rest in ([], TALK[:1], [TALK[0], TALK[1] | {"content": ""}]):
        with pytest.raises(
            BadRecord, match="a.jsonl:3: the text '.' of field 'messages' would not be in the sample; take"
        ):
            check_account(values, Document(Chat(rest), ""), location)
    with pytest.raises(BadRecord, match="the text 'Q' of"):
        check_account({"messages": [TALK[0], *TALK]}, Document(Chat(TALK), ""), location)
    arguments = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "x\\ny"}'}}]}
    held = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "x\ny"}}}]}
    check_account({"messages": [arguments]}, Document(Chat([held]), ""), location)
    held["tool_calls"][0]["function"]["arguments"] = {}
    with pytest.raises(BadRecord, match="the text 'x\\\\ny' of field"):
        check_account({"messages": [arguments]}, Document(Chat([held]), ""), location)


def test_an_input_without_a_place_in_the_template_is_refused():
    reader = RecordReader(template={"format": "{instruction}:"})
    record = dict(instruction="Add.", input="1 2", output="3")
    with pytest.raises(BadRecord, match="the text '1 2' of field 'input' would not be in the sample"):
        reader.document(record, "", "")


# Files


CSV_FAULTS = [
    (b'prompt,completion\na,b\nc,d,"e"\n', "row 1: 3 values under a header of 2, at line 3; put a text with commas"),
    (b"prompt,completion,id\na,b\n", "row 0: 2 values under a header of 3, at line 2"),
    (b'prompt,completion\na,"b\n', "row 0: cannot be read: unexpected end of data"),
    (b'prompt,completion\na,"b"c\n', "row 0: cannot be read: ',' expected after '\"'"),
    (
        b"prompt,completion,prompt\na,b,c\n",
        "has several columns 'prompt'; its columns: prompt, completion, prompt; ren",
    ),
    (b'"prompt,completion\na,b\n', "its first line, the names of its fields, cannot be read"),
    (b"pr\xffompt,completion\na,b\n", "its first line is not UTF-8"),
    (b"prompt,completion\na,\xff\n", "cannot be read: 'utf-8' codec"),
    (b"prompt,response\na,b\n", 'set training.format = "prompt_completion" and training.fields = { completion = "resp'),
]


@pytest.mark.parametrize("content, message", CSV_FAULTS, ids=range(len(CSV_FAULTS)))
def test_faults_of_csv_files_name_the_row(content, message, tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        for item in open_text_files(str(path), RecordReader()).documents():
            if isinstance(item, DataError):
                raise item
    assert message in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("head", ["", "\ufeff"])
def test_line_ends_blank_lines_and_byte_order_marks_of_csv_files(line_end, head, tmp_path):
    path = tmp_path / "a.csv"
    rows = ["prompt,completion", "a,b", "", f'"c{line_end}d","e\0"', ""]
    path.write_text(head + line_end.join(rows), encoding="utf-8", newline="")
    documents = [d for d in open_text_files(str(path), RecordReader()).documents() if d.content]
    assert [[span.content for span in d.spans] for d in documents] == [["a", "b"], [f"c{line_end}d", "e\0"]]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_key_that_is_there_twice_is_refused(suffix, tmp_path):
    line = '{"prompt": "a", "prompt": "b", "completion": "c"}'
    (tmp_path / f"a{suffix}").write_text(f"[{line}]" if suffix == ".json" else line)
    (item,) = open_text_files(str(tmp_path / f"a{suffix}"), RecordReader()).documents()
    assert "no usable JSON at byte" in str(item) and "the key 'prompt' is there twice" in str(item)
    fields = LabelledFields("prompt", "completion", 2)
    with pytest.raises(DataError, match="the key 'prompt' is there twice"):
        list(open_labelled_files(str(tmp_path / f"a{suffix}"), fields).documents())


LABELLED_FAULTS = [
    ("text,label\na,1,b\n", "row 0: 3 values under a header of 2, at line 2"),
    ("text,label\na,1\nb\n", "row 1: 1 values under a header of 2, at line 3"),
    ("text,label,text\na,1,b\n", "has several columns 'text'"),
]


@pytest.mark.parametrize("content, message", LABELLED_FAULTS, ids=range(len(LABELLED_FAULTS)))
def test_labelled_rows_have_the_length_of_the_header(content, message, tmp_path):
    (tmp_path / "a.csv").write_text(content)
    source = open_labelled_files(str(tmp_path / "a.csv"), LabelledFields("text", "label", 2))
    with pytest.raises(DataError, match=message):
        len(source)


def test_maps_of_arrow_are_tables(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    columns = {
        "messages": pyarrow.array([TALK]),
        "chat_template_kwargs": pyarrow.array([[("style", "kind")]], kind),
        "score": pyarrow.array([0.5]),
    }
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    (document,) = open_text_files(str(tmp_path / "a.parquet"), RecordReader()).documents()
    assert document.content == Chat(TALK, None, {"style": "kind"}) and document.unread == ("score",)


# Fields that are not read


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_fields_that_no_format_claims_are_named(suffix, tmp_path, capfd):
    path = tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        path.write_text('{"prompt": "a", "completion": "b", "id": 5, "source": "web"}\n')
    elif suffix == ".csv":
        path.write_text("prompt,completion,id,source\na,b,5,web\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.table({"prompt": ["a"], "completion": ["b"], "id": [5], "source": ["web"]})
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    assert unread_of(open_text_files(str(path), RecordReader())) == ["id", "source"]
    options = ["--dataset_path", str(path), "--tokenizer_path", "bytes", "--workers", "1"]
    assert prepare.main([*options, "--output", str(tmp_path / "shards")]) == 0
    assert f"{path}: not read: 'id', 'source'\n" in capfd.readouterr().out
    fields = LabelledFields("prompt", "id", 6)
    assert unread_of(open_labelled_files(str(path), fields)) == ["completion", "source"]


@pytest.mark.parametrize("template, names", [("{{ m.name }}", []), ("", ["name of messages"])])
def test_a_name_that_the_template_does_not_render_is_named(template, names, tmp_path, capfd):
    text = "{% for m in messages %}" + template + "{{ m.role + m.content + '<|eot_id|>' }}{% endfor %}"
    folder = folder_with(tmp_path / "tokenizer", text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [TALK[0] | {"name": "Ann"}, TALK[1]]}))
    source = open_text_files(str(tmp_path / "a.jsonl"), RecordReader())
    assert unread_fields(source, build_tokenizer(str(folder))) == names
    shards = prepared_shards(source, str(tmp_path), str(folder), tmp_path / "data", 1, True)
    assert shards.header["unread"] == names


# Earlier versions


def test_caches_of_records_are_made_again_and_those_of_plain_texts_are_kept(tmp_path, monkeypatch):
    def folder(path):
        source = open_source("text", str(path), RecordReader())
        return prepared_shards(source, str(path), "bytes", tmp_path / "data", 1, True).folder

    rows = {"a.jsonl": '{"text": "a"}', "b.jsonl": '{"prompt": "a", "completion": "b"}', "c.csv": "text\na\n"}
    for name, content in rows.items():
        (tmp_path / name).write_text(content)
    now = [folder(tmp_path / name) for name in rows]
    monkeypatch.setattr("torchtitan.datasets.preparing.RECORDS_VERSION", 1)
    assert [folder(tmp_path / name) == before for name, before in zip(rows, now, strict=True)] == [True, False, False]
    assert not has_records(open_source("text", str(tmp_path / "a.jsonl"), RecordReader()))


def loader_of(records, tmp_path, state=None):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = open_source("text", str(path), RecordReader())
    return build_loader([WeightedSource("text", source, 1.0)], build_tokenizer("bytes", CHATML), OPTIONS, state=state)


CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


def of_an_earlier_version(state):
    """Return the state as a version before the reading of records had one would have saved it."""
    return state | {"fingerprint": {name: value for name, value in state["fingerprint"].items() if name != "records"}}


def test_a_checkpoint_of_records_that_were_misread_is_refused_and_others_go_on(tmp_path):
    """Checkpoints of earlier versions lack the version of the reading of records."""
    plain, misread = {"prompt": "question", "completion": "answer"}, {"system": "S", "messages": TALK}
    for records, is_refused in (([plain] * 40, False), ([misread] * 40, True)):
        state = loader_of(records, tmp_path).state_dict()
        assert state["fingerprint"]["records"] == 2
        older = of_an_earlier_version(state)
        if is_refused:
            with pytest.raises(JobError, match="records: nothing in the checkpoint, 2 now; the reading of records of"):
                loader_of(records, tmp_path, older)
        else:
            assert loader_of(records, tmp_path, older).state_dict() == older  # and the next resume knows it too
    shards = [{"files": {"a.jsonl": 5}, "shards": {"shard-00000.bin": checksum}} for checksum in ("x", "y")]
    with pytest.raises(JobError, match="the tokens of these records have changed since the checkpoint's run began"):
        check_same_data({"fingerprint": shards[0]}, shards[1])
    check_same_data({"fingerprint": shards[0]}, shards[0])


def test_a_later_record_that_was_misread_is_refused_when_a_run_of_that_version_reaches_it(tmp_path):
    listed = {"prompt": "question", "completion": "answer"}
    records = [*[listed] * 100, {"prompt": json.dumps(TALK[:1]), "completion": json.dumps(TALK[1:])}]
    state = loader_of(records, tmp_path).state_dict()
    with pytest.raises(DataError, match=r"a\.jsonl:101: the reading of records of this form has changed since"):
        for _ in zip(range(400), loader_of(records, tmp_path, of_an_earlier_version(state)), strict=False):
            pass
    for _ in zip(range(400), loader_of(records, tmp_path, state), strict=False):  # of this version
        pass


OPTIONS = LoaderOptions(seq_len=16, local_batch_size=1, global_batch_size=1, dp_rank=0, dp_size=1, seed=0, shuffle=True)
