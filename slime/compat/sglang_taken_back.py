"""Has an engine answer HTTP 503 where the run ended somebody's request, in place of half an answer that looks whole.

A weight sync with `--pause-generation-mode abort` ends everything that an engine has. SGLang 0.5.16 then answers 200
with the tokens that there are, and says in a field that few clients read that they are not all: code that asks by HTTP
takes half a verdict for a verdict. The run's own client (ids that begin with `OWN_REQUESTS`) goes on behind such
tokens. Others are asked to try again; that request then waits until the engine has its new weights. Who ends a request
of their own, by its id, gets what SGLang gives. To be removed when SGLang lets a pause say how it ends requests.

Invariant: what `pause_generation` or an abort of everything ended reaches others as an error: HTTP 503, or in a stream
the stream's error event.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from slime.core.ports import ASK_AGAIN, OWN_REQUESTS

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_MARK = "slime_taken_back"
"""Attribute of SGLang's state of a request."""


def register() -> None:
    """Call before SGLang's server loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MANAGER}.abort_request", mark, HookType.BEFORE)
    HookRegistry.register(f"{_MANAGER}._handle_abort_finish_reason", refuse, HookType.AROUND)


def mark(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Before an abort is sent: notes whose requests it ends without having been asked to."""
    if abort_all:
        for known, state in manager.rid_to_state.items():
            setattr(state, _MARK, not str(known).startswith(OWN_REQUESTS))


async def refuse(
    handle: Callable[..., Awaitable[Any]], manager: Any, out: dict[str, Any], state: Any, is_stream: bool
) -> Any:
    """Around the end of a request that has a reason. Raises what SGLang turns into HTTP 503, or an error event."""
    told = await handle(manager, out, state, is_stream)
    if told is not None or not getattr(state, _MARK, False) or out["meta_info"]["finish_reason"]["type"] != "abort":
        return told
    if is_stream:
        raise ValueError(ASK_AGAIN)
    import fastapi

    raise fastapi.HTTPException(status_code=503, detail=ASK_AGAIN)
