"""Tasks by the names of the installed lm-eval: `--tasks hellaswag,arc_easy`; also its groups and tags.

Unlike task files these are part of an installed package, so what they define in Python runs. Their data come from the
Hugging Face Hub, from its cache on this machine, or from a folder of the data set's name in the working folder.
"""

import difflib
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.core.errors import JobError

CODE_SEED, NUMPY_SEED = 0, 1234
"""lm-eval's default seeds, for tasks that draw numbers when they are opened."""
NEAREST = 3
"""Names that the message on an unknown one lists."""


def is_names(tasks: str) -> bool:
    """Return True if the argument has names of tasks; False if it is a path."""
    return not Path(tasks).exists() and os.sep not in tasks and not tasks.endswith((".yaml", ".yml"))


def open_named_tasks(names: Sequence[str]) -> dict[str, Any]:
    """Load tasks by name, as lm-eval's command does: {"tasks": {name: task}, "groups": {name: group}, ...}."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    for name in names:
        if name not in manager.all_tasks:
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks, n=NEAREST))
            remedy = f"did you mean one of {near}?" if near else "`lm_eval ls tasks` lists them"
            raise JobError(f"--tasks: given {name!r}; allowed: a file, a folder, or tasks of lm-eval by name; {remedy}")
    random.seed(CODE_SEED)
    np.random.seed(NUMPY_SEED)
    try:
        opened: dict[str, Any] = manager.load(list(names))
    except Exception as error:  # exceptions of lm-eval, its tasks and its data readers have no common base
        remedy = "data that are not on this machine need a connection to the Hugging Face Hub"
        raise JobError(
            f"--tasks {','.join(names)}: lm-eval does not open it: {type(error).__name__}: {error}; {remedy}"
        ) from None
    for name, task in opened["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            allowed = "tasks of text that do not run what the model writes"
            raise JobError(f"--tasks: given {name}; allowed: {allowed}; run it with lm-eval on an export")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return opened
