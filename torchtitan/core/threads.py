"""Run a function in several threads.

`multiprocessing.pool.ThreadPool` needs a semaphore in /dev/shm, which a container may lack, and `concurrent.futures`
refuses tasks once the main thread has ended, as after a crash during a background save. Python 3.12 refuses new threads
then, and so does a container at its limit of processes: the calling thread always works, too.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

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
