"""Brings weights that are broadcast to the draft of an engine as well (`--speculative-algorithm`).

SGLang 0.5.16 gives an update from shared memory or from disk to the model and to the draft, one from a process group
(`/update_weights_from_distributed`) to the model alone: its layer of multi-token prediction would keep the weights of
the start, and the weight sync, which compares digests of the draft too, would fail. `register` puts that right through
SGLang's own plugin registry: while such an update is handled the model's loader hands the tensors to the draft's
first. To be removed when SGLang does so itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from slime.compat.sglang_token_versions import MANAGER

FLAG = "--speculative-algorithm"
_UPDATE = f"{MANAGER}.update_weights_from_distributed"


def register() -> None:
    """Call before SGLang's scheduler loads its plugins, which puts the hook in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_UPDATE, _reach_the_draft, HookType.AROUND)


def models(manager: Any) -> list[Any]:
    """The model of a scheduler, and behind it its draft, if it has one."""
    found = [manager.tp_worker.model_runner.model]
    inner = getattr(manager.draft_worker, "draft_worker", None)
    if inner is not None:
        found.append(inner.draft_runner.model)
    return found


def _reach_the_draft(update: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around an update."""
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
