"""Gives each weight-update session an owner, so that two runs cannot mix their weights in one engine.

Sessions in SGLang 0.5.23 have no owner. A sender that dies leaves its session open, and the next sender has to close
it. But if the first sender is still alive, for example a run whose driver lost the network, its tensors and its call to
end the session would be attributed to the next sender. The engine would then resume with a mix of both senders'
weights. With these hooks, the front end records the session's owner, which the sender specifies in a header. The latest
sender becomes the owner, and earlier ones are rejected. While a session is open, nobody can resume the engine.

Remove this module when SGLang's sessions have owners. An engine without the hooks accepts updates from anybody.

Invariants
1. During a session, only its owner's tensors reach the model, and only the owner can end it.
2. An engine with an open session cannot be resumed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from slime.compat import Hook
from slime.core.engine_interface import SENDER_HEADER, SESSION_CONFLICT, WITH_SESSIONS

_OWNER = "_slime_update_owner"
"""Attribute of SGLang's front end that holds the owner of the open session, or None."""
Call = Callable[..., Awaitable[tuple[bool, str]]]


def _sender(request: Any) -> str:
    return "" if request is None else request.headers.get(SENDER_HEADER, "")


def _refuse(why: str) -> None:
    import fastapi

    raise fastapi.HTTPException(status_code=SESSION_CONFLICT, detail=why)


def _require_owner(manager: Any, _update: Any, request: Any = None) -> None:
    """Rejects calls from a sender while another sender's session is open."""
    owner = getattr(manager, _OWNER, None)
    if owner is not None and owner != _sender(request):
        _refuse("another run has started to update this engine's weights; give each run its own engines")


def _require_closed(manager: Any, *_: Any, **__: Any) -> None:
    if getattr(manager, _OWNER, None) is not None:
        _refuse("the engine cannot resume during a weight update; end the update or start a new one")


async def _begin(begin: Call, manager: Any, update: Any, request: Any = None) -> tuple[bool, str]:
    """Opens a session for this sender. Closes the previous session if it is still open."""
    from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

    if getattr(manager, _OWNER, None) is not None:
        setattr(manager, _OWNER, _sender(request))
        ended, message = await manager.end_weight_update(EndWeightUpdateReqInput(), request)
        if not ended:
            return False, f"could not end the previous weight update: {message}"
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
