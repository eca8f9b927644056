"""Law: an engine on which requests live through weight syncs starts only with a prefix cache that weights do not share,
whatever chose it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime.compat.sglang_version_prefixes import _require_divided
from slime.core.errors import EngineError


def made(name: str, **settings: bool) -> None:
    """The hook behind the making of a cache of SGLang's class `name`."""
    both: dict[str, Any] = {"enable_hierarchical_cache": False, "enable_streaming_session": False, **settings}
    _require_divided(type(name, (), {})(), SimpleNamespace(server_args=SimpleNamespace(**both)))


@pytest.mark.parametrize("name", ["RadixCache", "UnifiedRadixCache", "ChunkCache"])
def test_what_goes_by_the_key_or_keeps_nothing_is_taken(name: str) -> None:
    made(name)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("RadixCacheCpp", {}),
        ("HiRadixCache", {"enable_hierarchical_cache": True}),
        ("UnifiedRadixCache", {"enable_hierarchical_cache": True}),
        ("UnifiedRadixCache", {"enable_streaming_session": True}),
        ("LMCRadixCache", {}),
        ("CacheOfAPlugin", {}),
    ],
)
def test_any_other_ends_the_start(name: str, settings: dict[str, bool]) -> None:
    with pytest.raises(EngineError, match=f"the prefix cache {name}.*--pause-generation-mode abort"):
        made(name, **settings)
