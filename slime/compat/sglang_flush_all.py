"""Makes an engine with DP attention say that its cache is empty when that of every DP group is.

SGLang 0.5.16 asks all groups to flush and answers with what the first one said. A group in which a request is still
ending would keep what it has cached, and serve it under the next weights. `register` lets the front door answer with a
refusal, if there is one; it has asked them all in any case. To be removed when SGLang merges the answers.
"""

from __future__ import annotations

from typing import Any

FLAG = "--enable-dp-attention"
_DOOR = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.flush_cache"


def register() -> None:
    """Call before SGLang's server loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_DOOR, _flush, HookType.REPLACE)


async def _flush(manager: Any, timeout_s: float | None = None) -> Any:
    """In place of `TokenizerControlMixin.flush_cache`."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    manager.auto_create_handle_loop()
    answers = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))
    return next((answer for answer in answers if not answer.success), answers[0])
