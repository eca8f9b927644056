"""Client and fake engine share an event loop here, so their deadlines may leave out the pauses of the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.patient_loop import patient


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    yield from patient()
