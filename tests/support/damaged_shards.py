"""Damage of optimizer states."""

OF_OPTIMIZER = {
    "AdamWBF16": dict(training__dtype="bfloat16", training__mixed_precision_param="bfloat16")
    | dict(optimizer__options='{rounding="stochastic"}'),
    "APOLLO": dict(optimizer__options="{rank=4, update_gap=2}"),
    "GaLore": dict(optimizer__options='{rank=4, update_gap=2, basis="rsvd"}'),
}
"""Options that optimizers need in a job this small; bases are redrawn within its steps."""
