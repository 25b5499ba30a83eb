"""Declarations of a class about its methods, and a check that they still hold for an object's methods.

A class can declare what a parallelism relies on (these are the steps of its forward; this is plain attention). The
declaration holds for that class. A subclass that overrides forward inherits the attribute, but has to repeat it for the
new method.
"""


def stands_behind(thing: object, statement: str, *methods: str) -> bool:
    """Return True if the declaration `statement` holds for the object's `methods`: no subclass of the declaring class,
    and not the object itself, overrides them. False if no class declares it.
    """
    kinds = type(thing).__mro__

    def depth(name: str) -> int:
        return next((index for index, kind in enumerate(kinds) if name in vars(kind)), len(kinds))

    declared = depth(statement)
    return declared < len(kinds) and all(depth(name) >= declared and name not in vars(thing) for name in methods)
