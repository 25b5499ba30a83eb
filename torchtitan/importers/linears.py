"""Linears by the names that other libraries have for them."""

ATTENTION = {"q": "*attention.wq", "k": "*attention.wk", "v": "*attention.wv", "o": "*attention.wo"}
LINEARS: dict[str, list[str]] = {
    **{f"{name}_proj": [pattern] for name, pattern in ATTENTION.items()},
    "gate_proj": ["*feed_forward.w1"],
    "down_proj": ["*feed_forward.w2"],
    "up_proj": ["*feed_forward.w3"],
    "query": [ATTENTION["q"]],
    "key": [ATTENTION["k"]],
    "value": [ATTENTION["v"]],
    "c_attn": [ATTENTION[name] for name in "qkv"],
    "c_fc": ["*feed_forward.w1"],
    "c_proj": [ATTENTION["o"], "*feed_forward.w2"],
    "out_proj": [ATTENTION["o"]],
    "fc1": ["*feed_forward.w1"],
    "fc2": ["*feed_forward.w2"],
}
"""As Llama, RoBERTa, GPT-2 and OPT call them, the targets that they are here."""
