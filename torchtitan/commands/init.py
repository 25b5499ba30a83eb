"""`torchtitan init [FILE]`: write a commented job that runs unchanged, as a starting point."""

from pathlib import Path

from torchtitan.commands.command_lines import parse_command
from torchtitan.core.errors import JobError

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
    options, _ = parse_command("init", argv)
    path = Path(options.file)
    write_new_file(path, JOB.format(name=path, stem=path.stem))
    print(f"wrote {path}\n  torchtitan check {path}\n  torchtitan train {path}")
    return 0


def write_new_file(path: Path, text: str) -> None:
    """Write a file. Raises JobError if it exists, or cannot be written."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise JobError(f"{path}: exists; give another name, or remove it") from None
    except OSError as error:
        raise JobError(f"{path}: cannot be written ({error.strerror}); give another name") from None
