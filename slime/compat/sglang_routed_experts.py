"""What `--use-rollout-routing-replay` needs of an engine: a request says that it wants its experts, and gets those with
which its tokens were sampled.

SGLang 0.5.16 returns them for a request with the fields `return_routed_experts` and `routed_experts_start_len`, if it
was started with `--enable-return-routed-experts`. sglang-router 0.3.2 drops fields that it does not know, and headers,
but hands on the request's id as it is. So the id says it (`slime.core.ports.ROUTED_EXPERTS_MARK`), and at the engine's
front door `register` has the fields set from it, through SGLang's own plugin registry. To be removed when the router
hands both fields on.

SGLang keeps the experts of a token with its keys and values, and reads them when the request ends. A request that it
retracts (`--pause-generation-mode retract`, or because memory runs out) loses those, and its tokens are read again: by
new weights, or in a prefill that rounds otherwise, while the log-probs of the tokens that it has sampled stay. So what
was recorded is set aside before that, and is what the answer says. To be removed when SGLang does so.

Invariants
1. Requests without the mark, and those of many prompts, are left as they are.
2. Where the first hook did not take effect the experts are missing, and the client refuses the answer. That the others
   are in their places the launcher checks.
3. A row is that of the pass which sampled the next token. Rows of a prompt are those of the first time it was read.
"""

from __future__ import annotations

from typing import Any

from slime.core.ports import ROUTED_EXPERTS_MARK

FLAG = "--enable-return-routed-experts"
FRONT_DOOR = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
TAKEN_BACK = "sglang.srt.managers.schedule_batch.release_req"
"""Whatever retracts a request, this gives its keys and values back."""
COLLECTED = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor._maybe_collect_routed_experts"
)
_KEPT = "_slime_experts"
"""Attribute of a request: the rows that were set aside, from the first one that is asked for on."""


def register() -> None:
    """Call before the server loads its plugins, which puts the hook in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(FRONT_DOOR, read_mark, HookType.BEFORE)
    HookRegistry.register(TAKEN_BACK, _set_aside, HookType.BEFORE)
    HookRegistry.register(COLLECTED, _put_back, HookType.AFTER)


def read_mark(_manager: Any, request: Any, *_more: Any, **_named: Any) -> None:
    """Before a request is taken in: sets the two fields if its id has the mark."""
    rid = request.rid
    if not isinstance(rid, str):
        return
    _, mark, start = rid.partition(ROUTED_EXPERTS_MARK)
    if mark and start.isdecimal():
        request.return_routed_experts = True
        request.routed_experts_start_len = int(start)


def _set_aside(*_: Any, req: Any, req_to_token_pool: Any, **__: Any) -> None:
    """Before a request is taken back: of the token that it sampled last there is no row, for nobody has read it yet."""
    import torch
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    if not (req.return_routed_experts and req.output_ids):
        return
    kept = getattr(req, _KEPT, None)
    start = req.routed_experts_start_len + (0 if kept is None else len(kept))
    num_tokens = len(req.origin_input_ids) + len(req.output_ids)
    if start >= num_tokens - 1:  # it has sampled nothing since
        return
    rows = get_global_experts_capturer().get_topk(req.req_pool_idx, num_tokens, req_to_token_pool, start)
    setattr(req, _KEPT, rows if kept is None else torch.cat([kept, rows]))


def _put_back(_result: Any, _processor: Any, req: Any, *_: Any, **__: Any) -> None:
    """Behind the reading of the rows of a request that has ended."""
    kept = getattr(req, _KEPT, None)
    if kept is not None and req.routed_experts is not None:
        req.routed_experts[: len(kept)] = kept[: len(req.routed_experts)]
