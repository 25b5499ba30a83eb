"""`torchtitan convert SOURCE TARGET`: convert weights between formats, one tensor at a time.

    torchtitan convert outputs/debug model_hf                         a run's newest checkpoint, for other programs
    torchtitan convert Llama-3.2-1B llama                             a folder of Hugging Face, as a native export
    torchtitan convert Llama-3.2-1B llama.safetensors --dtype bfloat16
    torchtitan convert step-1000 model_hf --model.name llama3.1 --model.flavor 8B      from PyTorch's torchtitan
    torchtitan convert outputs/debug titan/step-0 --to torchtitan-main                 the way back to it
    torchtitan convert Llama-2-7b larger --add-tokens '<|im_start|>' '<|im_end|>' --vocab-multiple 64

The sizes come from the run that wrote the weights or from the config.json next to them; otherwise from options of a
job. At most one tensor is in memory at a time.

A vocabulary can be resized on the way: rows for new tokens are the mean of the existing ones, and padding rows have no
token in the tokenizer. Padding is never generated here, and generation_config.json suppresses it for other programs.
config.json lists the new tokens until a run has trained them.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from torchtitan.assembly import parts
from torchtitan.checkpoint.agreement import Peers
from torchtitan.checkpoint.base_weights import find_weights
from torchtitan.checkpoint.folders import replace_folder
from torchtitan.checkpoint.layout import MODEL
from torchtitan.checkpoint.saving import SaveOptions, Snapshot, save
from torchtitan.checkpoint.storage import write_tensors
from torchtitan.checkpoint.weight_sources import Weights, open_weights, torchtitan_names
from torchtitan.commands.command_lines import FORMS, parse_command
from torchtitan.commands.generate import JOB, find_job, names_its_tokenizer
from torchtitan.config.manager import to_toml
from torchtitan.core.errors import JobError
from torchtitan.core.progress_bar import progress_bar
from torchtitan.core.tensor_storage import Deferred
from torchtitan.datasets.conversations import end_of_turn_ids
from torchtitan.datasets.tokenizer import Tokenizer, build_tokenizer
from torchtitan.datasets.tokenizer.hf_json import extended, missing_tokens, template_file
from torchtitan.job import ResolvedJob
from torchtitan.job.model import JobModel
from torchtitan.models.hf.config import CONFIG, GENERATION, UNTRAINED, find_config, untrained_token_ids
from torchtitan.models.hf.save import SourceConfigs, build_extra_files, read_source
from torchtitan.models.hf.torchtitan_names import TorchtitanNames

AT_ONCE = 2**14
"""Rows per chunk when summing in double precision."""
SUPPRESSED = "suppress_tokens"
"""Key of generation_config.json: tokens that transformers never generates."""


@dataclass(frozen=True)
class Resizing:
    """A change of the vocabulary's size.

    `num_known`: rows of existing tokens. `tokens`: number of tokens afterwards. `args`: model sizes with the new number
    of rows.
    """

    num_known: int
    tokens: int
    args: Any
    vocabulary: Tokenizer

    def source(self, source: SourceConfigs) -> SourceConfigs:
        """Return the source with the new number of rows in its config."""
        return SourceConfigs(source.config | {"vocab_size": self.args.vocab_size}, source.generation)

    def extra_files(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the files next to the weights, with the new rows and the rows without a token marked."""
        config, generation = (json.loads(files[name]) for name in (CONFIG, GENERATION))
        rows = self.args.vocab_size
        new = sorted({*untrained_token_ids(config), *range(self.num_known, self.tokens)} & {*range(self.tokens)})
        hidden = [token_id for token_id in generation.get(SUPPRESSED) or [] if token_id < self.num_known] + [
            *range(self.tokens, rows)
        ]
        for content, key, ids in ((config, UNTRAINED, new), (generation, SUPPRESSED, hidden)):
            content.pop(key, None)
            content |= {key: ids} if ids else {}
        texts = {
            name: json.dumps(content, indent=2) + "\n" for name, content in ((CONFIG, config), (GENERATION, generation))
        }
        return {**files, **{name: text.encode() for name, text in texts.items()}}


@contextmanager
def resizing(job: ResolvedJob, tokens: Sequence[str], eos: str | None, multiple: int | None) -> Iterator[Resizing]:
    """Yield the resizing of the job's model. Raises JobError if its tokenizer is unknown or cannot take the tokens."""
    args = job.model.args
    if not names_its_tokenizer(job.config.model):
        raise JobError("the tokens of the model are unknown: give its tokenizer with --model.tokenizer_path")
    before = job.tokenizer()
    new = missing_tokens(before, tokens)
    for token in sorted(set(tokens) - set(new)):
        print(f"{token!r} exists already, with id {before.special_tokens[token]}", file=sys.stderr)
    with TemporaryDirectory(prefix="torchtitan-") as folder:
        for name, content in extended(before, new, eos).items():
            Path(folder, name).write_bytes(content)
        after = build_tokenizer(folder)
        rows = max(args.vocab_size, after.vocab_size)
        if multiple is not None:
            rows = -(-after.vocab_size // multiple) * multiple
        num_known = min(before.vocab_size, args.vocab_size)
        yield Resizing(num_known, after.vocab_size, replace(args, vocab_size=rows), after)


class Resized(Weights):
    """Weights with the rows of a vocabulary of another size."""

    def __init__(self, weights: Weights, model: JobModel, to: Resizing):
        shapes, args = parts.model_spec(model).hf.shapes, model.args
        other = shapes(replace(args, vocab_size=args.vocab_size + 1))
        self.weights, self.to, self.step = weights, to, weights.step
        self.by_token = {name for name, shape in shapes(args).items() if other[name] != shape}

    def dtype(self, name: str) -> torch.dtype:
        return self.weights.dtype(name)

    def full_tensor(self, name: str) -> torch.Tensor:
        value = self.weights.full_tensor(name)
        if name not in self.by_token:
            return value
        trained_rows, rows = value[: self.to.num_known], self.to.args.vocab_size
        mean = sum(part.double().sum(0) for part in trained_rows.split(AT_ONCE)) / len(trained_rows)
        resized = mean.to(value.dtype).expand(rows, *value.shape[1:]).clone()
        resized[: len(trained_rows)] = trained_rows
        spare = value[self.to.tokens : rows]  # rows without a token before and after
        resized[self.to.tokens : self.to.tokens + len(spare)] = spare
        return resized


def main(argv: list[str]) -> int:
    options, job_args = parse_command("convert", argv)
    source, target = Path(options.source), Path(options.target)
    if target.exists():
        raise JobError(f"{target}: exists; give another target, or remove it first")
    kind, place = find_weights(source)
    resizes = bool(options.add_tokens or options.eos_token or options.vocab_multiple)
    form = options.to or (
        "file" if target.suffix == ".safetensors" else "native" if kind == "hf" and not resizes else "hf"
    )
    if resizes and form not in ("hf", "native"):
        raise JobError(f"{target}: {FORMS[form]} cannot hold the tokenizer that resized weights need; write --to hf")
    job = find_job(place, job_args, with_tokenizer=False)
    with ExitStack() as stack:
        source_model, args, to = job.config.model, job.model.args, None
        weights = stack.enter_context(open_weights(place, source_model.name, args, source_model.ignore_config_keys))
        if resizes:
            vocabulary_changes = (options.add_tokens, options.eos_token, options.vocab_multiple)
            to = stack.enter_context(resizing(job, *vocabulary_changes))
            weights, args = Resized(weights, job.model, to), to.args
        dtype = parts.DTYPES[options.dtype] if options.dtype else weights.dtype("tok_embeddings.weight")
        conversion = Conversion(job, place, weights, args, dtype, to)
        write = {"file": conversion.write_file, "hf": conversion.write_hf, "native": conversion.write_native}.get(
            form, partial(conversion.write_torchtitan, version=form)
        )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write(target)
        except OSError as error:
            raise JobError(f"{target}: not written: {error}") from error
    print(f"{place} -> {target}: {source_model.name}, {args.num_parameters:,} parameters, {FORMS[form]}")
    if to is not None:
        print(f"{to.tokens:,} tokens, {to.tokens - to.num_known:,} of them new, in {args.vocab_size:,} rows")
    return 0


@dataclass(frozen=True)
class Conversion:
    """Weights of `place`, and how they are written: the model's sizes, their type, a change of the vocabulary."""

    job: ResolvedJob
    place: Path
    weights: Weights
    args: Any
    dtype: torch.dtype
    to: Resizing | None

    def extra_files(self) -> dict[str, bytes]:
        """Return the files to write next to the weights: config.json and, if there is a tokenizer, its files.

        A missing tokenizer is reported. Weights count as trained unless there is a config.json next to them.
        """
        to, folder = self.to, self.job.config.model.hf_folder
        vocabulary = to.vocabulary if to else self._tokenizer()
        if vocabulary is None:
            print("no tokenizer is written: give the model's tokenizer with --model.tokenizer_path", file=sys.stderr)
        is_trained = find_config(self.place) is None
        source = read_source(folder, trained=is_trained) if folder and Path(folder, CONFIG).is_file() else None
        files = build_extra_files(
            self.job.model.converter,
            self.args,
            self.dtype,
            source=to.source(source) if to and source else source,
            tokenizer_files={} if vocabulary is None else vocabulary.as_hf_files() | template_file(vocabulary),
            bos_id=None if vocabulary is None else vocabulary.bos_id,
            end_ids=[] if vocabulary is None else sorted(end_of_turn_ids(vocabulary)),
            pad_id=None if vocabulary is None else vocabulary.pad_id,
        )
        if vocabulary is None:
            return {CONFIG: files[CONFIG]}
        return to.extra_files(files) if to else files

    def _tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer, or None if the job has none that fits the model."""
        try:
            vocabulary = self.job.tokenizer()
        except JobError:
            return None
        spare = self.args.vocab_size - vocabulary.vocab_size
        return vocabulary if spare == 0 or (spare > 0 and names_its_tokenizer(self.job.config.model)) else None

    def _unread_tensors(self) -> dict[str, Deferred]:
        """Return every tensor, unread, by our names. A tied output head is left out."""
        shapes = parts.model_spec(self.job.model).hf.shapes(self.args)
        tied = {"output.weight"} if self.args.tied_embeddings else set()
        return {name: self.weights.deferred(name, shape) for name, shape in shapes.items() if name not in tied}

    def write_file(self, target: Path) -> None:
        """Write one file of Hugging Face."""
        parts.model_spec(self.job.model).hf.save_hf_file(target, self._unread_tensors(), self.args, self.dtype)

    def write_hf(self, target: Path) -> None:
        extra_files, hf = self.extra_files(), parts.model_spec(self.job.model).hf
        with replace_folder(target.resolve(), write=True) as folder:
            hf.save_hf(folder, self._unread_tensors(), self.args, dtype=self.dtype, extra_files=extra_files)

    def write_native(self, target: Path) -> None:
        """Write an export of this project, with config.json and tokenizer.

        A model that transformers does not support gets the job instead of a config.json.
        """
        try:
            extra_files = self.extra_files()
        except JobError:
            if self.to is not None:
                raise
            extra_files = {JOB: to_toml(self.job.portable().config).encode()}
        unread = self._unread_tensors()
        types = {name: self._dtype_of(name) for name in unread}
        shells = {
            MODEL + name: torch.empty(tensor.shape, dtype=types[name], device="meta") for name, tensor in unread.items()
        }
        with progress_bar(f"writing {target.name}", sum(tensor.nbytes for tensor in shells.values())) as progress:
            snapshot = Snapshot("model", self.weights.step, shells, staged=_Read(unread, types, progress))
            with replace_folder(target.resolve(), write=True) as folder:
                save(snapshot, folder, None, Peers("convert"), SaveOptions())
                for name, content in extra_files.items():
                    (folder / name).write_bytes(content)

    def _dtype_of(self, name: str) -> torch.dtype:
        dtype = self.weights.dtype(name)
        return self.dtype if dtype.is_floating_point and not name.endswith("expert_bias") else dtype

    def _read_for_torchtitan(self, names: TorchtitanNames, name: str, source: str) -> torch.Tensor:
        return names.from_ours(name, self.weights.finite_tensor(source))

    def write_torchtitan(self, target: Path, version: str) -> None:
        """Write a checkpoint of weights that PyTorch's torchtitan of this version reads; its folder is all there is."""
        names = torchtitan_names(target, self.job.config.model.name, self.args)
        if getattr(self.args, "n_mtp_layers", 0):
            raise JobError(
                f"{target}: names of multi-token prediction (n_mtp_layers = {self.args.n_mtp_layers}) are not known; "
                "write --to hf or --to native"
            )
        unread, shells, types = {}, {}, {}
        shapes = parts.model_spec(self.job.model).hf.shapes(self.args)
        for name, shape in shapes.items():
            source = "tok_embeddings.weight" if self.args.tied_embeddings and name == "output.weight" else name
            stored = names.name(name, version)
            shape, types[stored] = names.shape(name, shape), self._dtype_of(source)
            unread[stored] = Deferred(shape, partial(self._read_for_torchtitan, names, name, source))
            shells[stored] = torch.empty(shape, dtype=types[stored], device="meta")
        for stored in names.absent_biases(shapes, version):
            shape, types[stored] = (self.args.n_experts,), torch.float32
            unread[stored] = Deferred(shape, partial(torch.zeros, shape))
            shells[stored] = torch.empty(shape, device="meta")
        with progress_bar(f"writing {target.name}", sum(tensor.nbytes for tensor in shells.values())) as progress:
            staged = _Read(unread, types, progress, prefix="")
            with replace_folder(target.resolve(), write=True) as folder:
                write_tensors(folder, shells, staged, Peers("convert"))


class _Read(Mapping):
    """Supplies the values of the empty tensors, each read when it is written."""

    def __init__(self, unread: dict[str, Deferred], types: dict[str, torch.dtype], progress: Any, prefix: str = MODEL):
        self.unread, self.types, self.progress, self.prefix = unread, types, progress, prefix

    def __getitem__(self, name: str) -> torch.Tensor:
        name = name.removeprefix(self.prefix)
        value = self.unread[name].detach().to(self.types[name]).contiguous()
        self.progress.update(value.nbytes)
        return value

    def __contains__(self, name: object) -> bool:
        return str(name).removeprefix(self.prefix) in self.unread

    def __iter__(self) -> Iterator[str]:
        return (self.prefix + name for name in self.unread)

    def __len__(self) -> int:
        return len(self.unread)
