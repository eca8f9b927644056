"""Laws of what is shown of executions: spans of a row nest, they are few, and what raises is shown, too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.observability.spans import read_trace, start_recording
from slime.rollout import traces as module
from slime.rollout.manager import RolloutManager
from slime.rollout.traces import EXECUTION_ROWS as ROWS
from slime.rollout.traces import traced, traced_execution
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of this process; executions may begin as often as they like."""
    monkeypatch.setattr(module, "EVERY_S", 0.0)
    monkeypatch.setattr(module, "_FREE", module._Free())  # an execution of another test may have been traced just now
    spans = start_recording("rollout", tmp_path / "traces")
    yield tmp_path / "traces"
    spans.close()
    start_recording("main", None)


def spans_of(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Row -> its spans."""
    (path,) = folder.glob("*.json")
    rows: dict[int, list[dict[str, Any]]] = {}
    for event in read_trace(path):
        if event["ph"] == "X":
            rows.setdefault(event["tid"], []).append(event)
    return rows


def test_spans_of_a_row_never_overlap_partly(trace: Path) -> None:
    async def tool(number: int) -> None:
        with traced("tool", number=number):
            await asyncio.sleep(0.003 * (1 + number % 3))

    async def execution(index: int) -> None:
        with traced_execution(index=index):
            await asyncio.gather(*(tool(n) for n in range(4)))
            if index % 2:
                with traced("grade"):
                    raise RuntimeError("no")

    async def main() -> None:
        await asyncio.gather(*(execution(i) for i in range(3 * ROWS)), return_exceptions=True)

    asyncio.run(main())
    rows = spans_of(trace)
    found = [span for spans in rows.values() for span in spans]
    assert sum(span["name"] == "execution" for span in found) == ROWS, "as many as there are rows, at a time"
    assert sum(span["name"] == "tool" for span in found) == 4 * ROWS
    assert {span["args"].get("error") for span in found if span["name"] == "grade"} == {"RuntimeError"}
    for spans in rows.values():
        for one in spans:
            for two in spans:
                begin, end = one["ts"], one["ts"] + one["dur"]
                inner, last = two["ts"], two["ts"] + two["dur"]
                assert not begin + 1 < inner < end - 1 < last - 2, (one, two)


def test_an_execution_shows_its_parts(tmp_path: Path, trace: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from slime.rollout.generate import generate as default\n"
        "from slime.rollout.traces import traced\n"
        "async def generate(args, sample, sampling_params):\n"
        "    with traced('tool: look', what='x'):\n"
        "        return await default(args, sample, sampling_params)\n"
    )
    args = rollout_args(tmp_path, "--custom-generate-function-path", f"{own}:generate")

    async def work(manager: RolloutManager) -> Any:
        return await manager.generate(0)

    asyncio.run(with_manager(args, FakeEngine(), work))
    names = {span["name"] for spans in spans_of(trace).values() for span in spans}
    assert {"execution", "generate", "tool: look", "grade", "request: place"} <= names
