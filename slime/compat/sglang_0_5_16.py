"""Hooks needed by SGLang 0.5.16 but not by 0.5.23. Delete this file once the oldest supported version is newer.

- The draft (`DRAFT_HOOKS`, `--speculative-algorithm`): updates from shared memory or disk are loaded into both model
  and draft, but updates from a process group (`/update_weights_from_distributed`) only into the model. The draft would
  keep its initial weights, and the weight sync would fail when it compares the draft's digests. The hook loads the
  tensors of such an update into the draft as well.
- The expert router of GLM-4.5 to 4.7 and 4.7-Flash: SGLang makes a float32 copy of the router's weight in the first
  forward pass and never updates it (`Glm4MoeGate._weight_fp32`). In half precision, the router would keep choosing
  experts with stale weights. Digests do not cover the copy, because it is not a resident tensor. The hook updates the
  copy after each weight update, in place because captured CUDA graphs read it.
- The log of changed settings: SGLang logs each change to its settings after startup in a list that it never reads. The
  weight version is a setting, so without the hook the list grows by 0.3 kB per bucket. The hook keeps only the latest
  change of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from slime.compat import Hook
from slime.compat.sglang_token_versions import MANAGER, UPDATES
from slime.core.engine_interface import BEFORE_SESSIONS

DRAFT_FLAG = "--speculative-algorithm"
_RECORD = "_runtime_mutations"


def models(manager: Any) -> list[Any]:
    """Returns a scheduler's model and, if it has one, its draft."""
    found = [manager.tp_worker.model_runner.model]
    inner = getattr(manager.draft_worker, "draft_worker", None)
    if inner is not None:
        found.append(inner.draft_runner.model)
    return found


def reach_the_draft(update: Callable[..., Any], manager: Any, request: Any) -> Any:
    model, *drafts = models(manager)
    load = model.load_weights

    def load_all(weights: Iterable[tuple[str, Any]]) -> Any:
        tensors = list(weights)
        for draft in drafts:
            draft.load_weights(tensors)
        return load(tensors)

    model.load_weights = load_all
    try:
        return update(manager, request)
    finally:
        del model.load_weights


def renew_router(_answer: Any, manager: Any, *_: Any, **__: Any) -> None:
    for model in models(manager):
        for module in model.modules():
            if getattr(module, "_weight_fp32", None) is not None:
                module._weight_fp32.copy_(module.weight.data)


def keep_newest_settings(_result: Any, settings: Any, *_: Any, **__: Any) -> None:
    """Keeps only the latest change for each source and set of fields."""
    record = getattr(settings, _RECORD, None)
    if record:
        record[:] = {(source, tuple(fields)): (source, fields) for source, fields in record}.values()


HOOKS = (
    *(Hook("AFTER", update, renew_router, BEFORE_SESSIONS) for update in UPDATES),
    Hook("AFTER", "sglang.srt.server_args.ServerArgs.override", keep_newest_settings, BEFORE_SESSIONS),
)
DRAFT_HOOKS = (Hook("AROUND", f"{MANAGER}.update_weights_from_distributed", reach_the_draft, BEFORE_SESSIONS),)
