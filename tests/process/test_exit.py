"""Exit of a process: cleanup runs, but the interpreter is not finalized while gloo's threads run."""

import os
import subprocess
import sys

import pytest

from tests.support.jobs import ROOT

PROGRAM = """
import atexit, sys, threading, time
from torchtitan.process.exit import exit_with

class Witness:
    def __del__(self):
        print("finalized", flush=True)

def later():
    time.sleep(0.2)
    print("thread")

def command():
    global witness
    witness = [Witness()]
    witness.append(witness)  # which only Python's finalization finds
    atexit.register(print, "atexit")
    threading.Thread(target=later).start()
    print("errors", file=sys.stderr)
    {end}

exit_with(command)
"""


@pytest.mark.parametrize(
    ("end", "code", "out"),
    [
        ("return 3", 3, ["thread", "atexit"]),
        ("return None", 0, ["thread", "atexit"]),
        ("raise TypeError('ours')", 1, ["thread", "atexit"]),
        ("sys.exit(5)", 5, ["thread", "atexit", "finalized"]),
    ],
)
def test_what_is_done_at_the_end(end, code, out):
    program = [sys.executable, "-c", PROGRAM.format(end=end)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (code, out)
    assert done.stderr.startswith("errors\n") and ("TypeError: ours" in done.stderr) == (code == 1)


def test_streams_that_are_closed_from_the_start():
    program = "import sys\nfrom torchtitan.process.exit import exit_with\nexit_with(lambda: sys.stdout.isatty() or 4)"
    command = ["sh", "-c", '"$0" -c "$1" >&-', sys.executable, program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (4, "")


def test_nobody_reads_what_is_printed():
    program = "from torchtitan.process.exit import exit_with\nexit_with(lambda: print('x') or 4)"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=buffered, **pipes) as process:
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (4, b"")
