"""`Column`: a list of numbers as an array, as narrow as holds equal ones.

A Python list of floats takes 32 bytes a number, of token ids 36; an array takes 2 to 8, and a list of few different
numbers in a row next to nothing. `UnpackedList` lets a field of a record be either: who reads it gets a list, which is
the field's value from then on, and who knows of columns asks for the array.

Invariants
1. `Column.of(numbers).tolist() == numbers`, of one type: integers among floats are floats. What no array holds exactly,
   and booleans, stay a list.
2. Arrays are not written to after they were made: records, their copies and checkpoints share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST = 32
"""Numbers of the shortest list that is worth an array."""
LEAST_RUN = 8
"""Numbers of a run, in the mean, from which on runs are kept instead of numbers."""
Numbers = npt.NDArray[Any]
"""[n], of one of the types below, or of float64."""
_INTEGERS = (np.uint8, np.uint16, np.int32, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """Numbers that do not change."""

    values: Numbers
    """[n] all of them, or [k] one of each run of equal ones."""
    counts: npt.NDArray[np.int32] | None = None
    """[k] lengths of the runs."""

    @classmethod
    def of(cls, numbers: Sequence[Any]) -> Column | None:
        """A list as a column; None if no array has equal numbers (NaN, beyond 64 bits, no number), or of booleans."""
        try:
            array = np.asarray(numbers)
        except (ValueError, OverflowError):
            return None
        if array.ndim != 1 or array.dtype.kind not in "if":
            return None
        column = cls(_narrow_floats(array)) if array.dtype.kind == "f" else _integers(array)
        return column if column.tolist() == numbers else None

    def __len__(self) -> int:
        return len(self.values) if self.counts is None else int(self.counts.sum())

    @property
    def array(self) -> Numbers:
        """[n] all numbers."""
        return self.values if self.counts is None else np.repeat(self.values, self.counts)

    @property
    def distinct(self) -> Numbers:
        """[at most n] every number that is there, in the order of the list, some of them more than once."""
        return self.values

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        return self.values.nbytes + (0 if self.counts is None else self.counts.nbytes)

    def tolist(self) -> list[Any]:
        """A new list of Python numbers."""
        numbers: list[Any] = self.array.tolist()
        return numbers

    def __deepcopy__(self, _memo: object) -> Column:
        return self  # invariant 2


class UnpackedList:
    """A field that holds a list or a `Column`, over the slot of its class: read as a list, it is one from then on."""

    def __init__(self, slot: Any) -> None:
        """`slot`: the descriptor that a class with slots has for the field."""
        self._slot = slot

    def __get__(self, record: Any, owner: type | None = None) -> Any:
        if record is None:
            return self
        value = self._slot.__get__(record)
        if isinstance(value, Column):
            value = value.tolist()
            self._slot.__set__(record, value)
        return value

    def __set__(self, record: Any, value: Any) -> None:
        self._slot.__set__(record, value)

    def packed(self, record: Any) -> Any:
        """The value as it is held."""
        return self._slot.__get__(record)

    def pack(self, record: Any) -> None:
        """Holds a list of some length as a column, if one holds it exactly."""
        value = self._slot.__get__(record)
        if type(value) is list and len(value) >= LEAST and (column := Column.of(value)) is not None:
            self._slot.__set__(record, column)


def _narrow_floats(array: Numbers) -> Numbers:
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    return narrow if np.array_equal(narrow, array) else array.astype(np.float64)


def _integers(array: Numbers) -> Column:
    ends = np.flatnonzero(array[1:] != array[:-1])
    runs = (len(ends) + 1) * LEAST_RUN <= len(array)
    starts = np.concatenate(([0], ends + 1)) if runs else None
    values = array if starts is None else array[starts]
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    fits = (kind for kind in _INTEGERS if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    counts = None if starts is None else np.diff(starts, append=len(array)).astype(np.int32)
    return Column(values.astype(next(fits)), counts)
