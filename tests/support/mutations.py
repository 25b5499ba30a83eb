"""Mutations of a JSON value: each field at any depth removed, null, of another type, huge, or one more beside it."""

import copy
import random
from collections.abc import Iterator
from typing import Any

STRANGE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2.0, 10**30, -(10**30), 1e300, float("nan"), float("inf")),
    *("", "x", "../../outside", "/tmp/outside", "a/b", "..", "\0", "\ud800", "x" * 3_000_000),
    *([], [1], {}, {"a": 1}, [[[]]], "stop", 9, 15, 65536),
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value below this one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from paths_of(item, (*path, key))


def mutations_of(value: dict[str, Any], seed: int, draws: int) -> Iterator[dict[str, Any]]:
    """Yield each field removed, null and doubled by another, and `draws` values of another kind in random places."""
    paths, chance = list(paths_of(value)), random.Random(seed)
    for path in paths:
        yield _change(value, path, None)
        yield _change(value, path, None, remove=True)
        yield _change(value, (*path[:-1], "further"), 1)
    for _ in range(draws):
        yield _change(value, chance.choice(paths), chance.choice(STRANGE_VALUES))


def _change(value: dict[str, Any], path: tuple[Any, ...], new: Any, remove: bool = False) -> dict[str, Any]:
    result = copy.deepcopy(value)
    place: Any = result
    for key in path[:-1]:
        place = place[key]
    if remove:
        del place[path[-1]]
    elif isinstance(place, list):
        place[path[-1] if isinstance(path[-1], int) else 0 : 1] = [new]
    else:
        place[path[-1]] = new
    return result
