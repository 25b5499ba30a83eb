"""Compare prepared shards with the sums in their header at every start of a run.

Otherwise a file that was damaged after it was prepared would be trained on unnoticed. Up to FOREGROUND_BYTES are
compared before the first batch. More are compared in a background thread during training, and the run ends when a
difference is found. A resumed run compares them again, because the earlier run may have ended before the comparison.
"""

import logging
import threading
from collections.abc import Sequence

from torchtitan.core.errors import format_bytes
from torchtitan.core.machine_errors import MachineError, is_of_the_machine
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.token_shards import TokenShards

logger = logging.getLogger(__name__)

FOREGROUND_BYTES = 2**30
"""Largest data in bytes that is verified before training. Reading it takes a second or two."""


class Verification:
    """A comparison in a background thread."""

    def __init__(self, shards: Sequence[TokenShards]) -> None:
        self.shards = list(shards)
        self.size = sum(part["bytes"] for folder in self.shards for part in folder.files)
        self.error: DataError | MachineError | None = None
        self._thread = threading.Thread(target=self._compare, name="verification", daemon=True)
        self._thread.start()

    def _compare(self) -> None:
        in_front = self.size <= FOREGROUND_BYTES
        if not in_front:
            logger.info("data       %s are compared with their sums during training", format_bytes(self.size))
        try:
            for folder in self.shards:
                folder.verify(shown=in_front)
        except (DataError, MachineError) as error:
            self.error = error
        except OSError as error:
            text = f"{error}; the data must stay where and as they are while a job runs"
            self.error = MachineError(text) if is_of_the_machine(error) else DataError(text)
        except Exception as error:  # otherwise a crash of the thread would look like success
            cause = f"{type(error).__name__}: {error}"
            names = ", ".join(str(folder.folder) for folder in self.shards)
            self.error = DataError(f"{names}: cannot be compared with its sums: {cause}; make the folder again")
        if self.error is None and not in_front:
            logger.info("data       %s match their sums", format_bytes(self.size))

    def raise_if_damaged(self) -> None:
        """Raise DataError, which names the file, if a difference has been found, and MachineError if a file could not
        be read. Waits for small data.
        """
        if self.size <= FOREGROUND_BYTES:
            self._thread.join()
        if self.error is not None:
            raise self.error


_verifications: dict[tuple[str, ...], Verification] = {}


def start_verification(shards: Sequence[TokenShards]) -> Verification | None:
    """Return the comparison of these folders, which the first call in this process starts; None without shards."""
    if not shards:
        return None
    folders = tuple(str(source.folder.resolve()) for source in shards)
    if folders not in _verifications:
        _verifications[folders] = Verification(shards)
    return _verifications[folders]
