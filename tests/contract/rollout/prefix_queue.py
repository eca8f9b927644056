"""The waiting queue of SGLang's scheduler with the hooks of `slime.compat.sglang_version_prefixes`, without an engine.

SGLang's own requests, policies and tree, in a process of its own because hooks stay. The tree holds numbers in place of
keys and values.
"""

from __future__ import annotations

import contextlib
from array import array
from typing import Any

from tests.support.ranks import Seat

CACHED = list(range(100, 180))
"""A prompt that the tree knows under the first weights."""
OTHER = list(range(200, 280))


def order_and_matches(seat: Seat, policy: str) -> dict[str, Any]:
    """What a queue looks like to a policy before and after a weight update, and with keys of users."""
    if seat.listener is not None:
        seat.listener.close()
    hooked()
    from sglang.srt.managers.schedule_policy import SchedulePolicy
    from sglang.srt.mem_cache.radix_cache import RadixCache

    tree: Any = RadixCache.create_simulated()
    scheduler: Any = SchedulePolicy(policy, tree, False, False, False)
    first = request("first", CACHED)
    keep(tree, first)
    out = {"fresh": look(scheduler, [request("other", OTHER), request("same", CACHED)])}
    fail_to_update()
    out["after an update"] = look(scheduler, [request("other", OTHER), request("same", CACHED), first])
    keep(tree, first)
    out["read again"] = look(scheduler, [request("other", OTHER), request("same", CACHED), first])
    return out


def keys(seat: Seat, given: list[str | None]) -> dict[str, Any]:
    """What becomes of users' keys: when a request is about to be read, when it goes on with its next chunk, and when it
    is read again under other weights.
    """
    if seat.listener is not None:
        seat.listener.close()
    hooked()
    from sglang.srt.mem_cache.radix_cache import RadixCache

    tree: Any = RadixCache.create_simulated()
    requests = [request(str(i), CACHED, key) for i, key in enumerate(given)]
    out = {}
    for name, update, where in (("read", False, tree), ("next chunk", True, None), ("again", False, tree)):
        if update:
            fail_to_update()
        for one in requests:
            one.init_next_round_input(where)
        out[name] = [one.extra_key for one in requests]
    return out


def hooked() -> None:
    """SGLang in this process as in a scheduler of slime's launcher."""
    from slime.compat.sglang_cpu import activate

    activate("cpu")
    from sglang.srt.plugins.hook_registry import HookRegistry

    from slime.compat import register, sglang_token_versions, sglang_version_prefixes

    register([*sglang_token_versions.HOOKS, *sglang_version_prefixes.HOOKS])
    HookRegistry.apply_hooks()
    missing = HookRegistry._hooks.keys() - HookRegistry._patched
    assert not missing, missing


def request(name: str, tokens: list[int], key: str | None = None) -> Any:
    """A request that has just come."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req(name, "", array("q", tokens), SamplingParams(max_new_tokens=8), extra_key=key)


def keep(tree: Any, one: Any) -> None:
    """Has a request be read: from then on the tree has its prompt."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    one.init_next_round_input(tree)
    tokens = one.origin_input_ids
    tree.insert(InsertParams(key=RadixKey(tokens, one.extra_key), value=torch.arange(len(tokens))))


def fail_to_update() -> None:
    """A weight update that fails in the middle, as far as anybody can know: weights may have changed."""
    from types import SimpleNamespace

    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    with contextlib.suppress(AttributeError):
        SchedulerWeightUpdaterManager.update_weights_from_tensor(
            SimpleNamespace(), SimpleNamespace(weight_version="1", flush_cache=False)
        )


def look(scheduler: Any, queue: list[Any]) -> list[tuple[str, int]]:
    """(request, tokens that are cached for it) in the order of the queue."""
    scheduler.calc_priority(queue)
    return [(one.rid, one.num_matched_prefix_tokens) for one in queue]
