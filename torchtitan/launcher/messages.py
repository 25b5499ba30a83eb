"""The messages between the launchers of several machines. Each kind is a dataclass: its fields, their types and bounds.

A line from the network becomes one of the kinds that its receiver expects, or it is a `MalformedLine`: not JSON, an
unknown kind, a field too many or too few, a value of another type or out of bounds. Nothing in a message is executed,
and a name for a file is a plain one.

PROTOCOL is increased with every change of what launchers send, so that two versions refuse each other by name.
"""

import importlib.metadata
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from torchtitan.core.bounded import Count, ExitCode, Seconds
from torchtitan.launcher.hangs import ExitReport, PlainName
from torchtitan.process.exit import STOP_SIGNALS
from torchtitan.process.ranks import Restart

PROTOCOL = 3
MAX_TEXT = 1 << 20
"""Characters of a text. `clip_text` cuts what may be longer."""


def launcher_version() -> str:
    """Return what two launchers have to have in common."""
    try:
        package = importlib.metadata.version("torchtitan-toml")
    except importlib.metadata.PackageNotFoundError:  # sources that are not installed
        package = "of no version"
    return f"torchtitan {package}, protocol {PROTOCOL}"


def clip_text(text: str) -> str:
    return text[:MAX_TEXT]


def _check_signal(number: int) -> int:
    if number not in STOP_SIGNALS:
        raise ValueError(f"{number} is no stop signal")
    return number


Machine = Annotated[int, Field(ge=0, lt=1 << 20)]
StopSignal = Annotated[int, AfterValidator(_check_signal)]
Port = Annotated[int, Field(gt=0, lt=1 << 16)]
Hex256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
SourceText = Annotated[str, Field(pattern="^hf://", max_length=1000)]
VersionText = Annotated[str, Field(max_length=100)]


@dataclass(frozen=True, kw_only=True)
class Message:
    """Any message. Its fields are read strictly, and so are those of the dataclasses in it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, str_max_length=MAX_TEXT
    )
    kind: str


# The greeting, before which neither end knows the other


@dataclass(frozen=True, kw_only=True)
class Challenge(Message):
    kind: Literal["challenge"] = "challenge"
    nonce: Hex256
    version: VersionText


@dataclass(frozen=True, kw_only=True)
class Proof(Message):
    kind: Literal["proof"] = "proof"
    nonce: Hex256
    version: VersionText
    proof: Hex256


@dataclass(frozen=True, kw_only=True)
class Welcome(Message):
    kind: Literal["welcome"] = "welcome"
    proof: Hex256


@dataclass(frozen=True, kw_only=True)
class Stranger(Message):
    """The other end has proved nothing."""

    kind: Literal["stranger"] = "stranger"


# Events: from another machine to the first


@dataclass(frozen=True, kw_only=True)
class Event(Message):
    attempt: Count = 0
    """Number of the start of the ranks that the sender knows last. Events of an earlier start are ignored."""


@dataclass(frozen=True, kw_only=True)
class Here(Event):
    """The first message of a machine."""

    kind: Literal["here"] = "here"
    index: Machine
    count: Machine
    """Number of machines, as this one was given it."""
    ranks: Count
    """Number of its ranks."""
    host: Annotated[str, Field(max_length=255)]
    refused: str = ""
    """Why this machine refuses the job, or empty."""


@dataclass(frozen=True, kw_only=True)
class Stop(Event):
    """A stop was requested; in either direction."""

    kind: Literal["stop"] = "stop"
    number: StopSignal


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """A rank has failed."""

    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, kw_only=True)
class Hung(Event):
    """No rank of the machine makes progress; sent at every poll."""

    kind: Literal["hung"] = "hung"
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """All ranks of the machine have ended."""

    kind: Literal["end"] = "end"
    report: ExitReport


# Orders: from the first machine to the others


@dataclass(frozen=True, kw_only=True)
class Start(Message):
    kind: Literal["start"] = "start"
    attempt: Count
    port: Port
    """Of the ranks' store."""
    restart: Restart | None
    commits: dict[SourceText, Commit] = field(default_factory=dict)
    """Of the sources on the hub, as the first machine has chosen them."""


@dataclass(frozen=True, kw_only=True)
class Follow(Message):
    """Another machine has failed: end the ranks."""

    kind: Literal["follow"] = "follow"


@dataclass(frozen=True, kw_only=True)
class Collect(Message):
    """All ranks hang: write their evidence to a folder of this name, and end them."""

    kind: Literal["collect"] = "collect"
    name: PlainName
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class Waiting(Message):
    """The start is delayed; a line to print."""

    kind: Literal["waiting"] = "waiting"
    text: str


@dataclass(frozen=True, kw_only=True)
class Leave(Message):
    kind: Literal["leave"] = "leave"
    code: ExitCode
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Alive(Message):
    """The sender is alive; in both directions, so that a silent connection is known to be dead."""

    kind: Literal["alive"] = "alive"


class MalformedLine(Exception):
    """A line that is none of the expected messages; the text says in what."""


@dataclass(frozen=True)
class Inbox:
    """The kinds of messages that one end of a connection receives, in lines of at most `max_bytes`."""

    kinds: tuple[type[Message], ...]
    max_bytes: int

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        kinds: Any = Union[self.kinds]  # noqa: UP007  (of a tuple)
        by_kind: Any = Annotated[kinds, Field(discriminator="kind")] if len(self.kinds) > 1 else kinds
        return TypeAdapter(by_kind)

    def parse(self, line: bytes) -> Any:
        """Return the message in a line. Raises `MalformedLine`."""
        try:
            return self._adapter.validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            text = f"{place}: {first['msg']}" if place else first["msg"]
            raise MalformedLine(text[:200].encode("unicode_escape").decode()) from None  # for a terminal


GREETING_BYTES = 1 << 12
"""Longest line of an end that has not proved yet that it belongs to the run."""
GREETING_TO_FIRST = Inbox((Proof,), GREETING_BYTES)
GREETING_TO_OTHER = Inbox((Challenge, Welcome, Stranger), GREETING_BYTES)
INTRODUCTION = Inbox((Here, Alive), 2 * MAX_TEXT)
EVENTS = Inbox((Stop, Failed, Hung, Ended, Alive), 1 << 27)
"""After a hang a machine sends what is needed of the flight recorder's log of each of its ranks."""
ORDERS = Inbox((Start, Stop, Follow, Collect, Waiting, Leave, Alive), 2 * MAX_TEXT)


def dump_message(message: Message) -> bytes:
    """Return the message as one line without its end. What no text can hold (half a surrogate of a file's name) becomes
    a question mark.
    """
    return json.dumps(asdict(message), ensure_ascii=False).encode(errors="replace")
