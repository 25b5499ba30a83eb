"""What a class says of itself, and whether it says so of the methods that it has now.

A class that says of its forward what a parallelism builds on (these are its steps; this is plain attention) says it for
itself. A subclass with a forward of its own inherits the words but has not been asked; it has to repeat them.
"""


def stands_behind(thing: object, statement: str, *methods: str) -> bool:
    """Whether the class that says `statement` also knows the `methods` of the object: no class further down, and not
    the object itself, has others. False where nobody says it.
    """
    kinds = type(thing).__mro__

    def depth(name: str) -> int:
        return next((index for index, kind in enumerate(kinds) if name in vars(kind)), len(kinds))

    said = depth(statement)
    return said < len(kinds) and all(depth(name) >= said and name not in vars(thing) for name in methods)
