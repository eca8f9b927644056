"""Compares what engines hold with what the trainer meant to send, and names every tensor that is not equal.

Law 2: engine weights equal trainer weights under the version that they are served under. A missing, an extra and a
differing tensor are all violations. (Engines leave buffers that are never loaded, such as rotary tables, out of their
report. What the trainer only carries along they loaded themselves; a vision tower that a trainer sees with is compared
in engines of one rank.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime.core.errors import WeightSyncError
from slime.core.ports import RankChecksums
from slime.core.topology import EngineLayout, EngineRank
from slime.models.common.table import FamilyTable

NAMES_SHOWN = 8
"""Tensors of each kind that an error message names."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How one engine rank departs from what was meant. Resident names, sorted."""

    missing: tuple[str, ...]
    """Meant to be there, not reported."""
    extra: tuple[str, ...]
    """Reported, not meant to be there."""
    differing: tuple[str, ...]
    """Reported with another digest."""
    num_equal: int
    """Tensors that are as meant."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.differing)


def compare(expected: Mapping[str, str], actual: Mapping[str, str]) -> Difference:
    """Compares digests by resident name."""
    shared = sorted(set(expected) & set(actual))
    differing = tuple(n for n in shared if expected[n] != actual[n])
    return Difference(
        missing=tuple(sorted(set(expected) - set(actual))),
        extra=tuple(sorted(set(actual) - set(expected))),
        differing=differing,
        num_equal=len(shared) - len(differing),
    )


def require_equal(
    table: FamilyTable,
    expected: Mapping[EngineLayout, Mapping[EngineRank, Mapping[str, str]]],
    reports: Mapping[str, tuple[EngineLayout, Sequence[RankChecksums]]],
    *,
    version: int,
    transport: str,
    carried: Mapping[str, str] | None = None,
) -> None:
    """Raises one `WeightSyncError` that names every engine, rank and tensor that departs.

    `expected`: layout -> rank -> resident name -> digest; `reports`: engine url -> (its layout, what its ranks hold; a
    rank may report several times); `carried`: resident name -> digest of what the trainer reads but does not send, and
    an engine of one rank has to have loaded as it did.
    """
    complaints: list[str] = []
    departing: set[str] = set()
    for url, (layout, ranks) in reports.items():
        if problem := _misreported(layout, ranks):
            complaints.append(f"engine {url} {problem}")
            departing.add(url)
            continue
        for rank, reported in {(r.rank, tuple(sorted(r.checksums.items()))) for r in ranks}:
            alike = carried if carried and layout.num_ranks == 1 else {}
            held = {name: d for name, d in reported if name in alike or not table.carries(name)}
            difference = compare({**expected[layout][rank], **alike}, held)
            if difference:
                complaints.append(f"engine {url} rank {rank}: {describe(table, difference)}")
                departing.add(url)
    if complaints:
        error = WeightSyncError(
            f"got weights of version {version} by {transport} that differ from the trainer's, so they must not be "
            f"served: {'; '.join(sorted(complaints))}. The engines stay paused; sync again, or replace them"
        )
        error.engines = tuple(sorted(departing))
        raise error


def _misreported(layout: EngineLayout, ranks: Sequence[RankChecksums]) -> str | None:
    """What is wrong with who reported, in words; None if it is every rank of an engine of this layout."""
    named = ("tp_size", "pp_size", "dp_size")
    for report in ranks:
        if any(getattr(report.layout, name) != getattr(layout, name) for name in named):
            return f"says that it is of {report.layout}, it was started with {layout}"
    numbers = {rank: number for number, rank in enumerate(layout.ranks())}
    got = sorted({numbers.get(report.rank, -1) for report in ranks})
    return None if got == list(range(layout.num_ranks)) else f"reported ranks {got}, it has {layout.num_ranks}"


def describe(table: FamilyTable, difference: Difference) -> str:
    """One line: resident names with the HF tensors that they hold."""
    hf = {name: tuple(n for e in held for n in e.hf) for name, held in table.resident.items()}

    def some(names: tuple[str, ...]) -> str:
        shown = [n if hf.get(n, (n,)) == (n,) else f"{n} (holds {_listed(hf[n])})" for n in names[:NAMES_SHOWN]]
        return ", ".join(shown) + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "")

    kinds = (("differing", difference.differing), ("missing", difference.missing), ("extra", difference.extra))
    text = "; ".join(f"{kind}: {some(names)}" for kind, names in kinds if names)
    hint = " (no tensor is equal: do trainer and engine use the same dtype?)" if not difference.num_equal else ""
    return text + hint


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
