"""A job with experts, on several ranks."""

SIZES = "{dim=32, n_layers=4, n_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, "
SIZES += "ffn_dim=48, expert_dim=16, vocab_size=260, bias_rate=0.001}"
# Slow enough that no choice of experts is so near a tie that another order of float32 sums decides it.
JOB = dict(model__name="deepseek", model__overrides=SIZES, optimizer__lr=1e-3)
EP, PP = dict(parallelism__expert_parallel_degree=2), dict(parallelism__pipeline_parallel_degree=2)
