"""The private names of torch that the package uses. tests/repository/test_layering.py refuses them in other rooms.

A file for each subject. Each name is an assignment or a function, whose docstring begins with the version of torch in
which it was read and says what it is used for. tests/torch_internals holds that torch has each of them, with the
parameters and attributes that are used. `replacement.replace` replaces methods of torch.
"""
