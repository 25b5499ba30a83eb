"""Neurocache (arXiv:2407.02486): a frozen decoder that remembers its document.

A document is read segment by segment. What each token's state was at one layer is compressed and kept, and tokens of
later segments look up which of the kept states are nearest to theirs; a small attention beside the model's own, in the
upper layers, reads what they found.

`lookup` says which entries are found, `store` keeps them, `memory` is the module that does both for a model,
`attention` reads what was found, `kind` puts it all into a model.
"""
