"""What a token's label is, by what the task learns: the next token (packing.batch_arrays), the token itself, or the
class of its record.
"""

from typing import Literal

import numpy as np

from torchtitan.datasets.packing import IGNORE, batch_arrays

Labels = Literal["next", "same", "first", "last"]
"""The next token, the token itself, or the class of a record as that of its first or its last token."""
Begins = tuple[np.ndarray, np.ndarray]


def own_arrays(
    rows: np.ndarray, begins: Begins, document_mask: bool, vocab_size: int, trained: np.ndarray | None
) -> list[np.ndarray]:
    """As batch_arrays, but each trained token is its own label, for a model from which some are hidden."""
    arrays = batch_arrays(rows, begins, document_mask, vocab_size)
    known = True if trained is None else trained[:, :-1]
    arrays[1] = np.where(known, arrays[0], IGNORE)
    return arrays


def class_arrays(
    rows: np.ndarray, begins: Begins, vocab_size: int, trained: np.ndarray, pad_id: int, first: bool
) -> list[np.ndarray]:
    """As batch_arrays with a document mask, of records that end with their class, which alone is trained: the class is
    the label of the record's first token, or of its last one, and in its own place stands padding.
    """
    row, column = np.nonzero(trained)
    classes, rows = rows[row, column], rows.copy()
    rows[row, column] = pad_id
    apart = np.concatenate([begins[0], row]), np.concatenate([begins[1], column])
    arrays = batch_arrays(rows, apart, True, vocab_size)
    _, labels, _, positions = arrays
    labels[:] = IGNORE
    last = column - 1
    labels[row, last - positions[row, last] if first else last] = classes
    return arrays
