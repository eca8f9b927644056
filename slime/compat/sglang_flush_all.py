"""Makes an engine with DP attention report a successful cache flush only if all DP groups flushed their caches.

SGLang (0.5.16 and 0.5.23) asks all groups to flush but returns only the first group's result. A group with an
unfinished request would keep its cache and use it with the next weights. With the hook, the front end returns a failure
if any group fails. Remove it when SGLang merges the results.
"""

from __future__ import annotations

from typing import Any

from slime.compat import Hook

FLAG = "--enable-dp-attention"


async def _flush(manager: Any, timeout_s: float | None = None) -> Any:
    """Replaces `TokenizerControlMixin.flush_cache`."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    manager.auto_create_handle_loop()
    answers = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))
    whole = next((answer for answer in answers if not answer.success), answers[0])
    if whole.success and hasattr(manager.mm_processor, "clear_preprocess_cache"):
        manager.mm_processor.clear_preprocess_cache()
    return whole


HOOKS = (Hook("REPLACE", "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.flush_cache", _flush),)
