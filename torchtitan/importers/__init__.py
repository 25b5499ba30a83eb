"""Readers that translate command lines and files of other programs to jobs.

A reader is one file and one entry here. `torchtitan import` finds it by the script that a line runs, by its flags, or
by the suffix of its options file. It does not import torch.
"""

from typing import NamedTuple

from torchtitan.core.registry import Registry
from torchtitan.importers.translation import CommandLine


class Source(NamedTuple):
    """A kind of command line that can be imported.

    `script`: the file name of the script, or None for any script with these `flags`, or with an options file that ends
    in one of `files`. `reader`: "module:function", which translates a translation.CommandLine to a
    translation.JobDraft. `uses_accelerate`: True if the script takes precision, sharding and compilation from
    accelerate launch.
    """

    script: str | None
    reader: str
    description: str
    flags: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    uses_accelerate: bool = False

    def __str__(self) -> str:
        if self.files:
            return f"a file that ends in {' or '.join(self.files)}"
        return self.script or f"any script with --{' --'.join(self.flags)}"

    def matches(self, line: CommandLine) -> bool:
        if self.files:
            return line.config is not None and line.config.endswith(self.files)
        if self.script is None:
            return set(self.flags) <= {name for name, _ in line.flags}
        return line.script == self.script


_BUILTIN = {
    "relora": Source("torchrun_main.py", "torchtitan.importers.relora:read", "pretraining with restarted adapters"),
    "galore": Source(
        None,
        "torchtitan.importers.galore:read",
        "LoRA, GaLore and both in 8 bits, compared with AdamW",
        ("mode", "optimizer", "model"),
    ),
    "axolotl": Source(
        None,
        "torchtitan.importers.axolotl:read",
        "fine-tuning, with its launcher",
        files=(".yaml", ".yml"),
        uses_accelerate=True,
    ),
    "neurocache": Source(
        "train_neurocache.py",
        "torchtitan.importers.neurocache:read",
        "a cache of past states for a frozen decoder",
        uses_accelerate=True,
    ),
    "deepspeed": Source(None, "torchtitan.importers.deepspeed:read", "DeepSpeed's ZeRO stages", files=(".json",)),
}
SOURCES: Registry[Source] = Registry("torchtitan.importers", _BUILTIN, Source)
