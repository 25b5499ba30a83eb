"""The one kind of error that is the user's: commands end it in a line and an exit code.

Every other exception is a fault of the program, ends with exit code 1 and keeps its traceback.
"""


class JobError(ValueError):
    """Something that the user gave cannot work: a job, a file, data, a checkpoint, an argument. The message says what
    was given, what is allowed and what to do.
    """
