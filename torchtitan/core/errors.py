"""The one kind of error that is the user's: commands end it in a line and an exit code.

Every other exception is a fault of the program, ends with exit code 1 and keeps its traceback.
"""

import textwrap

LONGEST_LINE = 200
"""Characters, of what is said to a user."""


class JobError(ValueError):
    """Something that the user gave cannot work: a job, a file, data, a checkpoint, an argument. The message says what
    was given, what is allowed and what to do.
    """


def in_units(size: float) -> str:
    """So many bytes, in the unit that tells something."""
    for unit, digits, power in (("GiB", 2, 30), ("MiB", 1, 20), ("KiB", 1, 10)):
        if size >= 0.1 * 2**power:
            return f"{size / 2**power:.{digits}f} {unit}"
    return f"{size:.0f} bytes"


def folded(text: object) -> str:
    """What is said to a user, lines that are too long continued on further ones; a long path stays in one piece."""
    fold = textwrap.TextWrapper(
        LONGEST_LINE, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    return "\n".join(line if len(line) <= LONGEST_LINE else fold.fill(line) for line in str(text).splitlines())
