"""What a record gives to its chat template in addition to the messages, compared with transformers."""

import pytest

from tests.support.chat_templates import folder_with
from torchtitan.datasets.encoding import encode
from torchtitan.datasets.sources import BadRecord, Chat, DataError, Document
from torchtitan.datasets.tokenizer import build_tokenizer

TEMPLATE = """\
{%- if tools is not none %}{{- 'TOOLS' + (tools | tojson) + '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
    {{- m.role + ':' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ ('' if thinking is defined and not thinking else '<think>') + m.content + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}{{- m.content + '<|eot_id|>' }}{% endif %}
{%- endfor %}
"""
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
TOOLS = [{"type": "function", "function": {"name": "sum", "description": "é", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_with(tmp_path_factory.mktemp("variables") / "t", TEMPLATE)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("template_kwargs", [{}, {"thinking": False}])
def test_tools_and_template_kwargs_reach_the_template(tools, template_kwargs, folder):
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        MESSAGES, tools=tools, return_dict=True, return_assistant_tokens_mask=True, **template_kwargs
    )
    tokens = encode(build_tokenizer(folder), Document(Chat(MESSAGES, tools, template_kwargs), "a.jsonl:3"))
    assert tokens.ids.tolist() == expected["input_ids"]
    assert tokens.loss_mask.astype(int).tolist() == expected["assistant_masks"]


def test_template_kwargs_cannot_replace_what_is_rendered(folder):
    tokenizer = build_tokenizer(folder)
    with pytest.raises(BadRecord, match="a.jsonl:3: chat_template_kwargs has 'messages', which is no variable"):
        encode(tokenizer, Document(Chat(MESSAGES, None, {"messages": []}), "a.jsonl:3"))


def test_tools_never_contain_special_tokens(folder):
    tokenizer = build_tokenizer(folder)
    tools = [{"<|eot_id|>": {"name": "<|eot_id|>"}}]
    ids = encode(tokenizer, Document(Chat(MESSAGES, tools), "a.jsonl:3")).ids.tolist()
    assert ids.count(tokenizer.special_tokens["<|eot_id|>"]) == 3
    with pytest.raises(DataError, match="reserved as marks"):
        encode(tokenizer, Document(Chat(MESSAGES, [{"a": "\ue0f0"}]), "a.jsonl:3"))
