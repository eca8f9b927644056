"""Loads broadcast weights also into an engine's draft model (`--speculative-algorithm`).

SGLang 0.5.16 loads an update from shared memory or disk into model and draft, but an update from a process group
(`/update_weights_from_distributed`) only into the model. The draft would keep its initial weights, and the weight sync
would fail, because it also compares the draft's digests. During such an update the hook loads the tensors into the
draft, too. SGLang 0.5.23 does this itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from slime.compat import Hook
from slime.compat.sglang_token_versions import MANAGER
from slime.core.engine_versions import BEFORE_SESSIONS

FLAG = "--speculative-algorithm"


def models(manager: Any) -> list[Any]:
    """Returns a scheduler's model, followed by its draft if it has one."""
    found = [manager.tp_worker.model_runner.model]
    inner = getattr(manager.draft_worker, "draft_worker", None)
    if inner is not None:
        found.append(inner.draft_runner.model)
    return found


def _reach_the_draft(update: Callable[..., Any], manager: Any, request: Any) -> Any:
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


HOOKS = (Hook("AROUND", f"{MANAGER}.update_weights_from_distributed", _reach_the_draft, BEFORE_SESSIONS),)
