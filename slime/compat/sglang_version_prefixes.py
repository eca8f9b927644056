"""Keeps an engine's prefix cache while requests live through weight syncs: each version has its own part of it.

The cache of SGLang 0.5.16 holds keys and values of whatever weights read a prefix, and cannot be flushed under running
requests. Its tree is divided by the `extra_key` of requests, for other purposes. A request gets the key of the version
that serves when the scheduler is about to read it, on the thread on which weights change, too: one that waited through
a weight sync, or was taken back by it, looks for prefixes of the new weights. To be removed when SGLang knows of it.

Invariants
1. A prefix is read from the cache only if all of it was put there by requests that were begun under the version that
   serves. With `in_place` a request that lives on puts what it has into the part of the version that it began with.
2. The key that a request has already (LoRA, a namespace) stays in front.
"""

from __future__ import annotations

from typing import Any

from slime.compat.sglang_token_versions import served_version

_SCHEDULED = "sglang.srt.managers.schedule_batch.Req.init_next_round_input"
_MARK = "|weights "


def register() -> None:
    """Call before SGLang's scheduler loads its plugins, beside `sglang_token_versions.register`, which it needs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SCHEDULED, _divide, HookType.BEFORE)


def _divide(request: Any, *_: Any, **__: Any) -> None:
    """Before the scheduler looks for the prefix of a request."""
    own = (request.extra_key or "").partition(_MARK)[0]
    request.extra_key = f"{own}{_MARK}{served_version()}"
