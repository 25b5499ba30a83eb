"""Hostile paths, and commands that open them in a child process with limits of time and memory."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torchtitan.core.errors import JobError

KINDS = ("pipe", "device", "folder", "oversize")
SECONDS = 60
"""Wall time of one command, after which it counts as a hang: it takes less than a second on an idle machine."""
OVERSIZE = 2**28
"""Bytes, more than any tokenizer, template, table or JSON file may have."""
_SERVER = """
import json, os, resource, signal, sys
from torchtitan import cli
import torchtitan.commands.check
for module in json.loads(sys.argv[1]):
    __import__(module)
def run(argv, log):
    if (child := os.fork()):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        for number in (1, 2):
            os.dup2(log, number)
        signal.alarm(int(sys.argv[2]))
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, used + 2**31))
        os._exit(cli.main(argv))
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException as error:
        os.write(log, f"TRACEBACK {type(error).__name__}: {error}".encode())
        os._exit(99)
found = []
for argv in json.load(sys.stdin):
    log = os.memfd_create("log")
    code = run(argv, log)
    found.append([code, os.pread(log, 100_000, 0).decode(errors="replace")])
json.dump(found, sys.stdout)
"""


class Outcome(NamedTuple):
    code: int
    """Negative: the number of the signal that ended it; 99: an exception that the command did not expect."""
    text: str
    """All that it printed."""

    def problem(self, name: str) -> str | None:
        """Describe how a command failed to refuse a file called `name` properly; None if it did."""
        is_named = name in self.text or "/dev/zero" in self.text  # to which some links lead
        if self.code == 2 and is_named and "Traceback" not in self.text and "usage:" not in self.text:
            return None
        ending = {-14: "it hung", 99: "it raised"}.get(self.code, f"exit code {self.code}")
        return f"{ending}: {self.text[-500:]}"


def make(kind: str, path: Path) -> Path:
    """Put a pipe, a link to a device, an empty folder, or far too large a file at the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(OVERSIZE)  # which takes no room on the disk
    return path


def outcomes(commands: list[list[str]], folder: Path, *modules: str) -> list[Outcome]:
    """Run `torchtitan` with each of these arguments, in a child that may take 2 GiB and SECONDS."""
    done = subprocess.run(
        [sys.executable, "-c", _SERVER, json.dumps(modules), str(SECONDS)],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=SECONDS * (len(commands) + 1),
    )
    assert done.returncode == 0, done.stderr
    return [Outcome(*result) for result in json.loads(done.stdout)]


def in_child(read: Callable[[], object]) -> Outcome:
    """Run a function in a fork of this process with the same limits. Code 2: it raised a JobError; 0: it returned."""
    log = os.memfd_create("log")
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Outcome(code, os.pread(log, 100_000, 0).decode(errors="replace"))
    code = 99
    try:
        signal.alarm(SECONDS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, used + 2**31))
        read()
        code = 0
    except JobError as error:
        os.write(log, str(error).encode())
        code = 2
    except BaseException as error:
        os.write(log, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(code)
