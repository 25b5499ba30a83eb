"""JobError, the one kind of error that is the user's: commands report it in a line and end with an exit code.

Every other exception is a bug: it ends with exit code 1 and keeps its traceback.
"""

import textwrap

LONGEST_LINE = 200
"""Maximum number of characters in a line of a message."""


class JobError(ValueError):
    """A job, file, dataset, checkpoint or argument of the user cannot work.

    The message names the given value, the allowed values and the remedy.
    """


def format_bytes(size: float) -> str:
    """Format a number of bytes in GiB, MiB, KiB or bytes: the largest unit with a value of at least 0.1."""
    for unit, digits, power in (("GiB", 2, 30), ("MiB", 1, 20), ("KiB", 1, 10)):
        if size >= 0.1 * 2**power:
            return f"{size / 2**power:.{digits}f} {unit}"
    return f"{size:.0f} bytes"


def wrap_lines(text: object) -> str:
    """Wrap lines longer than LONGEST_LINE and indent their continuation. A long path stays in one piece."""
    fold = textwrap.TextWrapper(
        LONGEST_LINE, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    return "\n".join(line if len(line) <= LONGEST_LINE else fold.fill(line) for line in str(text).splitlines())
