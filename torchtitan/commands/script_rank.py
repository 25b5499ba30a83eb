"""The program of one rank of `torchtitan run`: runs a user's script as `python script.py` does.

`__name__`, `sys.argv`, `sys.path[0]` and, on the first rank, stdin are the same. Lines that other ranks print begin
with their rank. Needs no torch.
"""

import faulthandler
import os
import signal
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType, ModuleType, TracebackType

from torchtitan.core.errors import JobError, wrap_lines
from torchtitan.core.machine_errors import MachineError
from torchtitan.launcher.hangs import write_stacks_on_request
from torchtitan.metrics.run_end import PEER_GONE, RunEnd, read_end
from torchtitan.process.exit import (
    CRASHED,
    INTERRUPTED,
    OUT_OF_MEMORY,
    REFUSED,
    STOPPED,
    die_with_parent,
    exit_with,
    exiting_on_stop_signals,
    failure_kind,
)
from torchtitan.process.ranks import Ranks, read_ranks
from torchtitan.process.run_log import begin_lines_with_rank, print_error

ENDS = "torchtitan.training.ends"
"""Module that knows the failures of an engine, if the script has built one."""


class ScriptLoader(SourceFileLoader):
    """Loads a script, without a cache of its byte code."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def main(arguments: list[str]) -> int:
    """Run a script, given its path and arguments, and return its exit code."""
    ranks = read_ranks()
    faulthandler.enable()  # print every thread's stack after a crash in native code
    if ranks.launcher is not None:
        die_with_parent(ranks.launcher.pid)
        write_stacks_on_request(ranks.launcher)
    begin_lines_with_rank(ranks)
    if ranks.local_rank:  # ranks that read the same stdin would each get a part of it
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with exiting_on_stop_signals():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            run_as_main(arguments)
            return exit_code(0, ranks)
        except SystemExit as end:
            return exit_code(end.code, ranks)
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception as error:
            return report_failure(error, os.path.abspath(arguments[0]), ranks)


def run_as_main(arguments: list[str]) -> None:
    """Run a script as the module `__main__`."""
    path = os.path.abspath(arguments[0])
    if sys.path[-1:] == [""]:  # by process/children.py
        del sys.path[-1]
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    sys.argv = arguments
    module, loader = ModuleType("__main__"), ScriptLoader("__main__", path)
    module.__file__, module.__loader__ = path, loader
    sys.modules["__main__"] = module
    loader.exec_module(module)


def exit_code(value: int | str | None, ranks: Ranks) -> int:
    """Return the exit code of a script that ends well or by sys.exit, whose argument may be a message.

    A script whose engine has stopped early, on a signal or at its time limit, does not look finished.
    """
    if value is not None and not isinstance(value, int):
        print_error(str(value))
        return CRASHED
    end = read_end(Path(ranks.launcher.end).read_text()) if ranks.launcher is not None else None
    return value or (end.code if end is not None and end.code in STOPPED else 0)


def report_failure(error: Exception, path: str, ranks: Ranks) -> int:
    """Report an exception that the script has not handled, and return the exit code.

    The script's own failure is shown by its traceback. A failure that an engine has logged, or that another rank
    reports, is one line, with the line of the script.
    """
    frames = _frames_of(error.__traceback__, path)
    code = _explained_code(error, ranks)
    if code is None:
        is_torchs = str(sys.excepthook.__module__).startswith("torch.")  # begins each line with the rank once more
        hook = sys.__excepthook__ if is_torchs else sys.excepthook
        hook(type(error), error.with_traceback(frames), frames)
        return OUT_OF_MEMORY if failure_kind(error) == "memory" else CRASHED
    lines = [frame.lineno for frame in traceback.extract_tb(frames) if frame.filename == path]
    if lines:
        print_error(f"    at {path}, line {lines[-1]}")
    return code


def _frames_of(trace: TracebackType | None, path: str) -> TracebackType | None:
    """Return a traceback from the script's own first frame on; None if it has none, as in a syntax error."""
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace


def _explained_code(error: Exception, ranks: Ranks) -> int | None:
    """Report a failure that needs no traceback and return the exit code; None for any other."""
    end: RunEnd | None = None
    if ENDS in sys.modules:
        end = resolve_name(f"{ENDS}:end_of_failure")(error, None, ranks)
    elif isinstance(error, JobError | MachineError):
        print_error(wrap_lines(error))
        end = RunEnd(REFUSED if isinstance(error, JobError) else CRASHED, reason=str(error))
    elif failure_kind(error) == "peer":
        print_error(f"{PEER_GONE}: {str(error).splitlines()[0]}")
        end = RunEnd(CRASHED, reason=PEER_GONE)
    if end is None:
        return None
    if ranks.launcher is not None:  # an engine that could not be built has not done so
        end.pass_on(ranks.launcher.end)
    return end.code


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
