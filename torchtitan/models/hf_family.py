"""A family of models in the form of Hugging Face: state dicts, config.json, folders. What a family says of itself, and
all that follows from it.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from torchtitan.models.hf_folders import SHARD_BYTES, check_config, load_folder, save_folder
from torchtitan.models.hf_names import Form

NOT_COMPUTED_WITH = ("max_seq_len", "bias_rate", "aux_loss_weight")
"""Of the arguments that families share, those that change nothing in the logits."""


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """`compared`: fields of the arguments that have to be those of a folder's config.json; without it, all but
    `not_compared`, which change nothing in the logits. `ignored`: what a folder may hold beside the model.
    """

    build: Callable[[Any], nn.Module]
    form: Callable[[Any], Form]
    config_to_hf: Callable[..., dict[str, Any]]  # (args, dtype); ValueError for what transformers does not have
    config_from_hf: Callable[[Mapping[str, Any]], Any]  # ValueError for what the model does not have
    compared: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = NOT_COMPUTED_WITH
    ignored: Callable[[str, Any], bool] = lambda name, args: False

    def to_hf(self, state: Mapping[str, torch.Tensor], args: Any) -> dict[str, torch.Tensor]:
        """Full tensors by our names (weights, or their gradients) -> by their names. A tied head is left out."""
        return self.form(args).to_hf(state)

    def from_hf(self, state: Mapping[str, torch.Tensor], args: Any) -> dict[str, torch.Tensor]:
        """The inverse of to_hf, for load_state_dict: a tied head is there again."""
        return self.form(args).from_hf(state)

    def save_hf(
        self,
        folder: str | os.PathLike[str],
        state: Mapping[str, torch.Tensor],
        args: Any,
        *,
        dtype: torch.dtype = torch.float32,
        shard_bytes: int = SHARD_BYTES,
        write: bool = True,
    ) -> None:
        """See hf_folders.save_folder; in a process group all ranks call it, one of them with `write`. The state has to
        hold persistent buffers too.
        """
        config, shapes = self.config_to_hf(args, dtype), self._shapes(args)
        save_folder(folder, state, self.form(args), config, shapes, dtype=dtype, shard_bytes=shard_bytes, write=write)

    def load_hf(self, folder: str | os.PathLike[str], model: nn.Module, args: Any) -> None:
        """See hf_folders.load_folder. ValueError, with everything that is wrong, for a folder that does not fit."""
        compared = self.compared or [each.name for each in fields(args) if each.name not in self.not_compared]
        check_config(folder, args, self.config_from_hf, compared)
        load_folder(folder, model, self.form(args), self._shapes(args), lambda name: self._may_stay_unread(name, args))

    def _may_stay_unread(self, name: str, args: Any) -> bool:
        """What is computed, and a copy of the embedding: some exports hold them, transformers reads neither."""
        copy = args.tied_embeddings and name == "lm_head.weight"
        return copy or name.endswith("rotary_emb.inv_freq") or self.ignored(name, args)

    def _shapes(self, args: Any) -> dict[str, tuple[int, ...]]:
        with torch.device("meta"):
            return {name: tuple(value.shape) for name, value in self.build(args).state_dict().items()}
