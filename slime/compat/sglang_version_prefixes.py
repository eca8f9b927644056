"""Keeps an engine's prefix cache while requests live through weight syncs: each set of weights has its own part of it.

The cache of SGLang 0.5.16 holds keys and values of whatever weights read a prefix, and cannot be flushed under running
requests. Its tree is divided by the `extra_key` of requests, for other purposes. A request gets the key of the weights
that serve when the scheduler is about to look for its prefix, on the thread on which weights change, too: one that
waited through a weight sync, or was taken back by it, looks for prefixes of the new weights.

What names a set of weights is a count of the updates that this scheduler was asked for, as long as its process lives. A
version number would not do: an engine outlives a run, whose successor counts from 1 again, and a resumed run gives
numbers again that a crash has taken back. All ranks of an engine are asked for the same updates, so they agree.

To be removed when SGLang knows which weights read a prefix. That each hook is in its place the launcher checks; that
the cache is one that this divides is checked here when it is made.

Invariants
1. No two sets of weights share a key. The count goes up before an update, also one that fails.
2. A prefix is read from the cache only if all of it was put there by requests that were begun under the weights that
   serve. With `in_place` a request that lives on puts what it has into the part that it began with, and so does one
   that has been read in parts.
3. The key that a request has already (LoRA, a namespace) stays in front, whatever it is.
4. The order of the waiting queue, where it goes by cached prefixes, goes by those that a request will find.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.compat.sglang_token_versions import MANAGER, UPDATES
from slime.core.errors import EngineError

_CHANGES = (*UPDATES, f"{MANAGER}.update_weights_from_ipc")
_ORDERED = "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority"
_SCHEDULED = "sglang.srt.managers.schedule_batch.Req.init_next_round_input"
_MADE = "sglang.srt.mem_cache.registry.create_tree_cache"
DIVIDED = frozenset({"RadixCache", "UnifiedRadixCache", "SWARadixCache", "PureSWARadixCache", "MambaRadixCache"})
"""SGLang's caches whose every look-up and insertion goes by `extra_key`, with nothing behind them."""
EMPTY = frozenset({"ChunkCache", "SWAChunkCache", "PureSWAChunkCache"})
"""Those of `--disable-radix-cache`: they keep nothing beyond a request."""
_updates = {"asked": 0}
"""Of this process."""
_MARK = "|weights "
_KEYS = "_slime_keys"
"""Attribute of a request: (its key without ours, its key with it), as it was given them last."""


def register() -> None:
    """Call before SGLang's scheduler loads its plugins, which puts the hooks in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for change in _CHANGES:
        HookRegistry.register(change, _count, HookType.BEFORE)
    HookRegistry.register(_ORDERED, _divide_all, HookType.BEFORE)
    HookRegistry.register(_SCHEDULED, _divide, HookType.BEFORE)
    HookRegistry.register(_MADE, _require_divided, HookType.AFTER)


def _count(*_: Any, **__: Any) -> None:
    """Before a weight update."""
    _updates["asked"] += 1


def _divide_all(_policy: Any, waiting_queue: Sequence[Any], *_: Any, **__: Any) -> None:
    """Before the waiting queue is ordered, for which SGLang may look for the prefixes of all that is in it."""
    for request in waiting_queue:
        _give_key(request)


def _divide(request: Any, tree_cache: Any = None, *_: Any, **__: Any) -> None:
    """Before the scheduler looks for the prefix of a request; without a tree it goes on with what it has."""
    if tree_cache is not None:
        _give_key(request)


def _give_key(request: Any) -> None:
    own, given = getattr(request, _KEYS, (None, None))
    if given is None or request.extra_key != given:  # it has just come, or SGLang has changed its key
        own = request.extra_key or ""
    request.extra_key = f"{own}{_MARK}{_updates['asked']}"
    setattr(request, _KEYS, (own, request.extra_key))


def _require_divided(cache: Any, context: Any, *_: Any, **__: Any) -> None:
    """Behind the making of the cache. A setting that slime cannot see (a variable on the engine's host, a plugin) may
    have chosen another one."""
    name, settings = type(cache).__name__, context.server_args
    more = [flag for flag in ("enable_hierarchical_cache", "enable_streaming_session") if getattr(settings, flag)]
    if name in EMPTY | DIVIDED and not more:
        return
    raise EngineError(
        f"got the prefix cache {' with '.join([name, *more])}, which may hold what other weights have read, where "
        "requests live through weight syncs (--token-versions, --pause-generation-mode retract and in_place); leave "
        "out what chooses it, or use --pause-generation-mode abort"
    )
