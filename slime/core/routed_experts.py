"""`RoutedExperts`: the experts that the engine chose for each token of a sequence, layer by layer.

An engine chooses experts when it reads a token, so the last sampled token has no row. A sample has rows from its first
token on, appended after each request (a turn, or the rest of an interrupted response). Existing rows are never
replaced: the row of a token must come from the weight version that sampled the next token. If newer weights read the
same tokens again, they choose different experts, which do not match any trained log-prob. Such a row is dropped, and
the trainer routes that token itself.

Invariants
1. Row i belongs to token `start + i` and has one entry per layer; entries of dense layers have no meaning.
2. A row is recorded completely or not at all. In an unrecorded row all entries are `not_recorded(dtype)`, which is not
   the number of any expert.
3. Arrays are never written to.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slime.core.errors import DataError

Ids: TypeAlias = "npt.NDArray[np.uint8 | np.int16]"
"""[rows, L, topk]"""
_WORD, _ROWS_AT_ONCE = 8, 256
_MIXES = tuple((np.uint64(s), np.uint64(f)) for s, f in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)))
"""Shifts and factors of splitmix64 (Steele et al., 2014), for `digests_of`."""
_ON_THE_WIRE = np.dtype("<i4")
"""SGLang 0.5.16 sends base64 of int32, with one number per token, layer and choice."""


def dtype_for(num_experts: int) -> npt.DTypeLike:
    """Returns the narrower of uint8 and int16 that holds all expert numbers and the mark for unrecorded rows."""
    return np.uint8 if num_experts < np.iinfo(np.uint8).max else np.int16


def not_recorded(dtype: npt.DTypeLike) -> int:
    """Returns the number that marks unrecorded rows."""
    return int(np.iinfo(dtype).max)


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """The model's sizes that determine the format of its routed experts."""

    num_experts: int
    """Routed experts per layer."""
    topk: int
    """Experts per token and layer."""
    sparse: tuple[bool, ...]
    """[L] whether a layer has routed experts."""

    def decode(self, text: str, *, start: int, num_rows: int) -> RoutedExperts:
        """Decodes `num_rows` rows from an engine's base64; the first belongs to token `start`.

        Raises `DataError` for a wrong number of rows, an unknown expert, or a row that the engine never wrote.
        """
        try:
            flat = np.frombuffer(base64.b64decode(text, validate=True), _ON_THE_WIRE)
        except (binascii.Error, ValueError) as error:
            raise DataError(f"routed experts are not base64 of int32: {error}") from error
        size = len(self.sparse) * self.topk
        if len(flat) != num_rows * size:
            raise DataError(
                f"the engine reported {len(flat)} routed experts for {num_rows} tokens of {len(self.sparse)} layers "
                f"with {self.topk} each; engine and --hf-checkpoint must be the same model"
            )
        rows = flat.reshape(num_rows, len(self.sparse), self.topk)
        if rows.size and not (rows.min() >= 0 and rows.max() < self.num_experts):
            raise DataError(f"the engine reported experts {rows.min()} to {rows.max()} of {self.num_experts}")
        if self.topk > 1:
            unwritten = (rows[..., 0] == rows[..., 1]) & np.asarray(self.sparse)
            if unwritten.any():
                token, layer = np.argwhere(unwritten)[0].tolist()
                raise DataError(
                    f"the engine reported expert {rows[token, layer, 0]} twice for token {start + token} in layer "
                    f"{layer}, so it did not record that token; leave out --use-rollout-routing-replay with this engine"
                )
        return RoutedExperts(rows.astype(dtype_for(self.num_experts)), start)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The chosen experts for consecutive tokens of a sequence."""

    ids: Ids
    """[rows, L, topk] expert numbers."""
    start: int = 0
    """Index of the first row's token in the sequence."""
    read: tuple[int, int] | None = None
    """For an engine's response: (number of tokens in the request, weight version that read them). Other versions may
    have sampled some of these tokens. None: every row comes from the version that sampled the next token.
    """

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or self.ids.dtype not in (np.uint8, np.int16) or self.start < 0:
            raise DataError(
                f"routed experts from token {self.start} on have shape {self.ids.shape} and dtype {self.ids.dtype}; "
                "it must be [rows, layers, topk] of uint8 or int16"
            )

    @property
    def end(self) -> int:
        """Index of the token after the token of the last row."""
        return self.start + len(self.ids)

    @property
    def recorded(self) -> npt.NDArray[np.bool_]:
        """[rows] whether the row is recorded."""
        recorded: npt.NDArray[np.bool_] = self.ids[:, 0, 0] != not_recorded(self.ids.dtype)
        return recorded

    def upto(self, end: int) -> RoutedExperts:
        """Returns the rows before token `end`."""
        return replace(self, ids=self.ids[: max(0, end - self.start)])

    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[Any]:
        return np.asarray(self.ids, dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        same = self.start == other.start and self.ids.dtype == other.ids.dtype
        return same and np.array_equal(self.ids, other.ids)

    def __deepcopy__(self, _memo: object) -> RoutedExperts:
        return self  # invariant 3

    def to_dict(self) -> dict[str, Any]:
        text = base64.b64encode(self.ids.tobytes()).decode()
        return {"start": self.start, "dtype": str(self.ids.dtype), "shape": list(self.ids.shape), "ids": text}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RoutedExperts:
        """Raises `DataError` if the data is damaged."""
        try:
            flat = np.frombuffer(base64.b64decode(data["ids"], validate=True), np.dtype(data["dtype"]))
            return cls(flat.reshape(data["shape"]), int(data["start"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"routed experts are damaged: {type(error).__name__}: {error}") from error


def digests_of(ids: Ids) -> npt.NDArray[np.uint64]:
    """Returns a 64-bit digest per row [rows], to compare rows of one dtype. NumPy releases the GIL while it computes.

    Mixes each word of a row with an invertible function, multiplies the word by an odd number for its position, and
    sums up the products.
    """
    flat = np.ascontiguousarray(ids).reshape(len(ids), math.prod(ids.shape[1:])).view(np.uint8)
    out = np.empty(len(flat), np.uint64)
    num_words = -(-flat.shape[1] // _WORD)
    times = np.random.default_rng(0).integers(0, 2**64, num_words, np.uint64) | np.uint64(1)
    for start in range(0, len(flat), _ROWS_AT_ONCE):
        part = flat[start : start + _ROWS_AT_ONCE]
        padded = np.zeros((len(part), num_words * _WORD), np.uint8)
        padded[:, : part.shape[1]] = part
        words = padded.view(np.uint64)
        for shift, factor in _MIXES:
            words ^= words >> shift
            words *= factor
        words ^= words >> np.uint64(32)
        words *= times
        out[start : start + len(part)] = words.sum(axis=1, dtype=np.uint64)
    return out


def without_newer(
    more: RoutedExperts, versions: Sequence[int], first: int, num_read: int, read_under: int
) -> RoutedExperts:
    """Returns `more`, with a row marked as unrecorded if a version other than `read_under` sampled the next token.

    `versions`: weight versions of the tokens from index `first` on, negative where not sampled. `read_under`: the
    version that read the first `num_read` tokens of the sequence.
    """
    sampled_by = np.asarray(versions[: max(0, num_read - first)])
    rows = first - 1 + np.flatnonzero((sampled_by >= 0) & (sampled_by != read_under)) - more.start
    rows = rows[(rows >= 0) & (rows < len(more.ids))]
    if not len(rows):
        return more
    ids = more.ids.copy()
    ids[rows] = not_recorded(ids.dtype)
    return replace(more, ids=ids)


def join(
    known: RoutedExperts | None,
    more: RoutedExperts | None,
    num_tokens: int,
    versions: Sequence[int] = (),
    first: int = 0,
) -> RoutedExperts | None:
    """Returns the rows of a sequence from its first token on: `known`, then new rows of `more`. None: no rows.

    `versions`: weight versions of the tokens from index `first` on, negative where not sampled. If the weights that
    sampled a token are not those that read `more`, the experts behind its log-prob are unknown, and the row is marked
    as unrecorded. Missing rows between `known` and `more` are marked as well.

    Raises `DataError` if layers or topk differ, or if there is a row for the last of `num_tokens` tokens, which no
    engine has read yet.
    """
    if more is None:
        return known
    if more.end >= max(num_tokens, 1):
        raise DataError(
            f"there are routed experts for {more.end} of {num_tokens} tokens, but no engine has read the last token yet"
        )
    done = 0 if known is None else len(known.ids)
    if known is not None and (known.ids.shape[1:], known.ids.dtype) != (more.ids.shape[1:], more.ids.dtype):
        raise DataError(
            f"routed experts of shape {more.ids.shape} and {more.ids.dtype} follow {known.ids.shape} and "
            f"{known.ids.dtype}; all experts of a sample must come from one model"
        )
    if more.end <= done:
        return known
    if more.read is not None:
        more = without_newer(more, versions, first, *more.read)
    missing = max(0, more.start - done)
    parts = [more.ids[max(0, done - more.start) :]]
    if missing:
        parts.insert(0, np.full((missing, *more.ids.shape[1:]), not_recorded(more.ids.dtype), more.ids.dtype))
    if known is not None:
        parts.insert(0, known.ids)
    return RoutedExperts(np.concatenate(parts))
