"""The templates that LLaMA-Factory names, as chat templates with marks around answers.

LLaMA-Factory writes a conversation from a few texts: before everything, around the system message, around a question
and around an answer. `TEMPLATES` has them for the families that are supported here; conversations with tools are
refused by them, when they are read.
"""

import json
import re
from typing import NamedTuple

PLACE = re.compile(r"\{(content|bos|eos)\}")


class Turns(NamedTuple):
    """The texts of a template, with the places {content}, {bos} and {eos}.

    `joins_system`: the system message is part of the first question. `default_system`: the system message of
    conversations without one. `thought`: an answer without thoughts begins with this empty thought.
    """

    user: str
    assistant: str = "{content}{eos}"
    system: str = "{content}"
    prefix: str = ""
    default_system: str = ""
    joins_system: bool = False
    thought: str = ""


def _headed(start: str, middle: str, end: str, prefix: str = "", after: str = "") -> Turns:
    """Return a template in which each message has a header: `start`, its role, `middle`, the message, `end`."""

    def message(role: str) -> str:
        return f"{start}{role}{middle}{{content}}{end}"

    header = f"{start}assistant{middle}"
    system = message("system") + after
    return Turns(message("user") + after + header, f"{{content}}{end}{after}", system, prefix)


NAME_BREAK = "\ue0f2"
"""Stands in the names of special tokens in messages (datasets/conversations.py)."""
THOUGHT = "<think>\n\n</think>\n\n"
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
CHATML = _headed("<|im_start|>", "\n", "<|im_end|>", after="\n")
THINKING = CHATML._replace(thought=THOUGHT)
GEMMA = Turns(
    "<start_of_turn>user\n{content}<end_of_turn>\n<start_of_turn>model\n",
    "{content}<end_of_turn>\n",
    "{content}\n\n",
    "{bos}",
    joins_system=True,
)
DEEPSEEK = Turns("<｜User｜>{content}<｜Assistant｜>", prefix="{bos}")
MINISTRAL = Turns("[INST]{content}[/INST]", system="{content}\n\n", prefix="{bos}", joins_system=True)
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
TEMPLATES: dict[str, Turns] = {
    "alpaca": Turns("### Instruction:\n{content}\n\n### Response:\n", "{content}{eos}\n\n", default_system=ALPACA),
    "chatml": CHATML,
    "deepseek": Turns("User: {content}\n\nAssistant:", system="{content}\n\n", prefix="{bos}"),
    "deepseek3": DEEPSEEK,
    "deepseekr1": DEEPSEEK._replace(thought=THOUGHT),
    "default": Turns("Human: {content}{eos}\nAssistant:", "{content}{eos}\n", "System: {content}{eos}\n"),
    "falcon_h1": CHATML._replace(prefix="{bos}"),
    "gemma": GEMMA,
    "gemma3": GEMMA,
    "granite3": _headed("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", after="\n"),
    "llama2": Turns("{bos}[INST] {content} [/INST]", system="<<SYS>>\n{content}\n<</SYS>>\n\n", joins_system=True),
    "llama3": _headed("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "{bos}"),
    "llama4": _headed("<|header_start|>", "<|header_end|>\n\n", "<|eot|>", "{bos}"),
    "ministral": MINISTRAL,
    "ministral3": MINISTRAL,
    "mistral": MINISTRAL._replace(user="[INST] {content}[/INST]", assistant=" {content}{eos}"),
    "mistral_small": Turns("[INST]{content}[/INST]", system="[SYSTEM_PROMPT]{content}[/SYSTEM_PROMPT]", prefix="{bos}"),
    "olmo": Turns("<|user|>\n{content}<|assistant|>\n", prefix="{eos}"),
    "openchat": Turns("GPT4 Correct User: {content}{eos}GPT4 Correct Assistant:", prefix="{bos}"),
    "phi": Turns("<|user|>\n{content}<|end|>\n<|assistant|>\n", "{content}<|end|>\n", "<|system|>\n{content}<|end|>\n"),
    "phi4": _headed("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "phi4_mini": Turns("<|user|>{content}<|end|><|assistant|>", "{content}<|end|>", "<|system|>{content}<|end|>"),
    "qwen": CHATML._replace(default_system=QWEN),
    "qwen3": THINKING,
    "qwen3_nothink": CHATML,
    "qwen3_5": THINKING,
    "qwen3_5_nothink": CHATML,
    "qwen3_6": THINKING,
    "smollm": CHATML,
    "yi": CHATML,
}
"""Those that write no token after the last answer alone, whose default system message is short or Alpaca's."""
KEEP_END_TOKEN = ("falcon_h1", "granite3", "smollm", "yi")
"""Templates whose token after an answer does not become the tokenizer's end token."""
_TEMPLATE = """\
{%- set first = 1 if messages[0].role == 'system' else 0 %}
{%- set system = TEXT %}
{{- PREFIX }}
{%- if HAS %}{{- SYSTEM }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- TURN }}
        {{- USER }}
    {%- elif m.role == 'assistant' %}
        {{- TURN }}{{- BEFORE }}{%- generation %}{{- ASSISTANT }}{% endgeneration %}
    {%- elif m.role != 'system' or not loop.first %}
        {{- raise_exception('no place for a message of role ' + m.role) }}
    {%- endif %}
{%- endfor %}
"""


def chat_template(
    turns: Turns,
    thinks: bool | None = True,
    thinks_at_the_end: bool = False,
    trims: bool = False,
    keeps_empty: bool = False,
    alternates: bool = False,
) -> str:
    """Return a chat template. A question ends with the header of its answer.

    `thinks`: LLaMA-Factory's enable_thinking. The empty thought of an answer without thoughts is learned if it is true,
    and only read otherwise; if it is false, answers with thoughts are refused. `thinks_at_the_end`: only the last
    answer gets one. `trims`: blanks around questions and answers are left out. `keeps_empty`: an empty
    system message is written too. `alternates`: other conversations than of questions and answers in turn are refused.
    """
    default, of_first = json.dumps(turns.default_system, ensure_ascii=False), "messages[0].content if first else"
    system_text, has = f"({of_first} '') or {default}", "system"
    if keeps_empty:
        system_text, has = f"{of_first} {default}", "(first or system)"
    content = "(m.content | trim)" if trims else "m.content"
    system = _expression(turns.system, "system")
    question = f"(({system}) if {has} and loop.index0 == first else '') + {content}" if turns.joins_system else content
    before, answer = "''", content
    if turns.thought:
        start, end = (json.dumps(part.strip()) for part in turns.thought.split("\n\n")[:2])
        text = f"{content}.replace({json.dumps(NAME_BREAK)}, '')"
        has_none = f"{start} not in {text} and {end} not in {text}" + " and loop.last" * thinks_at_the_end
        thought = f"({json.dumps(turns.thought)} if {has_none} else '')"
        before, answer = (before, f"{thought} + {content}") if thinks else (thought, answer)
        if thinks is False:
            remedy = json.dumps("thoughts are left out with enable_thinking: false; take them out of the records")
            before = f"(raise_exception({remedy}) if {start} in {text} else '') + {before}"
    in_turn = "''"
    if alternates:
        refusal = "raise_exception('questions and answers have to alternate, from a question on')"
        in_turn = f"({refusal} if (loop.index0 - first) % 2 != (m.role == 'assistant') | int else '')"
    parts = {
        "TURN": in_turn,
        "TEXT": system_text,
        "HAS": has,
        "PREFIX": _expression(turns.prefix, content),
        "SYSTEM": "''" if turns.joins_system else system,
        "USER": _expression(turns.user, question),
        "BEFORE": before,
        "ASSISTANT": _expression(turns.assistant, answer),
    }
    return re.sub("|".join(parts), lambda match: parts[match[0]], _TEMPLATE)


def end_token(name: str | None) -> str:
    """Return the token after an answer that a template makes the tokenizer's end token; empty if it keeps that one."""
    end = TEMPLATES[name].assistant.rpartition("{content}")[2].rstrip("\n") if name in TEMPLATES else ""
    return "" if end == "{eos}" or name in KEEP_END_TOKEN else end


def _expression(text: str, content: str) -> str:
    """Return a Jinja expression for a text with places."""
    places = {"content": f"({content})", "bos": "(bos_token or '')", "eos": "(eos_token or '')"}
    pieces = PLACE.split(text)  # texts and names of places in turn
    expressions = [
        places[piece] if number % 2 else json.dumps(piece, ensure_ascii=False) for number, piece in enumerate(pieces)
    ]
    return " + ".join(item for item in expressions if item != '""') or "''"
