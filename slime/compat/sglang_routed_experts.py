"""Returns each sampled token's routed experts for `--use-rollout-routing-replay` if the request id has a marker.

If SGLang was started with `--enable-return-routed-experts`, it returns routed experts for requests with the fields
`return_routed_experts` and `routed_experts_start_len`. sglang-router 0.3.2 drops unknown fields and headers but keeps
the request id. So the client puts a marker into the id (`slime.core.engine_interface.ROUTED_EXPERTS_MARK`), and a hook
in the engine's front end sets the fields. Remove it when the router forwards both fields.

SGLang stores each token's experts alongside the KV cache and reads them when the request finishes. A retracted request
(`--pause-generation-mode retract`, or out of memory) loses them. Later, a prefill recomputes them with new weights or
different rounding, although the log-probs of the sampled tokens do not change. So a second hook saves the recorded
experts before a retraction, and a third hook puts them into the response. Remove these hooks when SGLang does this.

Invariants
1. Requests without the marker and requests with several prompts are unaffected.
2. If the first hook has no effect, the experts are missing and the client rejects the response. The launcher checks
   that the other hooks are registered.
3. Each row comes from the forward pass that sampled the next token. The prompt's rows come from its first prefill.
"""

from __future__ import annotations

from typing import Any

from slime.compat import Hook
from slime.core.engine_interface import ROUTED_EXPERTS_MARK, WITH_SESSIONS, is_installed

FLAG = "--enable-return-routed-experts"
_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_KEPT = "_slime_experts"
"""Request attribute that holds the saved rows, starting at the first row that the request asks for."""


def read_mark(_manager: Any, request: Any, *_more: Any, **_named: Any) -> None:
    """Sets the two fields of a new request if its id has the marker."""
    rid = request.rid
    if not isinstance(rid, str):
        return
    _, mark, start = rid.partition(ROUTED_EXPERTS_MARK)
    if mark and start.isdecimal():
        request.return_routed_experts = True
        request.routed_experts_start_len = int(start)


def _set_aside(*_: Any, req: Any, req_to_token_pool: Any, **__: Any) -> None:
    """Saves a request's rows before it is retracted. The last token has no row, because no pass has processed it."""
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
    """Restores the saved rows of a finished request."""
    kept = getattr(req, _KEPT, None)
    if kept is not None and req.routed_experts is not None:
        req.routed_experts[: len(kept)] = kept[: len(req.routed_experts)]


HOOKS = (
    Hook("BEFORE", "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", read_mark),
    Hook("BEFORE", "sglang.srt.managers.schedule_batch.release_req", _set_aside),  # on a retraction
    Hook("AFTER", f"{_PROCESSOR}._maybe_collect_routed_experts", _put_back),
)
