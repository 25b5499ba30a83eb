"""Results of a start of all ranks: per machine, and combined over all machines."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchtitan.launcher.hangs import Evidence, explain_hang
from torchtitan.process.exit import EXPLAINED, HUNG, STOPPED


@dataclass(frozen=True)
class ExitReport:
    """The end of a machine's ranks. Plain values, because machines send it to each other."""

    code: int
    cause: str = ""
    """The error, or empty."""
    rank: int = 0
    """The rank that caused the failure, as far as is known."""
    reached: int = 0
    """The last step that any rank completed."""
    by_signal: bool = False
    """True if a signal killed this rank: a root cause, not a consequence of another failure."""
    followed: bool = False
    """True if another machine had failed before, so that this end is only a consequence."""
    asked: bool = False
    """True if a stop was requested."""
    done: bool = False
    """True if every rank had reached its end, with all state saved. Later failures (of the plot, a tracker or leaving
    the process group) are not retried.
    """
    trained: bool = False
    """True if every rank had saved the last step, so that at most the export was left to do."""
    evidence: Evidence | None = None
    """Evidence of a hang."""

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_final(self) -> bool:
        """True if another start would not help or is not wanted."""
        return self.code == 0 or self.code in EXPLAINED or self.asked or self.trained


def read_report(fields: dict[str, Any]) -> ExitReport:
    """Invert `ExitReport.to_fields` after a transfer as JSON, which turns integer keys into strings."""
    evidence = fields["evidence"]
    if evidence is not None:
        by_rank = {
            name: {int(rank): value for rank, value in evidence[name].items()} for name in ("doing", "states", "logs")
        }
        evidence = Evidence(**evidence | by_rank)
    return ExitReport(**fields | {"evidence": evidence})


def combine_reports(reports: Sequence[ExitReport]) -> ExitReport:
    """Combine the ends of all machines, in the order of their reports, to the run's."""
    first = min(reports, key=_order)
    evidence = [report.evidence for report in reports if report.evidence is not None]
    cause, rank = explain_hang(evidence) if first.code == HUNG and evidence else (first.cause, first.rank)
    return replace(
        first,
        cause=cause,
        rank=rank,
        reached=max(report.reached for report in reports),
        asked=any(report.asked for report in reports),
        done=all(report.done for report in reports),
        trained=all(report.trained for report in reports),
    )


def _order(report: ExitReport) -> int:
    """Return a sort key: the end that best explains why the run ended comes first."""
    if report.code in EXPLAINED - STOPPED:
        return 0
    if report.code == HUNG:
        return 1
    if report.code == 0:
        return 6
    if report.code in STOPPED:
        return 5
    return 4 if report.followed else 2 + (not report.by_signal)
