"""Model families for code that builds, runs, loads and saves their models, and the registry of families."""

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from torchtitan.core.registry import Registry
from torchtitan.core.tensor_storage import Value
from torchtitan.models import FAMILIES, GROUP
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.flops import FlopsPerToken
from torchtitan.models.hf.config import CONFIG
from torchtitan.models.hf.load import StoredWeights, load_weights, raise_mismatches
from torchtitan.models.hf.names import TensorMap
from torchtitan.models.hf.save import SHARD_BYTES, save_file, save_folder
from torchtitan.parallelisms.expert_parallel import LoadBalancing
from torchtitan.parallelisms.plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """Conversion of a family's models from and to folders in the Hugging Face format.

    `is_ignored`: True for the name of a tensor that a folder may hold although the model does not have it.
    """

    build: Callable[[Any], nn.Module]
    tensor_map: Callable[[Any], TensorMap]
    config: ConfigConverter
    is_ignored: Callable[[str, Any], bool] = lambda name, args: False

    def config_to_hf(self, args: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Return the fields of transformers' config. Raises JobError for what transformers does not support."""
        return self.config.to_hf(args, dtype)

    def to_hf(self, state: Mapping[str, torch.Tensor], args: Any) -> dict[str, torch.Tensor]:
        """Convert full tensors, weights or gradients, to Hugging Face's names and shapes, without a tied head."""
        return self.tensor_map(args).to_hf(state)

    def from_hf(self, state: Mapping[str, torch.Tensor], args: Any) -> dict[str, torch.Tensor]:
        """Invert to_hf, for load_state_dict: a tied head is included again. The tensors have Hugging Face's shapes."""
        return self.tensor_map(args).from_hf(state)

    def save_hf(
        self,
        folder: str | os.PathLike[str],
        state: Mapping[str, Value],
        args: Any,
        *,
        dtype: torch.dtype = torch.float32,
        shard_bytes: int = SHARD_BYTES,
        write: bool = True,
        extra_files: Mapping[str, bytes] | None = None,
        rounding: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a folder, see hf/save.py save_folder. In a process group all ranks call it, one of them with `write`.

        The state must hold persistent buffers too. `extra_files`: content of further files by name (build_extra_files);
        by default config.json alone.
        """
        if extra_files is None:
            extra_files = {CONFIG: (json.dumps(self.config_to_hf(args, dtype), indent=2) + "\n").encode()}
        tensor_map, shapes = self.tensor_map(args), self.shapes(args)
        options: dict[str, Any] = {"dtype": dtype, "shard_bytes": shard_bytes, "write": write, "rounding": rounding}
        save_folder(folder, state, tensor_map, extra_files, shapes, **options)

    def save_hf_file(self, path: Path, state: Mapping[str, Value], args: Any, dtype: torch.dtype) -> None:
        """Write one safetensors file, see hf/save.py save_file."""
        save_file(path, state, self.tensor_map(args), self.config_to_hf(args, dtype), dtype=dtype)

    def stored_weights(
        self,
        path: str | os.PathLike[str],
        args: Any,
        optional_names: Collection[str] = (),
        ignored_keys: Collection[str] = (),
    ) -> StoredWeights:
        """Return the weights of a folder or of a single safetensors file, not yet opened.

        Raises JobError if config.json disagrees with `args`. `ignored_keys`: its keys that are not judged.
        """
        if not os.path.isfile(path):
            raise_mismatches(path, self.config.ignoring(ignored_keys).differences(path, args))
        is_ignored = partial(self._may_stay_unread, args=args)
        return StoredWeights(path, self.tensor_map(args), self.shapes(args), is_ignored, optional_names)

    def load_hf(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        args: Any,
        fresh: Collection[str] = (),
        optional_names: Collection[str] = (),
        ignored_keys: Collection[str] = (),
    ) -> frozenset[str]:
        """Load weights into a model, see hf/load.py load_weights. Raises JobError that lists all mismatches."""
        return load_weights(self.stored_weights(path, args, optional_names, ignored_keys), model, fresh)

    def _may_stay_unread(self, name: str, args: Any) -> bool:
        """Return True for rotary frequencies, copies of a tied embedding, and tensors that the family ignores.

        Some exports hold them; transformers does not read them either.
        """
        copy = args.tied_embeddings and name == "lm_head.weight"
        return copy or name.endswith("rotary_emb.inv_freq") or self.is_ignored(name, args)

    def shapes(self, args: Any) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the full model's parameters and persistent buffers, by our names."""
        with torch.device("meta"):
            return {name: tuple(value.shape) for name, value in self.build(args).state_dict().items()}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model family: how to build it, shard it, convert it and count its FLOPs."""

    build: Callable[..., nn.Module]  # build(args, attention_backend="auto")
    plan: ParallelPlan
    hf: HuggingFace
    flops_per_token: Callable[[Any, int], FlopsPerToken]  # (args, seq_len)
    balance: LoadBalancing | None = None  # of a family with experts, as models/moe/router.py has it

    def balance_of(self, args: Any) -> LoadBalancing | None:
        """Return the balance of a model with experts; None without, also in a family that has sizes of both kinds."""
        return self.balance if hasattr(args, "n_experts") else None


MODELS: Registry[ModelSpec] = Registry(GROUP, FAMILIES, Family, lambda family: resolve_name(family.spec))
"""Model families by name. A family's code is imported on look-up only, because families import this module."""
