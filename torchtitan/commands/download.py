"""`torchtitan download hf://owner/name`: fetch models and records of the hub before a job needs them.

Only files that are data are fetched: safetensors, JSON, tokenizers and records (core/hub.py). Each line has the commit
that a job can be pinned to, and the folder.
"""

from torchtitan.commands.command_lines import parse_command
from torchtitan.core.errors import JobError
from torchtitan.core.hub import HubSource, is_hub_source, require_client


def main(argv: list[str]) -> int:
    options, _ = parse_command("download", argv)
    for text in options.source:
        if not is_hub_source(text):
            raise JobError(f"{text}: allowed: hf://owner/name, or hf://datasets/owner/name; write it so")
    for text in options.source:
        require_client(text)
        source = HubSource.parse(text, options.only)
        folder = source.download()
        print(f"{source.at(folder.name)}: {folder}")
    return 0
