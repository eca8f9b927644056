"""Makes an engine answer HTTP 503 when the run aborts somebody's request, instead of a partial answer that looks whole.

A weight sync with `--pause-generation-mode abort` ends all requests of an engine. SGLang 0.5.16 then answers 200 with
the tokens so far, and says so only in a field that few clients read: code that asks by HTTP would take half a verdict
for a whole one. The run's own client (ids that begin with `OWN_REQUESTS`) continues after such tokens. Other clients
are asked to try again; the new request waits until the engine has its new weights. A client that aborts its own request
by id gets SGLang's answer. Remove it when a pause in SGLang can say how it ends requests.

Invariant: requests of others that `pause_generation` or an abort of everything ended get an error: HTTP 503, or the
error event of a stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from slime.core.ports import ASK_AGAIN, OWN_REQUESTS

_MARK = "slime_taken_back"
"""Attribute of SGLang's state of a request."""


def mark(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Before an abort of everything: marks the requests of others."""
    if abort_all:
        for known, state in manager.rid_to_state.items():
            setattr(state, _MARK, not str(known).startswith(OWN_REQUESTS))


async def refuse(
    handle: Callable[..., Awaitable[Any]], manager: Any, out: dict[str, Any], state: Any, is_stream: bool
) -> Any:
    """Ends a request. Raises what SGLang turns into HTTP 503 or an error event if the request was marked."""
    told = await handle(manager, out, state, is_stream)
    if told is not None or not getattr(state, _MARK, False) or out["meta_info"]["finish_reason"]["type"] != "abort":
        return told
    if is_stream:
        raise ValueError(ASK_AGAIN)
    import fastapi

    raise fastapi.HTTPException(status_code=503, detail=ASK_AGAIN)


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS = (
    ("BEFORE", f"{_MANAGER}.abort_request", mark),
    ("AROUND", f"{_MANAGER}._handle_abort_finish_reason", refuse),
)
