"""Returns the routed experts of each sampled token, for `--use-rollout-routing-replay`, if the request's id has a mark.

SGLang returns routed experts for requests with the fields `return_routed_experts` and
`routed_experts_start_len`, if it was started with `--enable-return-routed-experts`. sglang-router 0.3.2 drops unknown
fields and headers, but keeps the request's id. So the client puts a mark into the id
(`slime.core.engine_interface.ROUTED_EXPERTS_MARK`), and a hook at the engine's front end sets the fields. Remove it
when the router forwards both fields.

SGLang stores the experts of a token with its keys and values, and reads them when the request ends. A request that is
retracted (`--pause-generation-mode retract`, or when memory runs out) loses them. Later a prefill recomputes its tokens
with new weights or different rounding, while the log-probs of the sampled tokens stay. So a second hook saves the
recorded experts before a retraction, and a third hook returns them with the response. Remove these hooks when SGLang
does this itself.

Invariants
1. Requests without the mark and requests with several prompts are unchanged.
2. If the first hook has no effect, the experts are missing and the client refuses the response. The launcher checks
   that the other hooks are in place.
3. Each row holds the experts of the pass that sampled the next token. Rows of a prompt are from its first prefill.
"""

from __future__ import annotations

from typing import Any

from slime.compat import Hook
from slime.core.engine_interface import ROUTED_EXPERTS_MARK
from slime.core.engine_versions import WITH_SESSIONS, is_installed

FLAG = "--enable-return-routed-experts"
_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_KEPT = "_slime_experts"
"""Attribute of a request with the saved rows, starting at the first requested one."""


def read_mark(_manager: Any, request: Any, *_more: Any, **_named: Any) -> None:
    """Sets the two fields of a new request if its id has the mark."""
    rid = request.rid
    if not isinstance(rid, str):
        return
    _, mark, start = rid.partition(ROUTED_EXPERTS_MARK)
    if mark and start.isdecimal():
        request.return_routed_experts = True
        request.routed_experts_start_len = int(start)


def _set_aside(*_: Any, req: Any, req_to_token_pool: Any, **__: Any) -> None:
    """Saves the rows of a request before it is retracted. Its last token has no row, because no pass has read it."""
    import torch
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    if not (req.return_routed_experts and req.output_ids):
        return
    kept = getattr(req, _KEPT, None)
    start = req.routed_experts_start_len + (0 if kept is None else len(kept))
    num_tokens = len(req.origin_input_ids) + len(req.output_ids)
    if start >= num_tokens - 1:  # no new tokens since the last retraction
        return
    slot = req.kv.req_pool_idx if is_installed("sglang", WITH_SESSIONS) else req.req_pool_idx
    rows = get_global_experts_capturer().get_topk(slot, num_tokens, req_to_token_pool, start)
    setattr(req, _KEPT, rows if kept is None else torch.cat([kept, rows]))


def _put_back(_result: Any, _processor: Any, req: Any, *_: Any, **__: Any) -> None:
    """Restores the saved rows of a request that has ended."""
    kept = getattr(req, _KEPT, None)
    if kept is not None and req.routed_experts is not None:
        req.routed_experts[: len(kept)] = kept[: len(req.routed_experts)]


HOOKS = (
    Hook("BEFORE", "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", read_mark),
    Hook("BEFORE", "sglang.srt.managers.schedule_batch.release_req", _set_aside),  # on a retraction
    Hook("AFTER", f"{_PROCESSOR}._maybe_collect_routed_experts", _put_back),
)
