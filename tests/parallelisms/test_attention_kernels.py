"""The choice of a kernel of torch for attention."""

from types import SimpleNamespace

import pytest
import torch

from torchtitan.parallelisms import attention_kernels


@pytest.mark.parametrize(
    "has_amx, expected",
    [(False, [(16, 1024), (64, 256), (128, 128)]), (True, [(16, 1024), (16, 1040), (16, 4096)])],
    ids=["no matrix units", "matrix units"],
)
def test_the_dtype_of_bfloat16_attention_on_a_cpu(has_amx, expected, monkeypatch):
    """Compare the (width, keys) that are computed in float32."""
    monkeypatch.setattr(attention_kernels, "HAS_AMX", has_amx)
    sizes = [(16, 1024), (16, 1040), (16, 4096), (64, 256), (64, 512), (128, 128), (128, 256)]
    dtypes = {size: attention_kernels.fastest_cpu_dtype(torch.bfloat16, *size) for size in sizes}
    assert [size for size, dtype in dtypes.items() if dtype == torch.float32] == expected
    assert attention_kernels.fastest_cpu_dtype(torch.float64, 16, 4) == torch.float64


@pytest.mark.parametrize(
    "dtype, head_dim, masked, kernel",
    [
        (torch.bfloat16, 128, False, "flash"),
        (torch.bfloat16, 128, True, "efficient"),
        (torch.bfloat16, 320, False, "efficient"),
        (torch.float32, 128, False, "efficient"),
        (torch.float64, 128, False, "written out"),
        (torch.bfloat16, 12, False, "written out"),
    ],
)
def test_choice_of_kernel(dtype, head_dim, masked, kernel):
    q = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 1, 1, head_dim))
    assert attention_kernels.kernel_for(q, torch.zeros(()) if masked else None) == kernel
    assert attention_kernels.kernel_for(torch.zeros(1, 1, 1, head_dim, dtype=dtype), None) == "cpu"
