"""Lets a request through sglang-router ask for its routed experts: what `--use-rollout-routing-replay` needs.

SGLang 0.5.16 returns them for a request with the fields `return_routed_experts` and `routed_experts_start_len`, if it
was started with `--enable-return-routed-experts`. sglang-router 0.3.2 drops fields that it does not know, and headers,
but hands on the request's id as it is. So the id says it (`slime.core.ports.ROUTED_EXPERTS_MARK`), and at the engine's
front door `register` has the fields set from it, through SGLang's own plugin registry. To be removed when the router
hands both fields on.

Invariants
1. Requests without the mark, and those of many prompts, are left as they are.
2. Where the hook did not take effect the experts are missing, and the client refuses the answer.
"""

from __future__ import annotations

from typing import Any

from slime.core.ports import ROUTED_EXPERTS_MARK

FLAG = "--enable-return-routed-experts"
FRONT_DOOR = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"


def register() -> None:
    """Call before the server loads its plugins, which puts the hook in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(FRONT_DOOR, read_mark, HookType.BEFORE)


def read_mark(_manager: Any, request: Any, *_more: Any, **_named: Any) -> None:
    """Before a request is taken in: sets the two fields if its id has the mark."""
    rid = request.rid
    if not isinstance(rid, str):
        return
    _, mark, start = rid.partition(ROUTED_EXPERTS_MARK)
    if mark and start.isdecimal():
        request.return_routed_experts = True
        request.routed_experts_start_len = int(start)
