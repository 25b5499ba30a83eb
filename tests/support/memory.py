"""Counts the memory of tensors, without asking the operating system."""

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Peak(TorchDispatchMode):
    """Tracks live CPU tensors that operators created. `bytes`: their peak, without parameters of `model`."""

    def __init__(self, model: nn.Module | None = None):
        super().__init__()
        parameters = () if model is None else model.parameters()
        self.own = {parameter.untyped_storage()._cdata for parameter in parameters}
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = self.at_most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **kwargs or {})
        for tensor in filter(torch.is_tensor, outputs if isinstance(outputs, tuple | list) else (outputs,)):
            if tensor.device.type == "cpu":  # shapes are asked of a meta model
                self.count(tensor.untyped_storage())
        if self.at_most > self.bytes:  # look who is gone only where it may matter
            self.living = {key: entry for key, entry in self.living.items() if not entry[0].expired()}
            self.at_most = sum(size for _, size in self.living.values())
            self.bytes = max(self.bytes, self.at_most)
        return outputs

    def count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.own and (key not in self.living or self.living[key][0].expired()):
            self.living[key] = StorageWeakRef(storage), size
            self.at_most += size
