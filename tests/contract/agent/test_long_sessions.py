"""An execution of hours, as a coding agent plays it: pictures, compaction, sub-agents beside it, and an early end.

OpenAI's SDK asks a real adapter; the engine is scripted, so hours take seconds. What the engine read and sampled is
recorded apart from the session, and is the oracle of what is trained.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest

from slime.agent.messages import Message
from slime.agent.session import Branch, Session, Turn
from slime.agent.template import Placed
from slime.core.columns import GrowingColumn
from slime.core.sample import Sample, Status
from tests.support.agent_room import Room, agent_room
from tests.support.vision import CHATML_TEMPLATE, COLOURS, data_uri, drawn

PICTURES = [drawn(16 + 8 * number, 24, [colour]) for number, colour in enumerate(COLOURS.values())]
COMPACTS_EVERY, HELPED_EVERY, SHOWN_EVERY, UPDATED_EVERY = 9, 7, 4, 5
"""Turns of the main agent until it compacts its history, has a sub-agent, gets a picture, or the weights change."""
HELPER_TURNS = 3

Trained = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(ids in front of a turn with one placeholder for an image, its ids, their weight versions)."""


@dataclass
class LongRun:
    """A main agent and its sub-agents, in one execution."""

    room: Room
    most: int
    """The turn cap."""
    engine: list[Trained] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    """Answers that the main agent and its helpers got, and how often the history was compacted."""

    async def play(self) -> tuple[list[Sample], weakref.ref[Session]]:
        self._record()
        key = self.room.adapter.open_session(max_turns=self.most)
        session = weakref.ref(self.room.adapter.session(key))
        async with openai.AsyncOpenAI(
            base_url=f"{self.room.url}/v1", api_key=key, max_retries=0, timeout=600.0
        ) as self.client:
            self.helpers: list[asyncio.Task[None]] = []
            with pytest.raises(openai.BadRequestError, match=f"limit of {self.most} turns"):
                await self._main()
            for ended in await asyncio.gather(*self.helpers, return_exceptions=True):
                assert ended is None or isinstance(ended, openai.BadRequestError), ended
        return self.room.adapter.finish_session(key, Sample(index=0, group_index=0), reward=1.0), session

    def _record(self) -> None:
        plain = self.room.model._sample

        async def recorded(body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
            self.room.says(f"answer {len(self.engine)} <b>{'word ' * (len(self.engine) % 5)}")
            answer = await plain(body, stop)
            sampled = tuple(answer["output_ids"])
            version = int(answer["meta_info"]["weight_version"])
            self.engine.append((tuple(body["input_ids"]), sampled, (version,) * len(sampled)))
            return answer

        self.room.model._sample = recorded  # type: ignore[method-assign]

    async def _ask(self, who: str, history: list[Any]) -> None:
        made = await self.client.chat.completions.create(model="m", messages=history)
        self.asked[who] += 1
        history.append(made.choices[0].message.model_dump(exclude_none=True))

    async def _main(self) -> None:
        system = {"role": "system", "content": "You mend programs."}
        history: list[Any] = [system, {"role": "user", "content": "Mend this one."}]
        for turn in count(1):
            await self._ask("main", history)
            seen: list[Any] = [{"type": "text", "text": f"output {turn}"}]
            if not turn % SHOWN_EVERY:
                uri = data_uri(PICTURES[turn % len(PICTURES)])
                seen.append({"type": "image_url", "image_url": {"url": uri}})
            history.append({"role": "user", "content": seen})
            if not turn % UPDATED_EVERY:
                self.room.model.weight_version = str(int(self.room.model.weight_version) + 1)
            if not turn % HELPED_EVERY:
                self.helpers.append(asyncio.create_task(self._help(turn)))
            if not turn % COMPACTS_EVERY:
                history = [system, {"role": "user", "content": f"Summary of {turn} turns. Go on."}]
                self.asked["compacted"] += 1

    async def _help(self, number: int) -> None:
        history: list[Any] = [{"role": "system", "content": f"You help with {number}."}]
        for turn in range(HELPER_TURNS):
            history.append({"role": "user", "content": f"question {turn}"})
            await self._ask(f"helper {number}", history)


def folded(ids: Sequence[int], placeholder: int) -> tuple[int, ...]:
    """Ids with one placeholder for each image, as an engine gets them."""
    pairs = zip(ids, [None, *ids], strict=False)
    return tuple(token for token, before in pairs if token != placeholder or before != placeholder)


def trained(samples: Sequence[Sample], placeholder: int) -> list[Trained]:
    """Each run of trained tokens, with what stands in front of it."""
    found: list[Trained] = []
    for sample in samples:
        first, mask = sample.prompt_length, [*(sample.loss_mask or ()), 0]
        versions, begin = sample.token_versions or [], 0
        for place, kept in enumerate(mask):
            if kept and not (place and mask[place - 1]):
                begin = place
            if not kept and place and mask[place - 1]:
                span = slice(first + begin, first + place)
                found.append(
                    (
                        folded(sample.tokens[: first + begin], placeholder),
                        tuple(sample.tokens[span]),
                        tuple(versions[begin:place]),
                    )
                )
    return found


def check(run: LongRun, samples: list[Sample], placeholder: int) -> None:
    assert sorted(trained(samples, placeholder)) == sorted(run.engine), "trained is what was sampled, once"
    assert len(run.engine) == run.most
    branches = Counter(sample.metadata["agent"]["branch"] for sample in samples)
    helpers = sum(name.startswith("helper") for name in run.asked)
    compacted = run.asked["compacted"] - (run.asked["main"] % COMPACTS_EVERY == 0)  # the last one may get no answer
    assert branches == {"first": 1, "compaction": compacted, "sub-agent": helpers}, (branches, run.asked)
    assert sum(sample.metadata["agent"]["turns"] for sample in samples) == run.most
    assert [sample.status for sample in samples].count(Status.TRUNCATED) == 1, "the branch where the cap ended it"
    for sample in samples:
        assert folded(sample.tokens, placeholder).count(placeholder) == len(sample.images), "pictures of its own path"
    assert sum(len(sample.images) for sample in samples) > 0 and len({v for *_, vs in run.engine for v in vs}) > 2


def left() -> Counter[str]:
    """How many objects of conversations live."""
    gc.collect()
    kinds = (Session, Branch, Turn, Message, Placed, GrowingColumn)
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds)


@pytest.mark.parametrize("most", [36, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
async def test_a_session_of_hours_trains_what_was_sampled_and_leaves_nothing(tmp_path: Path, most: int) -> None:
    """Law: trained ids are sampled ids, with their versions, in branches by the reason of the docs; a session that has
    ended leaves no message, token or picture in the adapter.
    """
    async with agent_room(template=CHATML_TEMPLATE, image_folder=tmp_path) as room:
        images = room.adapter._template.images
        assert images is not None
        before = left()
        run = LongRun(room, most)
        samples, session = await run.play()
        check(run, samples, images.token_id)
        del samples
        assert left() == before and session() is None
        shown = min(len(PICTURES), run.asked["main"] // SHOWN_EVERY)
        assert len(images._known) <= shown, "a picture is known once, whatever the number of its turns"
        assert list(room.adapter._sessions) == [room.key]
