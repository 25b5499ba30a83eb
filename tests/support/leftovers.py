"""Remove traces of a job that was trained in the test process: environment variables and a process group."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restore_after_test() -> Iterator[None]:
    """Destroy a process group that was created inside, and restore the environment variables, which torch's libraries
    read. Imports nothing: if there is a group, torch has been imported.
    """
    environment, had_world = dict(os.environ), has_world()
    try:
        yield
    finally:
        if not had_world and has_world():
            sys.modules["torch.distributed"].destroy_process_group()
        restore_environment(environment)


def restore_environment(environment: dict[str, str]) -> None:
    """Restore changed variables; others are not written, as threads of libraries may be reading them."""
    for name in {*environment, *os.environ} - {"PYTEST_CURRENT_TEST"}:  # pytest's own, which changes within a test
        if name not in environment:
            del os.environ[name]
        elif os.environ.get(name) != environment[name]:
            os.environ[name] = environment[name]


def has_world() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
