"""Files of a checkpoint: hashed while they are written, and read back from the disk, in several threads. Needs no
torch.

Both bypass the page cache where the file system can (O_DIRECT). A copy through the cache costs a core more time than
the hash (docs/benchmarks.md), displaces what others have in it, and reading it back would say nothing of the disk.

Threads are our own: `multiprocessing.pool.ThreadPool` needs a semaphore in /dev/shm, which a container may lack, and
`concurrent.futures` refuses tasks once the main thread has ended, as after a crash during a background save. Python
3.12 refuses new threads then, and so does a container at its limit of processes: the calling thread always works, too.
"""

import errno
import fcntl
import hashlib
import io
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

from torchtitan.core.files import open_file

Item = TypeVar("Item")
T = TypeVar("T")


def map_in_threads(function: Callable[[Item], T], items: Iterable[Item], num_threads: int) -> list[T]:
    """Return the function's result for each item, in their order.

    At most `num_threads` items are in work at a time. After a failure no further item is begun, and the failure of the
    first failed item is raised.
    """
    pending = list(enumerate(items))[::-1]
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}

    def work() -> None:
        while not failures:
            try:
                index, item = pending.pop()  # of a list this is atomic
            except IndexError:
                return
            try:
                results[index] = function(item)
            except BaseException as error:
                failures[index] = error

    count = len(pending)
    threads = []
    with suppress(RuntimeError):
        for _ in range(min(num_threads, count) - 1):
            thread = threading.Thread(target=work)
            thread.start()
            threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[min(failures)]
    return [results[index] for index in range(count)]


PARALLEL_FILES = 4
"""Most files that one process writes or hashes at a time: some wait for the disk while others are hashed."""
_BLOCK_BYTES = 8 << 20
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
"""Errors of file systems that accept O_DIRECT and then refuse a read with it."""


class HashedFile:
    """A new file to write to. `sha256` and `size` are of all bytes handed to the system, and the file is on the disk
    with all of them, once `close` has returned."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.path = path
        self._descriptor: int | None = os.open(path, flags, 0o666)
        self._is_direct = _bypass_cache(self._descriptor)
        self._block = memoryview(mmap.mmap(-1, _BLOCK_BYTES))  # aligned to a page, as direct writes require
        self._filled = self.size = 0
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, content: bytes | memoryview) -> int:
        """Append all bytes and return their number."""
        remaining = memoryview(content).cast("B")
        size = len(remaining)
        while remaining:
            piece, remaining = remaining[: _BLOCK_BYTES - self._filled], remaining[_BLOCK_BYTES - self._filled :]
            self._block[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            if self._filled == _BLOCK_BYTES:
                self._write_block()
        self.size += size
        return size

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Do nothing: blocks are written when they are full, and the last one by `close`."""

    def close(self) -> None:
        """Write the rest and wait until the file is on the disk. A second call does nothing."""
        if self._descriptor is None:
            return
        try:
            if self._filled:
                self._use_cache()  # the last block may end anywhere
                self._write_block()
            os.fsync(self._descriptor)
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise
        finally:
            self._abandon()

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write_block(self) -> None:
        assert self._descriptor is not None
        remaining = self._block[: self._filled]
        self._digest.update(remaining)
        while remaining:
            try:
                remaining = remaining[os.write(self._descriptor, remaining) :]
            except OSError as error:
                if not self._is_direct:
                    error.filename = str(self.path)
                    raise
                self._use_cache()  # a file system that refuses direct writes; any other error comes again
        self._filled = 0

    def _use_cache(self) -> None:
        if self._is_direct:
            _set_direct(cast(int, self._descriptor), False)
            self._is_direct = False


def sha256_of(path: Path, report: Callable[[int], object] = int, from_disk: bool = False) -> str:
    """Return the SHA-256 digest of a file. `report` is called with the size of every block read.

    `from_disk` reads the content of the disk, not of the page cache, where the system can tell them apart.
    """
    digest, buffer = hashlib.sha256(), mmap.mmap(-1, _BLOCK_BYTES)
    with open_file(path) as file, memoryview(buffer) as view:
        raw = cast(io.BufferedReader, file).raw  # reads in whole blocks
        descriptor = file.fileno()
        is_direct = from_disk and _bypass_cache(descriptor)
        if from_disk and not is_direct:
            _drop_cache(descriptor)
        remaining = os.fstat(descriptor).st_size
        while remaining > 0:
            try:
                count = raw.readinto(view) or 0
            except OSError as error:
                if error.errno not in _REFUSALS or not is_direct:
                    raise
                is_direct = False
                _set_direct(descriptor, False)
                _drop_cache(descriptor)
                continue
            if count == 0:
                break
            digest.update(view[:count])
            report(count)
            remaining -= count
    return digest.hexdigest()


def hash_files(paths: Sequence[Path], report: Callable[[int], object] = int, from_disk: bool = False) -> list[str]:
    """Return `sha256_of` each path; several files are read at a time."""
    return map_in_threads(lambda path: sha256_of(path, report, from_disk), paths, PARALLEL_FILES)


def _bypass_cache(descriptor: int) -> bool:
    """Let reads and writes of an open file bypass the page cache. Return False if its file system does not."""
    try:
        return _set_direct(descriptor, True)
    except OSError:
        return False


def _set_direct(descriptor: int, direct: bool) -> bool:
    """Turn O_DIRECT of an open file on or off. Return False on systems without it; raises OSError if refused."""
    flag = getattr(os, "O_DIRECT", 0)  # Linux
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if direct else flags & ~flag)
    return flag != 0


def _drop_cache(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
