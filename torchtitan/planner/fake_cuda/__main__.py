"""`python -m torchtitan.planner.fake_cuda` answers lists of questions, each a line of JSON (`Question` in __init__.py).

Its answers are lines too, one a question as soon as it is there: [number, True, result] or [number, False, traceback].
"""

import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pkgutil import resolve_name
from typing import Any

from torchtitan.planner.fake_cuda import LIMIT, Question, step
from torchtitan.process.exit import die_with_parent

_context = multiprocessing.get_context("fork")
AT_ONCE = len(os.sched_getaffinity(0))


def answered(questions: list[Question]) -> Iterator[tuple[int, bool, Any]]:
    """Answer each in a fork of this process, which has all imports and whose changes end with it."""
    remaining, running = list(enumerate(questions)), dict[Any, tuple[int, Any, float]]()
    while remaining or running:
        while remaining and len(running) < AT_ONCE:
            number, question = remaining.pop(0)
            pipe, child_pipe = _context.Pipe(duplex=False)
            process = _context.Process(target=answer, args=(os.getpid(), child_pipe, *question))
            process.start()
            child_pipe.close()
            running[pipe] = number, process, time.monotonic() + LIMIT
        earliest = min(end for _, _, end in running.values())
        ready: list[Any] = wait(list(running), max(0.0, earliest - time.monotonic()))
        for pipe in ready or [pipe for pipe, (_, _, end) in running.items() if end <= time.monotonic()]:
            number, process, _ = running.pop(pipe)
            yield (number, *(_received(pipe) if pipe in ready else (False, f"no answer within {LIMIT} s")))
            process.kill()
            process.join()


def _received(pipe: Connection) -> tuple[bool, Any]:
    try:
        ok, answer = json.loads(pipe.recv_bytes())
        return ok, answer
    except EOFError:
        return False, "the process ended without an answer"


def answer(parent: int, pipe: Connection, function: str, before: str, arguments: list[Any]) -> None:
    die_with_parent(parent)
    try:
        if before:
            resolve_name(before)()
        result = True, resolve_name(function)(*arguments)
    except BaseException:
        result = False, traceback.format_exc()
    pipe.send_bytes(json.dumps(result).encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what else is printed is no answer
    step.install()
    gc.freeze()
    for line in sys.stdin:
        for result in answered(json.loads(line)):
            print(json.dumps(result), file=answers, flush=True)
