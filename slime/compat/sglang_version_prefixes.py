"""Partitions an engine's prefix cache by weight version, for requests that continue across weight syncs. Also makes a
cache flush reach every DP group.

SGLang 0.5.16's cache does not record which weights computed its keys and values, and it cannot be flushed while
requests are running. But SGLang partitions its radix tree by the requests' `extra_key`, which exists for other
purposes. Just before the scheduler looks up a request's prefix, on the thread that also updates weights, a hook adds
the current weights to the key. So a request that waited during a weight sync, or was retracted for it, matches only
prefixes computed with the new weights.

The key contains the number of updates in this scheduler process. Version numbers are not enough: an engine can outlive
its run, the next run starts at 1 again, and a resumed run reuses numbers. All ranks of an engine get the same updates,
so their counts agree.

Remove the hooks when SGLang records which weights computed a prefix. The launcher checks that each hook is registered,
and this module checks the cache's type when it is created.

With DP attention, SGLang (0.5.16 and 0.5.23) asks all groups to flush but returns only the first group's result. A
group with an unfinished request would keep its cache and use it with the next weights. With `FLUSH_HOOKS`, the front
end returns a failure if any group fails. Remove them when SGLang merges the results.

Invariants
1. Two sets of weights never share a key. The count increases before each update, even if the update then fails.
2. A cached prefix is used only if all of it was written by requests that started under the current weights. With
   `in_place`, a request that continues, or is prefilled in chunks, keeps writing to the partition in which it started.
3. A request's original key (LoRA, a namespace) is kept as a prefix of the new key.
4. If SGLang orders the waiting queue by cached prefix length, it uses the prefixes that requests will actually match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.compat import Hook
from slime.compat.sglang_token_versions import MANAGER, UPDATES
from slime.core.errors import EngineError

DP_FLAG = "--enable-dp-attention"
DIVIDED = frozenset({"RadixCache", "UnifiedRadixCache", "SWARadixCache", "PureSWARadixCache", "MambaRadixCache"})
"""SGLang's caches that use `extra_key` in every lookup and insertion and have no second cache behind them."""
EMPTY = frozenset({"ChunkCache", "SWAChunkCache", "PureSWAChunkCache"})
"""Caches used with `--disable-radix-cache`. They keep nothing after a request finishes."""
_updates = {"asked": 0}
"""Number of weight updates that this process has started."""
_MARK = "|weights "
_KEYS = "_slime_keys"
"""Request attribute that holds the last (original key, key with the weights)."""


def _count(*_: Any, **__: Any) -> None:
    _updates["asked"] += 1


def _divide_all(_policy: Any, waiting_queue: Sequence[Any], *_: Any, **__: Any) -> None:
    """Sets the keys of all waiting requests before SGLang orders the queue, because ordering may look up prefixes."""
    for request in waiting_queue:
        _give_key(request)


def _divide(request: Any, tree_cache: Any = None, *_: Any, **__: Any) -> None:
    """Sets a request's key before the scheduler looks up its prefix. Without a tree, there is no lookup."""
    if tree_cache is not None:
        _give_key(request)


def _give_key(request: Any) -> None:
    own, given = getattr(request, _KEYS, (None, None))
    if given is None or request.extra_key != given:  # the request is new, or SGLang changed its key
        own = request.extra_key or ""
    request.extra_key = f"{own}{_MARK}{_updates['asked']}"
    setattr(request, _KEYS, (own, request.extra_key))


def _require_divided(cache: Any, context: Any, *_: Any, **__: Any) -> None:
    """Raises `EngineError` if SGLang created a cache of an unknown type, for example because of a plugin or an
    environment variable on the engine's host, neither of which slime can see.
    """
    name, settings = type(cache).__name__, context.server_args
    more = [flag for flag in ("enable_hierarchical_cache", "enable_streaming_session") if getattr(settings, flag)]
    if name in EMPTY | DIVIDED and not more:
        return
    raise EngineError(
        f"the prefix cache {' with '.join([name, *more])} may mix prefixes of different weights when requests "
        "continue across weight syncs (--token-versions, --pause-generation-mode retract and in_place); remove the "
        "setting that selects this cache, or use --pause-generation-mode abort"
    )


async def _flush(manager: Any, timeout_s: float | None = None) -> Any:
    """Replaces `TokenizerControlMixin.flush_cache`."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    manager.auto_create_handle_loop()
    answers = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))
    whole = next((answer for answer in answers if not answer.success), answers[0])
    if whole.success and hasattr(manager.mm_processor, "clear_preprocess_cache"):
        manager.mm_processor.clear_preprocess_cache()
    return whole


HOOKS = (
    *(Hook("BEFORE", change, _count) for change in (*UPDATES, f"{MANAGER}.update_weights_from_ipc")),
    Hook("BEFORE", "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority", _divide_all),
    Hook("BEFORE", "sglang.srt.managers.schedule_batch.Req.init_next_round_input", _divide),
    Hook("AFTER", "sglang.srt.mem_cache.registry.create_tree_cache", _require_divided),
)
FLUSH_HOOKS = (
    Hook("REPLACE", "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.flush_cache", _flush),
)
