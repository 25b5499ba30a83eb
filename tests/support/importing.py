"""What readers of other programs' jobs make of them, in tests."""

from typing import Any

from torchtitan.importers.translation import JobDraft


def difference(first: JobDraft, then: JobDraft) -> tuple[dict[str, Any], str]:
    """What the second has otherwise of the options, None where it has them not, and the notes that are new."""
    assert then.faults == [], then.faults
    keys = first.values.keys() | then.values.keys()
    values = {key: then.values.get(key) for key in keys if first.values.get(key) != then.values.get(key)}
    return values, " ".join(note for note in then.notes if note not in first.notes)
