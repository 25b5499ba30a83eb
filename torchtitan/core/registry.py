"""Registries of the names in a job: the project's, those of its plugins, and those that installed packages add.

Needs no torch. A package declares in its metadata, for example

    [project.entry-points."torchtitan.optimizers"]
    Lion = "my_package.lion_spec:LION"

and the name is known wherever ours are. Only installed packages count, and a package is imported when a job uses one
of its names. A check of a job does not wait for packages that it does not use. Only a callback may be named by its
module (core/callbacks.py).
"""

from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from torchtitan.core.errors import JobError
from torchtitan.core.plugins import plugin_entries

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """An option of a job, or one that an entry of a registry reads from a table of the job."""

    annotation: Any
    default: Any
    """pydantic_core.PydanticUndefined where it must be given."""
    help: str


@cache
def installed_entries(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of installed packages by name, without an import. Several packages may share a name."""
    points_by_name: dict[str, tuple[EntryPoint, ...]] = {}
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, package_of(point))):
        if point not in points_by_name.get(point.name, ()):  # a package that is on sys.path twice has it twice
            points_by_name[point.name] = (*points_by_name.get(point.name, ()), point)
    return points_by_name


def package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


class Registry(UserDict[str, T]):
    """A mapping from names to the entries of the project and its plugins, then to a group's entry points.

    An entry point is loaded on access.

    `kind`: the type that an entry point must lead to. `read` converts an entry, ours or a package's, to the registry's
    value. A package that cannot be used raises a JobError that names it.
    """

    def __init__(
        self, group: str, entries: dict[str, Any], kind: Any = object, read: Callable[[Any], T] = lambda entry: entry
    ) -> None:
        self.group, self.kind, self.read = group, kind, read
        plugins = plugin_entries(group)
        self.data = entries | plugins if plugins else entries  # registries may share their entries

    def __getitem__(self, name: str) -> T:
        if name in self.data:
            entry = self.data[name]
            return self.read(entry.load() if isinstance(entry, EntryPoint) else entry)
        points = installed_entries(self.group).get(name)
        if points is None:
            raise KeyError(name)
        return self.read(_loaded(self.group, points, self.kind))

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in installed_entries(self.group)

    def __iter__(self) -> Iterator[str]:
        yield from self.data
        yield from (name for name in installed_entries(self.group) if name not in self.data)

    def __len__(self) -> int:
        return len(self.data.keys() | installed_entries(self.group).keys())


def _loaded(group: str, points: tuple[EntryPoint, ...], kind: Any) -> Any:
    point, package = points[0], package_of(points[0])
    label = f"{point.name!r} of group {group}, by the installed package {package} ({point.value})"
    if len(points) > 1:
        other_packages = ", ".join(package_of(other) for other in points[1:])
        raise JobError(f"{label}: {other_packages} gives it too; uninstall all but one")
    try:
        entry = point.load()
    except Exception as error:  # foreign code may raise any type, from anywhere
        reason = f"{type(error).__name__}: {error}"
        raise JobError(f"{label}: cannot be imported ({reason}); mend or uninstall the package") from error
    if not isinstance(entry, kind):
        problem = f"leads to a {type(entry).__name__}, where a {kind.__name__} is needed"
        raise JobError(f"{label}: {problem}; mend or uninstall the package")
    return entry


def faults_of_packages(registry: Registry[Any]) -> dict[str, str]:
    """Return name -> fault for the unusable entries that packages add to a registry. Imports every entry."""
    faults = {}
    for name, points in installed_entries(registry.group).items():
        if name in registry.data:
            packages = ", ".join(map(package_of, points))
            faults[name] = f"{name!r} of {packages} is not used: the project has one of that name; rename it"
            continue
        try:
            _loaded(registry.group, points, registry.kind)
        except JobError as error:
            faults[name] = str(error)
    return faults
