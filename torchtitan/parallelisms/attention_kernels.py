"""Torch's attention kernels, called below autograd: output and logsumexp of one block of queries x keys, and gradients.

A bias includes the causal mask. Flash kernels need values as wide as keys. CUDA's flash kernel takes no bias, its
efficient one no grouped heads.

Letters of the shapes: B samples, H query heads, K key/value heads, Q and S tokens of queries and of keys, E width of a
head's query and key, V width of its value, at most E.
"""

import math

import torch
import torch.nn.functional as F

from torchtitan.torch_internals import dispatch

MASKED_SCORE = -1e30
"""Added to masked scores. It is not -inf, because a row without visible keys in one region would become NaN. Its output
is then some average, with a weight of exp(-1e30) = 0."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


HAS_AMX = bool(torch.cpu.get_capabilities().get("amx_bf16", False))


def fastest_cpu_dtype(dtype: torch.dtype, width: int, keys: int) -> torch.dtype:
    """Return the dtype of a CPU's fastest attention to `keys` keys with heads of this width, given in `dtype`.

    Only bfloat16 is exchanged, for float32. On a CPU with matrix units its kernel is slow for narrow heads: 33.7 ms
    against 12.9 at a width of 16 (2 cores). Without them (EPYC, 1 core) it is slow for few keys: forward and backward
    take 3.0 of the time at 128 keys and a width of 16, 1.5 at 256, 0.85 at 2,048; at a width of 64 1.65, 1.08 and 0.79
    (torch 2.13).
    """
    slow = width < 64 if HAS_AMX else keys * width <= 2**14
    return torch.float32 if dtype == torch.bfloat16 and slow else dtype


def kernel_dtype(q: torch.Tensor, device_type: str | None = None) -> torch.dtype:
    """Return the compute dtype of the kernels on this type of device, by default that of q, of any shape."""
    return accumulation_dtype(q.dtype) if (device_type or q.device.type) == "cpu" else q.dtype


def mask_bias(visible: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the mask to add to the scores of queries q, of the shape of `visible`, True where a key is visible."""
    hidden = max(MASKED_SCORE, torch.finfo(q.dtype).min / 2)
    return torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, hidden)


def block_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Attend within one region: q [B, H, Q, E], k [B, K, S, E], v [B, K, S, V], bias [B, 1, Q, S].

    Returns the output [B, H, Q, V], the logsumexp [B, H, Q], and extra results for `block_backward`.
    """
    kernel, width = kernel_for(q, bias), v.shape[-1]
    if kernel == "cpu":
        out, logsumexp = dispatch.attention_for_cpu(
            q, k, _pad_to_width(v, k), 0.0, causal and bias is None, attn_mask=bias
        )
        return out[..., :width], logsumexp, ()
    if kernel == "flash":
        out, logsumexp, _, _, _, _, *random_state, _ = dispatch.flash_attention(q, k, _pad_to_width(v, k), 0.0, causal)
        return out[..., :width], logsumexp, tuple(random_state)
    k, v = _repeat_heads(q, k, v)
    if kernel == "efficient":
        out, logsumexp, *random_state = dispatch.efficient_attention(
            q, k, v, _aligned(q, bias), True, 0.0, causal and bias is None
        )
        return out, logsumexp[..., : q.shape[2]], tuple(random_state)  # the kernel pads it to a multiple of 32
    scores = _scores(q, k, causal, bias)
    logsumexp = scores.logsumexp(-1)
    return (scores - logsumexp[..., None]).exp() @ v, logsumexp, ()


def block_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    bias: torch.Tensor | None,
    grad: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    extras: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return one region's contribution to the gradients of q, k and v, of their shapes (as in block_forward).

    `grad`, `out` [B, H, Q, V] and `logsumexp` [B, H, Q] belong to the merged result over all regions. `extras`: from
    any forward of this kernel.
    """
    kernel, width = kernel_for(q, bias), v.shape[-1]
    if kernel in ("cpu", "flash"):
        grad, v, out = (_pad_to_width(x, k) for x in (grad, v, out))
    if kernel == "cpu":
        grad_q, grad_k, grad_v = dispatch.attention_for_cpu_backward(
            grad, q, k, v, out, logsumexp, 0.0, causal and bias is None, attn_mask=bias
        )
        return grad_q, grad_k, grad_v[..., :width]
    if kernel == "flash":
        lengths = (None, None, q.shape[2], k.shape[2])  # None: samples of equal length
        grad_q, grad_k, grad_v = dispatch.flash_attention_backward(
            grad, q, k, v, out, logsumexp, *lengths, 0.0, causal, *extras
        )
        return grad_q, grad_k, grad_v[..., :width]
    heads = k.shape[1]
    k, v = _repeat_heads(q, k, v)
    if kernel == "efficient":
        # padded to a multiple of 32 with infinity, so that these rows get no weight
        filled = F.pad(logsumexp, (0, -q.shape[2] % 32), value=math.inf)
        grad_q, grad_k, grad_v, _ = dispatch.efficient_attention_backward(
            grad, q, k, v, _aligned(q, bias), out, filled, *extras, 0.0, [True, True, True, False],
            causal and bias is None,
        )  # fmt: skip
    else:
        weights = (_scores(q, k, causal, bias) - logsumexp[..., None]).exp()
        of_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        grad_q, grad_k, grad_v = of_scores @ k, of_scores.mT @ q, weights.mT @ grad
    return grad_q, _sum_heads(grad_k, heads), _sum_heads(grad_v, heads)


def kernel_for(q: torch.Tensor, bias: torch.Tensor | None) -> str:
    """Return the kernel for these inputs, shaped as in block_forward: "cpu", "flash", "efficient" or "written out".

    The last one supports all inputs but materializes the scores.
    """
    if q.device.type == "cpu":
        return "cpu"
    fits = q.device.type == "cuda" and q.shape[-1] % 8 == 0
    if fits and bias is None and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256:
        return "flash"
    return "efficient" if fits and q.dtype in (torch.bfloat16, torch.float16, torch.float32) else "written out"


def _pad_to_width(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Pad a tensor of the values' width [B, K, S, V] with zeros to the keys' width [B, K, S, E]."""
    missing = k.shape[-1] - x.shape[-1]
    assert missing >= 0, "values must not be wider than keys"
    return F.pad(x, (0, missing)) if missing else x


def _repeat_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = q.shape[1] // k.shape[1]
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


def _sum_heads(grad: torch.Tensor, heads: int) -> torch.Tensor:
    return grad.unflatten(1, (heads, -1)).sum(2, dtype=accumulation_dtype(grad.dtype))


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, bias: torch.Tensor | None) -> torch.Tensor:
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if bias is not None:
        return scores + bias
    if not causal:
        return scores
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~visible, MASKED_SCORE)


def _aligned(q: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Expand the bias to all heads, with rows aligned to 16 elements, as the efficient kernel requires."""
    if bias is None:
        return None
    length = bias.shape[-1]
    return F.pad(bias, (0, -length % 16))[..., :length].expand(-1, q.shape[1], -1, -1)
