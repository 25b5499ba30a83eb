"""Hardware that jobs run on: peaks, memory and links of a device and of its machine. Imports no torch.

Each TOML file in torchtitan/hardware describes one device. MFU, memory limits and times of messages come from these
files alone. A device that is not among them is described by a file of the user in the same format; `torchtitan bench
--hardware FILE` measures this machine and writes one.
"""

import re
from dataclasses import field, replace
from difflib import get_close_matches
from functools import cache
from math import log2, prod
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from torchtitan.core.errors import JobError
from torchtitan.core.files import read_file

FOLDER = Path(__file__).parent.parent / "hardware"
LARGEST_FILE = 2**16
"""Largest hardware file in bytes."""
ASSUMED = "assumed"
"""Evidence of figures without a measurement. Other classes: "fitted on n rows", "measured on ..."."""

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
_Above0 = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Curve:
    """A share of a peak that grows with the sizes of an operation and saturates."""

    most: _Share
    """Share that very large operations reach."""
    half: tuple[_Above0, ...]
    """For each size, the value at which half of `most` is reached."""
    evidence: str = ASSUMED

    def share(self, *sizes: float) -> float:
        """Return most * s1 / (s1 + h1) * s2 / (s2 + h2) ... for as many sizes as the curve has."""
        return self.most * prod(size / (size + half) for size, half in zip(sizes, self.half, strict=True))


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Peak:
    """FLOP/s of dense matrix products by type of the factors; None where the device lacks the type."""

    bfloat16: _Above0
    float16: _Above0 | None = None
    float8: _Above0 | None = None
    tf32: _Above0 | None = None
    float32: _Above0


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Link:
    """The connection of a device to others."""

    bandwidth: _Above0
    """Bytes/s that a device sends, in one direction, by the data sheet."""
    latency: _Above0
    """Seconds of a hop, from a rank to the next one in a ring or a tree."""
    reached: _Share = 1.0
    """Share of the bandwidth that large messages reach."""
    evidence: str = ASSUMED
    """Evidence of `latency` and `reached`."""

    @property
    def reached_bandwidth(self) -> float:
        return self.bandwidth * self.reached


CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class MeasuredCollective:
    """A measured collective, which replaces the figures of a link for messages like it."""

    kind: CollectiveKind
    ranks: Annotated[int, Field(ge=2)]
    machines: Annotated[int, Field(ge=1)] = 1
    latency: _Above0
    """Seconds of a hop, as of a `Link`."""
    bandwidth: _Above0
    """Bytes/s that large messages reach: of a rank, or of its share of the network where there are several machines."""
    smallest: _Above0
    """Bytes of the smallest and the largest message that was measured: of the whole gathered, reduced, summed or
    exchanged tensor."""
    largest: _Above0

    def __post_init__(self) -> None:
        if self.ranks % self.machines or self.smallest > self.largest:
            group = f"{self.ranks} ranks on {self.machines} machines, {self.smallest:g} to {self.largest:g} bytes"
            raise ValueError(f"given {group}; allowed: equally many ranks on each machine, and smallest <= largest")

    @property
    def reached_bandwidth(self) -> float:
        return self.bandwidth

    def distance(self, ranks: float, machines: float, size: float) -> tuple[float, float]:
        """Return how far a group is from the measured one, then how far a message is from the measured sizes.

        Both are in doublings.
        """
        group = abs(log2(ranks / self.ranks)) + abs(log2(machines / self.machines))
        return group, max(0.0, log2(self.smallest / size), log2(size / self.largest))


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class MeasuredCollectives:
    """Measured collectives. The version says what their figures mean."""

    version: Literal[1]
    rows: tuple[MeasuredCollective, ...]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Curves:
    """Shares of the peak in float32, of a device on which they differ from those of types with fewer bits."""

    products: Curve
    attention: Curve


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Hardware:
    """A device, and the machine and network that it is in."""

    name: str
    """Name of the file without its ending. Users choose hardware by this name."""
    title: str
    chip: str = ""
    """Name of the chip and its power. Files of the same chip share fitted factors (planner/time/measured_runs.py)."""
    device_names: tuple[str, ...] = ()
    """Regular expressions that search in the name that torch reports for a GPU; none for a CPU."""
    peak: Peak
    memory_gib: _Above0
    """Memory that a process can use, in GiB: what torch reports, which is less than the data sheet's GB."""
    memory_bandwidth: _Above0
    """Bytes/s."""
    devices_per_machine: Annotated[int, Field(ge=1)]
    machine_link: Link
    """To devices of the same machine."""
    network_link: Link
    """To other machines, a device's share of the network cards."""
    collectives: MeasuredCollectives | None = None
    """Collectives that were measured; others take the figures of the links."""
    products: Curve = field(default_factory=lambda: Curve(most=0.8, half=(256, 256, 256)))
    """Share of the peak in a product of matrices [m, k] and [k, n]. Sizes: m, n, k."""
    attention: Curve = field(default_factory=lambda: Curve(most=0.45, half=(256,)))
    """Share of the peak in attention. Size: keys of a query."""
    memory_bound: Curve = field(default_factory=lambda: Curve(most=0.85, half=(8e6,)))
    """Share of the memory bandwidth in elementwise operations, sums and copies. Size: bytes."""
    float32: Curves | None = None
    """Products and attention in float32; None if their shares of the peak are those of other types."""
    cores: Annotated[int, Field(ge=1)] | None = None
    """Cores that the ranks of a machine share, for a CPU: its peaks and its memory bandwidth are of one of them. None
    if each rank has a device."""
    price: _Above0 | None = None
    """Price of a device for an hour, in any currency."""

    def slowdown(self, ranks: int) -> float:
        """Return the seconds of a rank's computation relative to those on a device, or on a core if ranks share cores.

        The launcher gives each rank cores // ranks threads; more ranks than cores take turns.
        """
        if self.cores is None:
            return 1.0
        ranks = min(ranks, self.devices_per_machine)
        return max(ranks / self.cores, 1 / max(1, self.cores // ranks))

    def with_speeds(self, inside: float = 1.0, between: float = 1.0, latency: float = 1.0) -> "Hardware":
        """Return the hardware with multiples of the bandwidths inside and between machines, and of all latencies."""

        def scaled(link: Any, factor: float) -> Any:
            return replace(link, bandwidth=factor * link.bandwidth, latency=latency * link.latency)

        collectives = self.collectives
        if collectives is not None:
            rows = tuple(scaled(row, inside if row.machines == 1 else between) for row in collectives.rows)
            collectives = replace(collectives, rows=rows)
        links = {"machine_link": scaled(self.machine_link, inside), "network_link": scaled(self.network_link, between)}
        return replace(self, **links, collectives=collectives)

    def matches(self, device_name: str) -> bool:
        """Return whether torch reports this device by `device_name`."""
        return any(re.search(pattern, device_name) for pattern in self.device_names)


_HARDWARE = TypeAdapter(Hardware)


def known_hardware() -> list[str]:
    """Return the names of the hardware that the package describes, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_hardware(name_or_path: str) -> Hardware:
    """Load known hardware by name, or a file by its path. Raises JobError, which lists the names."""
    name = name_or_path.lower()
    if name in known_hardware():
        return _load_known(name)
    path = Path(name_or_path).expanduser()
    if path.suffix != ".toml":
        names = ", ".join(known_hardware())
        remedy = f"or a .toml file like {FOLDER / 'h100-80.toml'}, as `torchtitan bench --hardware` writes"
        completions = [full_name for full_name in known_hardware() if full_name.startswith(name)]
        near = completions or get_close_matches(name, known_hardware(), n=1)
        question = f"; did you mean {near[0]}?" if near else ""
        raise JobError(f"--gpu: given {name_or_path!r}; allowed: {names}, {remedy}{question}")
    return _load(path)


def find_hardware(device_name: str) -> Hardware | None:
    """Return the known hardware that torch reports by this name, or None."""
    return next((hardware for hardware in map(_load_known, known_hardware()) if hardware.matches(device_name)), None)


@cache
def _load_known(name: str) -> Hardware:
    return _load(FOLDER / f"{name}.toml")


def _load(path: Path) -> Hardware:
    """Read and check a file. Raises JobError."""
    remedy = f"{FOLDER / 'h100-80.toml'} shows the format"
    try:
        table = tomli.loads(read_file(path, LARGEST_FILE).decode())
        hardware = _HARDWARE.validate_python({**table, "name": path.stem})
        for pattern in hardware.device_names:
            re.compile(pattern)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].lower()}" for fault in error.errors())
        raise JobError(f"{path}: {'; '.join(faults)}; {remedy}") from None
    except JobError:
        raise
    except (ValueError, re.error) as error:
        raise JobError(f"{path}: is not TOML of hardware ({error}); {remedy}") from None
    sizes = {"products": 3, "attention": 1, "memory_bound": 1}
    curves = {name: getattr(hardware, name) for name in sizes}
    if hardware.float32:
        curves |= {f"float32.{name}": getattr(hardware.float32, name) for name in ("products", "attention")}
    for name, curve in curves.items():
        number = sizes[name.rpartition(".")[2]]
        if len(curve.half) != number:
            raise JobError(f"{path}: {name}.half has {number} value{'s' * (number > 1)}; {remedy}")
    return hardware
