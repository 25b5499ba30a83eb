"""What the project needs of a model family to build, run, load and save its models; families by name."""

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
from torchtitan.models.family import ConfigForm, Family
from torchtitan.models.flops import FlopsPerToken
from torchtitan.models.hf.config import CONFIG
from torchtitan.models.hf.load import StoredWeights, load_weights, refuse
from torchtitan.models.hf.names import Form
from torchtitan.models.hf.save import SHARD_BYTES, save_file, save_folder
from torchtitan.parallelisms.expert_balance import Balance
from torchtitan.parallelisms.plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """`ignored`: what a folder may hold beside the model."""

    build: Callable[[Any], nn.Module]
    form: Callable[[Any], Form]
    config: ConfigForm
    ignored: Callable[[str, Any], bool] = lambda name, args: False

    def config_to_hf(self, args: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """The fields of transformers' config. JobError for what it does not have."""
        return self.config.to_hf(args, dtype)

    def to_hf(self, state: Mapping[str, torch.Tensor], args: Any) -> dict[str, torch.Tensor]:
        """Full tensors by our names (weights, or their gradients) -> by their names. A tied head is left out."""
        return self.form(args).to_hf(state)

    def from_hf(self, state: Mapping[str, torch.Tensor], args: Any) -> dict[str, torch.Tensor]:
        """The inverse of to_hf, for load_state_dict: a tied head is there again."""
        return self.form(args).from_hf(state)

    def save_hf(
        self,
        folder: str | os.PathLike[str],
        state: Mapping[str, Value],
        args: Any,
        *,
        dtype: torch.dtype = torch.float32,
        shard_bytes: int = SHARD_BYTES,
        write: bool = True,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        """See folders.save_folder; in a process group all ranks call it, one of them with `write`. The state has to
        hold persistent buffers too. `beside`: what export.beside_weights says; without it, config.json alone.
        """
        if beside is None:
            beside = {CONFIG: (json.dumps(self.config_to_hf(args, dtype), indent=2) + "\n").encode()}
        form, shapes = self.form(args), self.shapes(args)
        save_folder(folder, state, form, beside, shapes, dtype=dtype, shard_bytes=shard_bytes, write=write)

    def save_hf_file(self, path: Path, state: Mapping[str, Value], args: Any, dtype: torch.dtype) -> None:
        """See folders.save_file."""
        save_file(path, state, self.form(args), self.config_to_hf(args, dtype), dtype=dtype)

    def stored(self, path: str | os.PathLike[str], args: Any, may_lack: Collection[str] = ()) -> StoredWeights:
        """Weights of a folder, or of a file of safetensors alone, to be read. JobError where config.json has others."""
        if not os.path.isfile(path):
            refuse(path, self.config.differences(path, args))
        ignored = partial(self._may_stay_unread, args=args)
        return StoredWeights(path, self.form(args), self.shapes(args), ignored, may_lack)

    def load_hf(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        args: Any,
        fresh: Collection[str] = (),
        may_lack: Collection[str] = (),
    ) -> frozenset[str]:
        """See stored.load_weights. JobError, with everything that is wrong, for what does not fit."""
        return load_weights(self.stored(path, args, may_lack), model, fresh)

    def _may_stay_unread(self, name: str, args: Any) -> bool:
        """What is computed, and a copy of the embedding: some exports hold them, transformers reads neither."""
        copy = args.tied_embeddings and name == "lm_head.weight"
        return copy or name.endswith("rotary_emb.inv_freq") or self.ignored(name, args)

    def shapes(self, args: Any) -> dict[str, tuple[int, ...]]:
        """Of the whole model's parameters and persistent buffers, by our names."""
        with torch.device("meta"):
            return {name: tuple(value.shape) for name, value in self.build(args).state_dict().items()}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    build: Callable[..., nn.Module]  # build(args, attention_backend="auto")
    plan: ParallelPlan
    hf: HuggingFace
    flops_per_token: Callable[[Any, int], FlopsPerToken]  # (args, seq_len)
    balance: Balance | None = None  # of a family with experts, as models/moe/balance.py has it


MODELS: Registry[ModelSpec] = Registry(GROUP, FAMILIES, Family, lambda family: resolve_name(family.spec))
"""A family's code is imported when its name is looked up: families import this module."""
