"""`stream`: a request whose tokens come as they are sampled, for generate functions that stop it early (a tool call).

    async with aclosing(stream(current().engine(), sample.tokens, sampling_params)) as parts:
        async for part in parts:
            sample.append_response_tokens(part.tokens, log_probs=part.log_probs, weight_version=part.weight_version,
                                          text=part.text, finish_reason=part.finish_reason)
            if "</tool>" in sample.response:
                sample.status = Status.COMPLETED
                break

Who ends it: the engine, or the consumer by closing the iterator; then the request is aborted in the engine, and what it
sampled beyond the last part is nobody's.

Invariants
1. The parts, one after the other, are what `EngineClient.generate` would return, under the same checks, scope, slot and
   limit of time. Each but the last has the finish reason `abort`, which is what it is if none comes after it.
2. Only the first part is asked for again. A stream that breaks later is an error: its tokens have been handed out.
3. An engine sends what is new in each part (`incremental_streaming_output`, which slime's engines are started with).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from slime.core.errors import EngineError
from slime.rollout.client import NEVER_SENT, REQUEST_SCOPE, EngineClient, Generation, parse_generation

_UNFINISHED = {"type": "length"}
"""Read as a reason that needs no further check; `stream` says `abort`."""


async def stream(
    client: EngineClient,
    input_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    *,
    session_id: str | None = None,
) -> AsyncGenerator[Generation, None]:
    """Yields what was sampled since the part before. Raises what `EngineClient.generate` raises."""
    scope, (payload, headers) = REQUEST_SCOPE.get(), client._request(input_ids, sampling_params, session_id)
    payload["stream"], content, rids = True, list[aiohttp.StreamReader](), set[str]()

    async def post(*_: Any) -> tuple[int, bytes]:
        rids.add(payload["rid"])
        if scope is not None:
            scope.rids.add(payload["rid"])
        sent = client._get_session().post(f"{client.base_url}/generate", json=payload, headers=headers)
        response = await connection.enter_async_context(sent)
        if response.status != 200:
            return response.status, await response.read()
        content[:] = [response.content]
        body = await _event(response.content)
        error = json.loads(body).get("error")
        return int(error.get("code") or 500) if error else 200, body

    async with client._slots, AsyncExitStack() as connection:
        await client._open.wait()
        ends_at, ended = asyncio.get_running_loop().time() + client._request_timeout_s, False
        try:
            async with asyncio.timeout_at(ends_at):
                aborted = scope is not None and scope.aborted
                answer = None if aborted else await client._post_with_retries(payload, headers, scope, post)
            while answer is not None and not ended:
                ended = bool(answer["meta_info"]["finish_reason"])
                yield _part(answer, client._token_versions)
                if not ended:
                    async with asyncio.timeout_at(ends_at):
                        answer = json.loads(await _event(content[0]))
            if not ended:
                yield NEVER_SENT
        except TimeoutError as expiry:
            raise client._late(payload) from expiry
        except aiohttp.ClientError as broken:
            raise EngineError(f"the stream of request {payload['rid']} broke: {broken!r}") from broken
        finally:
            if rids and not ended:
                client._abort_later([payload["rid"]])
            if scope is not None:
                scope.rids.difference_update(rids)


def _part(answer: dict[str, Any], token_versions: bool) -> Generation:
    """Reads one event."""
    meta = answer["meta_info"]
    if meta["finish_reason"]:
        return parse_generation(answer, token_versions)
    part = parse_generation({**answer, "meta_info": {**meta, "finish_reason": _UNFINISHED}}, token_versions)
    return dataclasses.replace(part, finish_reason="abort")


async def _event(content: aiohttp.StreamReader) -> bytes:
    """The next event of a stream, as JSON."""
    while line := await content.readline():
        if line.startswith(b"data:") and b"[DONE]" not in line:
            return line[5:]
    raise aiohttp.ClientPayloadError("it ended without a finish reason")
