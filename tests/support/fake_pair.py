"""Two fake engines that answer together: one says that it has read a prompt, the other one samples when that is so."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.support.fake_engine import FakeEngine


class Rooms(defaultdict[int, asyncio.Event]):
    """By the number that two engines know of each other's requests: whether the prompt has been handed over."""

    def __init__(self) -> None:
        super().__init__(asyncio.Event)


@dataclass
class Half(FakeEngine):
    """What both have: a request that names no other engine is refused, as SGLang does it."""

    rooms: Rooms = field(default_factory=Rooms)

    async def _sample(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        if "bootstrap_room" in body:
            return await self._half(body, stop)
        reason = {"type": "abort", "message": "without bootstrap room id", "status_code": 400}
        meta = {**self._meta(body, []), "finish_reason": reason, "output_token_logprobs": []}
        return {"text": "", "output_ids": [], "meta_info": meta}

    async def _half(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        return await super()._sample(body, stop)


@dataclass
class FakePrefill(Half):
    """Reads prompts: its answer is one token."""

    reads: bool = True
    """False: it reads nothing, and waits to be ended."""

    async def _half(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        if not self.reads:
            await stop.wait()
        elif not stop.is_set():
            self.rooms[body["bootstrap_room"]].set()
        return await super()._half({**body, "sampling_params": {"max_new_tokens": 1}}, stop)


@dataclass
class FakeDecode(Half):
    """Samples what was read; ended before that it has no token."""

    async def _half(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        read = self.rooms[body["bootstrap_room"]]
        waits = [asyncio.create_task(event.wait()) for event in (read, stop)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        return await super()._half(body, stop)
