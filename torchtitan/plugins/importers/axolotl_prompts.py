"""Axolotl's prompt types of instructions and of pairs, as options of a source.

Facts: prompters.py, prompt_tokenizers.py and prompt_strategies of Axolotl v0.18. The ids are Axolotl's: prompt and
answer are encoded as two texts, a begin token before the first, the end token after the second.
"""

from typing import Any, NamedTuple

TASK = "an instruction that describes a task"
WITH_INPUT, CONTEXT = f"Below is {TASK}, paired with an input that", " provides further context."
ASKS = "Write a response that appropriately completes the request."
SYSTEM = {True: f"{WITH_INPUT}{CONTEXT} {ASKS}", False: f"Below is {TASK}. {ASKS}"}
"""The system message of a record, by whether it has an input."""
FROM_USER = "Below is an instruction from a USER that describes a task"
CHAT_SYSTEM = {
    True: f"{FROM_USER}, paired with an input that{CONTEXT} The ASSISTANT writes a response that concisely and "
    "appropriately completes the request.\n\n",
    False: f"{FROM_USER}. The ASSISTANT writes a response that appropriately and concisely completes the request.\n\n",
}
ARTICLE = "Use the following contextual information to concisely answer the question.\n"
CREATIVE = (
    "Answer the following question in a comprehensive, in-depth, and creative way. Additionally your response should "
    "be relevant, accurate, and free of any ambiguity.\n"
)


class Style(NamedTuple):
    """Texts of a prompt: with an input, without one, and the system message before both."""

    turn: str
    turn_without_input: str
    system: str


STYLES = {
    "instruct": Style(
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Response:\n",
        "{system}\n\n",
    ),
    "chat": Style("USER: {instruction}\n{input}\nASSISTANT:", "USER: {instruction}\nASSISTANT:", "SYSTEM: {system}\n"),
}
ORCA = Style(
    "### Human:\n{instruction}\n### Additional Context:\n{input}\n### Assistant:\n",
    "### Human:\n{instruction}\n### Assistant:\n",
    "### System:\n{system}\n",
)
TOKEN_STYLES = ("chatml", "phi")
"""Styles that write special tokens, which prompts here do not contain."""


class PromptType(NamedTuple):
    """The options of a source for a prompt type."""

    template: dict[str, str] = {}
    fields: dict[str, str] = {}


def _fixed(style: Style, system: dict[bool, str]) -> dict[str, str]:
    """Return the template of a style whose system message is the prompter's own."""
    heads = {has_input: style.system.replace("{system}", text) if text else "" for has_input, text in system.items()}
    return {"format": heads[True] + style.turn, "no_input_format": heads[False] + style.turn_without_input}


def _of_record(style: Style) -> dict[str, str]:
    """Return the template of a style whose system message stands in the record."""
    return {"format": style.turn, "no_input_format": style.turn_without_input, "system_format": style.system}


def _same(text: str) -> dict[str, str]:
    return {"format": text, "no_input_format": text}


NO_SYSTEM = {True: "", False: ""}
WITHOUT_INPUT = {"input": ""}
QUESTION = {"instruction": "question", "output": "answer", **WITHOUT_INPUT}
OF_ORCA = {"instruction": "question", "output": "response", "system": "system_prompt", **WITHOUT_INPUT}
CHAT, INSTRUCT = STYLES["chat"], STYLES["instruct"]
OF_ARTICLE = "{input}\n===\n{instruction}"
BY_STYLE: dict[str, PromptType] = {
    "alpaca": PromptType(),
    "gpteacher": PromptType(fields={"output": "response"}),
    "oasst": PromptType(fields={"instruction": "INSTRUCTION", "output": "RESPONSE", **WITHOUT_INPUT}),
    "jeopardy": PromptType(
        {"output_format": "what is {output}"}, {"instruction": "question", "input": "category", "output": "answer"}
    ),
}
"""Types of Alpaca's prompter, whose style may follow after a colon."""
STRATEGIES: dict[str, PromptType] = {
    "alpaca_instruct": PromptType(),
    "alpaca_instruct.load_no_prompt": PromptType(_fixed(INSTRUCT, NO_SYSTEM)),
    "alpaca_chat": PromptType(_fixed(CHAT, SYSTEM)),
    "alpaca_chat.load_concise": PromptType(_fixed(CHAT, CHAT_SYSTEM)),
    "alpaca_chat.load_qa": PromptType(_fixed(CHAT, CHAT_SYSTEM), QUESTION),
    "alpaca_chat.load_camel_ai": PromptType(
        _fixed(CHAT, CHAT_SYSTEM), {"instruction": "message_1", "output": "message_2", **WITHOUT_INPUT}
    ),
    "alpaca_chat.load_no_prompt": PromptType(_fixed(CHAT, NO_SYSTEM)),
    "alpaca_w_system": PromptType(_of_record(CHAT)),
    "alpaca_w_system.load_chat": PromptType(_of_record(CHAT)),
    "alpaca_w_system.load_instruct": PromptType(_of_record(INSTRUCT)),
    "alpaca_w_system.load_open_orca": PromptType(_of_record(ORCA), OF_ORCA),
    "orcamini": PromptType(_same("### System:\n{system}\n\n### User:\n{instruction}\n\n### Response:\n"), OF_ORCA),
    "context_qa": PromptType(
        _same(f"SYSTEM: {ARTICLE}\nUSER: {OF_ARTICLE}\nASSISTANT:"),
        {"instruction": "question", "input": "article", "output": "answer"},
    ),
    "context_qa.load_v2": PromptType(
        _same("Context: {input}\nQuestion: {instruction}\n") | {"output_format": "Answer: {output}"},
        {"instruction": "question", "input": "context", "output": "answer"},
    ),
    "creative_acr.load_answer": PromptType(
        _same(CREATIVE + CHAT.turn_without_input), {"output": "revision", **WITHOUT_INPUT}
    ),
    "summarizetldr": PromptType(
        _same("USER: Summarize the following article as a TL;DR.\n{instruction}\nASSISTANT:"),
        {"instruction": "article", "output": "summary", **WITHOUT_INPUT},
    ),
}
TEMPLATES_OF_PAIRS = ("chatml", "llama3")
PAIRS: dict[str, dict[str, str]] = {
    "intel": {},
    "icr": {"question": "input"},
    "prompt_pairs": {"question": "prompt"},
    "ultra": {"question": "prompt"},
    "argilla_chat": {},
}
"""Strategies of pairs under a template -> fields of the format preference."""
PAIRS_OF_MESSAGES = ("ultra", "argilla_chat")
"""Those whose answers are lists of messages."""
BRADLEY_TERRY = "bradley_terry.chat_template"
"""Type of the pairs of a reward model: system, input, chosen and rejected, under the chat template."""
TWO_TEXTS = "its answer is made of several fields: join them in one, and give it as output"
JOIN_CHOICES = "write question and choices as one text in the field instruction, and the answer as output"
AS_MESSAGES = "write the records as messages, and name the template with chat_template"
REASONS = {
    "reflection": TWO_TEXTS,
    "explainchoice": JOIN_CHOICES,
    "concisechoice": JOIN_CHOICES,
    "context_qa.load_404": "its answer is in no field: write it into the records as output",
    "creative_acr.load_critique": TWO_TEXTS,
    "creative_acr.load_revise": TWO_TEXTS,
    "metharme": "it ends an answer with three end tokens",
    "pygmalion": AS_MESSAGES,
    "llama2_chat": f"{AS_MESSAGES}: llama2",
    "alpaca_w_system.load_open_orca_chatml": AS_MESSAGES,
    BRADLEY_TERRY: "give reward_model: true, for which it is made",
    "stepwise_supervised": "reward models of single steps are not supported",
}
"""Types that are not translated -> why, and what to do."""


def prompt_of(kind: str) -> PromptType | None:
    """Return the options of a prompt type, None for others. Loaders without a name are `load`."""
    kind = kind.removesuffix(".load")
    if kind in STRATEGIES:
        return STRATEGIES[kind]
    name, _, style = kind.partition(":")
    if name not in BY_STYLE or (style and style not in STYLES):
        return None
    prompt = BY_STYLE[name]
    template = _fixed(STYLES[style], SYSTEM) if style not in ("", "instruct") else {}
    return prompt._replace(template=template | prompt.template)


def pair_fields_of(kind: str) -> tuple[str, dict[str, str]] | None:
    """Return the template and the fields of a strategy of pairs, None for others."""
    template, _, name = kind.partition(".")
    return (template, PAIRS[name]) if template in TEMPLATES_OF_PAIRS and name in PAIRS else None


def reason_of(kind: str) -> str:
    """Return why a prompt type is not translated; empty if it is unknown."""
    if kind.partition(":")[2] in TOKEN_STYLES:
        return f"its prompt contains special tokens: {AS_MESSAGES}"
    return REASONS.get(kind.removesuffix(".load"), "")


def source_of(prompt: PromptType) -> dict[str, Any]:
    """Return a prompt as options of a source. A type without a place for system messages does not read that field."""
    has_system = "system" in prompt.fields or "system_format" in prompt.template
    fields = prompt.fields if has_system or not prompt.template else {**prompt.fields, "system": ""}
    options = {"format": "instruct", "fields": dict(fields), "template": dict(prompt.template)}
    return {name: value for name, value in options.items() if value}
