"""What keeps many requests cheap: the least loaded engine is found at once, and wakes are spread over turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.client.engine_pool import Loads
from slime.rollout.client.upstream import CALLS_PER_TURN, DISMISSED, LATE, Budget, Interrupted, Slices, Try, Upstream


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["more", "less", "drop", "put"]), st.integers(0, 4)), min_size=1, max_size=80
    )
)
def test_the_least_loaded_is_what_a_look_at_all_of_them_finds(steps: list[tuple[str, int]]) -> None:
    engines, loads, known = [Upstream(f"{i}", f"{i}.", 0.0) for i in range(5)], Loads(), set[Upstream]()
    for step, number in steps:
        upstream = engines[number]
        tries: set[Any] = upstream.tries
        match step:
            case "more":
                tries.add(object())
            case "less" if tries:
                tries.pop()
            case "drop":
                loads.drop(upstream)
                known.discard(upstream)
                continue
        loads.put(upstream)
        known.add(upstream)
        least = loads.least_loaded()
        assert least in known and len(loads) == len(known)
        assert least is not None and len(least.tries) == min(len(one.tries) for one in known)
    for upstream in engines:
        loads.drop(upstream)
    assert loads.least_loaded() is None


async def test_work_is_done_in_order_some_in_each_turn() -> None:
    done, slices, turns = list[int](), Slices(), list[int]()
    slices.add([lambda i=i: done.append(i) for i in range(3 * CALLS_PER_TURN)])  # type: ignore[misc]
    slices.add([lambda: done.append(-1)])
    while len(done) <= 3 * CALLS_PER_TURN:
        turns.append(len(done))
        await asyncio.sleep(0)
    assert done == [*range(3 * CALLS_PER_TURN), -1]
    assert all(after - before <= CALLS_PER_TURN for before, after in zip([0, *turns], turns, strict=False))


async def test_work_that_raises_costs_nobody_else_his_turn() -> None:
    def fails() -> None:
        raise ValueError("meant")

    done, slices = list[int](), Slices()
    with pytest.raises(ValueError, match="meant"):
        slices.add([fails, lambda: done.append(0)])
    slices.add([lambda: done.append(1)])
    for _ in range(3):
        await asyncio.sleep(0)
    assert done == [0, 1]
    slices.add([lambda: done.append(2)])
    assert done == [0, 1, 2], "nothing is left to do, so it is done at once"


async def test_a_prompt_may_wait_for_room_at_an_engine_that_makes_progress() -> None:
    """Law: a reader is silent from the last token of its own engine, or of the one that is to get what it reads."""
    reading, sampling = Upstream("http://reads", "p.", 0.0), Upstream("http://samples", "q.", 0.0)
    one, reader, others = Try(sampling, None, 0.0), Try(reading, None, 0.0), Try(sampling, None, 0.0)
    one.reader, reader.beside = reader, sampling
    waiting = [asyncio.create_task(each.wait(lambda: asyncio.sleep(3600))) for each in (one, reader)]
    while one._guard is None or reader._guard is None:
        await asyncio.sleep(0)
    assert (one.silent_s(10.0), reader.silent_s(10.0)) == (0.0, 10.0)
    others.got_tokens(12.0)
    assert (one.silent_s(20.0), reader.silent_s(20.0)) == (0.0, 8.0)
    one.reader = None
    assert one.silent_s(25.0) == 5.0, "from here on it counts for itself"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_request_that_is_interrupted_twice_ends_once() -> None:
    one, slices = Try(Upstream("http://engine", "p.", 0.0), None, 0.0), Slices()
    waiting = asyncio.create_task(one.wait(lambda: asyncio.sleep(3600)))
    while one._guard is None:
        await asyncio.sleep(0)
    one.interrupt(LATE)
    slices.add([one.break_off])
    second = list[Any]()

    def again() -> None:  # between the end of the first wait and the turn in which the request hears of it
        second.append(one._guard)
        one.interrupt(DISMISSED)
        slices.add([one.break_off, lambda: second.append("others have their turn")])

    asyncio.get_running_loop().call_soon(again)
    with pytest.raises(Interrupted, match=LATE):
        await waiting
    assert second[0] is not None, "the request had not yet heard of the first"
    assert second[1:] == ["others have their turn"]


def test_a_budget_lets_through_in_order_what_a_turn_has_room_for() -> None:
    """Law: the work of one turn is bounded but for one task, nobody overtakes, and who gave up takes nothing."""

    async def main() -> list[tuple[int, int]]:
        budget, turn, through = Budget(10), 0, list[tuple[int, int]]()

        async def work(number: int, amount: int) -> None:
            await budget.wait_for_room(amount)
            through.append((number, turn))

        amounts = [4, 4, 4, 25, 1, 9, 3, 3]
        tasks = [asyncio.create_task(work(number, amount)) for number, amount in enumerate(amounts)]
        await asyncio.sleep(0)
        tasks[6].cancel()
        while not all(task.done() for task in tasks):
            turn += 1
            await asyncio.sleep(0)
        for turns in {t for _, t in through}:
            done = [amounts[number] for number, t in through if t == turns]
            assert sum(done[:-1]) < 10, "only the last one goes beyond"
        return through

    through = asyncio.run(main())
    assert [number for number, _ in through] == [0, 1, 2, 3, 4, 5, 7]
    assert len({turn for _, turn in through}) >= 4
