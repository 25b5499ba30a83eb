"""What the modes that watch a rehearsal have in common. They see every operator, so what they cost is felt."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_DEVICE = torch.ops.prim.device.default
"""What autograd asks a tensor without values before most operators: more than half of all that is seen."""


class Watching(TorchDispatchMode):
    """`saw` is called in the place of every operator, and gives what that gives."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch's: for a program that compiles nothing, two calls more an operator
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        return self.saw(func, args, kwargs or {})

    def saw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError
