"""Optimizers by name. No torch here, as `torchtitan check` reads the names; `build.py` makes them.

A value says where the class is, "module:attribute". A new optimizer is one file and one line here.
"""

OPTIMIZERS: dict[str, str] = {
    "Adam": "torch.optim:Adam",
    "AdamW": "torch.optim:AdamW",
}
