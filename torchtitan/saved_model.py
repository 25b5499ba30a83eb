"""The job's model on one device, with what a checkpoint has: for export and generation."""

import dataclasses
from pathlib import Path

import torch
from torch import nn

from torchtitan.adapters.interface import Adapter
from torchtitan.build import adapted_model, base_reference, model_args, saves_adapter_alone
from torchtitan.checkpoint import base, load_model_for_inference, read_state
from torchtitan.checkpoint.kinds import find_weights
from torchtitan.config.job import JobConfig
from torchtitan.stores import stores
from torchtitan.weights import load_foreign


def filled_model(config: JobConfig, step_folder: Path, device: torch.device) -> tuple[nn.Module, Adapter | None]:
    """The job's model on one device, with its adapter and the weights of a checkpoint; in evaluation. CheckpointError
    where these do not fit, or where an adapter's base is not the one it was made for.
    """
    built, _, installed = adapted_model(config)
    built.to_empty(device=device)
    if find_weights(step_folder)[0] != "ours":
        load_foreign(step_folder, [built], config.model.name, model_args(config))
        return built.eval(), installed
    alone = saves_adapter_alone(config)
    if alone:
        base.refuse_another(read_state(step_folder)["trainer"], base_reference(config))
        fill_base(config, built, installed)
    load_model_for_inference(step_folder, built, installed.frozen if alone else ())
    return built.eval(), installed


@torch.no_grad()
def plain_state(
    config: JobConfig, step_folder: Path, filled: nn.Module, installed: Adapter | None
) -> tuple[dict[str, torch.Tensor], str]:
    """The plain model's tensors with what its adapter has learned folded in; and into what. Beside a packed base, of
    which checkpoints hold the adapter alone, that is the original weights, else those that the run computed with.
    """
    if installed is None:
        return filled.state_dict(), "weights"
    is_packed = any(True for _ in stores(filled))
    if not is_packed or not saves_adapter_alone(config):
        return installed.merged([filled]), "unpacked" if is_packed else "weights"
    original = dataclasses.replace(config, adapter=dataclasses.replace(config.adapter, kind="lora"))
    built, _, unpacked = adapted_model(original)
    built.to_empty(device="cpu")
    fill_base(original, built, unpacked)
    load_model_for_inference(step_folder, built, unpacked.frozen)
    return unpacked.merged([built]), "original"


def fill_base(config: JobConfig, built: nn.Module, installed: Adapter | None) -> None:
    """Of a model on one device: the weights that the job starts from."""
    path = config.checkpoint.initial_load_path
    assert path is not None  # the rules ask for it where an adapter is saved alone
    kind, place = find_weights(Path(path))
    fresh = installed.fresh if installed else ()
    if kind == "ours":
        load_model_for_inference(place, built, fresh)
    else:
        load_foreign(place, [built], config.model.name, model_args(config), fresh)
