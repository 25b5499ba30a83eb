"""Kernels of a step and the bytes that they move, by place in the package.

Every operation on device tensors is a kernel that reads its inputs and writes its outputs once, except views and
allocations. A function that torch.compile was asked to compile is one kernel: whether it really becomes one is for a
test that compiles it.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

from torchtitan.planner.fake_cuda import device  # first: see there

import torch  # isort: skip
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from torchtitan.torch_internals.dispatch import OpOverload, TorchDispatchMode, storage_key, tree_leaves

NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"),
    *("_unsafe_view", "_local_scalar_dense", "is_pinned", "record_stream", "_assert_async"),
}
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
"""Operations in place that do not read what they write."""
BYTES_A_SECOND, LAUNCH = 2.8e12, 2e-6
FLOPS_A_SECOND = {"products": 0.66e15, "attention": 0.35e15, "float32": 45e12}
"""An H100's rates for an estimate, and the least seconds of a kernel: FlashAttention 2, matrix products in bfloat16."""
LOOKUPS = {"embedding", "gather", "index", "index_select"}
"""Operations that read as much of their first input as they write."""


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; an expanded one is stored and read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _device_tensors(tree: Any) -> dict[int, torch.Tensor]:
    return {id(t): t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.device.type == "cuda"}


class Kernels(TorchDispatchMode):
    """Counts kernels and bytes by place while it is entered."""

    supports_higher_order_operators = True
    active: "Kernels | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.by_place: dict[str, Counter[str]] = {"kernels": Counter(), "bytes": Counter(), "seconds": Counter()}
        self.outputs: dict[int, torch.Tensor] | None = None
        """Tensors that the compiled function under way writes to; None outside of one."""

    def __enter__(self) -> "Kernels":
        Kernels.active = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Kernels.active = None
        super().__exit__(*error)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # count the operations on the local tensors
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        namespace, _, name = func.name().split(".")[0].rpartition("::")
        if namespace in ("prim", "c10d", "_c10d_functional") or name in NO_KERNEL or getattr(func, "is_view", False):
            return out
        outputs, inputs = _device_tensors(out), _device_tensors((args, kwargs))
        for argument, value in _arguments(func, args, kwargs):
            if argument.alias_info is not None and argument.alias_info.is_write:
                outputs |= _device_tensors(value)
                if name in OVERWRITES or argument.kwarg_only:
                    inputs = {key: t for key, t in inputs.items() if key not in _device_tensors(value)}
        if not outputs and not inputs:
            return out
        if self.outputs is not None:
            self.outputs |= outputs
            return out
        size = sum(map(_size, outputs.values()))
        if name in LOOKUPS:
            inputs.pop(id(args[0]), None)
            size *= 2
        size += sum(map(_size, inputs.values()))
        seconds = max(size / BYTES_A_SECOND, _product_seconds(func, args, out))
        self.add(device.place_of(device.frame_of_package().f_code), size, seconds)
        return out

    def add(self, place: str, size: int, seconds: float) -> None:
        self.by_place["kernels"][place] += 1
        self.by_place["bytes"][place] += size
        self.by_place["seconds"][place] += seconds + LAUNCH  # type: ignore[assignment]


def _product_seconds(func: Any, args: Any, out: Any) -> float:
    """Estimate the seconds of an operation's products; causal attention computes half of them."""
    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    if formula is None:
        return 0.0
    flops = formula(*(arg for arg in args if isinstance(arg, torch.Tensor)), out_val=out)
    if "attention" in func.name():
        return flops / 2 / FLOPS_A_SECOND["attention"]
    wide = all(t.dtype == torch.float32 for t in _device_tensors(args).values())  # a sum may be wider than its products
    return flops / FLOPS_A_SECOND["float32" if wide else "products"]


def _arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return declared arguments of an operation with their values; none for operations of higher order."""
    arguments = func._schema.arguments if isinstance(func, OpOverload) else ()
    by_name = {argument.name: argument for argument in arguments}
    return [*zip(arguments, args, strict=False), *((by_name[name], value) for name, value in kwargs.items() if by_name)]


def compiled(model: Callable | None = None, **options: Any) -> Callable:
    """Stand in for torch.compile: the function's calls count as one kernel each."""
    if model is None:
        return functools.partial(compiled, **options)
    function = model
    place = device.place_of(inspect.unwrap(function).__code__)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        device.compiled_calls.append(place)
        try:
            return counted_call(*args, **kwargs)
        finally:
            device.compiled_calls.pop()

    def counted_call(*args: Any, **kwargs: Any) -> Any:
        kernels = Kernels.active
        if kernels is None or kernels.outputs is not None:
            return function(*args, **kwargs)
        kernels.outputs = {}
        try:
            out = function(*args, **kwargs)
            inputs, outputs = _device_tensors((args, kwargs)), _device_tensors(out)
            stored = {storage_key(t.untyped_storage()) for t in inputs.values()}
            changed = {k: t for k, t in kernels.outputs.items() if storage_key(t.untyped_storage()) in stored}
            size = sum(map(_size, [*inputs.values(), *(outputs | changed).values()]))
        finally:
            kernels.outputs = None
        kernels.add(place, size, size / BYTES_A_SECOND)
        return out

    return call
