"""Write a Hugging Face folder as one GGUF file for llama.cpp, with an Ollama Modelfile next to it.

The package `gguf` names tensors and metadata and writes the file. One tensor of the file is in memory at a time.
Matrices have the type of the folder, vectors and routers float32, as llama.cpp expects them.

Llama and Mistral rotate adjacent features in llama.cpp, and features half a head apart in transformers: the rows of
their queries and keys are put in the order of the former. The other families rotate as in transformers.
"""

import importlib.util
import json
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan.core.errors import JobError
from torchtitan.core.progress_bar import progress_bar
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.models.hf.config import CONFIG, rope_config, scaling_from_hf, tensor_files
from torchtitan.models.layers import frequencies
from torchtitan.plugins.gguf.modelfile import modelfile
from torchtitan.plugins.gguf.vocabulary import vocabulary_fields

MODEL_FILE, MODELFILE = "model.gguf", "Modelfile"
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_ROTATED = re.compile(r".*\.self_attn\.([qk])_proj\.(?:weight|bias)")


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's computation of a model type of transformers.

    `adjacent_pairs`: it rotates features 2i and 2i + 1. `only`: keys of config.json and the one value that it has.
    """

    name: str
    adjacent_pairs: bool = False
    only: Mapping[str, Any] | None = None


ARCHITECTURES = {
    "llama": Architecture("llama", adjacent_pairs=True, only={"attention_bias": False, "mlp_bias": False}),
    "mistral": Architecture("llama", adjacent_pairs=True),
    "qwen2": Architecture("qwen2", only={"use_sliding_window": False}),
    "qwen3": Architecture("qwen3", only={"use_sliding_window": False}),
    "qwen3_moe": Architecture(
        "qwen3moe", only={"norm_topk_prob": True, "mlp_only_layers": [], "use_sliding_window": False}
    ),
}
"""By model_type of config.json."""


@dataclass(frozen=True)
class Entry:
    """A tensor of the file: its name, and the tensors of the folder that it is stacked from."""

    name: str
    sources: list[str]
    rotated_heads: int = 0  # of queries or keys whose rows are reordered


class GGUFExport:
    """An export to GGUF. All that can be refused is refused when it is made, before the weights are written.

    `files`: config.json and the tokenizer's files of the folder, by name.
    """

    def __init__(self, files: Mapping[str, bytes], tokenizer: Tokenizer) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise JobError("--format gguf needs the package gguf; install it with: pip install 'torchtitan-toml[gguf]'")
        self.config = config = json.loads(files[CONFIG])
        model_type, classes = config["model_type"], config["architectures"]
        architecture = ARCHITECTURES.get(model_type)
        if architecture is None or not classes[0].endswith("ForCausalLM"):
            raise JobError(
                f"--format gguf: given {classes[0]} ({model_type}); allowed: causal models of "
                f"{', '.join(ARCHITECTURES)}; export a Hugging Face folder (without --format) and try llama.cpp's "
                "convert_hf_to_gguf.py on it"
            )
        self.architecture = architecture
        for key, value in (architecture.only or {}).items():
            if config.get(key, value) != value:
                raise JobError(
                    f"--format gguf: {key} = {config[key]!r}; allowed: {value!r}, as llama.cpp computes {model_type}; "
                    "export a Hugging Face folder (without --format)"
                )
        self.head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.scaling = scaling_from_hf(config)
        if self.scaling is not None and not (self.scaling.kind == "llama3" and architecture.name == "llama"):
            raise JobError(
                f"--format gguf: rope_scaling of the kind {self.scaling.kind}; allowed: none, or llama3 in the Llama "
                "family; export a Hugging Face folder (without --format)"
            )
        self.fields = self._model_fields() | vocabulary_fields(files, config, bool(tokenizer.begin_ids))
        self.modelfile = modelfile(MODEL_FILE, files, tokenizer, self.context)

    @property
    def context(self) -> int:
        """Return the longest context, in tokens. llama.cpp has no sliding window in these families."""
        longest = self.config["max_position_embeddings"]
        return min(longest, self.config.get("sliding_window") or longest) if self.uses_window else longest

    @property
    def uses_window(self) -> bool:
        return self.config["model_type"] == "mistral"

    def _model_fields(self) -> dict[str, Any]:
        """Return the metadata of the model: names of the writer's `add_` functions, and their arguments."""
        config = self.config
        fields = {
            "context_length": self.context,
            "embedding_length": config["hidden_size"],
            "block_count": config["num_hidden_layers"],
            "feed_forward_length": config["intermediate_size"],
            "head_count": config["num_attention_heads"],
            "head_count_kv": config["num_key_value_heads"],
            "key_length": self.head_dim,
            "value_length": self.head_dim,
            "rope_dimension_count": self.head_dim,
            "rope_freq_base": float(rope_config(config)["rope_theta"]),
            "layer_norm_rms_eps": config["rms_norm_eps"],
            "vocab_size": config["vocab_size"],
        }
        if "num_experts" in config:
            fields["expert_count"] = config["num_experts"]
            fields["expert_used_count"] = config["num_experts_per_tok"]
            fields["expert_feed_forward_length"] = config["moe_intermediate_size"]
        return fields

    def entries(self, names: Mapping[str, str]) -> list[Entry]:
        """Return the tensors of the file for those of a folder, in the folder's order."""
        import gguf

        architecture = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture.name)
        name_map = gguf.get_tensor_name_map(architecture, self.config["num_hidden_layers"])
        sources: dict[str, list[str]] = {}
        for name in sorted(names, key=_by_number):
            match = _EXPERT.fullmatch(name)
            sources.setdefault(f"{match[1]}.{match[3]}" if match else name, []).append(name)
        entries = []
        for name, stacked in sources.items():
            target = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
            if target is None:
                raise JobError(f"--format gguf: the tensor {name} has no name in llama.cpp's {self.architecture.name}")
            match = _ROTATED.fullmatch(name) if self.architecture.adjacent_pairs else None
            heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}
            entries.append(Entry(target, stacked, self.config[heads[match[1]]] if match else 0))
        return entries

    def write(self, folder: Path, target: Path, name: str) -> None:
        """Write the model in `folder` as MODEL_FILE and MODELFILE into the folder `target`. Raises OSError."""
        import gguf
        from safetensors import safe_open

        names = tensor_files(folder)
        target.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(target / MODEL_FILE, self.architecture.name)
        writer.add_name(name)
        for key, value in self.fields.items():
            getattr(writer, f"add_{key}")(value)
        with ExitStack() as stack:
            files = {file: stack.enter_context(safe_open(folder / file, "pt")) for file in sorted({*names.values()})}
            stack.callback(writer.close)
            tensors: list[Callable[[], torch.Tensor]] = []
            if self.scaling is not None:
                factors = self._rope_factors()
                _add(writer, "rope_freqs.weight", list(factors.shape), "F32")
                tensors.append(lambda: factors)
            file_type = "F32"
            for entry in self.entries(names):
                stored = [files[names[source]].get_slice(source) for source in entry.sources]
                shape = [*[len(stored)] * bool(_EXPERT.fullmatch(entry.sources[0])), *stored[0].get_shape()]
                kind = stored[0].get_dtype() if len(shape) > 1 and "_inp." not in entry.name else "F32"
                file_type = kind if kind != "F32" else file_type
                _add(writer, entry.name, shape, kind)
                tensors.append(partial(_read, entry, stored, kind))
            writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[file_type]])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            with progress_bar(f"writing {MODEL_FILE}", len(tensors), unit=" tensors") as progress:
                for read in tensors:
                    tensor = read().contiguous()
                    writer.write_tensor_data(tensor.view(torch.uint8).numpy())
                    progress.update()
        (target / MODELFILE).write_text(self.modelfile)

    def usage_lines(self, folder: Path) -> list[str]:
        """Return the commands that serve an exported folder."""
        file = shlex.quote(str(folder / MODEL_FILE))
        create = f"ollama create {shlex.quote(folder.name.lower())} -f {shlex.quote(str(folder / MODELFILE))}"
        return [f"serve it: llama-server -m {file}", f"or: {create}"]

    def _rope_factors(self) -> torch.Tensor:
        """Return what llama.cpp divides the frequencies by, [head_dim / 2]."""
        theta = self.fields["rope_freq_base"]
        plain, scaled = (frequencies(self.head_dim, theta, kind, torch.device("cpu")) for kind in (None, self.scaling))
        return plain / scaled


def _by_number(name: str) -> list[int | str]:
    """Return a sorting key with which layer and expert 2 come before 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _add(writer: Any, name: str, shape: list[int], kind: str) -> None:
    """Announce a tensor of one of TYPES; the writer takes bytes, as numpy has no bfloat16."""
    import gguf
    import numpy

    itemsize = 4 if kind == "F32" else 2
    of_bytes = [*shape[:-1], shape[-1] * itemsize]
    size = itemsize * torch.Size(shape).numel()
    writer.add_tensor_info(name, of_bytes, numpy.dtype("uint8"), size, gguf.GGMLQuantizationType[kind])


def _read(entry: Entry, stored: list[Any], kind: str) -> torch.Tensor:
    dtype = next(dtype for dtype, name in TYPES.items() if name == kind)
    parts = [value[:].to(dtype) for value in stored]
    if entry.rotated_heads:
        parts = [with_adjacent_pairs(part, entry.rotated_heads) for part in parts]
    return torch.stack(parts) if _EXPERT.fullmatch(entry.sources[0]) else parts[0]


def with_adjacent_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows [heads * head_dim, ...] with rows i and i + head_dim / 2 of each head next to each other."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
