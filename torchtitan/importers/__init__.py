"""Command lines of other programs, as jobs. A reader is one file and one line here; `torchtitan import` finds it by the
script that a line runs. No torch.
"""

from typing import NamedTuple

from torchtitan.registration import Registry


class Source(NamedTuple):
    """`script`: the name of the file that its command lines run. `reader`: "module:function", of the command line
    (command_line.CommandLine) the job that it means (meaning.Meaning).
    """

    script: str
    reader: str
    what: str


_own = {
    "relora": Source("torchrun_main.py", "torchtitan.importers.relora:read", "pretraining with restarted adapters"),
}
SOURCES: Registry[Source] = Registry("torchtitan.importers", _own, Source)
