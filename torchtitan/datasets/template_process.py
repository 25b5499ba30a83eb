"""Render chat templates in a child process with limits of time and memory (template_worker.py).

The package's own templates are rendered in this process, which is several times as fast. Each process that renders has
one child, started with the first template and again after a template has ended it. The child ends when its input is
closed, so also when its parent is killed.
"""

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torchtitan.datasets import template_worker
from torchtitan.datasets.template_worker import (
    HEAD,
    MEMORY,
    REFUSED,
    SECONDS,
    TOO_LONG,
    TooLong,
    environment,
    rendered,
    request_seconds,
)
from torchtitan.datasets.tokenizer.chat_templates import NAMED

ENVIRONMENT = ("LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "LANG")
"""The only environment variables that the child inherits."""
MAX_TEMPLATES = 64
"""Maximum number of templates in one child."""
WAIT = 10
"""Factor between a request's processor time and the longest wait for its answer. On a busy machine the child gets only
part of a core."""
OUT_OF_TIME, CRASH = "time", "crash"
"""Kinds of failure in addition to the worker's own: it exceeded SECONDS, or it ended for another reason."""


class RenderingFailed(Exception):
    """A rendering failed. `kind`: one of the worker's kinds of failure, OUT_OF_TIME or CRASH."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Child:
    def __init__(self) -> None:
        # -I: imports do not depend on the user's environment or the current folder
        command = [sys.executable, "-I", template_worker.__file__, json.dumps(sys.path)]
        self.process = subprocess.Popen(
            command,
            bufsize=0,  # a buffer would be written a second time by a fork of this process
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            start_new_session=True,  # Ctrl-C in a terminal is for the process that trains
        )
        self.sent: dict[str, int] = {}
        """Template -> its number in the child."""

    def ask(self, source: str, request: Mapping[str, Any]) -> dict[str, Any]:
        fresh = {} if source in self.sent else {"source": source}
        number = self.sent.setdefault(source, len(self.sent))
        content = json.dumps({"template": number, **fresh, **request}, default=str).encode()
        until = time.monotonic() + WAIT * request_seconds(len(request["renderings"]))
        self._write(HEAD.pack(len(content)) + content)
        return json.loads(self._read(HEAD.unpack(self._read(HEAD.size, until))[0], until))

    def _write(self, content: bytes) -> None:
        assert self.process.stdin is not None
        unwritten = memoryview(content)
        while unwritten:
            unwritten = unwritten[self.process.stdin.write(unwritten) :]

    def _read(self, size: int, until: float) -> bytes:
        assert self.process.stdout is not None
        pieces = []
        while size:
            with selectors.DefaultSelector() as selector:
                selector.register(self.process.stdout, selectors.EVENT_READ)
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError
            piece = self.process.stdout.read(size)
            if not piece:
                raise EOFError
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def end(self) -> int:
        """Close the pipes and wait for the child. Return its exit code, or minus the signal that ended it."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


_lock = threading.Lock()
_children: list[_Child] = []
"""The running child, at most one."""


def render(
    source: str, messages: Sequence[Any], variables: Mapping[str, Any], renderings: Sequence[tuple[int, bool]]
) -> list[str]:
    """Return the text of each rendering: (number of messages, whether to add the header of an answer).

    Raises RenderingFailed."""
    if source in NAMED.values():
        return _render_here(source, messages, variables, renderings)
    request = {"messages": messages, "variables": variables, "renderings": renderings}
    with _lock:
        if _children and len(_children[0].sent) >= MAX_TEMPLATES and source not in _children[0].sent:
            _children.pop().end()
        if not _children:
            _children.append(_Child())
        try:
            answer = _children[0].ask(source, request)
        except (EOFError, BrokenPipeError):
            code = _children.pop().end()
            late = code == -signal.SIGPROF
            raise RenderingFailed(
                OUT_OF_TIME if late else CRASH, f"more than {SECONDS} s" if late else f"exit code {code}"
            ) from None
        except TimeoutError:
            child = _children.pop()
            child.process.kill()
            child.end()
            raise RenderingFailed(OUT_OF_TIME, "no answer in time") from None
        except BaseException:  # such as Ctrl-C: the child's answer would be read by the next request
            _children.pop().process.kill()
            raise
    if "texts" not in answer:
        raise RenderingFailed(answer["failure"], answer["message"])
    return answer["texts"]


def _render_here(
    source: str, messages: Sequence[Any], variables: Mapping[str, Any], renderings: Sequence[tuple[int, bool]]
) -> list[str]:
    try:
        return [rendered(_compiled(source), messages, variables, *rendering) for rendering in renderings]
    except TooLong:
        raise RenderingFailed(TOO_LONG, "") from None
    except Exception as error:  # a message lacks a key that the template reads
        raise RenderingFailed(REFUSED, str(error)) from None


@lru_cache
def _compiled(source: str) -> Any:
    return environment().from_string(source)


def limits() -> str:
    """Describe the limits of a rendering."""
    return f"{SECONDS} s of processor time or {MEMORY // 2**20} MiB of memory"


def _end() -> None:
    while _children:
        _children.pop().end()


def _forget() -> None:
    """Drop the child in a fork of this process: it belongs to the parent."""
    global _lock
    _lock = threading.Lock()
    while _children:
        child = _children.pop()
        child.process.returncode = 0  # only the parent can wait for it
        for pipe in (child.process.stdin, child.process.stdout):
            assert pipe is not None
            pipe.close()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
