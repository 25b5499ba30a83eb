"""Neurocache (arXiv:2407.02486): a frozen decoder that remembers its document.

A document is read segment by segment. Each token's state at one layer is compressed and stored. Tokens of later
segments look up the stored states that are nearest to their states. A small attention in the upper layers, in addition
to the model's own, reads the retrieved states.

`cache` stores entries and finds the nearest, `memory` is the module that does both for a model, `attention` reads the
retrieved entries, and `adapter` installs all of it in a model.
"""
