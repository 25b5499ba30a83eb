"""`python -m torchtitan`, the same as the command `torchtitan`."""

from torchtitan.cli import run

run()
