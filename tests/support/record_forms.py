"""Forty forms in which datasets hold records, each with the sample that it means, for tests/datasets.

A sample is one document, or two of a pair: either texts [(text, trained)], between begin and end, or a conversation as
transformers is given it. `Talk.untrained`: number of messages at its beginning that are not learned.
"""

import json
from typing import Any, NamedTuple


class Talk(NamedTuple):
    messages: list[dict[str, Any]]
    untrained: int = 0
    tools: list[Any] | None = None
    variables: dict[str, Any] = {}


class Form(NamedTuple):
    """`sibling`: a record of the same form with other keys in its nested tables, so that Arrow fills in nulls."""

    record: dict[str, Any]
    documents: list[Any]
    options: dict[str, Any] = {}
    sibling: dict[str, Any] | None = None


def said(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def from_value(*pairs):
    return [{"from": role, "value": content} for role, content in pairs]


def call(name, arguments, **rest):
    return {**rest, "type": "function", "function": {"name": name, "arguments": arguments}}


Q, A, SYSTEM = ("user", "Two and two?"), ("assistant", "Four, I think."), ("system", "Be brief.")
HUMAN, GPT = ("human", Q[1]), ("gpt", A[1])
LONG = [Q, ("assistant", "Why?"), ("user", "For school.")]
TALK = Talk(said(Q, A))
TOOL = {
    "name": "weather",
    "description": "Look it up",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": TOOL}]
ARGUMENTS, OTHERS = {"city": "Oslo", "days": 2}, {"unit": "Kelvin"}
RESULT = {"role": "tool", "name": "weather", "content": "Rain all day"}


def with_call(arguments, **rest):
    return [*said(Q), {"role": "assistant", "content": "", "tool_calls": [call("weather", arguments, **rest)]}]


CALLED = Talk([*with_call(ARGUMENTS), RESULT, *said(A)], 0, TOOLS)


def openai(arguments):
    text = json.dumps(arguments)
    asked = {"role": "assistant", "content": None, "tool_calls": [call("weather", text, id="call_1")]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Rain all day"}
    return {"messages": [*said(Q), asked, result, *said(A)], "tools": TOOLS}


def sharegpt_call(arguments):
    text = json.dumps({"name": "weather", "arguments": arguments})
    turns = from_value(HUMAN, ("function_call", text), ("observation", "Rain all day"), GPT)
    return {"conversations": turns, "tools": json.dumps([TOOL])}


def hh(question, answer):
    return f"\n\nHuman: {question}\n\nAssistant:{answer}"


def pair(chosen, rejected):
    return [Talk(said(*chosen), len(chosen) - 1), Talk(said(*rejected), len(rejected) - 1)]


ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n"
)
BAD = ("assistant", "Five, of course.")
PROMPT_ANSWER = [[("Two and two?", False), (" Four.", True)]]
TEXT_PAIR = [[(Q[1], False), (A[1], True)], [(Q[1], False), (BAD[1], True)]]
TALK_PAIR = pair([Q, A], [Q, BAD])
LONG_PAIR = pair([*LONG, A], [*LONG, BAD])
COMPLETION = {"format_name": "prompt_completion"}
PARTS = [{"type": "text", "text": "Two and "}, {"type": "text", "text": "two?"}]
SEGMENTS = [{"text": Q[1], "label": False}, {"text": A[1], "label": True}]
SEGMENTS_READ = [[(Q[1], False), (A[1], True)]]

FORMS = {
    "text": Form({"text": "A plain text."}, [[("A plain text.", True)]]),
    "text like a list": Form({"text": '["a"] is a list'}, [[('["a"] is a list', True)]]),
    "text of another name": Form({"body": "A text."}, [[("A text.", True)]], {"text_field": "body"}),
    "segments": Form({"segments": SEGMENTS}, SEGMENTS_READ),
    "segments of another name": Form(
        {"parts": SEGMENTS}, SEGMENTS_READ, {"format_name": "input_output", "fields": {"segments": "parts"}}
    ),
    "prompt, completion": Form({"prompt": "Two and two?", "completion": " Four."}, PROMPT_ANSWER),
    "prompt, completion that look like JSON": Form(
        {"prompt": "[1, 2]", "completion": '{"sum": "t\\n3"}'}, [[("[1, 2]", False), ('{"sum": "t\\n3"}', True)]]
    ),
    "prompt, response": Form(
        {"prompt": "Two and two?", "response": " Four."},
        PROMPT_ANSWER,
        COMPLETION | {"fields": {"completion": "response"}},
    ),
    "question, answer": Form(
        {"question": "Two and two?", "answer": " Four."},
        PROMPT_ANSWER,
        COMPLETION | {"fields": {"prompt": "question", "completion": "answer"}},
    ),
    "alpaca": Form({"instruction": "Add.", "output": "3"}, [[(ALPACA.format("Add."), False), ("3", True)]]),
    "alpaca with input": Form(
        {"instruction": "Add.", "input": "1 {2}", "output": "3"},
        [[(ALPACA_INPUT.format("Add.", "1 {2}"), False), ("3", True)]],
    ),
    "alpaca with system": Form(
        {"instruction": "Add.", "output": "3", "system": "Be brief."},
        [[("Be brief.\n\n" + ALPACA.format("Add."), False), ("3", True)]],
        {"format_name": "alpaca", "fields": {"system": "system"}},
    ),
    "dolly": Form(
        {"instruction": "Add.", "context": "1 2", "response": "3"},
        [[(ALPACA_INPUT.format("Add.", "1 2"), False), ("3", True)]],
        {"format_name": "alpaca", "fields": {"input": "context", "output": "response"}},
    ),
    "messages": Form({"messages": said(Q, A)}, [TALK]),
    "messages, several turns": Form({"messages": said(SYSTEM, *LONG, A)}, [Talk(said(SYSTEM, *LONG, A))]),
    "messages with system beside": Form({"system": SYSTEM[1], "messages": said(Q, A)}, [Talk(said(SYSTEM, Q, A))]),
    "messages of parts": Form(
        {
            "messages": [
                {"role": "user", "content": PARTS},
                {"role": "assistant", "content": [{"type": "text", "text": A[1]}]},
            ]
        },
        [TALK],
    ),
    "messages with other keys": Form(
        {"messages": [{"who": "user", "said": Q[1]}, {"who": "assistant", "said": A[1]}]},
        [TALK],
        {"format_name": "chat", "fields": {"role": "who", "content": "said"}},
    ),
    "messages with variables": Form(
        {"messages": said(Q, A), "chat_template_kwargs": {"style": "Kind"}},
        [Talk(said(Q, A), 0, None, {"style": "Kind"})],
        {},
        {"messages": said(Q, A), "chat_template_kwargs": {"tone": "calm"}},
    ),
    "tool calls": Form(
        {"messages": CALLED.messages, "tools": TOOLS},
        [CALLED],
        {},
        {"messages": [*with_call(OTHERS), RESULT], "tools": TOOLS},
    ),
    "tool calls of OpenAI": Form(
        openai(ARGUMENTS),
        [
            Talk(
                [
                    *with_call(ARGUMENTS, id="call_1"),
                    {"role": "tool", "tool_call_id": "call_1", "content": "Rain all day"},
                    *said(A),
                ],
                0,
                TOOLS,
            )
        ],
        {},
        {"messages": said(Q, A), "tools": TOOLS},
    ),
    "tools as text": Form(
        {"messages": CALLED.messages, "tools": json.dumps(TOOLS)},
        [CALLED],
        {},
        {"messages": [*with_call(OTHERS), RESULT], "tools": ""},
    ),
    "sharegpt": Form({"conversations": from_value(HUMAN, GPT)}, [TALK]),
    "sharegpt, roles of others": Form(
        {"conversations": from_value(("user", Q[1]), ("chatgpt", "Why?"), ("human", "For school."), ("bing", A[1]))},
        [Talk(said(*LONG, A))],
    ),
    "sharegpt with system beside": Form(
        {"system": SYSTEM[1], "conversations": from_value(HUMAN, GPT)}, [Talk(said(SYSTEM, Q, A))]
    ),
    "sharegpt with system inside": Form(
        {"conversations": from_value(("system", SYSTEM[1]), HUMAN, GPT)}, [Talk(said(SYSTEM, Q, A))]
    ),
    "sharegpt with both systems": Form(
        {"system": SYSTEM[1], "conversations": from_value(("system", SYSTEM[1]), HUMAN, GPT)},
        [Talk(said(SYSTEM, Q, A))],
    ),
    "sharegpt calls": Form(
        sharegpt_call(ARGUMENTS),
        [Talk([*with_call(ARGUMENTS), {"role": "tool", "content": "Rain all day"}, *said(A)], 0, TOOLS)],
        {},
        sharegpt_call(OTHERS),
    ),
    "sharegpt with role, content": Form({"conversations": said(("human", Q[1]), ("gpt", A[1]))}, [TALK]),
    "prompt, completion of messages": Form(
        {"prompt": said(*LONG), "completion": said(A)}, [Talk(said(*LONG, A), len(LONG))]
    ),
    "pair of texts": Form({"prompt": Q[1], "chosen": A[1], "rejected": BAD[1]}, TEXT_PAIR),
    "pair of transcripts": Form(
        {"chosen": hh("Two?", " Four."), "rejected": hh("Two?", " Five.")},
        [[(hh("Two?", ""), False), (" Four.", True)], [(hh("Two?", ""), False), (" Five.", True)]],
    ),
    "pair of messages": Form({"prompt": said(*LONG), "chosen": said(A), "rejected": said(BAD)}, LONG_PAIR),
    "pair with implicit prompt": Form({"chosen": said(*LONG, A), "rejected": said(*LONG, BAD)}, LONG_PAIR),
    "pair with prompt as text": Form({"prompt": Q[1], "chosen": said(Q, A), "rejected": said(Q, BAD)}, TALK_PAIR),
    "pair with messages": Form({"messages": said(*LONG), "chosen": A[1], "rejected": BAD[1]}, LONG_PAIR),
    "pair with question": Form({"question": Q[1], "chosen": A[1], "rejected": BAD[1]}, TALK_PAIR),
    "pair with question and system": Form(
        {"system": SYSTEM[1], "question": Q[1], "chosen": A[1], "rejected": BAD[1]},
        pair([SYSTEM, Q, A], [SYSTEM, Q, BAD]),
    ),
    "pair of sharegpt": Form(
        {"conversations": from_value(HUMAN), "chosen": from_value(GPT)[0], "rejected": from_value(("gpt", BAD[1]))[0]},
        TALK_PAIR,
    ),
    "pair of sharegpt with system": Form(
        {
            "system": SYSTEM[1],
            "conversations": from_value(HUMAN),
            "chosen": from_value(GPT)[0],
            "rejected": from_value(("gpt", BAD[1]))[0],
        },
        pair([SYSTEM, Q, A], [SYSTEM, Q, BAD]),
    ),
}
