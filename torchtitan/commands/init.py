"""`torchtitan init [FILE]`: write a job to begin with, which runs as it is and says what to change."""

import sys
from pathlib import Path

USAGE = """\
usage: torchtitan init [FILE]

Writes a commented job (default: job.toml) that runs as it is, on text that every Python brings along."""

JOB = """\
# A first job. Explain it: torchtitan check {name}    Train it: torchtitan train {name}
# Every option, its default and meaning: torchtitan train --help

[job]
dump_folder = "./outputs/{stem}"          # checkpoints, metrics and the picture go here

[model]
name = "llama3"                          # families: llama3, llama3.1, deepseek, qwen3_moe, ...
flavor = "debugmodel"                    # a size of the family: 8B, 70B, ...
tokenizer_path = "debug"                 # a tokenizer's file or folder; debug comes with the package

[training]
dataset = "python_stdlib"                # "text" for your own: .txt, .jsonl, .parquet
# dataset_path = "my_texts/*.jsonl"      # a file, a folder or a pattern, for dataset = "text"
local_batch_size = 4                     # samples of a rank and forward pass
seq_len = 256                            # tokens of a sample
steps = 60                               # optimizer steps

[optimizer]
lr = 3e-3                                # the peak; warmup and decay follow from the number of steps

[metrics]
log_freq = 1                             # a line every so many steps

[checkpoint]
enable = true                            # started again, the job goes on where it stopped
interval = 50
"""


def main(argv: list[str]) -> int:
    if {"--help", "-h"} & set(argv):
        print(USAGE)
        return 0
    if len(argv) > 1 or argv and argv[0].startswith("-"):
        print(f"torchtitan init: given {' '.join(argv)}; allowed: one file name, or none", file=sys.stderr)
        return 2
    path = Path(argv[0] if argv else "job.toml")
    try:
        with path.open("x") as file:
            file.write(JOB.format(name=path, stem=path.stem))
    except FileExistsError:
        print(f"torchtitan init: {path} is there already; give another name, or remove it", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"torchtitan init: {path} cannot be written ({error.strerror}); give another name", file=sys.stderr)
        return 2
    print(f"wrote {path}\n  torchtitan check {path}\n  torchtitan train {path}")
    return 0
