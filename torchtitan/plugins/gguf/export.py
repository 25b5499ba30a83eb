"""Write a Hugging Face folder as one GGUF file for llama.cpp, with an Ollama Modelfile next to it.

The package `gguf` names tensors and metadata and writes the file. One tensor of the file is in memory at a time.
Matrices have the type of the folder, vectors and routers float32, as llama.cpp expects them.

Some families rotate adjacent features in llama.cpp, and features half a head apart in transformers: the rows of their
queries and keys are put in the order of the former. architectures.py says which, and how else the two differ.
"""

import importlib.util
import json
import math
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
from torchtitan.models.hf.config import CONFIG, rope_config, scaling_from_hf, split_partial_rotary, tensor_files
from torchtitan.models.hf.layer_kinds import FULL
from torchtitan.models.hunyuan import split_alpha
from torchtitan.models.layers import frequencies
from torchtitan.models.sizes import RopeScaling
from torchtitan.plugins.gguf.architectures import ARCHITECTURES, architecture_of, head_dim_of
from torchtitan.plugins.gguf.layouts import Convert
from torchtitan.plugins.gguf.modelfile import modelfile
from torchtitan.plugins.gguf.vocabulary import vocabulary_fields

MODEL_FILE, MODELFILE = "model.gguf", "Modelfile"
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}
ROUNDED = "not the same: llama.cpp blends YaRN's wavelengths between whole features (0.009 in log-probabilities)"
CONVERT = "try llama.cpp's convert_hf_to_gguf.py on it"
NAMES_ONLY = "llama.cpp has names for GPT-J's tensors, but no model that computes it"
GROWTH = "llama_4_scaling_beta"
PROPORTIONAL, UNROTATED = "proportional", 1e30
"""A kind of rotary positions with frequencies for all features of a head, and a factor that leaves no angle."""
_EXPERT = re.compile(r"(.*\.(?:experts|norms))\.(\d+)\.(.*)")
FLOAT32 = ("_inp", "_norm", "conv1d", "shortconv.conv", "ssm_a", "ssm_d", "position_embd")
"""Parts of the names of matrices that llama.cpp expects in float32, as vectors and biases are."""


@dataclass(frozen=True)
class Entry:
    """A tensor of the file: its name, the tensors of the folder that it is stacked from, and what becomes of each."""

    name: str
    sources: list[str]
    convert: Convert


class GGUFExport:
    """An export to GGUF. All that can be refused is refused when it is made, before the weights are written.

    `files`: config.json and the tokenizer's files of the folder, by name.
    """

    def __init__(self, files: Mapping[str, bytes], tokenizer: Tokenizer) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise JobError("--format gguf needs the package gguf; install it with: pip install 'torchtitan-toml[gguf]'")
        config = json.loads(files[CONFIG])
        model_type, classes = config["model_type"], config["architectures"]
        architecture = architecture_of(config)
        if architecture is None or not classes[0].endswith(("ForCausalLM", "LMHeadModel")):
            allowed = f"causal models of {', '.join(ARCHITECTURES)}; export a Hugging Face folder (without --format)"
            after = f", as {NAMES_ONLY}" if model_type == "gptj" else f" and {CONVERT}"
            raise JobError(f"--format gguf: given {classes[0]} ({model_type}); allowed: {allowed}{after}")
        self.architecture = architecture
        self.config = config = config | {key: config[name] for key, name in architecture.aliases.items()}
        for key, value in {**architecture.only, **architecture.only_by(config)}.items():
            if config.get(key, value) != value:
                raise JobError(
                    f"--format gguf: {key} = {config[key]!r}; allowed: {value!r}, as llama.cpp computes {model_type}; "
                    "export a Hugging Face folder (without --format)"
                )
        for key in architecture.fields.values():
            if config[key] is None:
                raise JobError(f"--format gguf: {key} = null; allowed: a number, as llama.cpp computes {model_type}")
        self.head_dim = head_dim_of(config)
        rotary, self.rotary_factor = split_partial_rotary(config, 1.0)
        rotary, alpha = split_alpha(rotary) if "ntk" in architecture.scalings else (rotary, None)
        tables = config.get("rope_parameters") or {}
        if FULL in tables:  # OLMo 3 and Gemma 4 have one for each kind of layers
            rotary["rope_parameters"] = tables[FULL]
            if tables[FULL]["rope_type"] == PROPORTIONAL:  # by factors of the frequencies
                rotary["rope_parameters"] = {"rope_type": "default", "rope_theta": tables[FULL]["rope_theta"]}
        elif GROWTH in tables:  # of queries, not of angles
            not_of_angles = (GROWTH, "partial_rotary_factor")
            rotary["rope_parameters"] = {key: value for key, value in tables.items() if key not in not_of_angles}
        table = tables or config.get("rope_scaling") or {}
        kind = table.get("rope_type", table.get("type"))
        if kind != "longrope":  # whose keys rope_config does not know
            kind = "ntk" if alpha else rope_config(rotary)["rope_type"]
        if kind not in ("default", *architecture.scalings):
            allowed = " or ".join(("none", *architecture.scalings))
            raise JobError(
                f"--format gguf: rope_scaling of the kind {kind}; allowed: {allowed}, in {model_type}; "
                "export a Hugging Face folder (without --format)"
            )
        self.rope_theta, self.scaling = float(rope_config(rotary)["rope_theta"]), scaling_from_hf(rotary)
        if alpha:  # which changes the base alone
            self.rope_theta = RopeScaling(alpha, kind="ntk").theta(self.rope_theta, self.head_dim)
        self._check_attention_factor()
        self.fields = self._model_fields() | vocabulary_fields(files, config, bool(tokenizer.begin_ids))
        self.modelfile = modelfile(MODEL_FILE, files, tokenizer, self.context)

    def _check_attention_factor(self) -> None:
        """Raise JobError if YaRN multiplies rotated features by another factor than in llama.cpp."""
        if self.scaling is None or self.scaling.kind != "yarn":
            return
        usual = 0.1 * math.log(max(self.scaling.factor, 1.0)) + 1
        allowed = 1.0 if "rope_scaling_yarn_log_mul" in self.architecture.fields_of(self.config) else usual
        factor = usual if self.scaling.attention_factor is None else self.scaling.attention_factor
        if not math.isclose(factor, allowed):
            raise JobError(
                f"--format gguf: YaRN's attention_factor = {factor:g}, set or by mscale and mscale_all_dim; allowed: "
                f"{allowed:g}, as llama.cpp computes {self.config['model_type']}; export a Hugging Face folder "
                "(without --format)"
            )

    @property
    def context(self) -> int:
        """Return the longest context, in tokens: the window, where llama.cpp has none in a family."""
        longest: int = self.config["max_position_embeddings"]
        bounded = self.architecture.window == "context"
        return min(longest, self.config.get("sliding_window") or longest) if bounded else longest

    def _model_fields(self) -> dict[str, Any]:
        """Return the metadata of the model: names of the writer's `add_` functions, and their arguments."""
        import gguf

        config = self.config
        fields = {
            "context_length": self.context,
            "embedding_length": config["hidden_size"],
            "block_count": config["num_hidden_layers"],
            "head_count": config["num_attention_heads"],
            "head_count_kv": config["num_key_value_heads"],
            "key_length": self.head_dim,
            "value_length": self.head_dim,
            "rope_dimension_count": int(self.head_dim * self.rotary_factor),
            "rope_freq_base": self.rope_theta,
            "vocab_size": config["vocab_size"],
        }
        if "rms_norm_eps" in config:
            fields["layer_norm_rms_eps"] = config["rms_norm_eps"]
        fields |= {name: config[key] for name, key in self.architecture.fields.items()}
        if "intermediate_size" in config:
            fields["feed_forward_length"] = config["intermediate_size"]
        if self.architecture.window == "field":
            fields["sliding_window"] = config["sliding_window"]
        if self.scaling is not None and self.scaling.kind == "linear":
            fields |= {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": self.scaling.factor}
        elif self.scaling is not None and self.scaling.kind == "yarn":
            fields |= {"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": self.scaling.factor}
            fields["rope_scaling_orig_ctx_len"] = self.scaling.original_max_seq_len
            fields |= {f"rope_scaling_yarn_{name}": getattr(self.scaling, name) for name in ("beta_fast", "beta_slow")}
        if "expert_weights_scale" in fields:  # of a router as DeepSeek's
            score = "SOFTMAX" if config.get("scoring_func") == "softmax" else "SIGMOID"
            fields["expert_gating_func"] = gguf.ExpertGatingFuncType[score]
        return fields | self.architecture.fields_of(config)

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
            for part, convert in self.architecture.parts(name, self.config):
                target = name_map.get_name(part, try_suffixes=(".weight", ".bias", ".scale"))
                if target is None:
                    raise JobError(
                        f"--format gguf: the tensor {name} has no name in llama.cpp's {self.architecture.name}"
                    )
                entries.append(Entry(target, stacked, convert))
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
            if (factors := self._rope_factors()) is not None:
                _add(writer, "rope_freqs.weight", list(factors.shape), "F32")
                tensors.append(partial(torch.clone, factors))
            file_type = "F32"
            for entry in self.entries(names):
                stored = [files[names[source]].get_slice(source) for source in entry.sources]
                converted = entry.convert(torch.empty(stored[0].get_shape(), device="meta"))
                shape = [*[len(stored)] * bool(_EXPERT.fullmatch(entry.sources[0])), *converted.shape]
                is_matrix = len(shape) > 1 and not entry.name.endswith(".bias")
                kind = stored[0].get_dtype() if is_matrix and not any(x in entry.name for x in FLOAT32) else "F32"
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
        """Return the commands that serve an exported folder, after a remark on what differs there."""
        file = shlex.quote(str(folder / MODEL_FILE))
        create = f"ollama create {shlex.quote(folder.name.lower())} -f {shlex.quote(str(folder / MODELFILE))}"
        rounded = [ROUNDED] * (self.scaling is not None and not self.scaling.truncate)
        return [*rounded, f"serve it: llama-server -m {file}", f"or: {create}"]

    def _rope_factors(self) -> torch.Tensor | None:
        """Return what llama.cpp divides the frequencies by, [head_dim / 2]; None for nothing."""
        table = (self.config.get("rope_parameters") or {}).get(FULL) or {}
        if table.get("rope_type") == PROPORTIONAL:
            width = self.fields["key_length"]
            rotated = int(table["partial_rotary_factor"] * width // 2)  # rounded as in transformers
            return torch.tensor([1.0] * rotated + [UNROTATED] * (width // 2 - rotated))
        if self.scaling is None or self.scaling.kind != "llama3":
            return None
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
    parts = [entry.convert(value[:].to(dtype)) for value in stored]
    return torch.stack(parts) if _EXPERT.fullmatch(entry.sources[0]) else parts[0]
