"""`python -m tests.support.fake_cuda` answers questions, each a line of JSON: [name in step.py, mutant or "", arguments
of the function]. Its answers are lines too: [whether it is one, the answer or a traceback].
"""

import gc
import json
import logging
import multiprocessing
import os
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

from tests.support.fake_cuda import LIMIT, step
from tests.support.fake_cuda.mutants import PLANTED

_context = multiprocessing.get_context("fork")


def answered(*question: Any) -> tuple[bool, Any]:
    """Answer in a fork of this process, which has all imports and whose changes end with it."""
    pipe, child_pipe = _context.Pipe(duplex=False)
    process = _context.Process(target=answer, args=(child_pipe, *question))
    process.start()
    child_pipe.close()
    try:
        return pipe.recv() if pipe.poll(LIMIT) else (False, f"no answer within {LIMIT} s")
    except EOFError:
        return False, "the process ended without an answer"
    finally:
        process.kill()
        process.join()


def answer(pipe: Connection, name: str, mutant: str, argv: list[str], rank: int, world_size: int) -> None:
    try:
        if mutant:
            PLANTED[mutant]()
        pipe.send((True, getattr(step, name)(argv, rank, world_size)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what else is printed is no answer
    step.install()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(answered(*json.loads(line))), file=answers, flush=True)
