"""Which cases of a table run with `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """Arguments for `parametrize`: the chosen cases are quick, the others slow. A case of several arguments is a tuple.

    Raises `AssertionError` if a chosen case is not in the table.
    """
    cases = list(cases)
    assert not [case for case in chosen if case not in cases], f"not in the table: {chosen}"
    rows = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [pytest.param(*row, marks=() if case in chosen else pytest.mark.slow) for case, row in rows]
