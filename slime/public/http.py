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

from slime.core.engine_interface import TOKEN_VERSIONS_KEY
from slime.core.errors import HookError
from slime.core.processes import host_port, http_url
from slime.core.sample import NOT_SAMPLED
from slime.rollout.client.call import ENGINE_MAX_NEW_TOKENS, Generation
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.client.retries import RETRY_STATUSES
from slime.rollout.context import current
from slime.rollout.generate import LIMITS
from slime.rollout.guard import waiting

TIMEOUT_S = 600.0
PAUSE_S = 1.0
ROUTING_KEY = "x-smg-routing-key"
"""The router sends all requests with the same value of this header to the same engine."""
_READ = {"input_ids", "text", "sampling_params", "return_logprob"}
_IGNORED: Mapping[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "return_routed_experts": (None, False, True),  # always returned if the run records them
    "logprob_start_len": (None, -1),
    "top_logprobs_num": (None, 0),
    "return_text_in_logprobs": (None, False),
    "image_data": (None, []),
    "rid": (None,),
}
"""Other request keys -> values that can safely be ignored."""


async def post(
    url: str, payload: Mapping[str, Any], max_retries: int = 60, headers: Mapping[str, str] | None = None
) -> Any:
    """Returns the response as parsed JSON or as text. Raises the last attempt's error, or `HookError`.

    Client errors (4xx) that a retry cannot fix are not retried.
    """
    client = client_of(url)
    if client is not None:
        return await _generate(client, payload, headers or {})
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
    args = context.args
    routers: dict[Any, Any] = {None: (args.sglang_router_ip, args.sglang_router_port)}
    for name, (host, port) in (routers | (args.sglang_model_routers or {})).items():
        if address == f"{host_port(str(host), port)}/generate":
            return context.engine() if name is None else context.models[name]
    return None


async def _generate(client: EngineClient, payload: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Generates with the engine client. Raises `HookError` for request keys that the client does not support."""
    odd = [name for name, value in payload.items() if name not in _READ and value not in _IGNORED.get(name, ())]
    if odd:
        raise HookError(
            f"the engine client does not support {', '.join(sorted(odd))} for /generate; pass only input_ids or text, "
            "sampling_params and return_logprob"
        )
    ids = payload.get("input_ids")
    if ids is None:
        tokenizer = current().tokenizer
        if tokenizer is None or "text" not in payload:
            raise HookError("a request to /generate requires input_ids or text; pass one of them")
        ids = tokenizer.encode(payload["text"], add_special_tokens=False)
    ids = list(ids)
    session = next((value for name, value in headers.items() if name.lower() == ROUTING_KEY), None)
    params = _limited(client, payload.get("sampling_params") or {}, len(ids))
    if params is None:
        return _worded(ids, Generation((), (), "length", NOT_SAMPLED, ""))
    return _worded(ids, await client.generate(ids, params, session_id=session, returns_partial=True))


def _limited(client: EngineClient, params: Mapping[str, Any], num_read: int) -> Mapping[str, Any] | None:
    """Caps `max_new_tokens` at the execution's limits. Returns None if no more tokens may be sampled."""
    limits, context = LIMITS.get(), current()
    if limits is None or client is not context.client:
        return params
    asked = params.get("max_new_tokens", ENGINE_MAX_NEW_TOKENS)
    asked = context.args.rollout_max_response_len if asked is None else asked
    most = limits.next_answer(asked, num_read)
    return {**params, "max_new_tokens": most} if most or not asked else None


def _worded(ids: list[int], generation: Generation) -> dict[str, Any]:
    """Returns the response in SGLang's format."""
    versions = generation.versions
    pairs = zip(generation.log_probs, generation.tokens, strict=True)
    meta = {
        "finish_reason": {"type": generation.finish_reason},
        "prompt_tokens": len(ids),
        "completion_tokens": len(generation.tokens),
        "cached_tokens": generation.cached_tokens,
        "weight_version": str(versions[-1] if versions else generation.weight_version),
        TOKEN_VERSIONS_KEY: versions,
        "output_token_logprobs": [[log_prob, token, None] for log_prob, token in pairs],
    }
    if generation.routed_experts is not None:
        meta["routed_experts"] = generation.routed_experts
    return {"text": generation.text, "output_ids": list(generation.tokens), "meta_info": meta}


# ---- images --------------------------------------------------------------------------------------------------------


def encode_image_for_rollout_engine(image: Any) -> str:
    """Returns an image of PIL as a data URI with an RGB PNG, the form in which engines get images."""
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
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)

    async def serve() -> None:
        await runner.setup()
        await web.SockSite(runner, listens).start()

    asyncio.run_coroutine_threadsafe(serve(), loop)
    bound = int(listens.getsockname()[1])
    return ServedApp(http_url("127.0.0.1" if host in ("0.0.0.0", "") else host, bound), bound, runner, loop)
