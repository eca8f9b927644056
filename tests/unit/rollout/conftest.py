"""Client and fake engine share an event loop here, so their deadlines may leave out the pauses of the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from slime.rewards import pool
from tests.support.graders_here import GraderHere
from tests.unit.rollout.patient_loop import PatientPolicy


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(PatientPolicy())
    yield
    asyncio.set_event_loop_policy(before)


@pytest.fixture
def graders_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grades in the process of the test, where the subject is not the grading."""
    monkeypatch.setattr(pool, "GraderProcess", GraderHere)
