"""How a start of all ranks ended: on one machine, and of all machines together."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchtitan.launcher.hangs import Evidence, explain
from torchtitan.process.exit import EXPLAINED, HUNG, STOPPED


@dataclass(frozen=True)
class End:
    """Of the ranks of a machine. Plain values, as machines tell it to each other."""

    code: int
    cause: str = ""
    """What went wrong, if anything did."""
    rank: int = 0
    """Whose fault it was, as far as is known."""
    reached: int = 0
    """The last step that was done on any rank."""
    by_signal: bool = False
    """Whether that rank was killed, which is nobody's consequence."""
    followed: bool = False
    """Whether another machine had failed before, so that this end says nothing of its own."""
    asked: bool = False
    """Whether somebody wanted this end."""
    done: bool = False
    """Whether every rank had come to its end, all saved: what fails there (the picture, a tracker, leaving the world)
    does not come back by another start."""
    trained: bool = False
    """Whether every rank had saved the last step, so that at most the export was left to do."""
    evidence: Evidence | None = None
    """Of a hang."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_final(self) -> bool:
        """Whether another start would be no use, or not wanted."""
        return self.code == 0 or self.code in EXPLAINED or self.asked or self.trained


def read_end(fields: dict[str, Any]) -> End:
    """The inverse of `End.plain`, after a journey as JSON, which knows no numbers as keys."""
    evidence = fields["evidence"]
    if evidence is not None:
        of_ranks = {
            name: {int(rank): value for rank, value in evidence[name].items()} for name in ("doing", "states", "logs")
        }
        evidence = Evidence(**evidence | of_ranks)
    return End(**fields | {"evidence": evidence})


def together(ends: Sequence[End]) -> End:
    """The run's, of its machines' in the order in which they were told."""
    first = min(ends, key=_order)
    seen = [end.evidence for end in ends if end.evidence is not None]
    cause, rank = explain(seen) if first.code == HUNG and seen else (first.cause, first.rank)
    return replace(
        first,
        cause=cause,
        rank=rank,
        reached=max(end.reached for end in ends),
        asked=any(end.asked for end in ends),
        done=all(end.done for end in ends),
        trained=all(end.trained for end in ends),
    )


def _order(end: End) -> int:
    """What says most about why a run ended comes first."""
    if end.code in EXPLAINED - STOPPED:
        return 0
    if end.code == HUNG:
        return 1
    if end.code == 0:
        return 6
    if end.code in STOPPED:
        return 5
    return 4 if end.followed else 2 + (not end.by_signal)
