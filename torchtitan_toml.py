"""The entry point of the command `torchtitan`.

It is not in the package, because PyTorch's torchtitan has a package of the same name, which may come first on the path.
"""

import importlib
import sys
from pathlib import Path


def run() -> None:
    """Run the package in this file's folder, and exit with the command's exit code."""
    home = str(Path(__file__).resolve().parent)
    sys.path.insert(0, home)
    cli = importlib.import_module("torchtitan.cli")
    sys.path.remove(home)
    cli.run()
