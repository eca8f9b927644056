"""Splits a stream of named tensors into buckets of bounded size, so that no stage needs a second copy of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # transports are imported where torch is not
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some HF tensors, those of wider numbers first: laid end to end, each begins at a multiple of its numbers."""

    tensors: tuple[tuple[str, Tensor], ...]
    """(HF name, full tensor)."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(t.numel() * t.element_size() for _, t in self.tensors)


def split(
    named_tensors: Iterable[tuple[str, Tensor]], limit_bytes: int, together: Mapping[str, str] | None = None
) -> Iterator[Bucket]:
    """Buckets of at most `limit_bytes`, in order; a tensor larger than that travels alone.

    Neighbours of one value in `together` stay in one bucket, even beyond the limit.
    """
    together = together or {}
    assert limit_bytes > 0, f"bucket limit {limit_bytes}"
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        joined = bool(held) and name in together and together[name] == together.get(held[-1][0])
        if held and size + num_bytes > limit_bytes and not joined:
            yield _bucket(held)
            held, size = [], 0
        held.append((name, tensor.detach().contiguous()))
        size += num_bytes
    if held:
        yield _bucket(held)


def _bucket(held: list[tuple[str, Tensor]]) -> Bucket:
    return Bucket(tuple(sorted(held, key=lambda named: -named[1].element_size())))
