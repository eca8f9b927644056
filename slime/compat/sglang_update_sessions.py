"""Gives each session of weight updates one owner, so that two runs cannot mix their weights in an engine.

A session of SGLang 0.5.23 belongs to nobody. A sender that dies leaves it open, and the next sender must close it. But
if the first sender is alive, for example a run whose driver lost the network, its tensors and its end of the session
would be taken as the next sender's, and its resume would let the engine serve weights that are half its own. With
these hooks the front end remembers the owner of the session, which the sender names in a header. The newest sender
becomes the owner; an earlier one is refused. While a session is open, nobody can resume the engine.

Remove it when SGLang has sessions with an owner. An engine without the hooks takes updates from everybody.

Invariants
1. In a session, only tensors of its owner reach the model, and only its owner ends it.
2. An engine with an open session is not resumed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from slime.compat import Hook
from slime.core.engine_interface import SENDER_HEADER
from slime.core.engine_versions import WITH_SESSIONS

_OWNER = "_slime_update_owner"
"""Attribute of SGLang's front end: the owner of the open session; None if no session is open."""
_CONFLICT = 409
Call = Callable[..., Awaitable[tuple[bool, str]]]


def _sender(request: Any) -> str:
    return "" if request is None else request.headers.get(SENDER_HEADER, "")


def _refuse(why: str) -> None:
    import fastapi

    raise fastapi.HTTPException(status_code=_CONFLICT, detail=why)


def _require_owner(manager: Any, _update: Any, request: Any = None) -> None:
    """Refuses the call of a sender while a session of another sender is open."""
    owner = getattr(manager, _OWNER, None)
    if owner is not None and owner != _sender(request):
        _refuse("another run has begun to update the weights of this engine; give each run its own engines")


def _require_closed(manager: Any, *_: Any, **__: Any) -> None:
    if getattr(manager, _OWNER, None) is not None:
        _refuse("a weight update is in progress, so the engine cannot serve yet; end it or begin a new one")


async def _begin(begin: Call, manager: Any, update: Any, request: Any = None) -> tuple[bool, str]:
    """Opens a session of this sender, and closes the previous one if it is still open."""
    from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

    if getattr(manager, _OWNER, None) is not None:
        setattr(manager, _OWNER, _sender(request))
        ended, message = await manager.end_weight_update(EndWeightUpdateReqInput(), request)
        if not ended:
            return False, f"the previous weight update could not be ended: {message}"
    begun, message = await begin(manager, update, request)
    if begun:
        setattr(manager, _OWNER, _sender(request))
    return begun, message


async def _end(end: Call, manager: Any, update: Any, request: Any = None) -> tuple[bool, str]:
    _require_owner(manager, update, request)
    ended, message = await end(manager, update, request)
    if ended:
        setattr(manager, _OWNER, None)
    return ended, message


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
HOOKS = (
    Hook("AROUND", f"{_CONTROL}.begin_weight_update", _begin, WITH_SESSIONS),
    Hook("AROUND", f"{_CONTROL}.end_weight_update", _end, WITH_SESSIONS),
    Hook("BEFORE", f"{_CONTROL}.update_weights_from_tensor", _require_owner, WITH_SESSIONS),
    Hook("BEFORE", f"{_CONTROL}.update_weights_from_distributed", _require_owner, WITH_SESSIONS),
    Hook("BEFORE", f"{_MANAGER}.update_weights_from_disk", _require_owner, WITH_SESSIONS),
    Hook("BEFORE", f"{_MANAGER}.continue_generation", _require_closed, WITH_SESSIONS),
)
