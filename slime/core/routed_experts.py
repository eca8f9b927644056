"""`RoutedExperts`: the experts that the engine selected for each token of a sequence in each layer.

An engine routes a token when it is fed in as input, so the last sampled token has no row. A sample's rows start at its
first token and are appended after each request (a turn, or the rest of an interrupted response). Existing rows are
never replaced, because a token's row must come from the weight version that sampled the next token. If newer weights
process the same tokens again, they select other experts, which do not match the recorded log-probs. Such rows are
marked as unrecorded, and the trainer routes those tokens itself.

Invariants
1. Row i belongs to token `start + i` and has one entry per layer. Entries of dense layers are meaningless.
2. A row is recorded completely or not at all. All entries of an unrecorded row are `not_recorded(dtype)`, which is not
   a valid expert number.
3. Arrays are read-only.
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
"""SGLang 0.5.16 sends base64-encoded int32 values of shape [tokens, layers, topk]."""


def dtype_for(num_experts: int) -> npt.DTypeLike:
    """Returns uint8 if it can represent all expert numbers and the marker for unrecorded rows, else int16."""
    return np.uint8 if num_experts < np.iinfo(np.uint8).max else np.int16


def not_recorded(dtype: npt.DTypeLike) -> int:
    """Returns the value that marks unrecorded rows."""
    return int(np.iinfo(dtype).max)


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """The model dimensions that determine the format of its routed experts."""

    num_experts: int
    """Routed experts per layer."""
    topk: int
    """Experts per token and layer."""
    sparse: tuple[bool, ...]
    """[L] whether each layer has routed experts."""

    def decode(self, text: str, *, start: int, num_rows: int) -> RoutedExperts:
        """Decodes `num_rows` rows from an engine's base64. The first row belongs to token `start`.

        Raises `DataError` for a wrong number of rows, an unknown expert, or a row that the engine did not fill in.
        """
        try:
            flat = np.frombuffer(base64.b64decode(text, validate=True), _ON_THE_WIRE)
        except (binascii.Error, ValueError) as error:
            raise DataError(f"routed experts are not base64-encoded int32 values: {error}") from error
        size = len(self.sparse) * self.topk
        if len(flat) != num_rows * size:
            raise DataError(
                f"the engine reported {len(flat)} routed experts for {num_rows} tokens, {len(self.sparse)} layers and "
                f"top-{self.topk} routing; the engine must serve the same model as --hf-checkpoint"
            )
        rows = flat.reshape(num_rows, len(self.sparse), self.topk)
        if rows.size and not (rows.min() >= 0 and rows.max() < self.num_experts):
            raise DataError(f"got experts {rows.min()} to {rows.max()}, but the model has {self.num_experts} experts")
        if self.topk > 1:
            unwritten = (rows[..., 0] == rows[..., 1]) & np.asarray(self.sparse)
            if unwritten.any():
                token, layer = np.argwhere(unwritten)[0].tolist()
                raise DataError(
                    f"the engine reported expert {rows[token, layer, 0]} twice for token {start + token} in layer "
                    f"{layer}, so it did not record that token; drop --use-rollout-routing-replay for this engine"
                )
        return RoutedExperts(rows.astype(dtype_for(self.num_experts)), start)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The selected experts for consecutive tokens of a sequence."""

    ids: Ids
    """[rows, L, topk] expert numbers."""
    start: int = 0
    """Index of the first row's token in the sequence."""
    read: tuple[int, int] | None = None
    """For an engine's response: (number of input tokens, weight version that processed them). Some of the input tokens
    may have been sampled by other versions. None: every row comes from the version that sampled the next token.
    """

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or self.ids.dtype not in (np.uint8, np.int16) or self.start < 0:
            raise DataError(
                f"routed experts from token {self.start} on have shape {self.ids.shape} and dtype {self.ids.dtype}; "
                "expected [rows, layers, topk] of uint8 or int16"
            )

    @property
    def end(self) -> int:
        """Index of the first token after the last row."""
        return self.start + len(self.ids)

    @property
    def recorded(self) -> npt.NDArray[np.bool_]:
        """[rows] whether each row is recorded."""
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
        """Raises `DataError` if the data is corrupt."""
        try:
            flat = np.frombuffer(base64.b64decode(data["ids"], validate=True), np.dtype(data["dtype"]))
            return cls(flat.reshape(data["shape"]), int(data["start"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"routed experts are corrupt: {type(error).__name__}: {error}") from error


def digests_of(ids: Ids) -> npt.NDArray[np.uint64]:
    """Returns one 64-bit digest per row, for comparing rows of the same dtype. NumPy releases the GIL while computing.

    Mixes each 64-bit word of a row with an invertible function, multiplies it by an odd constant for its position, and
    sums the products.
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
    more: RoutedExperts, versions: Sequence[int] | npt.NDArray[Any], first: int, num_read: int, read_under: int
) -> RoutedExperts:
    """Returns `more`, with a row marked as unrecorded if a version other than `read_under` sampled the next token.

    `versions`: weight versions of the tokens from index `first` on, negative where not sampled. `read_under`: the
    version that processed the first `num_read` tokens as input.
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
    versions: Sequence[int] | npt.NDArray[Any] = (),
    first: int = 0,
) -> RoutedExperts | None:
    """Appends the rows of `more` that `known` lacks. Both start at the first token; None means no rows.

    `versions`: weight versions of the tokens from index `first` on, negative where not sampled. If a token was sampled
    by a different version than the one that processed `more`, the experts behind its log-prob are unknown, and the row
    is marked as unrecorded. Missing rows between `known` and `more` are marked too.

    Raises `DataError` if layers or topk differ, or if there is a row for the last of `num_tokens` tokens, which no
    engine has processed as input yet.
    """
    if more is None:
        return known
    if more.end >= max(num_tokens, 1):
        raise DataError(
            f"got routed experts for {more.end} of {num_tokens} tokens, but the last token has not been routed yet"
        )
    done = 0 if known is None else len(known.ids)
    if known is not None and (known.ids.shape[1:], known.ids.dtype) != (more.ids.shape[1:], more.ids.dtype):
        raise DataError(
            f"cannot append routed experts {more.ids.shape} of {more.ids.dtype} to {known.ids.shape} of "
            f"{known.ids.dtype}; all experts of a sample must come from the same model"
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
