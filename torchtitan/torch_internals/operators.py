"""Operators that torch has under private names only."""

import torch

foreach_mul_ = torch._foreach_mul_
"""torch 2.13: multiplies many tensors in one kernel, to clip gradients."""
foreach_norm = torch._foreach_norm
"""torch 2.13: the norms of many tensors in one kernel."""
grouped_mm = torch.ops.aten._grouped_mm
"""torch 2.13: the operator of torch.nn.functional.grouped_mm, whose results selective recompute saves."""
scaled_mm = torch._scaled_mm
"""torch 2.13: a product of float8 matrices with a scale for each, or for each row."""
scaled_mm_operator = torch.ops.aten._scaled_mm
"""torch 2.13: its operator, whose results selective recompute saves."""
local_scalar_dense = torch.ops.aten._local_scalar_dense
"""torch 2.13: the operator of `item`, which a rehearsal answers."""

# Attention below autograd: with the logsumexp, and backward from it
attention_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""torch 2.13: (q, k, v, dropout, causal, *, attn_mask, scale) -> output, logsumexp."""
attention_for_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""torch 2.13: (grad, q, k, v, output, logsumexp, dropout, causal, *, attn_mask, scale) -> gradients."""
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
"""torch 2.13: (q, k, v, dropout, causal) -> output, logsumexp, lengths and longest of q and k, random state, mask."""
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
"""torch 2.13: (grad, q, k, v, output, logsumexp, lengths and longest, dropout, causal, random state) -> gradients."""
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
"""torch 2.13: (q, k, v, bias, with logsumexp, dropout, causal) -> output, logsumexp, random state."""
efficient_attention_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
"""torch 2.13: (grad, q, k, v, bias, output, logsumexp, random state, dropout, wanted, causal) -> gradients."""
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
"""torch 2.13: attention that torch may choose on a GPU, whose results selective recompute saves."""
