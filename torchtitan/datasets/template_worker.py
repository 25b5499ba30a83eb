"""The program that renders chat templates, in a process with limits. template_process.py starts it and talks to it.

A template may come from a stranger, and Jinja's sandbox bounds neither time nor memory: nested loops over ranges, a
text that doubles, or one `"a" * 10**9` would hang or end the process that renders them. Here each rendering may take
SECONDS of processor time, after which the kernel ends this process, even inside one long operation, and MEMORY bytes.

Messages both ways are JSON after their length in 8 bytes. This file is run by its path and imports nothing of the
package, so that it starts quickly.
"""

import json
import sys

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])  # the parent's import path, to find Jinja

import resource
import signal
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN, END = "\ue0f0", "\ue0f1"
"""Marks around text that a template declares as generated."""
SECONDS, MEMORY = 10, 2**29
"""Limits of a request, which renders a conversation a few times. Published templates need 1 ms and 1 MB."""
SECONDS_PER_RENDERING = 0.01
"""Additional time for each rendering of a request. Long conversations have one for each answer."""
MAX_TEXT = 2**22
"""Maximum number of characters that a rendering may have."""
HEAD = struct.Struct("<Q")
REFUSED, SYNTAX, TOO_LONG, TOO_MUCH_MEMORY = "refused", "syntax", "too long", "memory"
"""Kinds of failure: the template raised an error, is not valid Jinja, wrote too much text, or exceeded MEMORY."""


class TooLong(Exception):
    """More than MAX_TEXT characters."""


class _Generation(Extension):
    """The tag {% generation %} ... {% endgeneration %}, which marks generated text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return BEGIN + caller() + END


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON with transformers' options; Jinja's own filter is for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


class _Undefined(Undefined):
    """Undefined variables, among them strftime_now: templates that test it have a fixed date in its place."""

    @property
    def _undefined_message(self) -> str:
        if self._undefined_name == "strftime_now":
            return (
                "it writes today's date (strftime_now), which is refused on purpose, because a run would not resume "
                "with the same texts on another day; write a fixed date into the template"
            )
        return super()._undefined_message


def environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment like transformers', without strftime_now."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], undefined=_Undefined
    )
    jinja.filters["tojson"] = _to_json
    jinja.globals["raise_exception"] = _refuse
    return jinja


def rendered(template: Any, messages: Sequence[Any], variables: Mapping[str, Any], count: int, prompt: bool) -> str:
    """Return the text of the first `count` messages. `variables`: further variables. Raises TooLong."""
    pieces, size = [], 0
    for piece in template.generate(messages=messages[:count], add_generation_prompt=prompt, **variables):
        size += len(piece)
        if size > MAX_TEXT:
            raise TooLong
        pieces.append(piece)
    return "".join(pieces)


def request_seconds(renderings: int) -> float:
    """Return the processor time that a request may take."""
    return SECONDS + SECONDS_PER_RENDERING * renderings


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Let the kernel end this process (SIGPROF's default action) after this much processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def answer(request: dict[str, Any], templates: list[Any], jinja: ImmutableSandboxedEnvironment) -> dict[str, Any]:
    """Return {"texts": one per rendering}, or {"failure": kind, "message": text}."""
    try:
        with time_limit(request_seconds(len(request["renderings"]))):
            if "source" in request:
                templates.append({"failure": REFUSED, "message": "cannot be compiled"})
                templates[-1] = _compiled(request["source"], jinja)
            template = templates[request["template"]]
            if isinstance(template, dict):
                return template  # its failure in the first request
            texts = [
                rendered(template, request["messages"], request["variables"], *rendering)
                for rendering in request["renderings"]
            ]
        return {"texts": texts}
    except Exception as error:  # a template's expressions may raise anything
        return _failure(error)


def _compiled(source: str, jinja: ImmutableSandboxedEnvironment) -> Any:
    """Return the template, or, if it is invalid, the failure that answers all requests for it."""
    try:
        return jinja.from_string(source)
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> dict[str, Any]:
    if isinstance(error, TooLong):
        return {"failure": TOO_LONG, "message": ""}
    if isinstance(error, MemoryError):
        return {"failure": TOO_MUCH_MEMORY, "message": ""}
    kind = SYNTAX if isinstance(error, TemplateSyntaxError) else REFUSED
    return {"failure": kind, "message": str(error)[:1000]}


def _address_space() -> int:
    """Return the size of this process's address space in bytes; 0 if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a run that is asked to stop may need further texts
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    jinja, templates = environment(), list[Any]()
    used = _address_space()
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while head := requests.read(HEAD.size):
        request = json.loads(requests.read(HEAD.unpack(head)[0]))
        content = json.dumps(answer(request, templates, jinja)).encode()
        answers.write(HEAD.pack(len(content)) + content)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
