"""`Column`: a list of numbers stored as a compact array.

A Python list takes 32 bytes per float and 36 bytes per token id. An array takes 2 to 8 bytes per number, and runs of
equal numbers take almost no memory. A record field with an `UnpackedList` descriptor contains a list or a column.
Reading it permanently converts a column to a list. Code that works on arrays uses `packed` instead.

Invariants
1. `Column.of(numbers).tolist() == numbers`, except that integers among floats become floats. Lists with booleans, or
   with numbers that an array cannot represent exactly, stay lists.
2. Arrays are read-only, because records, their copies and checkpoints share them.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST = 32
"""Shorter lists are not converted."""
EXACT = 2**53
"""Floats represent every integer below."""
LEAST_RUN = 8
"""Minimum mean run length for run-length encoding."""
Numbers = npt.NDArray[Any]
"""[n] of float32, float64 or one of `_INTEGERS`."""
_INTEGERS = (np.uint8, np.uint16, np.int32, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    values: Numbers
    """[n] all numbers, or with run-length encoding [k] one number per run."""
    counts: npt.NDArray[np.int32] | None = None
    """[k] run lengths. None: not run-length encoded."""

    @classmethod
    def of(cls, numbers: Sequence[Any]) -> Column | None:
        """Returns None if no array holds the list exactly (booleans, NaN, integers beyond 64 bits, other types)."""
        try:
            array = _array_of(numbers)
        except (ValueError, OverflowError):
            return None
        if array.ndim != 1 or array.dtype.kind not in "if":
            return None
        column = cls.of_array(array)
        if array.dtype.kind == "i" or not len(array) or np.abs(array).max() < EXACT:  # false for NaN
            return column
        return column if column.tolist() == numbers else None

    @classmethod
    def of_array(cls, array: Numbers) -> Column:
        """Packs a copy of integers, or of floats without NaN."""
        return cls(_narrow_floats(array)) if array.dtype.kind == "f" else _integers(array)

    def __len__(self) -> int:
        return len(self.values) if self.counts is None else int(self.counts.sum())

    @property
    def array(self) -> Numbers:
        """[n] of int32, int64, float32 or float64. Unsigned numbers would wrap at -1, which means "not sampled"."""
        signed = self.values.astype(np.int32) if self.values.dtype.kind == "u" else self.values
        return signed if self.counts is None else np.repeat(signed, self.counts)

    @property
    def distinct(self) -> Numbers:
        """[at most n] every number that occurs, in order of appearance; a number can occur again later."""
        return self.values

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.counts is None else self.counts.nbytes)

    def tolist(self) -> list[Any]:
        numbers: list[Any] = self.array.tolist()
        return numbers

    def __deepcopy__(self, _memo: object) -> Column:
        return self  # invariant 2


class GrowingColumn(Sequence[Any]):
    """Numbers of one type, to which others are appended in amortised constant time. Reads like a list."""

    __slots__ = ("_num", "_values")

    def __init__(self, kind: npt.DTypeLike, numbers: npt.ArrayLike = ()) -> None:
        self._values, self._num = np.array(numbers, kind), len(np.asarray(numbers))

    @property
    def array(self) -> Numbers:
        """The numbers as a read-only view, which is valid until `shorten_to`."""
        view = self._values[: self._num]
        view.flags.writeable = False
        return view

    def extend(self, numbers: npt.ArrayLike) -> None:
        new = np.asarray(numbers, self._values.dtype)
        end = self._num + len(new)
        if end > len(self._values):
            grown = np.empty(max(end, 2 * len(self._values), LEAST), self._values.dtype)
            grown[: self._num] = self._values[: self._num]
            self._values = grown
        self._values[self._num : end] = new
        self._num = end

    def shorten_to(self, num: int) -> None:
        """Keeps only the first `num` numbers."""
        self._num = min(num, self._num)

    def upto(self, num: int) -> GrowingColumn:
        """Returns another column with the first `num` numbers."""
        return GrowingColumn(self._values.dtype, self._values[: min(num, self._num)])

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, at: Any) -> Any:
        return self.array[at].tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array.tolist())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Numbers:
        return np.array(self.array, dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(other) == self._num and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"GrowingColumn({self._values.dtype}, {self.array.tolist()})"


class UnpackedList:
    """Descriptor for a slot that contains a list or a `Column`. Reading it permanently converts a column to a list."""

    def __init__(self, slot: Any, check: Callable[[Any, Any], object] | None = None) -> None:
        """`slot`: the field's original slot descriptor. `check`: gets the record and each value that is set, except
        None and columns, and raises an error if it is wrong.
        """
        self._slot, self._check = slot, check

    def __get__(self, record: Any, owner: type | None = None) -> Any:
        if record is None:
            return self
        value = self._slot.__get__(record)
        if isinstance(value, Column):
            value = value.tolist()
            self._slot.__set__(record, value)
        return value

    def __set__(self, record: Any, value: Any) -> None:
        if self._check is not None and value is not None and not isinstance(value, Column):
            self._check(record, value)
        self._slot.__set__(record, value)

    def packed(self, record: Any) -> Any:
        """Returns the stored list or `Column` without converting it."""
        return self._slot.__get__(record)

    def pack(self, record: Any) -> None:
        """Converts a list of at least `LEAST` numbers to a column if a column can represent them exactly."""
        value = self._slot.__get__(record)
        if type(value) is list and len(value) >= LEAST and (column := Column.of(value)) is not None:
            self._slot.__set__(record, column)


def _array_of(numbers: Sequence[Any]) -> Numbers:
    """Returns `np.asarray` of numbers, in a third of the time for lists of integers or of floats.

    NumPy first looks at each number for a common type, which `bytes` and `array` need not: they refuse other types.
    """
    first = numbers[0] if type(numbers) is list and numbers else None
    with contextlib.suppress(TypeError, OverflowError):
        if isinstance(first, int) and not isinstance(first, bool):
            if numbers.count(first) == len(numbers):
                return np.full(len(numbers), first, np.int64)
            with contextlib.suppress(ValueError):  # above 255, or negative
                return np.frombuffer(bytes(numbers), np.uint8).astype(np.int64)
            return np.frombuffer(array("q", numbers), np.int64)
        if isinstance(first, float):
            return np.frombuffer(array("d", numbers), np.float64)
    return np.asarray(numbers)


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
