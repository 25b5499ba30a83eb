"""The arguments of `torchtitan run`."""

import pytest

from torchtitan.commands.run import split_arguments


@pytest.mark.parametrize(
    "line, ours, script",
    [
        ("s.py", "", "s.py"),
        ("s.py --ranks 4 --ranks 5", "--ranks 4", "s.py --ranks 5"),
        ("s.py --ranks=4 -x 1", "--ranks=4", "s.py -x 1"),
        ("--ranks 2 s.py --ranks 4", "--ranks 2", "s.py --ranks 4"),
        ("--ranks=2 --max-restarts 1 s.py --help", "--ranks=2 --max-restarts 1", "s.py --help"),
        ("--help s.py", "--help", "s.py"),
        ("s.py --max-restarts 3", "", "s.py --max-restarts 3"),
    ],
)
def test_what_follows_the_script_belongs_to_it(line, ours, script):
    assert split_arguments(line.split()) == (ours.split(), script.split())
