"""Messages in the forms that datasets have, converted to the one that chat templates read.

The result is what transformers' apply_chat_template is given: {role, content}, tool calls as {type, function: {name,
arguments}} with arguments as a table, and any further keys. ShareGPT's {from, value} get the usual role names, and its
`function_call` turns become tool calls of the assistant, as LLaMA-Factory reads them. A form that is not known here is
refused, because a template might leave it out, or a loss mask miss it.

Nulls inside tables are dropped: Arrow fills them in where another record has a key, so they mean "not there". It cannot
do so inside JSON text, so nulls in tools and arguments that are JSON text are kept.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torchtitan.core.files import unique_keys
from torchtitan.datasets.sources import REMEDY, Chat, DataError

ROLE_KEYS = ("role", "from")
CONTENT_KEYS = ("content", "value")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bing": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
"""Role names of the ShareGPT format. Names not listed are kept."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Role names that ShareGPT's messages may have too."""
FUNCTION_CALL = "function_call"
"""Role of a turn, and key of a message, that calls a function."""
TEXT_PART = {"type", "text"}
CALL_KEYS, FUNCTION_KEYS = {"id", "type", "index", "function"}, {"name", "arguments"}
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Fields of records, and keys of messages, that no text model reads."""
FLAGS = ("train", "weight", "loss")
"""Keys of a message that say whether it is trained, as Axolotl, OpenAI and ms-swift name them."""
KNOWN_KEYS = {
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "thinking",
    *FLAGS,
}
"""Keys of messages that common templates read, and flags of the loss mask."""
LIST_OF_TABLES = re.compile(r"\s*\[\s*\{\s*[\"'](role|from|content|value|text|label)[\"']\s*:")
"""Beginning of a text that is meant as a list of messages or segments."""


class JsonTable(dict[str, Any]):
    """A table of a JSON text: its nulls were written there."""


def without_nulls(value: Any) -> Any:
    """Return a nested value without the keys of tables whose value is null, unless they are of a JSON text."""
    if isinstance(value, dict) and not isinstance(value, JsonTable):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def without_absent(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of known keys without those whose value is null, which means "not there" also in JSON text."""
    return {key: value for key, value in table.items() if value is not None}


def _load_table(text: str) -> Any:
    """Parse the JSON text of a field, as `core.files.load_json`."""
    return json.loads(text, object_pairs_hook=lambda pairs: JsonTable(unique_keys(pairs)))


def parsed(text: str) -> Any:
    """Return the JSON value of a text; None if it is no JSON."""
    try:
        return _load_table(text)
    except (ValueError, RecursionError):
        return None


def is_messages(value: Any, role_keys: Collection[str] = ROLE_KEYS) -> bool:
    """Return True if a value is a list of messages, each with one of the keys of a role."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(item, dict) and not item.keys().isdisjoint(role_keys) for item in value)


def is_segments(value: Any) -> bool:
    """Return True if a value is a list of segments {text, label}."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) and "text" in v for v in value)


def json_in_text(value: str, field: str, location: str) -> Any:
    """Return the list or table that a field holds as JSON text, as in CSV; None for an empty text.

    `field` names the field and what it holds. Raises DataError, which names `location`, if it is none."""
    if not value.strip():
        return None
    try:
        content = _load_table(value)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{location}: {field}, also not as JSON ({error}); write it with json.dumps, or set training.format and "
            f"training.fields, or {REMEDY}"
        ) from None
    if not isinstance(content, list | dict):
        raise DataError(f"{location}: {field}, but {type(content).__name__} as JSON; {REMEDY}")
    return content


def messages_in_text(value: str, role_keys: Collection[str], column: str, location: str) -> Any:
    """Return the messages that a text holds as JSON; the text if it is an ordinary one.

    Raises DataError, which names `location`, if it begins like messages and is no JSON."""
    content = parsed(value) if value.lstrip()[:1] in ("[", "{") else None
    if is_messages(content, role_keys) or (
        isinstance(content, dict) and len(content) > 1 and is_messages([content], role_keys)
    ):
        return content
    if content is None and LIST_OF_TABLES.match(value):
        raise DataError(
            f"{location}: field {column!r} begins like a list of messages, but is no JSON; write it with "
            f"json.dumps, or {REMEDY}"
        )
    return value


def is_empty(value: Any) -> bool:
    """Return True if a field or key holds nothing: null, or an empty text, list or table, also as JSON, as in CSV."""
    is_json = isinstance(value, str) and value.strip() in ("", "[]", "{}", "null")
    return value is None or is_json or (isinstance(value, list | dict) and not value)


def as_list(value: Any) -> Any:
    """Return the rows of a table of columns, as `datasets` stores a Sequence of tables; other values unchanged."""
    if not isinstance(value, dict) or not value or not all(isinstance(column, list) for column in value.values()):
        return value
    if len({len(column) for column in value.values()}) != 1:
        return value
    return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]


def standard_role(name: Any) -> Any:
    """Map a ShareGPT role name to the usual one; return other names unchanged."""
    return SHAREGPT_ROLES.get(name, name) if isinstance(name, str) else name


class Context(NamedTuple):
    """The fields next to a conversation in its record.

    `system`: text of its system message, from the field that `column` names. `location`: named in errors."""

    system: str
    tools: list[Any] | None
    template_kwargs: dict[str, Any]
    column: str
    location: str

    @property
    def is_empty(self) -> bool:
        return not self.system and self.tools is None and not self.template_kwargs

    def chat(self, messages: list[dict[str, Any]]) -> Chat:
        """Return a conversation in this context. Raises DataError if it has another system message."""
        first = messages[0] if messages and messages[0]["role"] == "system" else None
        if self.system and first is not None and first["content"] != self.system:
            raise DataError(
                f"{self.location}: field {self.column!r} holds another system message than the conversation itself; "
                f"drop one of the two, or {REMEDY}"
            )
        if self.system and first is None:
            messages = [{"role": "system", "content": self.system}, *messages]
        return Chat(messages, self.tools, self.template_kwargs)


class MessageReader:
    """Converts the messages of one field. `location`, `field`: named in errors; `maps_roles`: role names are ShareGPT's
    also in messages with the key `role`. All methods raise DataError."""

    def __init__(self, field: str, location: str, maps_roles: bool = False) -> None:
        self.field, self.location, self.maps_roles = field, location, maps_roles

    def messages(self, value: list[Any]) -> list[dict[str, Any]]:
        """Return the messages {role, content, ...}."""
        return [self._message(item, number) for number, item in enumerate(value)]

    def tools(self, value: Any) -> list[Any] | None:
        """Return the tools of a record: a list of tables, or one. Those that are JSON texts are parsed."""
        value = without_nulls(value)
        tools = [value] if isinstance(value, dict) else value
        if tools is None or value == {}:
            return None
        tools = [parsed(tool) if isinstance(tool, str) else tool for tool in tools] if isinstance(tools, list) else None
        if tools is None or not all(isinstance(tool, dict) for tool in tools):
            raise self._error("holds", "not a list of tools, each a JSON object")
        return [self._tool(tool) for tool in tools]

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Return a tool; a bare function of ShareGPT's records as templates expect it."""
        is_bare = self.maps_roles and "name" in tool and not {"function", "type"} & tool.keys()
        return {"type": "function", "function": tool} if is_bare else tool

    def _message(self, item: Any, number: int) -> dict[str, Any]:
        if not isinstance(item, dict):
            raise self._error(f"has a {type(item).__name__} as message {number}", "not a message {role, content}")
        item = without_nulls(without_absent(item))
        if media := [key for key in MEDIA if item.get(key) and not is_empty(item[key])]:
            raise self._error(f"has {media[0]!r} in message {number}", "which no text model reads")
        name = self._one_of(item, ROLE_KEYS, number, "role")
        content = self._one_of(item, CONTENT_KEYS, number, "content")
        if not isinstance(name, str):
            raise self._no_text(number, name, "role")
        role = self._role(name, "from" in item, number)
        message = {"role": role} | {k: v for k, v in item.items() if k not in (*ROLE_KEYS, *CONTENT_KEYS)}
        calls = self._calls(message, number)
        if calls and role != "assistant":
            raise self._error(f"has tool calls in message {number} of role {name!r}", "which only the assistant makes")
        if name == FUNCTION_CALL:
            if calls:
                raise self._error(f"has tool_calls in message {number} of role {name!r}", "which holds calls itself")
            calls, content = self._function_calls(content, number), None
        if isinstance(content, list):
            content = self._joined_parts(content, number)
        if not isinstance(content, str) and not (content is None and calls):
            raise self._no_text(number, content, "content")
        texts = {} if content is None else {"content": content}
        return message | texts | ({"tool_calls": calls} if calls else {})

    def _one_of(self, item: Mapping[str, Any], keys: tuple[str, str], number: int, fact: str) -> Any:
        values = [item[key] for key in keys if key in item]
        if len(values) == 2 and values[0] != values[1]:
            both = " and ".join(map(repr, keys))
            raise self._error(f"has two values for the {fact} of message {number}", f"in {both}")
        return values[0] if values else None

    def _role(self, name: str, is_sharegpt: bool, number: int) -> str:
        role = standard_role(name)
        if (is_sharegpt or self.maps_roles) and role not in ROLES:
            allowed = ", ".join([*SHAREGPT_ROLES, *ROLES])
            raise self._error(f"has message {number} of role {name!r}", f"which is not known; allowed: {allowed}")
        if is_sharegpt or self.maps_roles:
            return str(role)
        usual = standard_role(name.strip().lower())
        if usual != name and usual in ROLES:
            raise self._error(
                f"has message {number} of role {name!r}",
                f"which a chat template does not know as {usual!r}; write {usual!r}, or set training.format = "
                '"sharegpt" for records with ShareGPT\'s role names',
            )
        return name

    def _calls(self, message: dict[str, Any], number: int) -> list[Any]:
        """Take tool_calls, or OpenAI's earlier function_call, out of a message, with arguments as tables."""
        calls = message.pop("tool_calls", None)
        if isinstance(calls, str) and calls.strip():
            calls = parsed(calls) or calls
        if FUNCTION_CALL in message:
            if calls:
                raise self._error(f"has message {number} with tool_calls and function_call", "of which one is allowed")
            calls = [{"type": "function", "function": message.pop(FUNCTION_CALL)}]
        if calls in (None, "", []):
            return []
        if not isinstance(calls, list):
            raise self._error(f"has tool_calls in message {number}", "that are no list of calls")
        return [self._call(call, number) for call in calls]

    def _call(self, call: Any, number: int) -> dict[str, Any]:
        call = without_absent(call) if isinstance(call, dict) else call
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise self._error(f"has a tool call in message {number}", "that names no function")
        unknown = [*(call.keys() - CALL_KEYS - (FUNCTION_KEYS if function is call else set()))]
        unknown += [*(without_absent(function).keys() - FUNCTION_KEYS)] if function is not call else []
        if unknown:
            raise self._error(
                f"has a tool call in message {number}", f"with the key {min(unknown)!r}, which is not known"
            )
        function = without_absent(function)
        if "arguments" in function:
            function |= {"arguments": self._arguments(function["arguments"], number)}
        return call | {"function": function} if "function" in call else function

    def _arguments(self, value: Any, number: int) -> Any:
        arguments = (parsed(value) if value.strip() else {}) if isinstance(value, str) else value
        if not isinstance(arguments, dict):
            raise self._error(f"has a tool call in message {number}", "whose arguments are no JSON object")
        return arguments

    def _function_calls(self, content: Any, number: int) -> list[Any]:
        """Return the calls of a ShareGPT turn: JSON of {name, arguments}, or of a list of them."""
        calls = parsed(content) if isinstance(content, str) else content
        calls = [calls] if isinstance(calls, dict) else calls
        if not isinstance(calls, list) or not calls:
            raise self._error(f"has message {number} of role 'function_call'", "that holds no JSON {name, arguments}")
        for call in calls:
            if not isinstance(call, dict) or call.keys() - {"name", "arguments"}:
                raise self._error(f"has message {number} of role 'function_call'", "that is not {name, arguments}")
        return [{"type": "function", "function": self._call(call, number)} for call in calls]

    def _joined_parts(self, parts: list[Any], number: int) -> str:
        """Return the text of a list of parts {type: text, text}, as templates that read lists write it."""
        for part in parts:
            table = part if isinstance(part, dict) else {}
            if table.get("type") != "text" or not isinstance(table.get("text"), str) or table.keys() - TEXT_PART:
                raise self._error(
                    f"has a part {str(part)[:100]} in message {number}",
                    'which no text model reads; allowed: {"type": "text", "text": ...}',
                )
        return "".join(part["text"] for part in parts)

    def _no_text(self, number: int, value: Any, key: str) -> DataError:
        kind = "nothing" if value is None else "dict" if isinstance(value, dict) else type(value).__name__
        return DataError(
            f"{self.location}: message {number} of field {self.field!r} has {kind} as {key}, not text; {REMEDY}"
        )

    def _error(self, problem: str, reason: str) -> DataError:
        return DataError(f"{self.location}: field {self.field!r} {problem}, {reason}; {REMEDY}")
