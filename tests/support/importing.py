"""Compare two jobs that importers have translated."""

from typing import Any

from torchtitan.plugins.importers.translation import JobDraft


def difference(first: JobDraft, then: JobDraft) -> tuple[dict[str, Any], str]:
    """Return the second job's differing options, None where unset, and its additional notes."""
    assert then.faults == [], then.faults
    keys = first.values.keys() | then.values.keys()
    values = {key: then.values.get(key) for key in keys if first.values.get(key) != then.values.get(key)}
    return values, " ".join(note for note in then.notes if note not in first.notes)
