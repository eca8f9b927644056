"""HTTP for plugins of the public slime: `post` with retries, images in requests, and serving an application.

Requests to `/generate` on one of the run's routers go through the engine client. It authenticates, resumes generation
after weight syncs and lost engines, and records which weights sampled each token (`transcript`). Responses have
SGLang's format.

The engine client has its own timeouts. For other servers, the timeout is `TIMEOUT_S` per attempt.
"""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from slime.core.errors import HookError
from slime.core.processes import host_port, http_url
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.client.retries import RETRY_STATUSES
from slime.rollout.context import current, on_rollout_loop
from slime.rollout.guard import waiting
from slime.rollout.loopback_router import generation_of

TIMEOUT_S = 600.0
PAUSE_S = 1.0


@on_rollout_loop
async def post(
    url: str, payload: Mapping[str, Any], max_retries: int = 60, headers: Mapping[str, str] | None = None
) -> Any:
    """Returns the response as parsed JSON or as text. Raises the last attempt's error, or `HookError`.

    Client errors (4xx) that a retry cannot fix are not retried.
    """
    client = client_of(url)
    if client is not None:
        return await generation_of(client, payload, headers or {})
    with waiting():
        for number in range(max(1, max_retries)):
            try:
                return await _send(url, payload, headers)
            except aiohttp.ClientResponseError as error:
                if error.status not in RETRY_STATUSES or number + 1 >= max_retries:
                    raise
            except (aiohttp.ClientError, TimeoutError):
                if number + 1 >= max_retries:
                    raise
            await asyncio.sleep(PAUSE_S)
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _send(url: str, payload: Mapping[str, Any], headers: Mapping[str, str] | None) -> Any:
    limit = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(url, json=dict(payload), headers=dict(headers or {})) as answer,
    ):
        answer.raise_for_status()
        if answer.content_type == "application/json":
            return await answer.json()
        return await answer.text()


def client_of(url: str) -> EngineClient | None:
    """Returns the engine client for a router's `/generate` URL. None for other URLs and outside a rollout."""
    try:
        context = current()
    except HookError:
        return None
    address = url.removeprefix("http://").removesuffix("/")
    if context.loopback is not None and address.endswith("/generate"):
        at = context.loopback.model_at(address.removesuffix("/generate"))
        if at is not None:
            return context.models[at]
    args = context.args
    routers: dict[Any, Any] = {None: (args.sglang_router_ip, args.sglang_router_port)}
    for name, (host, port) in (routers | (args.sglang_model_routers or {})).items():
        if address == f"{host_port(str(host), port)}/generate":
            return context.engine() if name is None else context.models[name]
    return None


# ---- images --------------------------------------------------------------------------------------------------------


def encode_image_for_rollout_engine(image: Any) -> str:
    """Returns a PIL image as a data URI with an RGB PNG, the format that is sent to engines."""
    out = io.BytesIO()
    image.convert("RGB").save(out, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns keyword arguments for a Hugging Face processor: the inputs by kind, ids as lists, media as tensors."""
    media = {name: {"return_tensors": "pt"} for name in ("images_kwargs", "videos_kwargs", "audio_kwargs")}
    text = {"return_tensors": None, "return_mm_token_type_ids": False}
    return {**(multimodal_inputs or {}), "text_kwargs": text, **media}


# ---- serving an application ----------------------------------------------------------------------------------------


ROLLOUT_LOOP: web.AppKey[asyncio.AbstractEventLoop] = web.AppKey("rollout_loop", asyncio.AbstractEventLoop)
"""Set in an application whose handlers need the rollout's event loop."""
READS_ENCODED: web.AppKey[bool] = web.AppKey("reads_encoded", bool)
"""Set in an application that decodes bodies itself, so that its server must not: aiohttp's errors are plain text."""


@dataclass(frozen=True, slots=True)
class ServedApp:
    url: str
    """Without a path."""
    port: int
    runner: web.AppRunner
    loop: asyncio.AbstractEventLoop

    def stop(self) -> None:
        """Stops listening, in the background."""
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop)


def run_app_in_thread(app: web.Application, host: str = "127.0.0.1", port: int = 0) -> ServedApp:
    """Serves an aiohttp application until the process ends. Returns once the port accepts connections.

    A daemon thread runs the handlers; those of an adapter run on the rollout's event loop, as its engine client does.
    Raises `OSError` if the port is in use.
    """
    listens = socket.create_server((host, port), backlog=1024)
    loop = app.get(ROLLOUT_LOOP)
    if loop is None:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name=f"app-{listens.getsockname()[1]}", daemon=True).start()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, auto_decompress=READS_ENCODED not in app)

    async def serve() -> None:
        await runner.setup()
        await web.SockSite(runner, listens).start()

    asyncio.run_coroutine_threadsafe(serve(), loop)
    bound = int(listens.getsockname()[1])
    return ServedApp(http_url("127.0.0.1" if host in ("0.0.0.0", "") else host, bound), bound, runner, loop)
