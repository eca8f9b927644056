"""`LoopbackRouter`: the address of a router for HTTP clients of user code, which do not have the run's keys.

    async with httpx.AsyncClient() as client:                                # in a generate function
        await client.post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", json=payload)

Requests to `/generate` go through the engine client of this process, like those of `slime.utils.http_utils.post`: they
continue after weight syncs and lost engines, and the transcript records what was sampled. Other requests that only
generate or read (`FORWARDED`) are sent to the run's router with its key.

Each call of a user's function gets its own address of 127.0.0.0/8 on the same port, which identifies its requests;
reward functions, which run in processes of their own, share one (`REWARDS`), whose requests are not recorded.
Where the operating system does not restrict a socket to the loopback device, all calls share 127.0.0.1. Requests that
belong to no running call are recorded in `transcript.STRAYS`.

Invariants
1. Only connections from this machine are accepted, and only from processes of this user (`user_of`).
2. The address of a call that has ended still works, but its requests do not count towards any execution.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import os
import socket
import struct
import weakref
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from slime.buffer.sources import image_column
from slime.core.engine_interface import TOKEN_VERSIONS_KEY
from slime.core.errors import DataError, DeadlineExceeded, HookError, RequestRejected, SlimeError
from slime.core.processes import http_url
from slime.core.sample import NOT_SAMPLED
from slime.core.text import NO_KEYS, EngineKeys, shorten
from slime.core.topology import EVAL_FLEET
from slime.rollout.client.call import ENGINE_MAX_NEW_TOKENS, Call, Generation, Pictures, joined
from slime.rollout.client.engine_client import REQUEST_SCOPE, STREAMED_INTERVAL, EngineClient
from slime.rollout.context import RolloutContext, current, offered
from slime.rollout.generate import LIMITS
from slime.rollout.guard import beside
from slime.rollout.transcript import STRAYS, TRANSCRIPT, Transcript
from slime.settings import Args
from slime.settings.topology_yaml import topology_of

logger = logging.getLogger(__name__)

SHARED = "127.0.0.1"
"""The address of requests that belong to no particular call."""
REWARDS = "127.0.0.2"
"""The address of requests from reward functions."""
FORWARDED = frozenset(
    [
        *("/model_info", "/get_model_info", "/server_info", "/get_server_info"),
        *("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank"),
        *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"),
    ]
)
MAX_BODY_BYTES = 256 * 2**20
ROUTING_KEY = "x-smg-routing-key"
"""The router sends all requests with the same value of this header to the same engine."""


def _on_eval_fleet() -> bool:
    """Returns whether this code belongs to an evaluation on the engines of `--eval-fleet`."""
    try:
        return current().on_eval_fleet
    except HookError:
        return False


class LoopbackRouter:
    """Listens from the first `addressed` call until `close`. Belongs to one event loop."""

    def __init__(self, args: Args, clients: Mapping[str, EngineClient], keys: EngineKeys = NO_KEYS) -> None:
        self._args, self._clients, self._main = args, clients, topology_of(args).main
        self._main_name = None if self._main is None else self._main.name
        self._is_exposed = any(args.was_given(name) for name in ("router_host", "sglang_router_ip"))
        self._key = args.router.get("api_key") or keys.use
        self._contexts: dict[str, contextvars.Context] = {}
        """Address -> the context of the running call that has it."""
        self._of_rewards: contextvars.Context | None = None
        """The context of requests from reward functions."""
        self._numbers = itertools.count(1)
        self._ports: dict[str, int] = {}
        self._own_addresses = True
        self._runners: list[web.AppRunner] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()
        """Connections whose user has been checked."""
        self._session: aiohttp.ClientSession | None = None
        self._refusals: set[str] = set()
        """What has been logged."""

    @contextlib.contextmanager
    def addressed(self, view: Any, *, shared: bool = False) -> Iterator[None]:
        """Sets the router addresses in `view`, the settings that a user's function gets, to this process's.

        Requests to them during the block belong to the calling execution, unless `shared`. Keeps the addresses of a
        router that the user made reachable for others. Does nothing without engines.
        """
        if not isinstance(view, Args) or self._is_exposed or not self._clients or self._main is None:
            if isinstance(view, Args) and self._is_exposed and _on_eval_fleet():
                self._send_to_eval_fleet(view)
            yield
            return
        self._listen()
        host = self._own_address() if self._own_addresses and not shared else SHARED
        self._set(view, host)
        if not shared:
            self._contexts[host] = contextvars.copy_context()
        try:
            yield
        finally:
            if not shared:
                self._contexts.pop(host, None)

    def address_for_rewards(self, view: Any) -> None:
        """Sets the router addresses in `view`, the settings that reward functions get in processes of their own.

        Requests to them belong to no execution, and are not recorded. Does nothing where `addressed` does nothing.
        """
        if not isinstance(view, Args) or self._is_exposed or not self._clients or self._main is None:
            return
        self._listen()
        self._of_rewards = contextvars.copy_context()
        self._of_rewards.run(TRANSCRIPT.set, _Unrecorded())
        self._of_rewards.run(LIMITS.set, None)
        self._of_rewards.run(REQUEST_SCOPE.set, None)
        self._set(view, REWARDS if self._own_addresses else SHARED)

    def _send_to_eval_fleet(self, view: Args) -> None:
        """Replaces the address of the policy's router in `view` by that of the router of `--eval-fleet`."""
        assert self._main is not None, "there are engines"
        routers = dict(self._args.sglang_model_routers or {})
        routers[self._main.name] = ip, port = routers[EVAL_FLEET]
        values = {"sglang_router_ip": ip, "sglang_router_port": port, "sglang_model_routers": routers}
        view.__dict__.update(values)

    def _set(self, view: Args, host: str) -> None:
        assert self._main is not None, "there are engines"
        addresses = {name: (host, port) for name, port in self._ports.items()}
        ip, port = addresses[self._main.name]
        values = {"sglang_router_ip": ip, "sglang_router_port": port, "sglang_model_routers": addresses}
        view.__dict__.update(values)

    def model_at(self, address: str) -> str | None:
        """Returns the model whose requests go to `host:port`; None if that is not an address of this object."""
        host, _, port = address.rpartition(":")
        if not host.startswith("127."):
            return None
        return next((name for name, known in self._ports.items() if str(known) == port), None)

    async def close(self) -> None:
        for task in list(self._starting):
            await task
        for runner in self._runners:
            await runner.cleanup()
        if self._session is not None:
            await self._session.close()

    def _own_address(self) -> str:
        number = next(self._numbers)
        return f"127.{1 + (number >> 16) % 250}.{(number >> 8) % 256}.{number % 256}"

    def _listen(self) -> None:
        """Starts listening. Connections wait in the kernel until the server has started."""
        for name in self._clients if not self._ports else ():
            sock, self._own_addresses = _loopback_socket()
            app = web.Application(client_max_size=MAX_BODY_BYTES)
            app.router.add_route("*", "/{path:.*}", self._handler(name))
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
            self._runners.append(runner)
            task = asyncio.get_running_loop().create_task(_serve(runner, sock), name="loopback router")
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
            self._ports[name] = int(sock.getsockname()[1])

    def _handler(self, model: str) -> Any:
        async def handle(http: web.Request) -> web.StreamResponse:
            if not await self._is_ours(http):
                return _failed(403, "this address belongs to a run of another user")
            if http.path in ("/health", "/health_generate"):
                return web.Response(status=200 if self._clients[model].engines() else 503)
            context = self._context_of(http)
            if http.path != "/generate":
                apart = context is not None and model == self._main_name and context.run(_on_eval_fleet)
                return await self._forward(http, EVAL_FLEET if apart else model)
            if context is None:
                return _failed(503, "no function of the run is being called, so its engines take no requests")
            return await asyncio.get_running_loop().create_task(self._generate(http, model), context=context)

        return handle

    async def _is_ours(self, http: web.Request) -> bool:
        transport = http.transport
        if transport is None:
            return False
        if transport not in self._checked:
            peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
            if user_of(peer, own) != os.getuid():
                return False
            self._checked.add(transport)
        return True

    def _context_of(self, http: web.Request) -> contextvars.Context | None:
        """Returns the context in which a request runs; None if no call is running."""
        assert http.transport is not None, "the connection is open"
        host = http.transport.get_extra_info("sockname")[0]
        if host != SHARED and host in self._contexts:
            return self._contexts[host].copy()
        lives_on = offered()  # for threads of a rollout function, between its calls
        if self._of_rewards is not None and (host == REWARDS or not (self._contexts or lives_on)):
            return self._of_rewards.copy()
        if not self._contexts:
            return lives_on
        anyone = next(reversed(self._contexts.values())).copy()
        senders = [one for context in self._contexts.values() if (one := context.get(TRANSCRIPT)) is not None]
        anyone.run(TRANSCRIPT.set, _Anyones(senders=senders))
        anyone.run(LIMITS.set, None)
        return anyone

    async def _generate(self, http: web.Request, model: str) -> web.StreamResponse:
        try:
            payload = orjson.loads(await http.read())
            if not isinstance(payload, dict):
                raise DataError("the body must be a JSON object")
            if not payload.get("stream"):
                answer = await generation_of(self._client_of(model), payload, http.headers)
                answer["meta_info"].pop("routed_experts", None)  # the transcript has them
                return _json(answer)
            return await self._streamed(http, model, payload)
        except (ValueError, SlimeError) as problem:  # `DataError` is a `ValueError`
            status = _status(problem) if isinstance(problem, SlimeError) else 400
            self._note_refusal(str(problem))
            return _failed(status, str(problem))

    def _client_of(self, model: str) -> EngineClient:
        """Returns the client of a model for the call in whose context a request runs."""
        try:
            return current().models[model]
        except HookError:  # a request of a reward function
            return self._clients[model]

    def _note_refusal(self, said: str) -> None:
        """Logs a refusal, and keeps it for the error of the execution: an HTTP client's error has only the status."""
        transcript = TRANSCRIPT.get()
        if transcript is not None:
            transcript.refusal = transcript.refusal or said
        if said not in self._refusals:
            self._refusals.add(said)
            logger.warning("a request to /generate is refused: %s", said)

    async def _streamed(self, http: web.Request, model: str, payload: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        payload = {**payload, "stream": False}
        async with aclosing(generation_parts(self._client_of(model), payload, http.headers)) as parts:
            async for part in parts:
                part["meta_info"].pop("routed_experts", None)
                if not response.prepared:
                    await response.prepare(http)
                await response.write(b"data: " + orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _forward(self, http: web.Request, model: str) -> web.StreamResponse:
        routers = self._args.sglang_model_routers or {}
        if http.path not in FORWARDED:
            return _failed(404, f"{http.path} is not available here; use /generate, or slime's functions")
        if model not in routers:
            return _failed(503, f"{http.path} requires a router, which this run does not have; set --router-port")
        self._session = self._session or aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        headers = {"Content-Type": http.content_type} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        url, body = f"{http_url(*routers[model])}{http.path_qs}", await http.read()
        try:
            async with self._session.request(http.method, url, data=body, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(http)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectionError as problem:
            return _failed(502, f"the run's router does not answer: {problem}")


@dataclass(slots=True, eq=False, weakref_slot=False)
class _Anyones(Transcript):
    """The transcript of a request that any of several executions may have sent. Its answers go to `STRAYS`."""

    senders: Sequence[Transcript] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        for one in self.senders if name in ("taken_back", "refusal") and value else ():
            setattr(one, name, value)

    def begin_call(self, call: Call) -> None:
        STRAYS.begin_call(call)

    def end_call(self, call: Call) -> None:
        STRAYS.end_call(call)


class _Unrecorded(Transcript):
    """The transcript of a reward function's requests, whose answers are not trained on."""

    def begin_call(self, call: Call) -> None:
        pass

    def end_call(self, call: Call) -> None:
        pass


def _loopback_socket() -> tuple[socket.socket, bool]:
    """Returns a listening socket that only this machine can reach, and whether it covers all of 127.0.0.0/8."""
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        sock.bind(("0.0.0.0", 0))
        everywhere = True
    except (OSError, AttributeError):
        sock.close()
        sock = socket.socket()
        sock.bind((SHARED, 0))
        everywhere = False
    sock.listen(4096)
    return sock, everywhere


async def _serve(runner: web.AppRunner, sock: socket.socket) -> None:
    await runner.setup()
    await web.SockSite(runner, sock, backlog=4096).start()


def user_of(peer: tuple[str, int], own: tuple[str, int]) -> int | None:
    """Returns the user id of the process at the other end of a connection within this machine; None if unknown.

    Asks the kernel for this one socket (sock_diag(7)). Reading the table of all sockets, /proc/net/tcp, takes
    milliseconds.
    """
    ends = struct.pack("!HH", peer[1], own[1]) + _padded(peer[0]) + _padded(own[0])
    which = ends + struct.pack("=III", 0, ANY_COOKIE, ANY_COOKIE)
    asked = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, ALL_STATES) + which
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(ANSWER_S)
        netlink.send(struct.pack("=IHHII", 16 + len(asked), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + asked)
        answer = netlink.recv(1 << 12)
    _, kind = struct.unpack_from("=IH", answer)
    if kind != SOCK_DIAG_BY_FAMILY or answer[20 : 20 + len(ends)] != ends:
        return None
    return int(struct.unpack_from("=I", answer, USER_AT)[0])


NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
ALL_STATES, ANY_COOKIE = 0xFFFFFFFF, 0xFFFFFFFF
USER_AT = 16 + 4 + 48 + 12
"""Offset of the user id in an answer: after two headers, the socket's id, and three numbers."""
ANSWER_S = 5.0


def _padded(address: str) -> bytes:
    return socket.inet_aton(address).ljust(16, b"\0")


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), content_type="application/json")


def _failed(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _status(problem: SlimeError) -> int:
    match problem:
        case RequestRejected() | HookError() | DataError():
            return 400
        case DeadlineExceeded():
            return 504
    return 502


# ---- requests in SGLang's format -----------------------------------------------------------------------------------

_READ = {"input_ids", "text", "image_data", "sampling_params", "return_logprob", "rid"}
_HARMLESS = {
    *("log_metrics", "no_logs", "priority", "external_trace_header", "custom_labels", "routing_key", "conversation_id"),
    *("extra_key", "cache_salt", "return_routed_experts"),
}
"""Other request keys that change nothing in the answer. Routed experts are always returned if the run records them."""


def _changes_nothing(client: EngineClient, name: str, value: Any) -> bool:
    """Returns whether a request key that is not read can be ignored with this value."""
    if name in _HARMLESS or value is None or value is False or value in ([], {}, ""):
        return True
    match name:
        case "logprob_start_len":
            return isinstance(value, int)
        case "top_logprobs_num" | "routed_experts_start_len":
            return bool(value == 0)
        case "modalities":
            return isinstance(value, list) and set(value) == {"image"}
        case "model":
            models = current().models
            here = next((model for model, one in models.items() if one is client), None)
            return len(models) <= 1 or value == here
    return False


async def generation_of(client: EngineClient, payload: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Answers a request to `/generate`. Raises `HookError` for request keys that the client does not support."""
    ids, params, session = _request(client, payload, headers)
    seen: dict[str, Any] = {}
    if uris := payload.get("image_data"):
        ids, seen["pictures"] = await beside(_with_images, ids, uris, current())
        params = _limited(client, payload.get("sampling_params") or {}, len(ids))
    first = payload.get("logprob_start_len")
    if params is None:
        return _worded(ids, Generation((), (), "length", NOT_SAMPLED, ""), first=first)
    made = await client.generate(ids, params, session_id=session, returns_partial=True, **seen)
    return _worded(ids, made, first=first)


def _with_images(ids: list[int], images: Any, context: RolloutContext) -> tuple[list[int], Pictures]:
    """Stores the images of a request. Returns the prompt with one placeholder per image token, and the images.

    Raises `HookError` if the run takes no images, and `DataError` or `RequestRejected` for images that do not fit the
    placeholders.
    """
    column = image_column(context.args)
    if column is None:
        raise HookError("the request has image_data, but the run takes no images; set --multimodal-keys")
    found = column.read({column.column: images}, Path())
    pictures = context.pictures(found.digests)
    return column.expanded(pictures.written(ids), found), pictures


REPEATED = 64
"""A chunk of a stream adds at least one token per `REPEATED` tokens that it repeats, so a long answer costs 64 times
its length instead of its square."""


async def generation_parts(
    client: EngineClient, payload: Mapping[str, Any], headers: Mapping[str, str]
) -> AsyncGenerator[dict[str, Any], None]:
    """Like `generation_of`, but yields the answer so far after each chunk, as SGLang's stream does.

    Because each chunk repeats the whole answer, chunks of a long answer are longer.
    """
    if payload.get("image_data"):
        raise HookError("a request with image_data cannot be streamed; drop stream")
    ids, params, session = _request(client, payload, headers)
    so_far = Generation((), (), "length", NOT_SAMPLED, "")
    if params is None:
        yield _worded(ids, so_far)
        return
    parts: list[Generation] = []
    seen = num = 0
    asked: dict[str, Any] = {"session_id": session, "returns_partial": True, "interval": STREAMED_INTERVAL}
    async with aclosing(client.stream(ids, params, **asked)) as stream:
        async for part in stream:
            if num > seen + num // REPEATED:
                yield _worded(ids, joined(parts), ended=False)
                seen = num
            parts.append(part)
            num += len(part.tokens)
    yield _worded(ids, joined(parts))


def _request(
    client: EngineClient, payload: Mapping[str, Any], headers: Mapping[str, str]
) -> tuple[list[int], Mapping[str, Any] | None, str | None]:
    """Returns the prompt ids, the sampling parameters (None: no token may be sampled) and the session."""
    odd = [
        f"{name} = {shorten(repr(payload[name]), 60)}"
        for name in sorted(payload.keys() - _READ)
        if not _changes_nothing(client, name, payload[name])
    ]
    if odd:
        raise HookError(
            f"the engine client does not support {', '.join(odd)} for /generate; pass only input_ids or text, "
            "image_data, sampling_params and return_logprob"
        )
    ids = payload.get("input_ids")
    if ids is None:
        tokenizer = current().tokenizer
        if tokenizer is None or "text" not in payload:
            raise HookError("a request to /generate requires input_ids or text; pass one of them")
        ids = tokenizer.encode(payload["text"], add_special_tokens=False)
    ids = list(ids)
    session = next((value for name, value in headers.items() if name.lower() == ROUTING_KEY), None)
    return ids, _limited(client, payload.get("sampling_params") or {}, len(ids)), session


def _limited(client: EngineClient, params: Mapping[str, Any], num_read: int) -> Mapping[str, Any] | None:
    """Caps `max_new_tokens` at the execution's limits. Returns None if no more tokens may be sampled."""
    limits, context = LIMITS.get(), current()
    if limits is None or client is not context.client:
        return params
    asked = params.get("max_new_tokens", ENGINE_MAX_NEW_TOKENS)
    asked = context.args.rollout_max_response_len if asked is None else asked
    most = limits.next_answer(asked, num_read)
    return {**params, "max_new_tokens": most} if most or not asked else None


def _worded(ids: list[int], generation: Generation, *, ended: bool = True, first: int | None = None) -> dict[str, Any]:
    """Returns the response in SGLang's format. `first`: `logprob_start_len`; the prompt tokens from there on are listed
    with None in place of log-probs.
    """
    versions = generation.versions
    pairs = zip(generation.log_probs, generation.tokens, strict=True)
    meta: dict[str, Any] = {
        "finish_reason": {"type": generation.finish_reason} if ended else None,
        "prompt_tokens": len(ids),
        "completion_tokens": len(generation.tokens),
        "cached_tokens": generation.cached_tokens,
        "weight_version": str(versions[-1] if versions else generation.weight_version),
        TOKEN_VERSIONS_KEY: versions,
        "output_token_logprobs": [[log_prob, token, None] for log_prob, token in pairs],
    }
    if first is not None and first >= 0:
        meta["input_token_logprobs"] = [[None, token, None] for token in ids[first:]]
    if generation.routed_experts is not None:
        meta["routed_experts"] = generation.routed_experts
    return {"text": generation.text, "output_ids": list(generation.tokens), "meta_info": meta}
