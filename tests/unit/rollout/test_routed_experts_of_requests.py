"""A client asks for routed experts by the id of a request, and hands out those of the tokens that were read."""

from __future__ import annotations

import json
from collections import deque
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from slime.core.engine_interface import ROUTED_EXPERTS_MARK
from slime.core.errors import EngineError
from slime.core.routed_experts import ExpertFormat, RoutedExperts
from slime.rollout.client.call import Generation, before_stop, parse_experts
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.factories import engine_client
from slime.settings import parse_args
from tests.support.command_line import complete
from tests.support.fake_engine import FakeEngine, serve
from tests.support.published import SYNCED

FORMAT = ExpertFormat(num_experts=200, topk=2, sparse=(True,))
PARAMS = {"max_new_tokens": 5}
PROMPT = [7, 8, 9]


def read_ids(made: Generation) -> list[int]:
    assert made.routed_experts is not None
    return [int(i) for i in made.routed_experts.ids[:, 0, 0]]


@pytest.mark.parametrize("start", [0, 2, 3])
async def test_rows_are_of_the_tokens_that_were_read(start: int) -> None:
    async with serve(FakeEngine()) as engine:
        client = EngineClient(engine.url, experts=FORMAT)
        made = await client.generate(PROMPT, PARAMS, experts_from=start)
        await client.close()
    assert made.routed_experts is not None and made.routed_experts.start == start
    assert read_ids(made) == [*PROMPT, *made.tokens][start:-1]


async def test_a_second_try_asks_again_under_another_id() -> None:
    async with serve(FakeEngine(faults=deque([503]))) as engine:
        client = EngineClient(engine.url, experts=FORMAT)
        made = await client.generate(PROMPT, PARAMS, experts_from=1)
        await client.close()
    first, second = (body["rid"] for body in engine.requests)
    assert first != second and first.endswith(f"{ROUTED_EXPERTS_MARK}1") and second.endswith(f"{ROUTED_EXPERTS_MARK}1")
    assert read_ids(made)[0] == PROMPT[1]


async def test_the_last_part_of_a_stream_has_them_all() -> None:
    async with serve(FakeEngine()) as engine:
        client = EngineClient(engine.url, experts=FORMAT)
        async with aclosing(client.stream(PROMPT, PARAMS)) as stream:
            parts = [part async for part in stream]
        await client.close()
    assert all(part.routed_experts is None for part in parts[:-1])
    assert read_ids(parts[-1]) == [*PROMPT, *(t for part in parts for t in part.tokens)][:-1]


async def test_who_does_not_ask_gets_none() -> None:
    async with serve(FakeEngine()) as engine:
        client = EngineClient(engine.url)
        made = await client.generate(PROMPT, PARAMS)
        await client.close()
    assert made.routed_experts is None and ROUTED_EXPERTS_MARK not in engine.requests[0]["rid"]


async def test_an_engine_that_records_nothing_is_an_error() -> None:
    async with serve(FakeEngine(records=False)) as engine:
        client = EngineClient(engine.url, experts=FORMAT)
        with pytest.raises(EngineError, match="has no routed_experts"):
            await client.generate(PROMPT, PARAMS)
        await client.close()


def test_a_request_that_waited_when_it_was_aborted_has_none() -> None:
    answer = {"meta_info": {"finish_reason": {"type": "abort"}}}
    assert parse_experts(answer, FORMAT, start=0, num_tokens=9) is None


def test_the_format_is_the_checkpoints(tmp_path: Path) -> None:
    """Asked for where engines record; of a model with a dense layer."""
    flags, config = complete(tmp_path), SYNCED["GLM-4.5"][0]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    format_of_model = ExpertFormat(160, 8, (False,) * 3 + (True,) * (config["num_hidden_layers"] - 3))
    for flag, expected in (("--use-rollout-routing-replay", format_of_model), (None, None)):
        args = parse_args([*flags, *([flag] if flag else [])])
        client = engine_client(args, [], None)
        assert client._experts == expected


def test_tokens_that_are_taken_back_take_their_rows_along() -> None:
    class Letters:
        def decode(self, ids: tuple[int, ...]) -> str:
            return "".join(map(chr, ids))

    ids = tuple(map(ord, "abcSTO"))
    record = RoutedExperts(np.asarray([[[i % 100, 100]] for i in ids[:-1]], np.uint8), start=4)
    part = Generation(ids, (-1.0,) * 6, "abort", 1, "abcSTO", routed_experts=record)
    kept = before_stop(part, "STOP", Letters())
    assert kept.tokens == ids[:3] and kept.routed_experts is not None
    assert kept.routed_experts.start == 4 and len(kept.routed_experts.ids) == 2
