"""Graders without a process of their own, for tests whose subject is not the grading: a process takes half a second."""

from __future__ import annotations

import asyncio
import io
import json
import os
from typing import Any

from slime.rewards.grader_process import ProcessSettings, encoded
from slime.rewards.grader_worker import HEADER, OFFLINE, Server, read_columns


class _Nobody(io.RawIOBase):
    """Takes the frames in which a worker says how far it is."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


class GraderHere:
    """What `GraderPool` needs of a `GraderProcess`: the worker's own code, in this process and without any limit."""

    missing: tuple[str, ...] = ()
    by_itself = crashed = False

    def __init__(self, settings: ProcessSettings) -> None:
        self._server = Server(io.BufferedWriter(_Nobody()), parent=os.getpid(), kind=OFFLINE)
        self._server.args, self._server.limit_s = settings.args, settings.limit_s
        self.dead, self.num_reserved = False, 0

    @classmethod
    async def start(cls, settings: ProcessSettings, *, warm_up: dict[str, Any], kind: str) -> GraderHere:
        return cls(settings)

    async def ask(self, message: dict[str, Any], *, grace_s: float = 0.0, computes: bool = False) -> dict[str, Any]:
        frame = asyncio.StreamReader()
        frame.feed_data(encoded(message))
        (length,) = HEADER.unpack(await frame.readexactly(HEADER.size))
        request = {"id": 0, **json.loads(await frame.readexactly(length))}
        await read_columns(request, frame)
        reply: dict[str, Any] = json.loads(json.dumps(await self._server.score(request)))
        return reply

    async def kill(self) -> None:
        self.dead = True
