"""Makes an engine respond with HTTP 503 instead of truncated text when the run aborts another client's request.

A weight sync with `--pause-generation-mode abort` aborts all requests on an engine. SGLang 0.5.16 then responds with
status 200 and the tokens so far, and reports the abort only in a field that few clients read, so other clients would
mistake the truncated response for a complete one. The run's own client (request ids starting with `OWN_REQUESTS`)
continues from these tokens. The hook tells all other clients to retry, and a retried request waits until the engine has
the new weights. A client that aborts its own request by id still gets SGLang's response. Remove the hook when SGLang's
pause lets the caller choose how requests end.

Invariant: if `pause_generation` or an abort of all requests aborts another client's request, that client gets an error
(HTTP 503, or an error event in a stream).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from slime.compat import Hook
from slime.core.engine_interface import ASK_AGAIN, OWN_REQUESTS

_MARK = "slime_taken_back"
"""Attribute of SGLang's request state that says whether the run aborted another client's request."""


def mark(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Marks other clients' requests before SGLang aborts all requests."""
    if abort_all:
        for known, state in manager.rid_to_state.items():
            setattr(state, _MARK, not str(known).startswith(OWN_REQUESTS))


async def refuse(
    handle: Callable[..., Awaitable[Any]], manager: Any, out: dict[str, Any], state: Any, is_stream: bool
) -> Any:
    """Finishes a request. If it is marked, raises an error that SGLang turns into HTTP 503 or an error event."""
    told = await handle(manager, out, state, is_stream)
    if told is not None or not getattr(state, _MARK, False) or out["meta_info"]["finish_reason"]["type"] != "abort":
        return told
    if is_stream:
        raise ValueError(ASK_AGAIN)
    import fastapi

    raise fastapi.HTTPException(status_code=503, detail=ASK_AGAIN)


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS = (
    Hook("BEFORE", f"{_MANAGER}.abort_request", mark),
    Hook("AROUND", f"{_MANAGER}._handle_abort_finish_reason", refuse),
)
