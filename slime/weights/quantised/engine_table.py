"""The weight table of an engine that serves quantised weights: a row for each part of a quantised weight.

Everything that reads a table goes on to work: names and shapes of what is sent, shares and stages of ranks, fusing, and
with these the digests (`weights.engine_layout`). Its Megatron names do not name parameters: it
describes what travels and what an engine holds, beside the table that describes the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from slime.core.errors import ConfigError
from slime.models.common.table import Entry, FamilyTable, Row
from slime.weights.quantised.format import QuantisedFormat


def engine_table(table: FamilyTable, quantised: QuantisedFormat | None) -> FamilyTable:
    """`table` as engines hold it. Raises `ConfigError` for what they could not hold so."""
    if quantised is None:
        return table
    unknown = sorted(n for n in quantised.names - set(table.hf_names) if not table.ignores(n))
    if unknown:
        raise ConfigError(f"got quantised weights {unknown[:4]} ({len(unknown)} of them), which the model has not")
    _check_fused(table, quantised)

    def parts(rows: Iterable[Row], layer: int | None) -> tuple[Row, ...]:
        return tuple(part for row in rows for part in _parts(row, layer, quantised))

    return dataclasses.replace(
        table,
        before=parts(table.before, None),
        layers=tuple(parts(rows, number) for number, rows in enumerate(table.layers)),
        after=parts(table.after, None),
    )


def _parts(row: Row, layer: int | None, quantised: QuantisedFormat) -> tuple[Row, ...]:
    return quantised.rows(row) if quantised.is_quantised(Entry.of(row, layer, 0).hf) else (row,)


def _check_fused(table: FamilyTable, quantised: QuantisedFormat) -> None:
    """What an engine keeps in one tensor has one type, and each weight in it whole blocks."""
    for resident, held in table.resident.items():
        names = [name for entry in held for name in entry.hf]
        plain = [name for name in names if name not in quantised.names]
        if plain and len(plain) < len(names):
            odd = next(name for name in names if name in quantised.names)
            raise ConfigError(
                f"got {odd} in {quantised.title} and {plain[0]} as it is, which engines keep in one tensor, "
                f"{resident}; quantise both or none"
            )
        entries = held if held[0].expert is None and not plain else ()
        uneven = [e for e in entries[:-1] if any(shape[0] % quantised.block[0] for shape in e.row.shapes)]
        if uneven:
            raise ConfigError(
                f"got {uneven[0].hf[0]} of {uneven[0].row.shapes[0][0]} rows in {quantised.title}, which engines stack "
                f"with others in {resident}: a scale would belong to two weights; choose another checkpoint"
            )
