"""Run a module of this package in a child process: `python run_module.py PARENT[:SIGNAL] MODULE [ARGUMENTS]`.

Unlike `python -m` it never takes another package of our name in the current folder, such as a checkout of PyTorch's
torchtitan, for ours. The current folder comes last on the path and not first, so plugins in it can still be imported.

`PARENT` is the process ID with which this process ends, by SIGNAL (default: SIGKILL), or 0. With `--exec` in place of a
module, the arguments are a program, which replaces this process. Started as a script: it imports nothing of the package
before the path is right.
"""

import importlib
import os
import runpy
import sys

EXEC = "--exec"


def main() -> None:
    _correct_path()
    (parent, _, number), target = sys.argv[1].partition(":"), sys.argv[2]
    if int(parent):
        process = importlib.import_module("torchtitan.process.exit")
        process.die_with_parent(int(parent), *([int(number)] if number else []))
    del sys.argv[:2]
    if target == EXEC:
        os.execvp(sys.argv[1], sys.argv[1:])
    runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # as `python -m` does


def _correct_path() -> None:
    """Import our package, from wherever this file is, and replace this file's folder on the path by the current one."""
    folder = os.path.dirname(os.path.realpath(__file__))
    if sys.path and os.path.realpath(sys.path[0]) == folder:  # not so with PYTHONSAFEPATH
        del sys.path[0]
        sys.path.append("")
    home = os.path.dirname(os.path.dirname(folder))
    sys.path.insert(0, home)
    importlib.import_module("torchtitan")
    sys.path.remove(home)


if __name__ == "__main__":
    main()
