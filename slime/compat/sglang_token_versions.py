"""Makes an engine tell the weight version of each token: what `--pause-generation-mode retract|in_place` needs.

A request that lives through weight syncs has tokens of several versions. SGLang 0.5.16 answers with one, which is what
the process at its front door knew when the answer left. Forward passes and weight updates meet in the scheduler, on one
thread: there `register` notes and labels them, through SGLang's own plugin registry, and the labels travel in its
`customized_info`, which holds one entry per output token. Forward hooks would not do: CUDA graphs never run them. To be
removed when SGLang says itself which weights sampled each token.

Invariants
1. A label is the version of the last update before the forward pass was launched, whenever its result is read.
2. An update waits for the passes that were launched: with overlapped scheduling one may still be reading the weights.
3. Where a hook did not take effect labels are missing or stay 0, and the client refuses the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.core.ports import TOKEN_VERSIONS_KEY

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.run_batch"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = tuple(f"{MANAGER}.update_weights_from_{source}" for source in ("tensor", "distributed", "disk"))
"""The ways that weights come in, each a method in the scheduler."""
_served = {"version": 0}
"""Of this process; 0 is the checkpoint that the engine loaded itself, as `ServerSpec` calls it."""


def register() -> None:
    """Call before SGLang's scheduler loads its plugins, which puts the hooks in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SCHEDULER, _label, HookType.AFTER)
    for update in UPDATES:
        HookRegistry.register(update, _note, HookType.AROUND)


def _label(result: Any, _scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Behind the launch of a forward pass: the version for each request of the batch."""
    output = getattr(result, "logits_output", None)
    if output is not None:
        versions = [_served["version"]] * len(batch.reqs)
        output.customized_info = {**(output.customized_info or {}), TOKEN_VERSIONS_KEY: versions}


def _note(update: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around a weight update."""
    import torch

    torch.get_device_module().synchronize()
    answer = update(manager, request)
    _served["version"] = int(request.weight_version)
    return answer
