"""Divides an engine's prefix cache by weight version, for requests that continue across weight syncs.

The cache of SGLang 0.5.16 does not record which weights computed its keys and values, and cannot be flushed while
requests run. But SGLang divides its tree by the `extra_key` of requests, which it has for other purposes. Just before
the scheduler looks up a request's prefix, on the thread that also changes weights, the hook adds the serving weights to
the request's key. So a request that waited through a weight sync, or was retracted by it, finds only prefixes of the
new weights.

The key counts the updates of this scheduler process. A version number is not enough: an engine may outlive its run, the
next run counts from 1 again, and a resumed run reuses numbers. All ranks of an engine get the same updates, so their
counts agree.

Remove the hooks when SGLang records which weights computed a prefix. The launcher checks that each hook is in place;
this module checks the type of the cache when it is created.

Invariants
1. No two sets of weights share a key. The count increases before an update, even if the update fails.
2. A prefix is read from the cache only if requests that began under the serving weights wrote all of it. With
   `in_place`, a request that continues, or is prefilled in chunks, adds to the part of the cache in which it began.
3. A request's own key (LoRA, a namespace) stays as the beginning of the new key.
4. If SGLang orders the waiting queue by cached prefixes, it counts the prefixes that each request will find.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.compat import Hook
from slime.compat.sglang_token_versions import MANAGER, UPDATES
from slime.core.errors import EngineError

DIVIDED = frozenset({"RadixCache", "UnifiedRadixCache", "SWARadixCache", "PureSWARadixCache", "MambaRadixCache"})
"""SGLang's caches that use `extra_key` in every look-up and insertion and are not backed by a second cache."""
EMPTY = frozenset({"ChunkCache", "SWAChunkCache", "PureSWAChunkCache"})
"""Caches of `--disable-radix-cache`, which keep nothing after a request."""
_updates = {"asked": 0}
"""Number of weight updates that this process has begun."""
_MARK = "|weights "
_KEYS = "_slime_keys"
"""Attribute of a request: its last (own key, key with the weights)."""


def _count(*_: Any, **__: Any) -> None:
    _updates["asked"] += 1


def _divide_all(_policy: Any, waiting_queue: Sequence[Any], *_: Any, **__: Any) -> None:
    """Sets the keys of all waiting requests before SGLang orders the queue, which may look up their prefixes."""
    for request in waiting_queue:
        _give_key(request)


def _divide(request: Any, tree_cache: Any = None, *_: Any, **__: Any) -> None:
    """Sets a request's key before the scheduler looks up its prefix. Without a tree it looks up nothing."""
    if tree_cache is not None:
        _give_key(request)


def _give_key(request: Any) -> None:
    own, given = getattr(request, _KEYS, (None, None))
    if given is None or request.extra_key != given:  # the request is new, or SGLang has changed its key
        own = request.extra_key or ""
    request.extra_key = f"{own}{_MARK}{_updates['asked']}"
    setattr(request, _KEYS, (own, request.extra_key))


def _require_divided(cache: Any, context: Any, *_: Any, **__: Any) -> None:
    """Raises `EngineError` if SGLang made a cache of an unknown type. A setting that slime cannot see (a variable on
    the engine's host, a plugin) may have chosen it.
    """
    name, settings = type(cache).__name__, context.server_args
    more = [flag for flag in ("enable_hierarchical_cache", "enable_streaming_session") if getattr(settings, flag)]
    if name in EMPTY | DIVIDED and not more:
        return
    raise EngineError(
        f"the prefix cache {' with '.join([name, *more])} may mix prefixes of different weights when requests "
        "continue across weight syncs (--token-versions, --pause-generation-mode retract and in_place); leave out the "
        "setting that chooses this cache, or use --pause-generation-mode abort"
    )


HOOKS = (
    *(Hook("BEFORE", change, _count) for change in (*UPDATES, f"{MANAGER}.update_weights_from_ipc")),
    Hook("BEFORE", "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority", _divide_all),
    Hook("BEFORE", "sglang.srt.managers.schedule_batch.Req.init_next_round_input", _divide),
    Hook("AFTER", "sglang.srt.mem_cache.registry.create_tree_cache", _require_divided),
)
