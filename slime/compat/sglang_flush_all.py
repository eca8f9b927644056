"""Makes an engine with DP attention report an empty cache only when the caches of all DP groups are empty.

SGLang 0.5.16 tells all groups to flush but returns only the first group's response. A group that is still finishing a
request would keep its cache and use it with the next weights. With the hook the front end refuses if any group refuses.
Remove the hook when SGLang merges the responses.
"""

from __future__ import annotations

from typing import Any

FLAG = "--enable-dp-attention"


async def _flush(manager: Any, timeout_s: float | None = None) -> Any:
    """Replaces `TokenizerControlMixin.flush_cache`."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    manager.auto_create_handle_loop()
    answers = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))
    return next((answer for answer in answers if not answer.success), answers[0])


HOOKS = (("REPLACE", "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.flush_cache", _flush),)
