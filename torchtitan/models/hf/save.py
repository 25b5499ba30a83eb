"""Write a folder in the Hugging Face format: safetensors shards with their index, config.json, and tokenizer files.

Tensors may be sharded over ranks, and a pipeline rank has only its own stages. The family's `TensorMap` maps names and
layouts. Reading: hf/load.py.

If the model came from such a folder, its config.json is extended rather than replaced. So it keeps fields that the
model does not compute with: maximum lengths, constants of the router's balance, tokens that end a turn.
"""

import json
import logging
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan.core.errors import JobError
from torchtitan.core.progress_bar import progress_bar
from torchtitan.core.random_draws import clean_name
from torchtitan.core.tensor_storage import Value
from torchtitan.models.family import ConfigConverter
from torchtitan.models.hf.config import CONFIG, GENERATION, INDEX, UNTRAINED, read_json
from torchtitan.models.hf.config_keys import ROUNDED
from torchtitan.models.hf.load import summarize
from torchtitan.models.hf.names import TensorMap, sort_names
from torchtitan.models.hf.wrappers import OUTSIDE, text_part
from torchtitan.process import distributed

SHARD_BYTES = 5 * 10**9
STORED_AS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


def save_folder(
    folder: str | os.PathLike[str],
    state: Mapping[str, Value],
    tensor_map: TensorMap,
    extra_files: Mapping[str, bytes],
    full_shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    write: bool = True,
    rounding: Mapping[str, Any] | None = None,
) -> None:
    """Write the `extra_files` (config.json and others, by name), the shards of the weights, and last their index.

    `state` holds the model's tensors by our names. `full_shapes` has the names of the full model; JobError if the ranks
    together lack one. `rounding`: options of [qat] that the weights are rounded with, which the index keeps.

    In a process group all ranks call it, one of them with `write`. Tensors may be sharded or on the ranks of one
    pipeline stage only. They are gathered one at a time, so the writing rank holds one full tensor.
    """
    folder, gathered = Path(folder), _TensorGatherer(state, tensor_map, dtype, write)
    missing = [
        name
        for name in full_shapes
        if name not in gathered.shapes and not (tensor_map.tied and name == "output.weight")
    ]
    if missing:
        raise JobError(f"cannot export: the state lacks {summarize(missing)}. Pass parameters and persistent buffers")
    files = _split(gathered, shard_bytes)
    failure: OSError | None = None  # raised at the end, because the other ranks still gather
    if write:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in extra_files.items():
                (folder / name).write_bytes(content)
        except OSError as error:
            failure = error
    total_bytes = gathered.bytes_of(*gathered.shapes)
    progress = progress_bar("writing the weights", total_bytes)
    weight_map: dict[str, str] = {}
    for number, units in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= {hf_name: file for unit in units for hf_name in gathered.names_of(unit)}
        try:
            _write_file(folder / file if write and failure is None else None, gathered, units, {}, progress)
        except OSError as error:
            failure = error
    progress.close()
    if failure is not None:
        raise failure
    if write:
        metadata = {"total_size": total_bytes} | ({} if rounding is None else {ROUNDED: rounding})
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def _silence_redistribute_log() -> Iterator[None]:
    """Silence torch's log line, from each rank, about gathering a tensor in one collective instead of two.

    After training, one tensor at a time, two are as good.
    """
    logger = logging.getLogger("torch.distributed.tensor._redistribute")

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("While redistributing")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


class _TensorGatherer:
    """Full tensors on the writing rank, gathered from the ranks that have them; deferred ones are computed then.

    A tied head is left out. All ranks must ask for the same names in the same order.
    """

    def __init__(self, state: Mapping[str, Value], tensor_map: TensorMap, dtype: torch.dtype, write: bool):
        tensors = {clean_name(name): value for name, value in state.items()}
        if tensor_map.tied:
            tensors.pop("output.weight", None)
        self.state, self.tensor_map, self.dtype = tensors, tensor_map, dtype
        self.rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        share = {name: list(value.shape) for name, value in tensors.items()}, write
        shares = distributed.all_gather_json(share) if ranks > 1 else [share]
        self.writer = next((rank for rank, (_, writes) in enumerate(shares) if writes), 0)
        self.shapes = {name: shape for share, _ in shares for name, shape in share.items()}
        self.holders = {name: [r for r, (share, _) in enumerate(shares) if name in share] for name in self.shapes}

    def dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if self.tensor_map.is_float32(name) else self.dtype

    def bytes_of(self, *names: str) -> int:
        """Return the size of these tensors in the file, with their copies."""
        times = {name: 1 + len(self.tensor_map.copies.get(name, ())) for name in names}
        return sum(n * math.prod(self.shapes[name]) * self.dtype_of(name).itemsize for name, n in times.items())

    def units(self) -> list[list[str]]:
        """Return all names in order, grouped by the tensor in the file that they share."""
        return [
            self.tensor_map.joined_names(name)
            for name in sort_names(self.shapes)
            if self.tensor_map.joined_names(name)[0] == name
        ]

    def names_of(self, unit: list[str]) -> list[str]:
        """Return the names of a unit in the file, with its copies."""
        return [*self.tensor_map.hf_names(unit[0]), *self.tensor_map.copies.get(unit[0], ())]

    def gather(self, name: str) -> torch.Tensor | None:
        """Return the full tensor, of our shape, on the writing rank's CPU in the file's dtype; None elsewhere."""
        writes, holders, dtype = self.rank == self.writer, self.holders[name], self.dtype_of(name)
        sends = self.writer not in holders and self.rank == holders[0]
        value = self.state[name].detach() if name in self.state else None
        if isinstance(value, DTensor):
            with _silence_redistribute_log():
                value = value.full_tensor()  # all ranks that have a part call this
        if value is not None and (writes or sends):
            value = value.to("cpu", dtype)
        if sends:
            dist.send(value, self.writer)
        elif writes and name not in self.state:
            value = torch.empty(self.shapes[name], dtype=dtype)
            dist.recv(value, holders[0])
        return value if writes else None


def _split(gathered: _TensorGatherer, shard_bytes: int) -> list[list[list[str]]]:
    """Split the units in order into files of at most `shard_bytes`; a larger unit gets its own file."""
    files: list[list[list[str]]] = [[]]
    used = 0
    for names in gathered.units():
        size = gathered.bytes_of(*names)
        if files[-1] and used + size > shard_bytes:
            files.append([])
            used = 0
        files[-1].append(names)
        used += size
    return files


def save_file(
    path: Path, state: Mapping[str, Value], tensor_map: TensorMap, config: Mapping[str, Any], *, dtype: torch.dtype
) -> None:
    """Write one safetensors file, one tensor at a time, with the config under "config.json" in its metadata.

    The file appears under its name once it is complete. Raises OSError.
    """
    gathered = _TensorGatherer(state, tensor_map, dtype, write=True)
    with progress_bar(f"writing {path.name}", gathered.bytes_of(*gathered.shapes)) as progress:
        _write_file(path, gathered, gathered.units(), {CONFIG: json.dumps(config)}, progress)


def _write_file(
    path: Path | None, gathered: _TensorGatherer, units: list[list[str]], metadata: Mapping[str, str], progress: Any
) -> None:
    """Write one safetensors file, one tensor at a time; it appears under its name once it is complete.

    Without a path nothing is written. After an OSError the other tensors are still gathered, because other ranks take
    part; then it is raised.
    """
    units = sorted(units, key=lambda unit: -gathered.dtype_of(unit[0]).itemsize)  # keeps each aligned to its item size
    values = (_gather_unit(gathered, unit, progress) for unit in units)
    try:
        if path is not None:
            _write_values(path, _header(gathered, units, metadata), gathered.tensor_map, values)
    finally:
        for _ in values:
            pass


def _gather_unit(gathered: _TensorGatherer, unit: list[str], progress: Any) -> dict[str, torch.Tensor | None]:
    """Gather the tensors of one unit, by our names and of our shapes, and advance the progress bar."""
    values = {name: gathered.gather(name) for name in unit}
    progress.update(gathered.bytes_of(*unit))
    return values


def _header(gathered: _TensorGatherer, units: list[list[str]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file: its length, then JSON padded to a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for unit in units:
        name = unit[0]
        stored, shape = gathered.dtype_of(name), gathered.tensor_map.hf_shape(name, gathered.shapes[name])
        for hf_name in gathered.names_of(unit):
            end = offset + math.prod(shape) * stored.itemsize
            header[hf_name] = {"dtype": STORED_AS[stored], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_values(path: Path, header: bytes, tensor_map: TensorMap, values: Iterator[dict[str, torch.Tensor]]) -> None:
    """Write the header and the tensors, of any shape, to a temporary file, and rename it to `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(header)
            for unit in values:
                for part in tensor_map.to_hf(unit).values():
                    file.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
                del unit, part  # before the next one is made
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


SOURCE_ONLY_FIELDS = ("quantization_config", "auto_map", "transformers_version", "_name_or_path", "dtype", OUTSIDE)
"""Fields that describe the source's files (8 bits, code, author, other parts) and do not apply to the written ones."""
ROTARY_FIELDS = ("rope_theta", "rope_scaling", "rope_local_base_freq", "rope_parameters", "partial_rotary_factor")
ROTARY_FIELDS += ("rotary_emb_base", "rotary_pct")
"""Fields of rotary positions: `ConfigConverter.to_hf` writes some of them, which replace all of the source's."""
REWRITTEN_FIELDS = ("torch_dtype", "num_nextn_predict_layers", "tie_word_embeddings", *ROTARY_FIELDS)
"""Fields that `ConfigConverter.to_hf` always rewrites: in a spelling for older programs, if there is one, the number of
depths, and whether there is a head of its own, which the tensors decide."""
TASK_FIELDS = ("architectures", "id2label", "label2id")
"""Fields of the model's task, which may differ from the source's."""
CLASS_PREFIXES = {"xlm-roberta": "XLMRoberta", "camembert": "Camembert", "gemma4_unified_text": "Gemma4Unified"}
"""Prefixes of transformers' classes for model types that an export keeps, though the family writes another one."""


@dataclass(frozen=True)
class SourceConfigs:
    """The config.json and generation_config.json (empty if absent) of the folder that a model came from."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)


def read_source(folder: str | Path, trained: bool = False) -> SourceConfigs:
    """Read the configs of a folder. Raises JobError if config.json cannot be read.

    `trained`: the model has been trained since, so no token counts as untrained.
    """
    folder = Path(folder)
    generation = read_json(folder / GENERATION) if (folder / GENERATION).exists() else {}
    config = text_part(read_json(folder / CONFIG))
    return SourceConfigs(
        {key: value for key, value in config.items() if not (trained and key == UNTRAINED)}, generation
    )


def build_extra_files(
    converter: ConfigConverter,
    args: Any,
    dtype: Any,
    *,
    source: SourceConfigs | None,
    tokenizer_files: Mapping[str, bytes],
    bos_id: int | None,
    end_ids: Sequence[int],
    pad_id: int | None = None,
    labels: Sequence[str] = (),
) -> dict[str, bytes]:
    """Return the files to write next to the weights, by name.

    `end_ids`: tokens that end a text. `pad_id`: the tokenizer's padding. `labels`: names of the classes. Raises
    JobError for sizes that transformers does not support.
    """
    config_fields = converter.to_hf(args, dtype)
    generation: dict[str, Any] = {}
    if source is not None and _is_same_model(converter, args, source):
        # the model is computed without ignored keys
        left_out = {*SOURCE_ONLY_FIELDS, *ROTARY_FIELDS, *converter.ignored_keys}
        left_out |= {name for name, key in converter.aliases.items() if key in REWRITTEN_FIELDS}
        source_config = {key: value for key, value in source.config.items() if key not in left_out}
        config_fields = source_config | {
            key: config_fields[key] for key in (*REWRITTEN_FIELDS, *TASK_FIELDS) if key in config_fields
        }
        if prefix := CLASS_PREFIXES.get(source.config["model_type"]):
            names = config_fields["architectures"]
            config_fields["architectures"] = [f"{prefix}For{name.partition('For')[2]}" for name in names]
        generation = {key: value for key, value in source.generation.items() if key != "transformers_version"}
    ends = list(end_ids) if len(end_ids) > 1 else next(iter(end_ids), None)
    ids = {"bos_token_id": bos_id, "eos_token_id": ends}
    config_fields |= {key: _choose_token_ids(config_fields.get(key), id_) for key, id_ in ids.items()}
    generation |= {key: _choose_token_ids(generation.get(key, config_fields[key]), id_) for key, id_ in ids.items()}
    if "id2label" in config_fields:  # transformers finds the last token of a text by its padding
        pads = (config_fields.get("pad_token_id"), pad_id, *end_ids[:1])
        # A reward is read at the end token, if the answer has one, which then must not count as padding.
        usable = [pad for pad in pads if pad is not None and not (args.n_classes == 1 and pad in end_ids)]
        config_fields["pad_token_id"] = next(iter(usable), None)
    if labels:
        config_fields |= {"id2label": dict(enumerate(labels)), "label2id": {name: n for n, name in enumerate(labels)}}
    configs = {CONFIG: config_fields, GENERATION: generation}
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in configs.items()}
    return {name: text.encode() for name, text in texts.items()} | dict(tokenizer_files)


def _is_same_model(converter: ConfigConverter, args: Any, source: SourceConfigs) -> bool:
    """Return True if the source's config agrees with these arguments in all compared fields."""
    try:
        differing = converter.differing_fields(converter.args_from_config(source.config), args)
        return not set(differing) - {"tied_embeddings"}
    except JobError:
        return False


def _choose_token_ids(source_ids: Any, tokenizer_ids: int | list[int] | None) -> Any:
    """Return the source's token ids if they include the tokenizer's, otherwise the tokenizer's."""
    source_list, tokenizer_list = (ids if isinstance(ids, list) else [ids] for ids in (source_ids, tokenizer_ids))
    return source_ids if set(tokenizer_list) <= set(source_list) else tokenizer_ids
