"""Prefix caches that engines cannot have while their weights change: laws 1 and 2 hold for what is read from them, too.

What an engine has cached is of the weights that read it. With `--pause-generation-mode abort` each weight sync flushes
it, with `retract` and `in_place` it is divided by the weights (`slime.compat.sglang_version_prefixes`). SGLang 0.5.16
has caches that neither reaches. Stores beyond the engine's memory are keyed by tokens alone, are shared by engines and
runs, and a flush leaves them as they are: no engine whose weights change can have one. Others forget with a flush, and
are not divided: SGLang's tree in C++ takes no notice of the key, streaming sessions keep what they have read beside the
tree, and of the hierarchical cache in a host's memory nobody has shown here that it goes by the key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slime.settings.group import Rule
from slime.settings.groups.engine_rules import synced_engines

if TYPE_CHECKING:
    from slime.settings.args import Args

STORES: Mapping[str, str] = {
    "hicache_storage_backend": "pages in the store of the hierarchical cache",
    "enable_lmcache": "what LMCache stores",
    "enable_flexkv": "what FlexKV stores",
    "radix_cache_backend": "what a cache of a plugin holds",
}
"""Settings of SGLang by field name -> what they keep beyond a flush. A cache of somebody else's may do so as well."""
UNDIVIDED: Mapping[str, str] = {
    "enable_hierarchical_cache": "the cache in the host's memory",
    "enable_streaming_session": "what a streaming session has read",
}
"""Settings of SGLang by field name -> what a flush empties, and nothing divides."""
CPP_TREE_ENV = "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"
"""Chooses the tree in C++. Engines on hosts with another environment see for themselves."""
_OFF = (None, False, "")


def kept_prefixes(sglang: Mapping[str, Any], *, divided: bool) -> Iterator[str]:
    """What of an engine's settings keeps prefixes of old weights, each as got / because / do.

    `sglang`: ServerArgs by field name; `divided`: whether requests live through weight syncs.
    """
    for name, what in STORES.items():
        if sglang.get(name) not in _OFF:
            yield (
                f"{_flag(name, sglang[name])}: {what} is known by its tokens alone and outlives a flush, so prefixes "
                "that old weights have read would be served under new ones; leave it out"
            )
    for name, what in UNDIVIDED.items():
        if divided and sglang.get(name) not in _OFF:
            yield (
                f"{_flag(name, sglang[name])}: {what} is not divided by the weights that read it, and cannot be "
                "flushed under requests that live through weight syncs; leave it out, or use "
                "--pause-generation-mode abort"
            )


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def engines_forget_old_weights(args: Args) -> str | None:
    """No prefix that old weights have read is read from a cache under new ones."""
    divided = args.pause_generation_mode != "abort"
    for engines in synced_engines(args):
        for problem in kept_prefixes(engines.sglang, divided=divided):
            return engines.told(f"got --sglang-{problem.removeprefix('--')}")
        tree = os.environ.get(CPP_TREE_ENV, "")
        if divided and tree.lower() in ("true", "1", "yes", "y") and not engines.sglang.get("disable_radix_cache"):
            return engines.told(
                f"got {CPP_TREE_ENV}={tree} in the environment with --pause-generation-mode "
                f"{args.pause_generation_mode}: that tree takes no notice of the key by which prefixes of old weights "
                "are kept apart from those of new ones; unset it, or use --pause-generation-mode abort"
            )
    return None


RULES: tuple[Rule, ...] = (engines_forget_old_weights,)
