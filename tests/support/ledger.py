"""The ledger of a run, as its metrics tell it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def require_balance(rows: Mapping[int, Mapping[str, Any]]) -> None:
    """Each prompt that was ever issued is trained, filtered, failed, buffered or in flight. `rows`: by step."""
    for step, row in rows.items():
        settled = row["data/trained"] + row["data/filtered"] + row["data/failed"]
        assert row["data/issued"] == settled + row["data/buffered"] + row["data/in_flight"], (step, row)
