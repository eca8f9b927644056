"""A fake inference server for pure tests of the client and the loop: speaks `/generate`, `/abort_request`, `/workers`.

It answers as SGLang 0.5.16 does (ids with log-probs, version as a string, partial tokens after an abort), one token per
tick, and misbehaves on demand.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from slime.core.engine_interface import ROUTED_EXPERTS_MARK
from tests.support.loopback import served


@dataclass
class FakeEngine:
    """Samples ids 10, 11, 12, ... until `max_new_tokens`; ends with id 1 (`stop`) after `stop_after` tokens if set."""

    tick_s: float = 0.0
    stop_after: int | None = None
    hold_at: int | None = None
    """The number of tokens at which every response waits, until a test sets None or the request is aborted."""
    weight_version: str = "1"
    records: bool = True
    """Whether it returns routed experts to those who ask: of a model with one layer, two of 200 experts for each token,
    which are the remainder of its id by 100 and that plus 100."""
    stops: deque[int] = field(default_factory=deque)
    """Popped by each /generate before `stop_after` applies."""
    faults: deque[Any] = field(default_factory=deque)
    """Popped by each /generate: None = answer, int = HTTP status, "drop" = close the connection, "hang" = no answer,
    "cut" = close a stream after two events."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    """What requests showed as theirs."""
    control_keys: set[str | None] = field(default_factory=set)
    """What aborts did."""
    aborted: list[str] = field(default_factory=list)
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    most_running: int = 0
    transports: dict[str, asyncio.BaseTransport] = field(default_factory=dict)
    """Request -> its connection, of those that run."""
    _sampled: dict[str, list[int]] = field(default_factory=dict)
    """Request -> what a stream has sampled so far."""
    url: str = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.keys.add(request.headers.get("Authorization"))
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, int):
            return web.json_response({"error": {"message": "as told"}}, status=fault)
        if fault == "drop":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        stop = self.running[body["rid"]] = asyncio.Event()
        assert request.transport is not None
        self.transports[body["rid"]] = request.transport
        self.most_running = max(self.most_running, len(self.running))
        try:
            if fault == "hang":
                await stop.wait()
            if body.get("stream"):
                return await self._stream(request, body, stop, fault if fault in ("cut", "error") else None)
            return web.json_response(await self._sample(body, stop))
        finally:
            self.running.pop(body["rid"], None)
            self.transports.pop(body["rid"], None)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], stop: asyncio.Event, fault: str | None
    ) -> web.StreamResponse:
        """Events of `stream_interval` tokens, which hold what is new; with a fault, it comes after two of them."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        interval = body["sampling_params"].get("stream_interval") or 1
        sampled = self._sampled[body["rid"]] = list[int]()
        work, sent, told, num_events = asyncio.create_task(self._sample(body, stop)), 0, 0, 0
        try:
            while True:
                await asyncio.wait([work], timeout=self.tick_s or 0.005)
                whole = work.result() if work.done() else None
                ids = whole["output_ids"] if whole else sampled
                while whole or len(ids) - sent >= (interval if sent else 1):
                    new = ids[sent : sent + (interval if sent else 1)]
                    last = whole is not None and sent + len(new) == len(ids)
                    event = self._event(body, new, sent, told, whole, last=last)
                    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                    sent, told, num_events = sent + len(new), told + len(event["text"]), num_events + 1
                    if last:
                        await response.write(b"data: [DONE]\n\n")
                        return response
                    if fault is not None and num_events == 2:
                        assert request.transport is not None
                        if fault == "error":
                            await response.write(b'data: {"error": {"code": 500, "message": "as told"}}\n\n')
                        else:
                            request.transport.close()
                        return response
        except ConnectionError:
            return response
        finally:
            self._sampled.pop(body["rid"], None)
            work.cancel()

    def _event(
        self, body: dict[str, Any], new: list[int], sent: int, told: int, whole: dict[str, Any] | None, *, last: bool
    ) -> dict[str, Any]:
        """An event behind so many tokens and characters of a stream; `whole`: all of it, when it is known."""
        if whole is None:
            pairs = [[self.log_prob(body, sent + i), token, None] for i, token in enumerate(new)]
            text, meta = self.text(new), self._meta(body, new)
        else:
            meta = whole["meta_info"]
            pairs = meta["output_token_logprobs"][sent : sent + len(new)]
            text = whole["text"][told:] if last else whole["text"][told : told + len(new)]
        meta = {**meta, "output_token_logprobs": pairs, "finish_reason": meta["finish_reason"] if last else None}
        return {"text": text, "output_ids": new, "meta_info": meta}

    def _meta(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        return {"weight_version": self.weight_version, "prompt_tokens": len(body["input_ids"]), "cached_tokens": 0}

    def token(self, body: dict[str, Any], i: int) -> int:
        """The id that it samples as number `i` of a request."""
        return 10 + i % 50

    def is_end(self, token: int) -> bool:
        """Whether it ends an answer by itself."""
        return False

    def log_prob(self, body: dict[str, Any], i: int) -> float:
        """Nats, of that id."""
        return -0.5 - i / 1000

    def text(self, ids: list[int]) -> str:
        """A character for each id but the end token."""
        return "".join(chr(55 + i) for i in ids if i != 1)

    async def _sample(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        limit = body["sampling_params"]["max_new_tokens"]
        stop_after = self.stops.popleft() if self.stops else self.stop_after
        ids = self._sampled.get(body["rid"], [])
        reason: dict[str, Any] = {"type": "length", "length": limit}
        while len(ids) < limit:
            while len(ids) == self.hold_at and not stop.is_set():
                await asyncio.sleep(0.005)
            if stop.is_set():
                reason = {"type": "abort", "message": "Aborted"}
                break
            if stop_after is not None and len(ids) == stop_after:
                ids.append(1)
                reason = {"type": "stop", "matched": 1}
                break
            ids.append(self.token(body, len(ids)))
            if self.is_end(ids[-1]) and len(ids) < limit:
                reason = {"type": "stop", "matched": ids[-1]}
                break
            if self.tick_s:
                await asyncio.sleep(self.tick_s)
        text = self.text(ids)
        _, mark, start = body["rid"].partition(ROUTED_EXPERTS_MARK)
        recorded = {}
        if mark and self.records:
            read = [*body["input_ids"], *ids][int(start) : -1]
            rows = np.asarray([[t % 100, 100 + t % 100] for t in read], "<i4")
            recorded = {"routed_experts": base64.b64encode(rows.tobytes()).decode()}
        return {
            "text": text,
            "output_ids": ids,
            "meta_info": {
                **self._meta(body, ids),
                "finish_reason": reason,
                **recorded,
                "output_token_logprobs": [[self.log_prob(body, i), token, None] for i, token in enumerate(ids)],
            },
        }

    async def abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.aborted.append(body["rid"])
        self.control_keys.add(request.headers.get("Authorization"))
        if body.get("abort_all") or body["rid"] in self.running:
            for rid, stop in self.running.items():
                if body.get("abort_all") or rid.startswith(body["rid"]):
                    stop.set()
        return web.Response()

    async def workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": self.url}], "total": 1})


@contextlib.asynccontextmanager
async def serve(engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    """Serves on a free port of the loopback for the block."""
    app = web.Application()
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/abort_request", engine.abort)
    app.router.add_get("/workers", engine.workers)
    async with served(app) as engine.url:
        try:
            yield engine
        finally:
            for stop in engine.running.values():
                stop.set()
