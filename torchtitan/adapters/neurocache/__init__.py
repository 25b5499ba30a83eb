"""Neurocache (arXiv:2407.02486): a frozen decoder that remembers its document.

A document is read segment by segment. Each token's state at one layer is compressed and stored. Tokens of later
segments look up the stored states that are nearest to theirs, and a small attention in the upper layers, in addition to
the model's own, reads these.

`lookup` finds entries, `store` holds them, `memory` is the module that does both for a model, `attention` reads the
retrieved entries, `adapter` installs it all in a model.
"""
