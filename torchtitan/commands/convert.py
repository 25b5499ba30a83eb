"""`torchtitan convert SOURCE TARGET`: weights from one form to another, a tensor at a time.

    torchtitan convert outputs/debug model_hf                         a run's newest checkpoint, for other programs
    torchtitan convert Llama-3.2-1B llama                             a folder of Hugging Face, as an export of ours
    torchtitan convert Llama-3.2-1B llama.safetensors --dtype bfloat16
    torchtitan convert step-1000 model_hf --model.name llama3.1 --model.flavor 8B      torchtitan's own checkpoint

The sizes are those of the run that wrote the weights or of the config.json beside them; else options of a job say them.
No more than one of them is in memory.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan import build
from torchtitan.bars import progress_bar
from torchtitan.checkpoint.agreement import Peers
from torchtitan.checkpoint.folders import published
from torchtitan.checkpoint.kinds import find_weights
from torchtitan.checkpoint.layout import MODEL
from torchtitan.checkpoint.saving import Care, Snapshot, save
from torchtitan.commands.job_of import JOB, job_of, refuse_strangers
from torchtitan.config.job import JobConfig
from torchtitan.config.manager import to_toml
from torchtitan.config.options import options as job_options
from torchtitan.datasets.templates import turn_ends
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.deferred import Deferred
from torchtitan.errors import JobError
from torchtitan.models import CONFIGS
from torchtitan.models.hf.config import CONFIG
from torchtitan.models.hf.export import beside_weights, source_of
from torchtitan.weights import Weights, opened

FORMS = {"hf": "a folder of Hugging Face", "file": "one file of safetensors", "ours": "an export of this project"}


def main(argv: list[str]) -> int:
    options, words = parse(argv)
    source, target = Path(options.source), Path(options.target)
    if target.exists():
        raise JobError(f"{target}: exists; give another target, or remove it first")
    kind, place = find_weights(source)
    form = options.to or ("file" if target.suffix == ".safetensors" else "ours" if kind == "hf" else "hf")
    config = job_of(place, words, with_tokenizer=False)
    args = build.model_args(config)
    with opened(place, config.model.name, args) as weights:
        dtype = build.DTYPES[options.dtype] if options.dtype else weights.dtype("tok_embeddings.weight")
        write = {"hf": _write_hf, "file": _write_file, "ours": _write_ours}[form]
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write(target, config, args, weights, dtype)
        except OSError as error:
            raise JobError(f"{target}: not written: {error}") from error
    print(f"{place} -> {target}: {config.model.name}, {args.num_parameters:,} parameters, {FORMS[form]}")
    return 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of the conversion, and those of a job."""
    parser = argparse.ArgumentParser(
        prog="torchtitan convert",
        description="Convert weights: checkpoints, exports, torchtitan's own, folders and files of Hugging Face.",
        epilog="What model it is, where nothing beside the weights says so, is said by options of a job: "
        "--job.config_file job.toml, or --model.name and --model.flavor.",
        allow_abbrev=False,
    )
    parser.add_argument("source", help="a run, a checkpoint, an export, a folder or a file of safetensors")
    parser.add_argument("target", help="what to make; a name that ends with .safetensors is a file")
    told = "; ".join(f"{form}: {what}" for form, what in FORMS.items())
    parser.add_argument("--to", choices=list(FORMS), help=f"{told} (default: ours of Hugging Face's, else hf)")
    parser.add_argument("--dtype", choices=list(build.DTYPES), help="of the weights (default: as they are)")
    options, words = parser.parse_known_args(argv)
    refuse_strangers(parser, words)
    return options, words


def _beside(config: JobConfig, args: Any, dtype: torch.dtype) -> dict[str, bytes]:
    """What a folder holds beside the weights; without a tokenizer, config.json alone, which is said."""
    vocabulary = _tokenizer(config, args)
    form, folder = CONFIGS[config.model.name], config.model.hf_folder
    source = source_of(folder) if folder and Path(folder, CONFIG).is_file() else None
    if vocabulary is None:
        print("no tokenizer goes along: --model.tokenizer_path says which is its own", file=sys.stderr)
        kept = beside_weights(form, args, dtype, source=source, tokenizer_files={}, bos_id=None, end_ids=[])
        return {CONFIG: kept[CONFIG]}
    return beside_weights(
        form,
        args,
        dtype,
        source=source,
        tokenizer_files=vocabulary.as_hf_files(),
        bos_id=vocabulary.bos_id,
        end_ids=sorted(turn_ends(vocabulary)),
    )


def _tokenizer(config: JobConfig, args: Any) -> Tokenizer | None:
    """The model's own: the one for debugging, which a job has if it names none, is not a larger model's."""
    try:
        vocabulary = build.tokenizer(config)
    except JobError:
        return None
    is_named = config.model.tokenizer_path != job_options()["model.tokenizer_path"].default
    is_own = vocabulary.vocab_size <= args.vocab_size if is_named else vocabulary.vocab_size == args.vocab_size
    return vocabulary if is_own else None


def _unread(config: JobConfig, args: Any, weights: Weights) -> dict[str, Deferred]:
    """Every tensor once, by our names; a tied head is the embedding."""
    shapes = build.model_spec(config).hf.shapes(args)
    tied = {"output.weight"} if args.tied_embeddings else set()
    return {name: weights.unread(name, shape) for name, shape in shapes.items() if name not in tied}


def _write_hf(target: Path, config: JobConfig, args: Any, weights: Weights, dtype: torch.dtype) -> None:
    beside = _beside(config, args, dtype)
    with published(target.resolve(), write=True) as folder:
        build.model_spec(config).hf.save_hf(folder, _unread(config, args, weights), args, dtype=dtype, beside=beside)


def _write_file(target: Path, config: JobConfig, args: Any, weights: Weights, dtype: torch.dtype) -> None:
    build.model_spec(config).hf.save_hf_file(target, _unread(config, args, weights), args, dtype)


def _write_ours(target: Path, config: JobConfig, args: Any, weights: Weights, dtype: torch.dtype) -> None:
    """With what says the model's sizes: config.json and tokenizer, or for what transformers does not have, the job."""
    try:
        beside = _beside(config, args, dtype)
    except JobError:
        beside = {JOB: to_toml(build.movable(config)).encode()}
    unread = _unread(config, args, weights)
    narrow = {name for name in unread if weights.dtype(name).is_floating_point and not name.endswith("expert_bias")}
    types = {name: dtype if name in narrow else weights.dtype(name) for name in unread}
    shells = {MODEL + name: torch.empty(each.shape, dtype=types[name], device="meta") for name, each in unread.items()}
    with progress_bar(f"writing {target.name}", sum(each.nbytes for each in shells.values())) as progress:
        snapshot = Snapshot("model", weights.step, shells, staged=_Read(unread, types, progress))
        with published(target.resolve(), write=True) as folder:
            save(snapshot, folder, None, Peers("convert"), Care())
            for name, content in beside.items():
                (folder / name).write_bytes(content)


class _Read(Mapping):
    """Values of the shells, each read when it is written."""

    def __init__(self, unread: dict[str, Deferred], types: dict[str, torch.dtype], progress: Any):
        self.unread, self.types, self.progress = unread, types, progress

    def __getitem__(self, name: str) -> torch.Tensor:
        name = name.removeprefix(MODEL)
        value = self.unread[name].detach().to(self.types[name]).contiguous()
        self.progress.update(value.nbytes)
        return value

    def __contains__(self, name: object) -> bool:
        return str(name).removeprefix(MODEL) in self.unread

    def __iter__(self) -> Iterator[str]:
        return (MODEL + name for name in self.unread)

    def __len__(self) -> int:
        return len(self.unread)
