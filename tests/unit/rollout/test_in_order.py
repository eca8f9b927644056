"""Laws of calls that come in any order."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from slime.core.errors import DeadlineExceeded
from slime.rollout.workers import episode_worker
from slime.rollout.workers.episode_worker import InOrder


class Called:
    """Notes what begins."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def now(self, name: str) -> str:
        self.begun.append(name)
        return name

    async def later(self, name: str) -> str:
        self.begun.append(name)
        await asyncio.sleep(0.01)
        return name

    def wrong(self, name: str) -> str:
        self.begun.append(name)
        raise ValueError(name)


CALLS = ["later", "now", "wrong", "later"]


@pytest.mark.parametrize("turns", [0, 1], ids=["in one turn", "in turns of their own"])
@pytest.mark.parametrize("arrival", list(itertools.permutations(range(len(CALLS)))))
def test_calls_begin_in_the_order_of_their_numbers(arrival: tuple[int, ...], turns: int) -> None:
    """Also those that come in the same turn of the event loop: `resume` right behind `pause` would pause for ever."""

    async def main() -> None:
        called = Called()
        order = InOrder(called)
        tasks = {}
        for number in arrival:
            tasks[number] = asyncio.create_task(order.call(number, CALLS[number], str(number)))
            for _ in range(turns):
                await asyncio.sleep(0)
        answers = await asyncio.gather(*(tasks[number] for number in range(len(CALLS))), return_exceptions=True)
        assert called.begun == ["0", "1", "2", "3"]
        assert answers[:2] == ["0", "1"] and isinstance(answers[2], ValueError) and answers[3] == "3"

    asyncio.run(main())


def test_a_call_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_worker, "TURN_LIMIT_S", 0.01)
    with pytest.raises(DeadlineExceeded, match="the earlier call 1"):

        async def main() -> None:
            order = InOrder(Called())
            await order.call(0, "now", "0")
            await order.call(2, "now", "2")

        asyncio.run(main())
