"""What a job can name: what the project has, and what installed packages add by entry points. Needs no torch.

A package says in its metadata, for example

    [project.entry-points."torchtitan.optimizers"]
    Lion = "my_package.lion_spec:LION"

and the name is known wherever ours are. Only installed packages are looked at, and one is imported when a job names
what it has: a job file itself names no code, and checking a job does not wait for packages that it does not use.
"""

from collections import UserDict
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from torchtitan.core.errors import JobError

T = TypeVar("T")


@cache
def added(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Entry points of installed packages by name; one name may be given by several. Nothing is imported."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, package_of(point))):
        if point not in found.get(point.name, ()):  # a package found twice on sys.path says it twice
            found[point.name] = (*found.get(point.name, ()), point)
    return found


def package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


class Registry(UserDict[str, T]):
    """Our own by name, and behind them those of a group of entry points, read as they are asked for.

    `kind`: type that an entry point must lead to. `read` makes the registry's value of such an object, ours or a
    package's. A package that cannot be used is a JobError that names it.
    """

    def __init__(
        self, group: str, own: dict[str, Any], kind: Any = object, read: Callable[[Any], T] = lambda found: found
    ) -> None:
        self.group, self.kind, self.read = group, kind, read
        self.data = own

    def __getitem__(self, name: str) -> T:
        if name in self.data:
            return self.read(self.data[name])
        points = added(self.group).get(name)
        if points is None:
            raise KeyError(name)
        return self.read(_loaded(self.group, points, self.kind))

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in added(self.group)

    def __iter__(self) -> Iterator[str]:
        yield from self.data
        yield from (name for name in added(self.group) if name not in self.data)

    def __len__(self) -> int:
        return len(self.data.keys() | added(self.group).keys())


def _loaded(group: str, points: tuple[EntryPoint, ...], kind: Any) -> Any:
    point, package = points[0], package_of(points[0])
    what = f"{point.name!r} of group {group}, by the installed package {package} ({point.value})"
    if len(points) > 1:
        others = ", ".join(package_of(other) for other in points[1:])
        raise JobError(f"{what}: {others} gives it too; uninstall all but one")
    try:
        found = point.load()
    except Exception as error:  # somebody else's code: any type, from anywhere
        reason = f"{type(error).__name__}: {error}"
        raise JobError(f"{what}: cannot be imported ({reason}); mend or uninstall the package") from error
    if not isinstance(found, kind):
        told = f"leads to a {type(found).__name__}, where a {kind.__name__} is needed"
        raise JobError(f"{what}: {told}; mend or uninstall the package")
    return found


def faults_of_packages(registry: Registry[Any]) -> dict[str, str]:
    """Name -> why it cannot be used, of everything that packages give to a registry. Imports all of it."""
    faults = {}
    for name, points in added(registry.group).items():
        if name in registry.data:
            packages = ", ".join(map(package_of, points))
            faults[name] = f"{name!r} of {packages} is not used: the project has one of that name; rename it"
            continue
        try:
            _loaded(registry.group, points, registry.kind)
        except JobError as error:
            faults[name] = str(error)
    return faults
